//! What a program will cost on its machine: operations, bytes and time of an entry point. Two times: the bound at the
//! machine's ceilings, where an instruction takes the longer of its arithmetic and its traffic, and the estimate with
//! what of these is reached in a step. Transfers run beside the computation; what waits for them waits.

use std::collections::HashMap;

use tensor::DType;

use crate::instruction::{Attention, Cost, Documents, Instruction, Lane, Step};
use crate::machine::Machine;
use crate::memory::TensorRef;
use crate::program::{Entry, Program};

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
    /// Of `seconds`, those in which the computation waits for transfers.
    pub waiting: f64,
    /// Bytes between device and host that transfers move.
    pub transferred: f64,
}

/// What decides how much of the machine's ceilings an instruction reaches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    /// A kernel of the project's own, most of them bound by what they read and write.
    Kernel { launches: usize },
    /// `extra` bytes are moved beside the cost's.
    Product { launches: usize, extra: f64 },
    /// `filled`: mean length of a document as a share of the row, 1 where every row is one document.
    Attention { backward: bool, filled: f64 },
}

/// Kernels of a library's attention: the backward pass has the sums of rows and the rounding of dq beside it.
const FORWARD_LAUNCHES: usize = 1;
const BACKWARD_LAUNCHES: usize = 3;

/// Time of attention over short documents as a share of that over full rows, for documents of no length: their tiles
/// are mostly masked. cuDNN on an H200, 16 to 2048 tokens of 2048: 0.49 forward and 0.68 backward at 137 tokens, 0.54
/// and 0.72 at 420, about 1 at 2048.
const RAGGED_FORWARD: f64 = 0.46;
const RAGGED_BACKWARD: f64 = 0.66;

fn of_documents(filled: f64, ragged: f64) -> f64 {
    ragged + (1.0 - ragged) * filled.min(1.0)
}

/// Mean length of a document as a share of the row.
fn filled(of: &Attention) -> f64 {
    match of.documents {
        Documents::Rows => 1.0,
        Documents::Packed { count, .. } => of.q.shape[0] as f64 / count.max(1) as f64,
    }
}

/// Edge of the tiles that libraries cut products into, as far as the number of kernels goes.
const TILE: usize = 128;

fn rate(dtype: Option<DType>, machine: &Machine) -> f64 {
    if dtype == Some(DType::BF16) { machine.bf16_flops } else { machine.f32_flops }
}

/// Seconds that work is expected to take. `dtype` is that of the arithmetic of products and attention.
pub fn expected(work: Work, cost: Cost, dtype: Option<DType>, machine: &Machine) -> f64 {
    let reached = &machine.reached;
    let (launches, extra, flops, bandwidth) = match work {
        Work::Kernel { launches } => (launches, 0.0, reached.kernels, reached.bandwidth),
        Work::Product { launches, extra } => (launches, extra, reached.products, reached.product_bandwidth),
        Work::Attention { backward: false, filled } => {
            let rate = reached.attention_forward / of_documents(filled, RAGGED_FORWARD);
            (FORWARD_LAUNCHES, 0.0, rate, reached.bandwidth)
        }
        Work::Attention { backward: true, filled } => {
            let rate = reached.attention_backward / of_documents(filled, RAGGED_BACKWARD);
            (BACKWARD_LAUNCHES, 0.0, rate, reached.bandwidth)
        }
    };
    let own = (cost.flops / (flops * rate(dtype, machine))).max(cost.bytes / (bandwidth * machine.bandwidth));
    own + extra / (reached.bandwidth * machine.bandwidth) + launches as f64 * reached.launch
}

/// What an instruction of the computation is; none for those beside it.
fn work_of(step: &Step, machine: &Machine) -> Option<Work> {
    Some(match &step.instruction {
        Instruction::Gemm(gemm) => {
            // Too few tiles for the device: the sum over k is cut, and its parts are added by a further kernel.
            let split = gemm.batch * gemm.m.div_ceil(TILE) * gemm.n.div_ceil(TILE) * 2 <= machine.units;
            let pass = !gemm.low_rank.is_empty() && machine.reached.addend_pass;
            let extra = if pass { 2.0 * gemm.d.bytes() as f64 } else { 0.0 };
            Work::Product { launches: 1 + usize::from(split) + usize::from(pass), extra }
        }
        Instruction::AttentionForward(of) => Work::Attention { backward: false, filled: filled(&of.shared) },
        Instruction::AttentionBackward(of) => Work::Attention { backward: true, filled: filled(&of.shared) },
        Instruction::Launch(launch) => Work::Kernel { launches: launch.calls.len().max(1) },
        Instruction::Copy { .. } | Instruction::Zero { .. } => Work::Kernel { launches: 1 },
        Instruction::Transfer { .. } | Instruction::Record { .. } | Instruction::Wait { .. } => return None,
    })
}

/// Seconds of a transfer with the other direction under way; none for any other instruction.
fn transfer(step: &Step, machine: &Machine) -> f64 {
    match &step.instruction {
        Instruction::Transfer { from, .. } => from.bytes() as f64 / (machine.link.both_ways / 2.0),
        _ => 0.0,
    }
}

