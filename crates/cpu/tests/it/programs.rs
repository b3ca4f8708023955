//! Small programs built by hand: layouts, rounding points, and the same bits for any number of
//! threads.

use std::sync::Arc;

use cpu::CpuBackend;
use ops::{Call, Data, Input, Output};
use program::{
    Arena, ArenaId, ArenaKind, Arithmetic, Backend, BackendError, Constant, Cost, Entry, EntryKind, Gemm, Instruction,
    Launch, LowRank, Machine, Program, Provenance, Scales, Session, Step, TensorRef,
};
use tensor::{Attrs, DType, HostTensor, bf16_to_f32, f32_to_bf16};

const ARENA: usize = 1 << 21;

fn program(instructions: Vec<Instruction>, constants: Vec<Constant>) -> Program {
    let steps = instructions.into_iter().map(|instruction| Step {
        instruction,
        provenance: Provenance {
            op: "test".into(),
            phase: program::Phase::Forward,
            layer: Some(program::Layer { stack: "".into(), index: 3 }),
            at: Some("model.py:7".into()),
        },
        cost: Cost::default(),
    });
    Program {
        name: "test".into(),
        machine: Machine::cpu(1 << 30, 1),
        cluster: program::Cluster::ONE,
        arenas: vec![Arena::on_device(ArenaKind::Activations, ARENA)],
        layout: program::Layout::default(),
        constants,
        scalars: vec![],
        kernels: vec![],
        entries: vec![Entry {
            kind: EntryKind::Forward,
            name: String::new(),
            variant: None,
            steps: steps.collect(),
            inputs: vec![],
            outputs: vec![],
            stage: Default::default(),
        }],
        memory: vec![],
        activations: vec![],
        phases: vec![],
        plan: vec![],
        seed: 0,
    }
}

fn load(instructions: Vec<Instruction>, threads: usize) -> Box<dyn Session> {
    let backend = CpuBackend::new(Some(threads)).unwrap();
    backend.load(Arc::new(program(instructions, vec![]))).unwrap()
}

fn at(offset: usize, dtype: DType, shape: &[usize]) -> TensorRef {
    TensorRef::dense(ArenaId(0), offset, dtype, shape)
}

fn put(session: &mut dyn Session, at: &TensorRef, values: &[f32]) {
    let host = HostTensor::from_f32(at.shape.clone(), values).cast(at.dtype);
    session.write(at, &host.bytes).unwrap();
}

fn get(session: &mut dyn Session, at: &TensorRef) -> Vec<f32> {
    let mut bytes = vec![0; at.bytes()];
    session.read(at, &mut bytes).unwrap();
    HostTensor::new(at.dtype, at.shape.clone(), bytes).to_f32()
}

fn values(n: usize, seed: u32) -> Vec<f32> {
    (0..n as u32).map(|i| ((i.wrapping_mul(2654435761) ^ seed) % 4001) as f32 / 2000.0 - 1.0).collect()
}

fn rounded(values: &[f32]) -> Vec<f32> {
    values.iter().map(|x| bf16_to_f32(f32_to_bf16(*x))).collect()
}

fn launch(op: &str, attrs: Attrs, inputs: &[&TensorRef], outputs: &[&TensorRef]) -> Instruction {
    let own = |list: &[&TensorRef]| list.iter().map(|t| (*t).clone()).collect();
    Instruction::Launch(Launch {
        op: op.into(),
        attrs,
        inputs: own(inputs),
        outputs: own(outputs),
        scratch: None,
        arithmetic: Arithmetic::default(),
        calls: vec![],
    })
}

fn gemm(m: usize, n: usize, k: usize, a: &TensorRef, b: &TensorRef, d: &TensorRef) -> Gemm {
    Gemm {
        batch: 1,
        m,
        n,
        k,
        a: a.clone(),
        b: b.clone(),
        d: d.clone(),
        transpose_a: false,
        transpose_b: true,
        scale: 1.0,
        scales: None,
        bias: None,
        accumulate: false,
        batch_invariant: false,
        low_rank: vec![],
    }
}

