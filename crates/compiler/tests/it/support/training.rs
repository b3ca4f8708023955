//! Two steps of the shipped example with any options, as bits: what may not change a result is compared with.

use std::sync::Arc;

use compiler::{AdapterOptions, CompileOptions, EntryOptions, OptimizerKind};
use program::{Backend, EntryKind, Program, Session, TensorRef, scalar};
use tensor::{DType, HostTensor};

use super::{TASK, VARIANT, adapter, fill_parameters, options};

pub fn model() -> graph::Model {
    graph::from_json(include_str!("../../../../train/tests/ir/stories.json")).unwrap()
}

pub fn read(session: &mut dyn Session, at: &TensorRef) -> Vec<u8> {
    let mut tensor = HostTensor::zeros(at.dtype, at.shape.clone());
    session.read(at, &mut tensor.bytes).unwrap();
    tensor.bytes
}

pub fn write(session: &mut dyn Session, at: &TensorRef, values: impl Iterator<Item = f32>) {
    let values: Vec<f32> = values.take(at.len()).collect();
    let bytes = HostTensor::from_f32(at.shape.clone(), &values).cast(at.dtype).bytes;
    session.write(at, &bytes).unwrap();
}

/// Numbers between −0.1 and 0.1.
pub fn numbers(seed: usize) -> impl Iterator<Item = f32> {
    (0..).map(move |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1e4 - 0.1)
}

pub fn fill(session: &mut dyn Session, name: &str, at: &TensorRef, micro_step: usize) {
    let id = |i: usize| (i * 37 + micro_step * 11) % 500;
    let ints: Vec<i32> = match name {
        "input_ids" => (0..at.len()).map(|i| id(i) as i32).collect(),
        "targets" => (0..at.len()).map(|i| id(i + 1) as i32).collect(),
        "position_ids" => (0..at.len()).map(|i| (i % VARIANT.seq_len) as i32).collect(),
        "weights" => return write(session, at, std::iter::repeat(1.0)),
        _ => vec![0; at.len()],
    };
    session.write(at, &HostTensor::from_i32(at.shape.clone(), &ints).bytes).unwrap();
}

/// Loss, norm, weights, states and copies after two steps of two micro-steps, as bits. Of several ranks the first alone
/// trains; the rows of the others have no weight.
pub fn bits(program: Program) -> Vec<(String, Vec<u8>)> {
    bits_after(program, 2)
}

/// The same, with a number of micro-steps in each step.
pub fn bits_after(program: Program, micro_steps: usize) -> Vec<(String, Vec<u8>)> {
    let mut session = cpu::CpuBackend::new(Some(2)).unwrap().load(Arc::new(program)).unwrap();
    bits_of(session.as_mut(), 2, micro_steps, |_| 0)
}

/// The same on a session of any backend; of several ranks, the one that `has_rows` gives for a micro-step has rows that count.
pub fn bits_of(
    session: &mut dyn Session,
    steps: usize,
    micro_steps: usize,
    has_rows: impl Fn(usize) -> usize,
) -> Vec<(String, Vec<u8>)> {
    let program = session.program().clone();
    fill_parameters(session, |session, index, slot| {
        write(session, &slot.weight, numbers(index));
        slot.master.iter().for_each(|master| write(session, master, numbers(index)));
    });
    let mut results = Vec::new();
    for step in 0..steps {
        for micro_step in 0..micro_steps {
            let entry = program.micro_step(micro_step == 0, micro_step + 1 == micro_steps, Some(VARIANT)).unwrap();
            for (name, at) in &program.entries[entry].inputs {
                fill(session, name, at, micro_steps * step + micro_step);
            }
            let weights = program.entries[entry].inputs.iter().find(|(name, _)| name == "weights");
            let nothing = weights.map(|(_, at)| (at, vec![0; at.bytes()])).unwrap();
            let ranks = program.cluster.ranks;
            let others = (0..ranks).filter(|rank| *rank != has_rows(micro_steps * step + micro_step) % ranks);
            others.for_each(|rank| session.write_rank(rank, nothing.0, &nothing.1).unwrap());
            session.run(entry).unwrap();
        }
        let scalars =
            [(scalar::LEARNING_RATE, 1e-2), (scalar::BIAS_CORRECTION_1, 0.1), (scalar::BIAS_CORRECTION_2, 1e-3)];
        for (name, value) in scalars {
            write(session, program.scalar(name).unwrap(), std::iter::once(value));
        }
        session.run(program.entry(EntryKind::Update, None).unwrap()).unwrap();
        for name in [scalar::LOSS_SUM, scalar::GRADIENT_NORM] {
            results.push((name.to_owned(), read(session, program.scalar(name).unwrap())));
        }
    }
    for slot in &program.layout.parameters {
        let states = slot.states.iter().map(|state| &state.at);
        let kept = [Some(&slot.weight), slot.gradient.as_ref(), slot.master.as_ref()];
        for at in kept.into_iter().flatten().chain(states) {
            results.push((format!("{}: {at}", slot.name), read(session, at)));
        }
    }
    results
}

pub fn assert_same(found: Vec<(String, Vec<u8>)>, expected: &[(String, Vec<u8>)], what: &str) {
    assert_eq!(found.len(), expected.len());
    for ((name, found), (_, expected)) in found.iter().zip(expected) {
        assert!(found == expected, "{what}: other bits of {name}");
    }
}

/// Full and adapters, all optimizers, with and without f32 copies.
pub fn cases() -> Vec<(String, CompileOptions)> {
    let mut cases = Vec::new();
    let normuon = OptimizerKind::NorMuon { momentum: 0.95, beta2: 0.95, cautious: true };
    for kind in [OptimizerKind::AdamW, OptimizerKind::AdamW8bit, normuon] {
        for (adapters, master) in [(false, false), (false, true), (true, false)] {
            let mut of = options();
            (of.weights, of.compute) = (DType::BF16, DType::BF16);
            of.entries = vec![EntryOptions::train(TASK)];
            of.adapter = adapters.then(|| AdapterOptions { rank: 64, ..adapter() });
            let optimizer = of.training.as_mut().unwrap().optimizer.as_mut().unwrap();
            (optimizer.kind, optimizer.master) = (kind, master);
            cases.push((format!("{kind:?}, adapters {adapters}, copies {master}"), of));
        }
    }
    cases
}