/// Seconds for what an instruction of the computation reads and writes where it lies in host memory.
fn reaching(step: &Step, program: &Program) -> f64 {
    let on_host = |at: &&&TensorRef| program.arenas[at.arena.0 as usize].is_on_host();
    let bytes = |of: &[&TensorRef]| of.iter().filter(on_host).map(|at| at.bytes()).sum::<usize>() as f64;
    // What an update writes it has read before.
    let (read, written) = (bytes(&step.instruction.reads()), bytes(&step.instruction.writes()));
    let link = &program.machine.link;
    ((read + written) / link.one_way).max((read + 2.0 * written) / link.both_ways)
}

/// Seconds that one instruction is expected to take; none for marks and waits, whose time is that of others.
pub fn seconds(step: &Step, program: &Program) -> f64 {
    let machine = &program.machine;
    let Some(work) = work_of(step, machine) else { return transfer(step, machine) };
    expected(work, step.cost, step.instruction.compute_dtype(), machine).max(reaching(step, program))
}

/// Seconds that one instruction takes at the machine's ceilings.
pub fn ceiling(step: &Step, program: &Program) -> f64 {
    let machine = &program.machine;
    if work_of(step, machine).is_none() {
        return transfer(step, machine);
    }
    let rate = rate(step.instruction.compute_dtype(), machine);
    (step.cost.flops / rate).max(step.cost.bytes / machine.bandwidth).max(reaching(step, program))
}

/// Adds up an entry point of a program.
pub fn estimate(entry: &Entry, program: &Program) -> Estimate {
    let (seconds, waiting) = run(entry, |step| seconds(step, program));
    let (ceiling, _) = run(entry, |step| ceiling(step, program));
    let start = Estimate { seconds, ceiling, waiting, ..Estimate::default() };
    entry.steps.iter().fold(start, |sum, step| Estimate {
        flops: sum.flops + step.cost.flops,
        bytes: sum.bytes + step.cost.bytes,
        instructions: sum.instructions + 1,
        transferred: sum.transferred
            + match &step.instruction {
                Instruction::Transfer { from, .. } => from.bytes() as f64,
                _ => 0.0,
            },
        ..sum
    })
}

/// Lets the lanes run against one another: seconds until the computation is done, and how many of these it waits.
fn run(entry: &Entry, seconds: impl Fn(&Step) -> f64) -> (f64, f64) {
    let mut clocks = [0.0f64; Lane::ALL.len()];
    let mut marks = HashMap::new();
    let mut waiting = 0.0;
    for step in &entry.steps {
        let clock = &mut clocks[step.instruction.lane() as usize];
        match &step.instruction {
            Instruction::Record { event, .. } => {
                marks.insert(*event, *clock);
            }
            Instruction::Wait { event, lane } => {
                let wait = marks.get(event).map_or(0.0, |mark: &f64| (mark - *clock).max(0.0));
                *clock += wait;
                waiting += if *lane == Lane::Compute { wait } else { 0.0 };
            }
            _ => *clock += seconds(step),
        }
    }
    (clocks[Lane::Compute as usize], waiting)
}

/// The kind of an instruction for tables: `gemm`, `attention`, or the operation's name.
pub fn kind_of(step: &Step) -> &str {
    match &step.instruction {
        Instruction::Gemm(_) => "gemm",
        Instruction::AttentionForward(_) | Instruction::AttentionBackward(_) => "attention",
        Instruction::Launch(launch) => &launch.op,
        Instruction::Copy { .. } => "copy",
        Instruction::Zero { .. } => "zero",
        Instruction::Transfer { .. } => "transfer",
        Instruction::Record { .. } => "record",
        Instruction::Wait { .. } => "wait",
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
            Work::Kernel { launches: 1 },
            Work::Product { launches: 1, extra: 0.0 },
            Work::Attention { backward: false, filled: 1.0 },
            Work::Attention { backward: true, filled: 1.0 },
        ] {
            assert!(expected(work, cost, Some(DType::BF16), &h200) > bound, "{work:?}");
        }
        let attention = |filled| expected(Work::Attention { backward: true, filled }, cost, Some(DType::BF16), &h200);
        assert!(attention(0.05) < 0.75 * attention(1.0) && attention(0.05) > 0.6 * attention(1.0));
        let more = Work::Product { launches: 2, extra: 1e9 };
        let less = Work::Product { launches: 1, extra: 0.0 };
        let difference = expected(more, cost, None, &h200) - expected(less, cost, None, &h200);
        assert!((difference - 2e-6 - 1e9 / (0.93 * 4.27e12)).abs() < 1e-12);
    }

    #[test]
    fn a_machine_that_reaches_its_ceilings_has_estimates_that_are_bounds() {
        let cpu = Machine::cpu(1 << 30, 2);
        let cost = Cost { flops: 2e9, bytes: 1e3 };
        assert_eq!(expected(Work::Kernel { launches: 3 }, cost, None, &cpu), cost.flops / cpu.f32_flops);
    }
}
