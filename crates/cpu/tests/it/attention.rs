//! Attention on this backend against the operation's f64 reference: sizes that no tile divides, shared key
//! heads, documents, windows, last keys, branches, caps, sinks; and the same bits for any number of threads.

use std::sync::Arc;

use cpu::CpuBackend;
use ops::evaluate::{Array, apply};
use program::{
    Arena, ArenaId, ArenaKind, Arithmetic, Backend, Cost, Entry, EntryKind, Instruction, Launch, Machine, Program,
    Provenance, Step, TensorRef,
};
use tensor::{Attrs, DType, HostTensor};

fn values(n: usize, seed: u32) -> Vec<f32> {
    // Sequences of different seeds must not resemble one another: queries like keys would see themselves alone.
    let word = |i: u32| (i.wrapping_mul(2654435761) ^ seed.wrapping_mul(0x9e37_79b9)).wrapping_mul(2246822519) >> 7;
    (0..n as u32).map(|i| (word(i) % 4001) as f32 / 1000.0 - 2.0).collect()
}

#[derive(Clone, Copy, Default)]
struct Case {
    /// (B, T, heads, kv_heads, D, DV)
    shape: [usize; 6],
    /// First token of the second document.
    cut: usize,
    window: Option<i64>,
    /// Tokens of each document that see one another whole.
    prefix: usize,
    bidirectional: bool,
    /// Tokens of the common beginning of two branches in the last document; 0 without branches.
    common: usize,
    soft_cap: Option<f64>,
    has_sink: bool,
}

struct Operands {
    inputs: Vec<(Vec<usize>, Vec<f32>)>,
    /// document_start, then last_key or last_query.
    ints: Vec<Vec<i32>>,
    sink: Option<Vec<f32>>,
    attrs: Attrs,
    outputs: Vec<Vec<usize>>,
}

/// Forward operands, or backward ones with the o and lse that belong to them.
fn operands(case: &Case, forward: Option<&[Vec<f32>]>) -> Operands {
    let [b, t, h, g, d, dv] = case.shape;
    let start = |i: usize| if i < case.cut { 0 } else { case.cut };
    let last = |i: usize| i.max((start(i) + case.prefix).min(if i < case.cut { case.cut } else { t }).max(1) - 1);
    let row = |of: &dyn Fn(usize) -> usize| (0..b * t).map(|i| of(i % t) as i32).collect::<Vec<_>>();
    let mut ints = vec![row(&start)];
    ints.extend((case.prefix > 0).then(|| row(&last)));
    // The first branch ends half-way through what follows the common beginning.
    let first = if case.cut < t { case.cut } else { 0 } + case.common;
    let middle = first + (t - first) / 2;
    let last_query = |i: usize| if (first..middle).contains(&i) { middle - 1 } else { t - 1 };
    ints.extend((case.common > 0).then(|| row(&last_query)));
    let attrs = case.window.into_iter().fold(Attrs::new(), |attrs, window| attrs.with("window", window));
    let attrs = case.soft_cap.into_iter().fold(attrs, |attrs, cap| attrs.with("soft_cap", cap));
    let attrs = if case.bidirectional { attrs.with("bidirectional", true) } else { attrs };
    let attrs = if case.common > 0 { attrs.with("branches", true) } else { attrs };
    let (q, k, v, o) = (vec![b, t, h, d], vec![b, t, g, d], vec![b, t, g, dv], vec![b, t, h, dv]);
    let drawn = |shape: &Vec<usize>, seed: u32| (shape.clone(), values(shape.iter().product(), seed));
    let mut inputs = vec![drawn(&q, 1), drawn(&k, 2), drawn(&v, 3)];
    let mut outputs = vec![o.clone(), vec![b, h, t]];
    if let Some(results) = forward {
        inputs.extend([(o.clone(), results[0].clone()), (vec![b, h, t], results[1].clone()), drawn(&o, 4)]);
        outputs = vec![q, k, v];
    }
    Operands { inputs, ints, sink: case.has_sink.then(|| values(h, 5)), attrs, outputs }
}

