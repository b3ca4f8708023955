//! `adamw_8bit` and its code books against recorded numbers: ten steps, each from the recorded state
//! before it and all of them running freely.

use crate::golden::Golden;
use ops::evaluate::{Array, apply};
use ops::id;
use tensor::Attrs;

const COUNT: usize = 5000;
const BLOCKS: usize = COUNT.div_ceil(256);
const STEPS: usize = 10;

/// Weight, both moments as codes, both scales.
#[derive(Clone)]
struct State {
    weight: Vec<f32>,
    codes: [Vec<u8>; 2],
    scales: [Vec<f32>; 2],
}

/// The state after `step` steps; zeros and the first weights for 0.
fn recorded(golden: &Golden, step: usize) -> State {
    let Some(row) = step.checked_sub(1) else {
        let zeros = || (vec![0; COUNT], vec![0.0; BLOCKS]);
        let ((a, x), (b, y)) = (zeros(), zeros());
        return State { weight: golden.f32("adam.param0"), codes: [a, b], scales: [x, y] };
    };
    let codes = |name| golden.bytes(name)[row * COUNT..(row + 1) * COUNT].to_vec();
    let scales = |name| golden.f32(name)[row * BLOCKS..(row + 1) * BLOCKS].to_vec();
    State {
        weight: golden.f32("adam.param")[row * COUNT..(row + 1) * COUNT].to_vec(),
        codes: [codes("adam.state1"), codes("adam.state2")],
        scales: [scales("adam.absmax1"), scales("adam.absmax2")],
    }
}

fn attrs() -> Attrs {
    Attrs::new()
        .with("beta1", 0.9)
        .with("beta2", 0.999)
        .with("epsilon", 1e-8)
        .with("weight_decay", 0.1)
        .with("seed", 0)
        .with("stream", 0)
}

fn book(signed: bool) -> Array<f32> {
    let mut output = [(vec![256], Array::Real(vec![0.0; 256]))];
    let op = ops::get(id::DYNAMIC_MAP);
    apply::<f32>(op, &Attrs::new().with("signed", signed), &[], &mut output);
    let [(_, book)] = output;
    book
}

/// One step from `state`; `step` counts from 0.
fn advance(golden: &Golden, state: State, step: usize) -> State {
    let real = |x: Vec<f32>| Array::Real(x);
    let gradient = golden.f32("adam.grads")[step * COUNT..(step + 1) * COUNT].to_vec();
    let correction = |beta: f64| (1.0 - beta.powi(step as i32 + 1)) as f32;
    let scalars = [1e-3, correction(0.9), correction(0.999), 1.0, 1.0].map(|x| real(vec![x]));
    let (gradient, number, books) = (real(gradient), Array::Int(vec![step as i32]), [book(true), book(false)]);
    let mut inputs: Vec<(&[usize], &Array<f32>)> = vec![(&[COUNT], &gradient)];
    inputs.extend(scalars.iter().map(|s| (&[1usize][..], s)));
    inputs.push((&[1], &number));
    inputs.extend(books.iter().map(|b| (&[256usize][..], b)));
    let ([first, second], [first_scale, second_scale]) = (state.codes, state.scales);
    let mut outputs = [
        (vec![COUNT], real(state.weight)),
        (vec![COUNT], Array::Byte(first)),
        (vec![COUNT], Array::Byte(second)),
        (vec![BLOCKS], real(first_scale)),
        (vec![BLOCKS], real(second_scale)),
    ];
    apply::<f32>(ops::get(id::ADAMW_8BIT), &attrs(), &inputs, &mut outputs);
    let [weight, first, second, first_scale, second_scale] = outputs.map(|(_, array)| array);
    let bytes = |array| match array {
        Array::Byte(x) => x,
        other => panic!("codes are bytes, not {other:?}"),
    };
    State {
        weight: weight.real().to_vec(),
        codes: [bytes(first), bytes(second)],
        scales: [first_scale.real().to_vec(), second_scale.real().to_vec()],
    }
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn code_books_are_the_recorded_ones() {
    let golden = Golden::open("quant/adam8bit.safetensors");
    assert_eq!(book(true).real(), golden.f32("map_signed"));
    assert_eq!(book(false).real(), golden.f32("map_unsigned"));
}

#[test]
fn every_step_from_the_recorded_state_before_it() {
    let golden = Golden::open("quant/adam8bit.safetensors");
    for step in 0..STEPS {
        let (found, wanted) = (advance(&golden, recorded(&golden, step), step), recorded(&golden, step + 1));
        let difference = largest_difference(&found.weight, &wanted.weight);
        assert!(difference <= 1e-7, "step {step}: weights differ by {difference}");
        for moment in 0..2 {
            let ties = golden.bytes(["adam.near_tie1", "adam.near_tie2"][moment]);
            let ties = &ties[step * COUNT..(step + 1) * COUNT];
            for (i, (f, w)) in found.codes[moment].iter().zip(&wanted.codes[moment]).enumerate() {
                assert!(f.abs_diff(*w) <= ties[i], "step {step}, moment {moment}, element {i}: code {f}, not {w}");
            }
            for (f, w) in found.scales[moment].iter().zip(&wanted.scales[moment]) {
                assert!((f - w).abs() <= 1e-6 * w, "step {step}, moment {moment}: scale {f}, not {w}");
            }
        }
    }
}

#[test]
fn ten_steps_running_freely() {
    let golden = Golden::open("quant/adam8bit.safetensors");
    let mut state = recorded(&golden, 0);
    for step in 0..STEPS {
        state = advance(&golden, state, step);
        let difference = largest_difference(&state.weight, &recorded(&golden, step + 1).weight);
        assert!(difference <= 1e-5, "after step {step} weights differ by {difference}");
    }
}
