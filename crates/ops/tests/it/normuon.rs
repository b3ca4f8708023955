//! Newton-Schulz and `normuon` against recorded numbers: the orthogonalisation in f32 and bf16, five steps of
//! both kinds of decay. The rounds are put together here as the compiler puts them together.

use crate::golden::Golden;
use ops::evaluate::{Array, apply};
use ops::id;
use tensor::{Attrs, DType, convert};

const STEPS: usize = 5;
const ROUNDS: usize = 5;

fn call(op: &str, attrs: Attrs, inputs: &[(&[usize], &[f32])], shape: &[usize]) -> Vec<f32> {
    let arrays: Vec<Array<f32>> = inputs.iter().map(|(_, x)| Array::Real(x.to_vec())).collect();
    let inputs: Vec<(&[usize], &Array<f32>)> = inputs.iter().zip(&arrays).map(|((s, _), a)| (*s, a)).collect();
    let mut output = [(shape.to_vec(), Array::Real(vec![0.0; shape.iter().product()]))];
    apply::<f32>(ops::find(op).expect("registered"), &attrs, &inputs, &mut output);
    let [(_, result)] = output;
    result.real().to_vec()
}

fn rounded(x: Vec<f32>, dtype: DType) -> Vec<f32> {
    let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
    let (mut narrow, mut wide) = (vec![0; x.len() * dtype.size()], vec![0; bytes.len()]);
    convert(DType::F32, &bytes, dtype, &mut narrow);
    convert(dtype, &narrow, DType::F32, &mut wide);
    wide.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// `x` [m, n] made orthogonal, products of operands in `dtype`.
fn orthogonal(x: &[f32], [m, n]: [usize; 2], dtype: DType) -> Vec<f32> {
    let (shape, small) = ([1, m, n], m.min(n));
    let square = [1, small, small];
    let flag = |name: &str| Attrs::new().with(name, true);
    let polynomial = Attrs::new().with("a", 3.4445).with("b", -4.775).with("c", 2.0315);
    let unit = call("unit_matrices", Attrs::new().with("epsilon", 1e-7), &[(&shape, x)], &shape);
    let mut x = rounded(unit, dtype);
    for _ in 0..ROUNDS {
        let attrs = flag(if m <= n { "transpose_b" } else { "transpose_a" });
        let a = rounded(call("batched_matmul", attrs, &[(&shape, &x), (&shape, &x)], &square), dtype);
        let squared = call("batched_matmul", flag("f32"), &[(&square, &a), (&square, &a)], &square);
        let p = call("newton_schulz_polynomial", polynomial.clone(), &[(&square, &a), (&square, &squared)], &square);
        let p = rounded(p, dtype);
        let factors: [(&[usize], &[f32]); 2] =
            if m <= n { [(&square, &p), (&shape, &x)] } else { [(&shape, &x), (&square, &p)] };
        x = rounded(call("batched_matmul", Attrs::new(), &factors, &shape), dtype);
    }
    x
}

fn relative(found: &[f32], wanted: &[f32]) -> f64 {
    assert_eq!(found.len(), wanted.len());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut found.iter().zip(wanted).map(|(a, b)| f64::from(a - b))) / norm(&mut wanted.iter().map(|x| f64::from(*x)))
}

#[test]
fn orthogonalisation_in_both_types() {
    let golden = Golden::open("quant/muon.safetensors");
    for (index, shape) in [[96, 48], [48, 80], [64, 64]].into_iter().enumerate() {
        let x = golden.f32(&format!("ns.{index}.input"));
        let wanted = golden.f32(&format!("ns.{index}.output_f64_as_f32"));
        let exact = relative(&orthogonal(&x, shape, DType::F32), &wanted);
        assert!(exact <= 1e-5, "{shape:?} in f32: {exact:.1e}");
        let narrow = relative(&orthogonal(&x, shape, DType::BF16), &wanted);
        assert!(narrow <= 2e-2 && narrow > 1e-4, "{shape:?} in bf16: {narrow:.1e}");
    }
}

/// Weight and state of one matrix.
struct State {
    weight: Vec<f32>,
    first: Vec<f32>,
    rows: Vec<f32>,
}