#[test]
fn strided_bf16_operands_are_widened_and_results_rounded_once() {
    // x is the middle third of a merged matrix; y goes back into the last third.
    let whole = at(0, DType::BF16, &[5, 96]);
    let x = TensorRef { offset: 64, shape: vec![5, 32], ..whole.clone() };
    let y = TensorRef { offset: 128, shape: vec![5, 32], ..whole.clone() };
    let w = at(4096, DType::BF16, &[32]);
    let r = at(8192, DType::F32, &[5]);
    let mut session = load(vec![launch("rmsnorm", Attrs::new().with("eps", 1e-6), &[&x, &w], &[&y, &r])], 2);
    let (input, weight) = (rounded(&values(5 * 96, 1)), rounded(&values(32, 2)));
    put(&mut *session, &whole, &input);
    put(&mut *session, &w, &weight);
    session.run(0).unwrap();
    let (result, factors) = (get(&mut *session, &whole), get(&mut *session, &r));
    for row in 0..5 {
        let mean = (32..64).map(|c| input[row * 96 + c].powi(2)).sum::<f32>() / 32.0;
        assert!((factors[row] - 1.0 / (mean + 1e-6).sqrt()).abs() < 1e-5);
        for c in 0..32 {
            let exact = input[row * 96 + 32 + c] * factors[row] * weight[c];
            assert_eq!(result[row * 96 + 64 + c], bf16_to_f32(f32_to_bf16(exact)));
        }
        assert_eq!(result[row * 96..row * 96 + 64], input[row * 96..row * 96 + 64], "the rest is untouched");
    }
}

#[test]
fn rows_computed_some_at_a_time_may_overwrite_what_they_read() {
    // More elements than one task takes, so that several tasks share the rows.
    let (rows, columns) = (40, 3001);
    let logits = at(0, DType::BF16, &[rows, columns]);
    let elsewhere = at(300_032, DType::BF16, &[rows, columns]);
    let targets = at(600_064, DType::I32, &[rows]);
    let [loss, lse, d] = [601_088, 602_112, 603_136].map(|offset| at(offset, DType::F32, &[rows]));
    let forward = launch("cross_entropy", Attrs::new(), &[&logits, &targets], &[&loss, &lse]);
    let run = |result: &TensorRef, threads: usize| {
        let inputs = [&logits, &targets, &lse, &d];
        let backward = launch("cross_entropy_backward", Attrs::new(), &inputs, &[result]);
        let mut session = load(vec![forward.clone(), backward], threads);
        put(&mut *session, &logits, &values(rows * columns, 1));
        let ids: Vec<u8> = (0..rows as i32).flat_map(|i| (i * 70).to_le_bytes()).collect();
        session.write(&targets, &ids).unwrap();
        put(&mut *session, &d, &values(rows, 2));
        session.run(0).unwrap();
        get(&mut *session, result)
    };
    let apart = run(&elsewhere, 1);
    assert!(apart.iter().all(|x| x.is_finite()) && apart.iter().any(|x| x.abs() > 1e-4));
    assert_eq!(apart, run(&logits, 1));
    assert_eq!(apart, run(&logits, 3));
}

#[test]
fn an_update_in_pieces_has_the_bits_of_one_call() {
    // The last piece is a small one, and the call is a part of a larger tensor.
    let n = (2 << 15) + 4468;
    let [gradient, first, second] = [0, 300_032, 600_064].map(|offset| at(offset, DType::F32, &[n]));
    let weight = at(900_096, DType::BF16, &[n]);
    let scalars: Vec<TensorRef> = (0..5).map(|i| at(1_100_032 + 64 * i, DType::F32, &[1])).collect();
    let step = at(1_101_056, DType::I32, &[1]);
    let attrs = [("beta1", 0.9), ("beta2", 0.99), ("epsilon", 1e-8), ("weight_decay", 0.1)];
    let attrs = attrs.into_iter().fold(Attrs::new(), |attrs, (name, value)| attrs.with(name, value));
    let attrs = attrs.with("stochastic_rounding", true).with("seed", 7).with("stream", 3).with("start", 4096);
    let numbers = [values(n, 1), values(n, 2), values(n, 3).iter().map(|x| x.abs()).collect()];
    let of_step = [1e-2, 0.1, 0.01, 1.0, 1.0];
    let inputs: Vec<&TensorRef> = std::iter::once(&gradient).chain(&scalars).chain([&step]).collect();
    let found = [1, 3].map(|threads| {
        let mut session = load(vec![launch("adamw", attrs.clone(), &inputs, &[&weight, &first, &second])], threads);
        for (at, values) in [&gradient, &first, &second].into_iter().zip(&numbers) {
            put(&mut *session, at, values);
        }
        put(&mut *session, &weight, &values(n, 4));
        for (at, value) in scalars.iter().zip(of_step) {
            put(&mut *session, at, &[value]);
        }
        session.write(&step, &5i32.to_le_bytes()).unwrap();
        session.run(0).unwrap();
        [&weight, &first, &second].map(|at| get(&mut *session, at))
    });
    let [g, mut m, mut v] = numbers;
    let mut w = rounded(&values(n, 4));
    let (shape, one) = ([n], [1]);
    let of_step = of_step.map(|value| [value]);
    let real = |shape, values| Input { shape, data: Data::Real(values) };
    let scalars = of_step.iter().map(|value| real(&one[..], &value[..]));
    let step = Input { shape: &one[..], data: Data::Int(&[5]) };
    let inputs: Vec<Input<'_, f32>> = std::iter::once(real(&shape[..], &g[..])).chain(scalars).chain([step]).collect();
    let stored = [DType::BF16, DType::F32, DType::F32];
    let outputs = [&mut w, &mut m, &mut v].into_iter().zip(stored);
    let mut outputs: Vec<Output<'_, f32>> =
        outputs.map(|(data, storage)| Output::Real { shape: &shape, data, storage }).collect();
    ops::find("adamw").unwrap().reference_f32(&mut Call { attrs: &attrs, inputs: &inputs, outputs: &mut outputs });
    assert_ne!(w, rounded(&values(n, 4)));
    let expected = [w, m, v];
    assert!(found.iter().all(|found| *found == expected));
}