fn run(op: &str, operands: &Operands, threads: usize) -> Vec<Vec<f32>> {
    let mut offset = 0;
    let mut place = |dtype: DType, shape: &[usize]| {
        let at = TensorRef::dense(ArenaId(0), offset, dtype, shape);
        offset = (offset + at.bytes()).next_multiple_of(64);
        at
    };
    let mut inputs: Vec<TensorRef> = operands.inputs.iter().map(|(shape, _)| place(DType::F32, shape)).collect();
    let rows = &operands.inputs[0].0[..2];
    let ints: Vec<TensorRef> = operands.ints.iter().map(|_| place(DType::I32, rows)).collect();
    inputs.extend(ints.clone());
    let sink = operands.sink.as_ref().map(|sink| place(DType::F32, &[sink.len()]));
    inputs.extend(sink.clone());
    let outputs: Vec<TensorRef> = operands.outputs.iter().map(|shape| place(DType::F32, shape)).collect();
    let launch = Launch {
        op: op.into(),
        attrs: operands.attrs.clone(),
        inputs: inputs.clone(),
        outputs: outputs.clone(),
        scratch: None,
        arithmetic: Arithmetic::default(),
        calls: vec![],
    };
    let step =
        Step { instruction: Instruction::Launch(launch), provenance: Provenance::default(), cost: Cost::default() };
    let program = Program {
        arenas: vec![Arena::on_device(ArenaKind::Activations, offset)],
        entries: vec![Entry {
            kind: EntryKind::Forward,
            name: String::new(),
            variant: None,
            steps: vec![step],
            inputs: vec![],
            outputs: vec![],
            stage: Default::default(),
        }],
        ..empty()
    };
    let mut session = CpuBackend::new(Some(threads)).unwrap().load(Arc::new(program)).unwrap();
    for (at, (shape, values)) in inputs.iter().zip(&operands.inputs) {
        session.write(at, &HostTensor::from_f32(shape.clone(), values).bytes).unwrap();
    }
    for (at, values) in ints.iter().zip(&operands.ints) {
        session.write(at, &HostTensor::from_i32(at.shape.clone(), values).bytes).unwrap();
    }
    if let (Some(at), Some(values)) = (&sink, &operands.sink) {
        session.write(at, &HostTensor::from_f32(at.shape.clone(), values).bytes).unwrap();
    }
    // A second run must not see what the first left in the workspace.
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
        cluster: program::Cluster::ONE,
        arenas: vec![],
        layout: program::Layout::default(),
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
    let rows = operands.inputs[0].0[..2].to_vec();
    arrays.extend(operands.ints.iter().map(|values| (rows.clone(), Array::Int(values.clone()))));
    arrays.extend(operands.sink.iter().map(|values| (vec![values.len()], wide(values))));
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
    let plain = |[b, t, h, g, d]: [usize; 5], cut: usize| Case { shape: [b, t, h, g, d, d], cut, ..Case::default() };
    let cases = [
        plain([2, 5, 4, 2, 8], 3),
        plain([1, 130, 2, 1, 64], 70),
        Case { window: Some(17), ..plain([2, 300, 3, 3, 40], 300) },
        Case { window: Some(90), ..plain([1, 257, 4, 2, 132], 100) },
        Case { prefix: 80, ..plain([1, 200, 2, 1, 24], 110) },
        Case { prefix: 3, window: Some(5), has_sink: true, ..plain([2, 70, 2, 1, 24], 33) },
        Case { bidirectional: true, ..plain([2, 150, 2, 2, 16], 150) },
        Case { bidirectional: true, window: Some(40), soft_cap: Some(1.5), ..plain([1, 150, 2, 2, 16], 150) },
        Case { soft_cap: Some(0.8), has_sink: true, ..plain([1, 129, 4, 2, 8], 64) },
        Case { shape: [1, 100, 2, 1, 192, 128], cut: 40, ..Case::default() },
        Case { shape: [1, 67, 2, 1, 16, 72], cut: 67, has_sink: true, ..Case::default() },
        plain([1, 66, 1, 1, 512], 66),
        Case { common: 5, ..plain([2, 70, 2, 1, 24], 33) },
        Case { common: 70, has_sink: true, ..plain([1, 300, 4, 2, 64], 300) },
        Case { common: 1, soft_cap: Some(1.5), ..plain([1, 200, 2, 2, 40], 9) },
    ];
    for case in &cases {
        let forward = check(case, "attention", &operands(case, None));
        check(case, "attention_backward", &operands(case, Some(&forward)));
    }
}
