//! `adamw` against its formula written out, over several steps in f64; and what stochastic rounding
//! must keep: two neighbours to choose from, no drift, the same bits for the same counters.

use ops::evaluate::{Array, Evaluate, apply_stored};
use ops::id;
use tensor::{Attrs, DType, bf16_to_f32, f32_to_bf16};

const BETA1: f64 = 0.9;
const BETA2: f64 = 0.95;
const EPSILON: f64 = 1e-3;
const DECAY: f64 = 0.1;

/// learning rate, gradient scale, number of the step from 0
type Scalars = (f64, f64, i32);

fn attrs(stochastic: bool) -> Attrs {
    Attrs::new()
        .with("beta1", BETA1)
        .with("beta2", BETA2)
        .with("epsilon", EPSILON)
        .with("weight_decay", DECAY)
        .with("stochastic_rounding", stochastic)
        .with("seed", 17)
        .with("stream", 2)
}

/// Weight, first and second moment after one update.
fn update<T: Evaluate>(
    attrs: &Attrs,
    storage: DType,
    gradient: &[T],
    scalars: Scalars,
    state: [Vec<T>; 3],
) -> [Vec<T>; 3] {
    let (rate, scale, step) = scalars;
    let one = |x: f64| Array::Real(vec![T::from_f64(x)]);
    let correction = |beta: f64| one(1.0 - beta.powi(step + 1));
    let scalars = [one(rate), correction(BETA1), correction(BETA2), one(scale), one(1.0)];
    let (count, gradient, step) = ([gradient.len()], Array::Real(gradient.to_vec()), Array::Int(vec![step]));
    let mut inputs: Vec<(&[usize], &Array<T>)> = vec![(&count, &gradient)];
    inputs.extend(scalars.iter().map(|s| (&[1usize][..], s)));
    inputs.push((&[1], &step));
    let mut outputs = state.map(|x| (count.to_vec(), Array::Real(x)));
    let op = ops::get(id::ADAMW);
    apply_stored(op, attrs, &inputs, &mut outputs, &[storage, DType::F32, DType::F32]);
    outputs.map(|(_, array)| array.real().to_vec())
}

#[test]
fn follows_the_formula() {
    let count = 11;
    let wave = |k: f64| (0..count).map(|i| (k * i as f64).sin()).collect::<Vec<f64>>();
    let (mut weight, mut m, mut v) = (wave(0.7), vec![0.0; count], vec![0.0; count]);
    let mut state = [weight.clone(), m.clone(), v.clone()];
    for step in 0..6 {
        let (rate, scale, gradient) = (0.01 * (step + 1) as f64, 0.25, wave(1.3 + step as f64));
        for i in 0..count {
            let g = gradient[i] * scale;
            weight[i] -= rate * DECAY * weight[i];
            m[i] = BETA1 * m[i] + (1.0 - BETA1) * g;
            v[i] = BETA2 * v[i] + (1.0 - BETA2) * g * g;
            let (m_hat, v_hat) = (m[i] / (1.0 - BETA1.powi(step + 1)), v[i] / (1.0 - BETA2.powi(step + 1)));
            weight[i] -= rate * m_hat / (v_hat.sqrt() + EPSILON);
        }
        state = update(&attrs(false), DType::F32, &gradient, (rate, scale, step), state);
        for (found, wanted) in state.iter().zip([&weight, &m, &v]) {
            for (f, w) in found.iter().zip(wanted) {
                assert!((f - w).abs() <= 1e-13, "step {step}: {f}, not {w}");
            }
        }
    }
}

/// One update of 20,000 equal weights stored as bf16, each by its own random number.
fn stochastic(step: i32) -> (f32, Vec<f32>) {
    let count = 20_000;
    let weight = bf16_to_f32(f32_to_bf16(1.37));
    let state = || [vec![weight; count], vec![0.0; count], vec![0.0; count]];
    let gradient = vec![0.8f32; count];
    let scalars = (1e-3, 1.0, step);
    let [exact, ..] = update(&attrs(true), DType::F32, &gradient, scalars, state());
    let [rounded, ..] = update(&attrs(true), DType::BF16, &gradient, scalars, state());
    (exact[0], rounded)
}

#[test]
fn stochastic_rounding_takes_a_neighbour_and_does_not_drift() {
    let (exact, rounded) = stochastic(3);
    let below = f32::from_bits(exact.to_bits() & 0xffff_0000);
    let above = f32::from_bits(below.to_bits() + 0x1_0000);
    assert!(rounded.iter().all(|w| *w == below || *w == above));
    let mean = rounded.iter().map(|w| *w as f64).sum::<f64>() / rounded.len() as f64;
    let deviation = (above - below) as f64 * 0.5 / (rounded.len() as f64).sqrt();
    assert!((mean - exact as f64).abs() < 4.0 * deviation, "{mean}, not {exact}");
    assert_eq!(rounded, stochastic(3).1);
    assert_ne!(rounded, stochastic(4).1);
}

#[test]
fn weights_stored_as_f32_are_not_rounded() {
    let state = || [vec![1.37f32; 9], vec![0.0; 9], vec![0.0; 9]];
    let run = |flag| update(&attrs(flag), DType::F32, &[0.5; 9], (1e-3, 1.0, 0), state());
    assert_eq!(run(true), run(false));
}
