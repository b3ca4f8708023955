//! The values of a micro-batch's pairs in rising order, and the way back: distributions are compared by their quantiles.

use graph::{Element, OpId, ValueType};
use tensor::Attrs;

use super::{batch_kernel, check_alike};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("sorted.cu");
const HEADERS: &[(&str, &str)] =
    &[("types.cuh", include_str!("../../cuda/types.cuh")), ("reduce.cuh", include_str!("../../cuda/reduce.cuh"))];
const THREADS: usize = 1024;

/// y, order = sorted(x, present)
pub struct Sorted;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let (x, present) = (call.inputs[0].real(), call.inputs[1].real());
    let count = present.iter().filter(|p| p.to_f64() > 0.0).count();
    let mut places: Vec<usize> = (0..x.len()).collect();
    places[..count].sort_by(|a, b| x[*a].to_f64().total_cmp(&x[*b].to_f64()));
    let [y, order] = call.outputs_mut();
    for ((y, order), (i, place)) in y.real().iter_mut().zip(order.int()).zip(places.iter().enumerate()) {
        *y = if i < count { x[*place] } else { T::default() };
        *order = *place as i32;
    }
}

impl Op for Sorted {
    fn id(&self) -> OpId {
        id::SORTED
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "The values that are present in rising order, then 0; equal ones keep their order. order[i] is the place in x of \
         y[i]. Those that are present are the first. x, present f32 […] → y f32 […], order i32 […]."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        check_alike(inputs, 2, "x and present")?;
        Ok(vec![inputs[0].clone(), ValueType::new(Element::I32, inputs[0].shape.clone())])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let (order, dy) = (call.output(1), call.dy());
        Gradients::Inputs(vec![call.wanted(0, id::UNSORTED, &[dy, order], Attrs::new()), None])
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let numbers = [("COUNT", call.inputs[0].len()), ("THREADS", THREADS)];
        Lowered::Kernels(vec![batch_kernel("sorted", SOURCE, HEADERS, [1, THREADS], &numbers, call)])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let of = |shape: &[usize], values: Vec<f32>, count: usize| {
            let present = (0..values.len()).map(|i| f32::from(i < count)).collect();
            let shape = shape.to_vec();
            let x = ExampleInput::F32 { shape: shape.clone(), values };
            Example::new(vec![x, ExampleInput::F32 { shape, values: present }], Attrs::new())
        };
        let mixed: Vec<f32> = (0..60).map(|i| (i * 37 % 61) as f32 / 8.0 - 3.0).collect();
        // Entries after those that are present are not values, so the gradient check leaves them out.
        vec![
            of(&[2, 30], mixed.clone(), 60).differentiate(&[0]),
            of(&[3, 20], mixed, 41),
            of(&[1, 4], vec![1.0, 1.0, -2.0, 1.0], 4),
        ]
    }
}

/// x = unsorted(y, order)
pub struct Unsorted;

fn unsorted<T: Real>(call: &mut Call<'_, T>) {
    let (y, order) = (call.inputs[0].real(), call.inputs[1].int());
    let [x] = call.outputs_mut();
    let x = x.real();
    for (y, place) in y.iter().zip(order) {
        x[*place as usize] = *y;
    }
}

impl Op for Unsorted {
    fn id(&self) -> OpId {
        id::UNSORTED
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "x[order[i]] = y[i]: takes `sorted` back, and is its gradient. y f32 […], order i32 […], each place once → like y."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        match inputs {
            [y, order] if y.dtype == Element::F32 && order.dtype == Element::I32 && y.shape == order.shape => {
                Ok(vec![y.clone()])
            }
            _ => Err("takes y and order, f32 and i32 of the same shape".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the backward pass")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let numbers = [("COUNT", call.inputs[0].len()), ("THREADS", THREADS)];
        let grid = [call.inputs[0].len().div_ceil(THREADS), THREADS];
        Lowered::Kernels(vec![batch_kernel("unsorted", SOURCE, HEADERS, grid, &numbers, call)])
    }

    crate::reference!(unsorted);

    fn examples(&self) -> Vec<Example> {
        let order = (0..60).map(|i| i * 37 % 60).collect();
        vec![Example::new(
            vec![
                ExampleInput::NormalF32 { shape: vec![2, 30], scale: 1.0 },
                ExampleInput::Ints { shape: vec![2, 30], values: order },
            ],
            Attrs::new(),
        )]
    }
}
