//! The sum over a micro-batch at each of its entries: means over all pairs or tokens are made of it. Its own gradient.

use graph::{OpId, ValueType};
use tensor::Attrs;

use super::{batch_kernel, check_alike};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("batch_sum.cu");
const HEADERS: &[(&str, &str)] =
    &[("types.cuh", include_str!("../../cuda/types.cuh")), ("reduce.cuh", include_str!("../../cuda/reduce.cuh"))];
const THREADS: usize = 1024;

/// y = batch_sum(x)
pub struct BatchSum;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    // In f64: a batch has few tokens, and the sum should not depend on how they are distributed.
    let sum: f64 = call.inputs[0].real().iter().map(|x| x.to_f64()).sum();
    let [y] = call.outputs_mut();
    y.real().fill(T::from_f64(sum));
}

impl Op for BatchSum {
    fn id(&self) -> OpId {
        id::BATCH_SUM
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "Each entry is Σ x over the whole micro-batch. x f32 […] → like x."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        check_alike(inputs, 1, "x")?;
        Ok(inputs.to_vec())
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let dy = call.dy();
        Gradients::Inputs(vec![call.wanted(0, id::BATCH_SUM, &[dy], Attrs::new())])
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let numbers = [("COUNT", call.inputs[0].len()), ("THREADS", THREADS)];
        Lowered::Kernels(vec![batch_kernel("batch_sum", SOURCE, HEADERS, [1, THREADS], &numbers, call)])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        [vec![2, 700], vec![3, 5]]
            .map(|shape| {
                Example::new(vec![ExampleInput::NormalF32 { shape, scale: 1.0 }], Attrs::new()).differentiate(&[0])
            })
            .to_vec()
    }
}