#[test]
fn accumulating_operations_start_from_the_present_contents() {
    let (x, r, dy) = (at(0, DType::F32, &[9, 16]), at(4096, DType::F32, &[9]), at(8192, DType::F32, &[9, 16]));
    let dw = at(16384, DType::F32, &[16]);
    let attrs = Attrs::new().with("accumulate", true);
    let mut session = load(vec![launch("rmsnorm_weight_gradient", attrs, &[&x, &r, &dy], &[&dw])], 1);
    put(&mut *session, &x, &values(144, 1));
    put(&mut *session, &r, &values(9, 2));
    put(&mut *session, &dy, &values(144, 3));
    session.run(0).unwrap();
    let once = get(&mut *session, &dw);
    session.run(0).unwrap();
    let twice = get(&mut *session, &dw);
    assert!(once.iter().any(|x| x.abs() > 0.1));
    assert!(once.iter().zip(&twice).all(|(a, b)| (2.0 * a - b).abs() < 1e-5));
}

/// y = x·wᵀ + bias, with two adapters on column ranges, everything in bf16, D strided and added to.
fn product(session: &mut dyn Session, parts: &Parts) -> Vec<f32> {
    put(session, &parts.x, &values(parts.x.len(), 1));
    put(session, &parts.w, &values(parts.w.len(), 2));
    put(session, &parts.bias, &values(parts.bias.len(), 3));
    put(session, &parts.t, &values(parts.t.len(), 4));
    put(session, &parts.b, &values(parts.b.len(), 5));
    put(session, &parts.whole, &values(parts.whole.len(), 6));
    session.run(0).unwrap();
    get(session, &parts.whole)
}

struct Parts {
    x: TensorRef,
    w: TensorRef,
    bias: TensorRef,
    t: TensorRef,
    b: TensorRef,
    /// D is the columns from 8 on.
    whole: TensorRef,
    d: TensorRef,
}

fn parts(dtype: DType, d_dtype: DType, m: usize, n: usize, k: usize) -> (Parts, Instruction) {
    let whole = at(600_000, d_dtype, &[m, n + 16]);
    let d = TensorRef { offset: whole.offset + 8 * d_dtype.size(), shape: vec![m, n], ..whole.clone() };
    let parts = Parts {
        x: at(0, dtype, &[m, k]),
        w: at(200_000, dtype, &[n, k]),
        bias: at(400_000, dtype, &[n]),
        t: at(420_032, dtype, &[m, 4]),
        b: at(500_032, dtype, &[n / 2, 4]),
        whole,
        d,
    };
    let mut instruction = gemm(m, n, k, &parts.x, &parts.w, &parts.d);
    instruction.bias = Some(parts.bias.clone());
    instruction.accumulate = true;
    let adapter = |first: usize, scale: f32| LowRank {
        t: parts.t.clone(),
        b: parts.b.clone(),
        transpose_b: true,
        scale,
        columns: (first, n / 2),
    };
    instruction.low_rank = vec![adapter(1, 2.0), adapter(n / 2, -0.5)];
    (parts, Instruction::Gemm(instruction))
}

