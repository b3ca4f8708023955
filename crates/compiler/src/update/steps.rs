//! Steps of the update: instructions with their scratch space and provenance.

use ops::OpId;
use program::{Documents, Instruction, Provenance, Step, TensorRef};
use tensor::Attrs;

use crate::lowering::Lowering;

/// Adds an operation, while values of the update occupy the first `taken` bytes of the activation arena.
pub(crate) fn push_behind(
    steps: &mut Vec<Step>,
    lowering: &mut Lowering<'_>,
    taken: usize,
    op: OpId,
    attrs: Attrs,
    inputs: Vec<TensorRef>,
    outputs: Vec<TensorRef>,
) {
    let op = ops::get(op);
    let scratch = lowering.update_scratch(op, &attrs, &inputs, &outputs, taken);
    let (instruction, cost) = lowering.instruction(op, &attrs, inputs, outputs, scratch, Documents::Rows);
    steps.push(step(instruction, op.name(), cost));
}

pub(super) fn provenance(op: &str) -> Provenance {
    Provenance { op: op.to_owned(), phase: program::Phase::Update, layer: None, at: None }
}

pub(super) fn step(instruction: Instruction, op: &str, cost: program::Cost) -> Step {
    Step { instruction, provenance: provenance(op), cost }
}