fn advance(state: &mut State, gradient: &[f32], [m, n]: [usize; 2], cautious: bool, dtype: DType, applied: f32) {
    let attrs = Attrs::new().with("momentum", 0.95);
    let (scale, applied) = (Array::Real(vec![1.0]), Array::Real(vec![applied]));
    let gradient = Array::Real(gradient.to_vec());
    let flat = [m * n];
    let mut output = [(flat.to_vec(), Array::Real(std::mem::take(&mut state.first)))];
    let inputs: [(&[usize], &Array<f32>); 3] = [(&flat, &gradient), (&[1], &scale), (&[1], &applied)];
    apply::<f32>(ops::get(id::MOMENTUM), &attrs, &inputs, &mut output);
    state.first = output[0].1.real().to_vec();
    let direction = Array::Real(orthogonal(&state.first, [m, n], dtype));
    let attrs = Attrs::new()
        .with("beta2", 0.95)
        .with("epsilon", 1e-8)
        .with("scale", 0.2)
        .with("weight_decay", 0.1)
        .with("cautious", cautious)
        .with("seed", 0)
        .with("stream", 0);
    let (rate, step, shape) = (Array::Real(vec![0.02]), Array::Int(vec![0]), [1, m, n]);
    let inputs: [(&[usize], &Array<f32>); 4] = [(&shape, &direction), (&[1], &rate), (&[1], &applied), (&[1], &step)];
    let mut outputs = [
        (shape.to_vec(), Array::Real(std::mem::take(&mut state.weight))),
        (vec![1, m], Array::Real(std::mem::take(&mut state.rows))),
    ];
    apply::<f32>(ops::get(id::NORMUON), &attrs, &inputs, &mut outputs);
    let [(_, weight), (_, rows)] = outputs;
    (state.weight, state.rows) = (weight.real().to_vec(), rows.real().to_vec());
}

#[test]
fn five_steps_with_both_kinds_of_decay() {
    let golden = Golden::open("quant/muon.safetensors");
    for (index, [m, n]) in [[96, 48], [48, 80]].into_iter().enumerate() {
        for (name, cautious) in [("normuon_paper", false), ("normuon_paper_cautious", true)] {
            for (dtype, allowed) in [(DType::F32, 1e-5), (DType::BF16, 2e-2)] {
                let start = golden.f32(&format!("opt.{index}.param0"));
                let mut state = State { weight: start.clone(), first: vec![0.0; m * n], rows: vec![0.0; m] };
                let gradients = golden.f32(&format!("opt.{index}.grads"));
                let recorded = golden.f32(&format!("opt.{index}.{name}.param"));
                for step in 0..STEPS {
                    let gradient = &gradients[step * m * n..][..m * n];
                    advance(&mut state, gradient, [m, n], cautious, dtype, 1.0);
                    let change = |now: &[f32]| now.iter().zip(&start).map(|(a, b)| a - b).collect::<Vec<f32>>();
                    let wanted = &recorded[step * m * n..][..m * n];
                    let found = relative(&change(&state.weight), &change(wanted));
                    assert!(found <= allowed, "{m}×{n} {name} {dtype}, step {step}: {found:.1e}");
                }
                let wanted = golden.f32(&format!("opt.{index}.{name}.second_moment_final"));
                let found = relative(&state.rows, &wanted);
                assert!(found <= allowed, "{m}×{n} {name} {dtype}: means of the squares {found:.1e}");
            }
        }
    }
}

#[test]
fn nothing_moves_without_a_gradient_or_when_suppressed() {
    let (m, n) = (4, 6);
    let weight: Vec<f32> = (0..m * n).map(|i| i as f32 - 10.0).collect();
    let fresh = || State { weight: weight.clone(), first: vec![0.0; m * n], rows: vec![0.0; m] };
    let mut state = fresh();
    advance(&mut state, &vec![0.0; m * n], [m, n], true, DType::F32, 1.0);
    let decayed: Vec<f32> = weight.iter().map(|w| w * (1.0 - 0.02 * 0.1)).collect();
    assert_eq!(state.weight, decayed, "a step of 0 agrees with every sign: only the decay is left");
    let mut state = fresh();
    advance(&mut state, &vec![f32::NAN; m * n], [m, n], true, DType::F32, 0.0);
    assert_eq!((state.weight, state.first, state.rows), (weight, vec![0.0; m * n], vec![0.0; m]));
}