fn expected(parts: &Parts, dtype: DType, m: usize, n: usize, k: usize) -> Vec<f64> {
    let stored = |len: usize, seed: u32, dtype: DType| {
        let values = values(len, seed);
        if dtype == DType::BF16 { rounded(&values) } else { values }
    };
    let (x, w) = (stored(m * k, 1, dtype), stored(n * k, 2, dtype));
    let (bias, t, b) = (stored(n, 3, dtype), stored(m * 4, 4, dtype), stored(n / 2 * 4, 5, dtype));
    let mut out: Vec<f64> = stored(parts.whole.len(), 6, parts.whole.dtype).into_iter().map(f64::from).collect();
    for i in 0..m {
        for j in 0..n {
            let mut sum = bias[j] as f64 + (0..k).map(|p| x[i * k + p] as f64 * w[j * k + p] as f64).sum::<f64>();
            for (first, scale) in [(1, 2.0), (n / 2, -0.5)] {
                if (first..first + n / 2).contains(&j) {
                    let row = j - first;
                    sum += scale * (0..4).map(|p| t[i * 4 + p] as f64 * b[row * 4 + p] as f64).sum::<f64>();
                }
            }
            out[i * (n + 16) + 8 + j] += sum;
        }
    }
    out
}

#[test]
fn products_add_bias_adapters_and_present_contents() {
    for (m, n, k) in [(7, 10, 33), (300, 34, 64), (20, 290, 16)] {
        for (dtype, d_dtype) in [(DType::F32, DType::F32), (DType::BF16, DType::BF16), (DType::BF16, DType::F32)] {
            let (parts, instruction) = parts(dtype, d_dtype, m, n, k);
            let result = product(&mut *load(vec![instruction], 2), &parts);
            let tolerance = if d_dtype == DType::BF16 { 1.0 / 256.0 } else { 2e-6 };
            for (x, y) in result.iter().zip(expected(&parts, dtype, m, n, k)) {
                assert!((*x as f64 - y).abs() <= tolerance * y.abs() + 2e-5, "{m}×{n}×{k} {dtype}: {x} {y}");
            }
        }
    }
}

#[test]
fn long_sums_and_every_transposition() {
    let (m, n, k) = (21, 50, 5003);
    let (ak, ka, kb, bk) = ([m, k], [k, m], [k, n], [n, k]);
    for (dtype, d_dtype) in [(DType::F32, DType::F32), (DType::BF16, DType::BF16), (DType::BF16, DType::F32)] {
        for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
            let a = at(0, dtype, if ta { &ka } else { &ak });
            let b = at(450_560, dtype, if tb { &bk } else { &kb });
            let d = at(1_500_160, d_dtype, &[m, n]);
            let product =
                Gemm { transpose_a: ta, transpose_b: tb, scale: 0.5, accumulate: true, ..gemm(m, n, k, &a, &b, &d) };
            let run = |threads: usize| {
                let mut session = load(vec![Instruction::Gemm(product.clone())], threads);
                put(&mut *session, &a, &values(m * k, 1));
                put(&mut *session, &b, &values(k * n, 2));
                put(&mut *session, &d, &values(m * n, 3));
                session.run(0).unwrap();
                (get(&mut *session, &a), get(&mut *session, &b), get(&mut *session, &d))
            };
            let (x, y, result) = run(2);
            assert_eq!(result, run(1).2);
            let old = if d_dtype == DType::BF16 { rounded(&values(m * n, 3)) } else { values(m * n, 3) };
            for i in 0..m {
                for j in 0..n {
                    let x = |p: usize| x[if ta { p * m + i } else { i * k + p }] as f64;
                    let y = |p: usize| y[if tb { j * k + p } else { p * n + j }] as f64;
                    let sum = old[i * n + j] as f64 + 0.5 * (0..k).map(|p| x(p) * y(p)).sum::<f64>();
                    let tolerance = if d_dtype == DType::BF16 { 1.0 / 256.0 } else { 2e-6 };
                    let difference = (result[i * n + j] as f64 - sum).abs();
                    assert!(difference <= tolerance * sum.abs() + 1e-4, "{dtype} {ta} {tb} {i} {j}: {sum}");
                }
            }
        }
    }
}

