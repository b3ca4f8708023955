//! What a program will cost on its machine: operations, bytes and time of an entry point, from the
//! machine's measured ceilings. An instruction takes the longer of its arithmetic and its traffic.

use tensor::DType;

use crate::instruction::{Instruction, Step};
use crate::machine::Machine;
use crate::program::Entry;

/// Totals of one run of an entry point.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimate {
    /// Arithmetic operations, recomputation included.
    pub flops: f64,
    /// Bytes moved, inputs and outputs of each instruction counted once.
    pub bytes: f64,
    /// Seconds at the machine's ceilings, without gaps between instructions.
    pub seconds: f64,
    pub instructions: usize,
}

/// Seconds that one instruction takes at the machine's ceilings.
pub fn seconds(step: &Step, machine: &Machine) -> f64 {
    let rate = match step.instruction.compute_dtype() {
        Some(DType::BF16) => machine.bf16_flops,
        _ => machine.f32_flops,
    };
    (step.cost.flops / rate).max(step.cost.bytes / machine.bandwidth)
}

/// Adds up an entry point.
pub fn estimate(entry: &Entry, machine: &Machine) -> Estimate {
    entry.steps.iter().fold(Estimate::default(), |sum, step| Estimate {
        flops: sum.flops + step.cost.flops,
        bytes: sum.bytes + step.cost.bytes,
        seconds: sum.seconds + seconds(step, machine),
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
