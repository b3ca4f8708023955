//! What a program will cost on its machine: operations, bytes and time of an entry point. Two times: the bound at the
//! machine's ceilings, where an instruction takes the longer of its arithmetic and its traffic, and the estimate with
//! what of these is reached in a step.

use tensor::DType;

use crate::instruction::{Cost, Instruction, Step};
use crate::machine::Machine;
use crate::program::Entry;

/// Totals of one run of an entry point.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimate {
    /// Arithmetic operations, recomputation included.
    pub flops: f64,
    /// Bytes moved, inputs and outputs of each instruction counted once.
    pub bytes: f64,
    /// Seconds as they are expected.
    pub seconds: f64,
    /// Seconds at the machine's ceilings, which no run beats.
    pub ceiling: f64,
    pub instructions: usize,
}

/// What decides how much of the machine's ceilings an instruction reaches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    /// Rows or elements in, rows or elements out.
    Stream {
        launches: usize,
    },
    /// `extra` bytes are moved beside the cost's.
    Product {
        launches: usize,
        extra: f64,
    },
    AttentionForward,
    AttentionBackward,
}

/// Kernels of a library's attention: the backward pass has the sums of rows and the rounding of dq beside it.
const FORWARD_LAUNCHES: usize = 1;
const BACKWARD_LAUNCHES: usize = 3;

/// Edge of the tiles that libraries cut products into, as far as the number of kernels goes.
const TILE: usize = 128;

fn rate(dtype: Option<DType>, machine: &Machine) -> f64 {
    if dtype == Some(DType::BF16) { machine.bf16_flops } else { machine.f32_flops }
}

/// Seconds that work is expected to take. `dtype` is that of the arithmetic of products and attention.
pub fn expected(work: Work, cost: Cost, dtype: Option<DType>, machine: &Machine) -> f64 {
    let reached = &machine.reached;
    let (launches, extra, flops, bandwidth) = match work {
        Work::Stream { launches } => (launches, 0.0, 1.0, reached.bandwidth),
        Work::Product { launches, extra } => (launches, extra, reached.products, reached.product_bandwidth),
        Work::AttentionForward => (FORWARD_LAUNCHES, 0.0, reached.attention_forward, reached.bandwidth),
        Work::AttentionBackward => (BACKWARD_LAUNCHES, 0.0, reached.attention_backward, reached.bandwidth),
    };
    let own = (cost.flops / (flops * rate(dtype, machine))).max(cost.bytes / (bandwidth * machine.bandwidth));
    own + extra / (reached.bandwidth * machine.bandwidth) + launches as f64 * reached.launch
}

fn work_of(step: &Step, machine: &Machine) -> Work {
    match &step.instruction {
        Instruction::Gemm(gemm) => {
            // Too few tiles for the device: the sum over k is cut, and its parts are added by a further kernel.
            let split = gemm.batch * gemm.m.div_ceil(TILE) * gemm.n.div_ceil(TILE) * 2 <= machine.units;
            let pass = !gemm.low_rank.is_empty() && machine.reached.addend_pass;
            let extra = if pass { 2.0 * gemm.d.bytes() as f64 } else { 0.0 };
            Work::Product { launches: 1 + usize::from(split) + usize::from(pass), extra }
        }
        Instruction::AttentionForward(_) => Work::AttentionForward,
        Instruction::AttentionBackward(_) => Work::AttentionBackward,
        Instruction::Launch(launch) => Work::Stream { launches: launch.calls.len().max(1) },
        Instruction::Copy { .. } | Instruction::Zero { .. } => Work::Stream { launches: 1 },
    }
}

/// Seconds that one instruction is expected to take.
pub fn seconds(step: &Step, machine: &Machine) -> f64 {
    expected(work_of(step, machine), step.cost, step.instruction.compute_dtype(), machine)
}

/// Seconds that one instruction takes at the machine's ceilings.
pub fn ceiling(step: &Step, machine: &Machine) -> f64 {
    let rate = rate(step.instruction.compute_dtype(), machine);
    (step.cost.flops / rate).max(step.cost.bytes / machine.bandwidth)
}

/// Adds up an entry point.
pub fn estimate(entry: &Entry, machine: &Machine) -> Estimate {
    entry.steps.iter().fold(Estimate::default(), |sum, step| Estimate {
        flops: sum.flops + step.cost.flops,
        bytes: sum.bytes + step.cost.bytes,
        seconds: sum.seconds + seconds(step, machine),
        ceiling: sum.ceiling + ceiling(step, machine),
        instructions: sum.instructions + 1,
    })
}

/// The kind of an instruction for tables: `gemm`, `attention`, or the operation's name.
pub fn kind_of(step: &Step) -> &str {
    match &step.instruction {
        Instruction::Gemm(_) => "gemm",
        Instruction::AttentionForward(_) | Instruction::AttentionBackward(_) => "attention",
        Instruction::Launch(launch) => &launch.op,
        Instruction::Copy { .. } => "copy",
        Instruction::Zero { .. } => "zero",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_lie_above_the_bounds() {
        let h200 = Machine::h200();
        let cost = Cost { flops: 1e12, bytes: 1e9 };
        let bound = (cost.flops / h200.bf16_flops).max(cost.bytes / h200.bandwidth);
        for work in [
            Work::Stream { launches: 1 },
            Work::Product { launches: 1, extra: 0.0 },
            Work::AttentionForward,
            Work::AttentionBackward,
        ] {
            assert!(expected(work, cost, Some(DType::BF16), &h200) > bound, "{work:?}");
        }
        let more = Work::Product { launches: 2, extra: 1e9 };
        let less = Work::Product { launches: 1, extra: 0.0 };
        let difference = expected(more, cost, None, &h200) - expected(less, cost, None, &h200);
        assert!((difference - 2e-6 - 1e9 / (0.93 * 4.27e12)).abs() < 1e-12);
    }

    #[test]
    fn a_machine_that_reaches_its_ceilings_has_estimates_that_are_bounds() {
        let cpu = Machine::cpu(1 << 30, 2);
        let cost = Cost { flops: 2e9, bytes: 1e3 };
        assert_eq!(expected(Work::Stream { launches: 3 }, cost, None, &cpu), cost.flops / cpu.f32_flops);
    }
}