#[test]
fn codes_are_multiplied_as_the_numbers_that_they_stand_for() {
    let (m, n, k) = (21, 50, 300);
    for (dtype, d_dtype) in [(DType::E4M3, DType::F32), (DType::E5M2, DType::BF16)] {
        for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
            let stored =
                |turned: bool, rows: usize, columns: usize| if turned { [columns, rows] } else { [rows, columns] };
            let a = at(0, dtype, &stored(ta, m, k));
            let b = at(65_536, DType::E4M3, &stored(tb, k, n));
            let [d, exact] = [131_072, 196_608].map(|offset| at(offset, d_dtype, &[m, n]));
            let plain = |offset: usize, of: &TensorRef| at(offset, DType::F32, &of.shape);
            let (plain_a, plain_b) = (plain(262_144, &a), plain(327_680, &b));
            let scales = [0, 256].map(|offset| at(524_288 + offset, DType::F32, &[1]));
            let bias = at(525_312, DType::F32, &[n]);
            let with = |a: &TensorRef, b: &TensorRef, d: &TensorRef, scales| Gemm {
                transpose_a: ta,
                transpose_b: tb,
                scale: 0.5,
                scales,
                bias: Some(bias.clone()),
                accumulate: true,
                ..gemm(m, n, k, a, b, d)
            };
            let products = [
                with(&a, &b, &d, Some(Scales::of_tensors(scales.clone(), false))),
                with(&plain_a, &plain_b, &exact, None),
            ];
            let mut session = load(products.map(Instruction::Gemm).to_vec(), 2);
            for (index, (codes, plain)) in [(&a, &plain_a), (&b, &plain_b)].into_iter().enumerate() {
                let scale = [0.25, 2f32.powi(-9)][index];
                put(&mut *session, &scales[index], &[scale]);
                let drawn: Vec<f32> = values(codes.len(), index as u32).iter().map(|x| x / scale).collect();
                put(&mut *session, codes, &drawn);
                let small = codes.dtype.small().unwrap();
                let stored = |x: &f32| small.value(small.code(f64::from(*x))) * scale;
                put(&mut *session, plain, &drawn.iter().map(stored).collect::<Vec<f32>>());
            }
            for at in [&d, &exact] {
                put(&mut *session, at, &values(m * n, 3));
            }
            put(&mut *session, &bias, &values(n, 4));
            session.run(0).unwrap();
            let (found, exact) = (get(&mut *session, &d), get(&mut *session, &exact));
            let limit = if d_dtype == DType::BF16 { 1.0 / 256.0 } else { 1e-5 };
            for (x, y) in found.iter().zip(&exact) {
                assert!((x - y).abs() <= limit * (1.0 + y.abs()), "{dtype} {ta} {tb}: {x} {y}");
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    for (m, n, k) in [(333, 70, 120), (70, 333, 120)] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let run = |threads: usize| {
                let (parts, instruction) = parts(dtype, dtype, m, n, k);
                let bits: Vec<u32> =
                    product(&mut *load(vec![instruction], threads), &parts).into_iter().map(f32::to_bits).collect();
                bits
            };
            let one = run(1);
            assert_eq!(one, run(2));
            assert_eq!(one, run(3));
        }
    }
}

#[test]
fn a_batch_is_its_products_one_after_the_other() {
    let spaced = |offset: usize, stride: usize, shape: [usize; 3]| TensorRef {
        strides: vec![stride, shape[2], 1],
        ..at(offset, DType::F32, &shape)
    };
    let (a, b, d) = (spaced(0, 20, [3, 4, 5]), spaced(1024, 64, [3, 6, 5]), spaced(4096, 40, [3, 4, 6]));
    let whole = |at: &TensorRef| TensorRef::dense(at.arena, at.offset, at.dtype, [at.span() / 4]);
    let run = |instructions: Vec<Instruction>| {
        let mut session = load(instructions, 2);
        put(&mut *session, &whole(&a), &values(60, 1));
        put(&mut *session, &whole(&b), &values(whole(&b).len(), 2));
        put(&mut *session, &whole(&d), &values(whole(&d).len(), 3));
        session.run(0).unwrap();
        get(&mut *session, &whole(&d))
    };
    let batch = Gemm { batch: 3, ..gemm(4, 6, 5, &a, &b, &d) };
    let one = |at: &TensorRef, index: usize| TensorRef {
        offset: at.offset + index * at.strides[0] * 4,
        shape: at.shape[1..].to_vec(),
        strides: at.strides[1..].to_vec(),
        ..at.clone()
    };
    let single = |index: usize| Instruction::Gemm(gemm(4, 6, 5, &one(&a, index), &one(&b, index), &one(&d, index)));
    let result = run(vec![Instruction::Gemm(batch)]);
    assert_eq!(result, run((0..3).map(single).collect()));
    assert_ne!(result, run((0..2).map(single).collect()), "the last product is made as well");
}

