//! The sum of the blocks' sums of squares.

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use tensor::Attrs;

use super::spec;
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

/// One block of threads: a few loads of each, in flight together.
const THREADS: usize = 1024;

/// sum = total_squares(sums)
pub struct TotalSquares;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let sums = call.inputs[0].real();
    let [total] = call.outputs_mut();
    total.real()[0] = T::from_f64(sums.iter().map(|sum| sum.to_f64()).sum());
}

impl Op for TotalSquares {
    fn id(&self) -> OpId {
        id::TOTAL_SQUARES
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "The sum of all. sums f32 [blocks] → total f32 [1]."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        match inputs {
            [x] if x.dtype == Element::F32 && x.shape.len() == 1 => Ok(vec![ValueType::new(Element::F32, [1.into()])]),
            _ => Err("takes one flat f32 tensor".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    fn cost(&self, inputs: &[TensorRef], _outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        Cost { flops: inputs[0].len() as f64, bytes: inputs[0].bytes() as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let count = call.inputs[0].len();
        Lowered::Kernels(vec![spec("total_squares", THREADS, count, 1, vec![Arg::Input(0), Arg::Output(0)])])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |n: usize| {
            Example::new(vec![ExampleInput::UniformF32 { shape: vec![n], low: 0.0, high: 1.0 }], Attrs::new())
        };
        vec![example(1), example(18_203)]
    }
}
