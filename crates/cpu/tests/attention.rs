//! Attention on this backend against the operation's f64 reference: sizes that no tile divides, shared key
//! heads, documents, windows; and the same bits for any number of threads.

use std::sync::Arc;

use cpu::CpuBackend;
use ops::evaluate::{Array, apply};
use program::{
    Arena, ArenaId, ArenaKind, Backend, Cost, Entry, EntryKind, Instruction, Launch, Machine, Program, Provenance,
    Step, TensorRef,
};
use tensor::{Attrs, DType, HostTensor};

fn values(n: usize, seed: u32) -> Vec<f32> {
    (0..n as u32).map(|i| ((i.wrapping_mul(2654435761) ^ seed) % 4001) as f32 / 1000.0 - 2.0).collect()
}

struct Case {
    shape: [usize; 5],
    /// First token of the second document.
    cut: usize,
    window: Option<i64>,
}

struct Operands {
    inputs: Vec<(Vec<usize>, Vec<f32>)>,
    starts: Vec<i32>,
    attrs: Attrs,
    outputs: Vec<Vec<usize>>,
}

/// Forward operands, or backward ones with the o and lse that belong to them.
fn operands(case: &Case, forward: Option<&[Vec<f32>]>) -> Operands {
    let [b, t, h, g, d] = case.shape;
    let starts = (0..b * t).map(|i| if i % t < case.cut { 0 } else { case.cut as i32 }).collect();
    let attrs = Attrs::new().with("scale", 0.2);
    let attrs = case.window.into_iter().fold(attrs, |attrs, window| attrs.with("window", window));
    let (wide, narrow) = (vec![b, t, h, d], vec![b, t, g, d]);
    let drawn = |shape: &Vec<usize>, seed: u32| (shape.clone(), values(shape.iter().product(), seed));
    let mut inputs = vec![drawn(&wide, 1), drawn(&narrow, 2), drawn(&narrow, 3)];
    let mut outputs = vec![wide.clone(), vec![b, h, t]];
    if let Some(results) = forward {
        inputs.extend([(wide.clone(), results[0].clone()), (vec![b, h, t], results[1].clone()), drawn(&wide, 4)]);
        outputs = vec![wide, narrow.clone(), narrow];
    }
    Operands { inputs, starts, attrs, outputs }
}

fn run(op: &str, operands: &Operands, threads: usize) -> Vec<Vec<f32>> {
    let mut offset = 0;
    let mut place = |dtype: DType, shape: &[usize]| {
        let at = TensorRef::dense(ArenaId(0), offset, dtype, shape);
        offset = (offset + at.bytes()).next_multiple_of(64);
        at
    };
    let mut inputs: Vec<TensorRef> = operands.inputs.iter().map(|(shape, _)| place(DType::F32, shape)).collect();
    inputs.push(place(DType::I32, &operands.inputs[0].0[..2]));
    let outputs: Vec<TensorRef> = operands.outputs.iter().map(|shape| place(DType::F32, shape)).collect();
    let launch = Launch {
        op: op.into(),
        attrs: operands.attrs.clone(),
        inputs: inputs.clone(),
        outputs: outputs.clone(),
        scratch: None,
        calls: vec![],
    };
    let step =
        Step { instruction: Instruction::Launch(launch), provenance: Provenance::default(), cost: Cost::default() };
    let program = Program {
        arenas: vec![Arena::on_device(ArenaKind::Activations, offset)],
        entries: vec![Entry {
            kind: EntryKind::Forward,
            variant: None,
            steps: vec![step],
            inputs: vec![],
            outputs: vec![],
        }],
        ..empty()
    };
    let mut session = CpuBackend::new(Some(threads)).unwrap().load(Arc::new(program)).unwrap();
    for (at, (shape, values)) in inputs.iter().zip(&operands.inputs) {
        session.write(at, &HostTensor::from_f32(shape.clone(), values).bytes).unwrap();
    }
    let starts: Vec<u8> = operands.starts.iter().flat_map(|x| x.to_le_bytes()).collect();
    session.write(&inputs[inputs.len() - 1], &starts).unwrap();
    // A second run must not see what the first left in the scratch memory.
    session.run(0).unwrap();
    session.run(0).unwrap();
    let read = outputs.iter().map(|at| {
        let mut bytes = vec![0; at.bytes()];
        session.read(at, &mut bytes).unwrap();
        HostTensor::new(DType::F32, at.shape.clone(), bytes).to_f32()
    });
    read.collect()
}

fn empty() -> Program {
    Program {
        name: "test".into(),
        machine: Machine::cpu(1 << 30, 1),
        arenas: vec![],
        parameters: vec![],
        constants: vec![],
        scalars: vec![],
        kernels: vec![],
        entries: vec![],
        memory: vec![],
        seed: 0,
        activations: vec![],
        phases: vec![],
        plan: vec![],
    }
}

fn exact(op: &str, operands: &Operands) -> Vec<Vec<f64>> {
    let wide = |values: &[f32]| Array::Real(values.iter().map(|x| f64::from(*x)).collect());
    let mut arrays: Vec<(Vec<usize>, Array<f64>)> =
        operands.inputs.iter().map(|(shape, values)| (shape.clone(), wide(values))).collect();
    arrays.push((operands.inputs[0].0[..2].to_vec(), Array::Int(operands.starts.clone())));
    let inputs: Vec<(&[usize], &Array<f64>)> = arrays.iter().map(|(shape, array)| (shape.as_slice(), array)).collect();
    let zeros = |shape: &Vec<usize>| (shape.clone(), Array::Real(vec![0.0; shape.iter().product()]));
    let mut outputs: Vec<(Vec<usize>, Array<f64>)> = operands.outputs.iter().map(zeros).collect();
    apply(ops::find(op).unwrap(), &operands.attrs, &inputs, &mut outputs);
    outputs.into_iter().map(|(_, array)| array.real().to_vec()).collect()
}

fn check(case: &Case, op: &str, operands: &Operands) -> Vec<Vec<f32>> {
    let found = run(op, operands, 2);
    assert_eq!(found, run(op, operands, 1), "{op} {:?}: other bits on one thread", case.shape);
    for (index, (found, exact)) in found.iter().zip(exact(op, operands)).enumerate() {
        let size = exact.iter().map(|x| x * x).sum::<f64>().sqrt();
        let error = found.iter().zip(&exact).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum::<f64>().sqrt();
        assert!(error <= 2e-5 * size, "{op} {:?} result {index}: {}", case.shape, error / size);
    }
    found
}

#[test]
fn attention_equals_its_reference() {
    let cases = [
        Case { shape: [2, 5, 4, 2, 8], cut: 3, window: None },
        Case { shape: [1, 130, 2, 1, 64], cut: 70, window: None },
        Case { shape: [2, 300, 3, 3, 40], cut: 300, window: Some(17) },
        Case { shape: [1, 257, 4, 2, 132], cut: 100, window: Some(90) },
    ];
    for case in &cases {
        let forward = check(case, "attention", &operands(case, None));
        check(case, "attention_backward", &operands(case, Some(&forward)));
    }
}
