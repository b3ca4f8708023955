//! A program of one operation: what compares a backend with the reference, operation by operation.

use ops::{LowerCall, Op};
use program::{
    Arch, Arena, ArenaKind, Cluster, Documents, Entry, EntryKind, Layout, Machine, Program, Provenance, Step,
    TensorRef, Variant,
};
use tensor::{Attrs, DType};

use crate::lowering::Lowering;
use crate::memory::{ALIGNMENT_BYTES, align, arena};

/// One call of `op` on dense tensors, whose rows hold `documents`. Inputs are named `0`, `1`, … among the entry's inputs, results
/// likewise among its outputs; an update's state is written into the outputs beforehand.
pub fn compile_call(
    op: &'static dyn Op,
    attrs: &Attrs,
    inputs: &[(DType, Vec<usize>)],
    outputs: &[(DType, Vec<usize>)],
    machine: &Machine,
    documents: Documents,
) -> Program {
    let mut lowering = Lowering::new(machine);
    let mut end = 0;
    let mut place = |(dtype, shape): &(DType, Vec<usize>)| {
        let tensor = TensorRef::dense(arena::BATCH, end, *dtype, shape.clone());
        end = align(end + tensor.bytes(), ALIGNMENT_BYTES);
        tensor
    };
    let inputs: Vec<TensorRef> = inputs.iter().map(&mut place).collect();
    let outputs: Vec<TensorRef> = outputs.iter().map(&mut place).collect();
    let call = LowerCall { inputs: &inputs, outputs: &outputs, attrs, machine, documents };
    let scratch_bytes = if machine.arch == Arch::Cpu { 0 } else { op.scratch(&call) };
    let scratch = (scratch_bytes > 0).then(|| TensorRef::dense(arena::ACTIVATIONS, 0, DType::U8, vec![scratch_bytes]));
    let numbered = |list: &[TensorRef]| list.iter().enumerate().map(|(i, t)| (i.to_string(), t.clone())).collect();
    let (named_inputs, named_outputs) = (numbered(&inputs), numbered(&outputs));
    let (instruction, cost) = lowering.instruction(op, attrs, inputs, outputs, scratch, documents);
    let provenance = Provenance { op: op.name().to_owned(), phase: program::Phase::Forward, layer: None, at: None };
    let bytes = |kind: ArenaKind| match kind {
        ArenaKind::Batch => end,
        ArenaKind::Activations => scratch_bytes,
        _ => 0,
    };
    Program {
        name: op.name().to_owned(),
        machine: machine.clone(),
        cluster: Cluster::ONE,
        arenas: ArenaKind::ALL.map(|kind| Arena::on_device(kind, bytes(kind))).to_vec(),
        layout: Layout::default(),
        constants: Vec::new(),
        scalars: Vec::new(),
        kernels: lowering.kernels,
        entries: vec![Entry {
            kind: EntryKind::Forward,
            name: String::new(),
            variant: Some(Variant { batch: 1, seq_len: 1, documents, patches: 0, logits: 0 }),
            steps: vec![Step { instruction, provenance, cost }],
            inputs: named_inputs,
            outputs: named_outputs,
            stage: Default::default(),
        }],
        memory: Vec::new(),
        activations: Vec::new(),
        phases: Vec::new(),
        plan: Vec::new(),
        seed: 0,
    }
}