#[test]
fn a_product_may_overwrite_its_operand() {
    let (x, w) = (at(0, DType::F32, &[3, 3]), at(256, DType::F32, &[3, 3]));
    let mut session = load(vec![Instruction::Gemm(gemm(3, 3, 3, &x, &w, &x))], 1);
    put(&mut *session, &x, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
    put(&mut *session, &w, &[0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 2.0]);
    session.run(0).unwrap();
    assert_eq!(get(&mut *session, &x), [2.0, 1.0, 6.0, 5.0, 4.0, 12.0, 8.0, 7.0, 18.0]);
}

#[test]
fn copies_change_layout_and_type() {
    let heads = at(0, DType::F32, &[2, 3, 4, 5]);
    let moved = TensorRef { offset: 4096, strides: vec![60, 5, 15, 1], ..heads.clone() };
    let dense = at(4096, DType::F32, &[2, 4, 3, 5]);
    let half = at(8192, DType::BF16, &[2, 4, 3, 5]);
    let copy = |from: &TensorRef, to: &TensorRef| Instruction::Copy { from: from.clone(), to: to.clone() };
    let mut session = load(vec![copy(&heads, &moved), copy(&dense, &half)], 2);
    let input = values(120, 9);
    put(&mut *session, &heads, &input);
    session.run(0).unwrap();
    let (swapped, narrow) = (get(&mut *session, &dense), get(&mut *session, &half));
    for (b, t, h, d) in (0..120).map(|i| (i / 60, i / 20 % 3, i / 5 % 4, i % 5)) {
        let place = ((b * 4 + h) * 3 + t) * 5 + d;
        assert_eq!(swapped[place], input[((b * 3 + t) * 4 + h) * 5 + d]);
        assert_eq!(narrow[place], bf16_to_f32(f32_to_bf16(swapped[place])));
    }
}

#[test]
fn zero_leaves_gaps_alone() {
    let whole = at(0, DType::BF16, &[4, 6]);
    let part = TensorRef { offset: 4, shape: vec![4, 2], ..whole.clone() };
    let mut session = load(vec![Instruction::Zero { at: part }], 1);
    put(&mut *session, &whole, &[1.0; 24]);
    session.run(0).unwrap();
    let row = [1.0, 1.0, 0.0, 0.0, 1.0, 1.0];
    assert_eq!(get(&mut *session, &whole), row.repeat(4));
}

#[test]
fn constants_are_written_when_the_program_is_loaded() {
    let table = at(128, DType::F32, &[3]);
    let constant = Constant { at: table.clone(), value: HostTensor::from_f32([3], &[1.0, 2.0, 3.0]) };
    let backend = CpuBackend::new(Some(1)).unwrap();
    let mut session = backend.load(Arc::new(program(vec![], vec![constant]))).unwrap();
    assert_eq!(get(&mut *session, &table), [1.0, 2.0, 3.0]);
}

#[test]
fn unknown_operations_are_refused_with_their_place() {
    let x = at(0, DType::F32, &[4]);
    let backend = CpuBackend::new(Some(1)).unwrap();
    let error = backend.load(Arc::new(program(vec![launch("no_such", Attrs::new(), &[&x], &[&x])], vec![])));
    let Err(BackendError::Failed { message, context, .. }) = error else { panic!("expected a refusal") };
    assert_eq!(message, "there is no operation `no_such`");
    assert_eq!(context.unwrap(), "test, forward, layer 3, model.py:7");
}

#[test]
fn the_debug_mode_names_the_operation_that_made_a_nan() {
    let (from, to) = (at(0, DType::F32, &[4]), at(64, DType::BF16, &[4]));
    let copy = Instruction::Copy { from: from.clone(), to };
    let backend = CpuBackend::new(Some(1)).unwrap().check_finite(true);
    let mut session = backend.load(Arc::new(program(vec![copy], vec![]))).unwrap();
    put(&mut *session, &from, &[0.0, 1.0, f32::NAN, 3.0]);
    let text = session.run(0).unwrap_err().to_string();
    assert!(text.contains("NaN at element 2") && text.contains("layer 3, model.py:7"), "{text}");
    put(&mut *session, &from, &[0.0; 4]);
    session.run(0).unwrap();
}
