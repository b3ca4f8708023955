//! Gradients of matrices of which every group of rows has one: sums over the rows of a group.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Arithmetic, Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use super::grouped::{
    GROUPS, MMA_TILE, SOURCE, THREADS, TILE, check_offsets, columns, flag, on_tensor_cores, products,
    suits_tensor_cores,
};
use super::{example_groups, hopper, ints, kernel, normal};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered, defines_for};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

/// dw[group] = Σ over the rows of the group of dy·xᵀ
pub struct GroupedWeightGradient;

impl Op for GroupedWeightGradient {
    fn id(&self) -> OpId {
        id::GROUPED_WEIGHT_GRADIENT
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn multiplies(&self) -> bool {
        true
    }

    fn doc(&self) -> &'static str {
        "dw[g] = Σ over the rows of group g of aᵀ·b, in f32 and in the order of the rows; 0 for a group without rows. a \
         […, M], b […, K], offsets i32 [G + 1] → f32 `shape`, which has G·M·K elements. Two more inputs, both f32 [1], \
         multiply the sums. With `accumulate`, added to."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            GROUPS,
            Attribute { name: "shape", kind: "list of int", doc: "of the result" },
            Attribute { name: "accumulate", kind: "bool?", doc: "add to dw instead of overwriting it" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let (a, b, offsets, scales) = match inputs {
            [a, b, offsets, scales @ ..] if matches!(scales.len(), 0 | 2) => (a, b, offsets, scales),
            _ => return Err("takes a, b, the offsets, and nothing or the scales of a and b".into()),
        };
        let (groups, shape) = (attrs.size("groups")?, attrs.sizes("shape")?);
        attrs.flag("accumulate")?;
        check_offsets(offsets, groups)?;
        if a.shape[..a.shape.len() - 1] != b.shape[..b.shape.len() - 1] {
            return Err("a and b must have the same rows".into());
        }
        if shape.iter().product::<usize>() != groups * columns(a)? * columns(b)? {
            return Err(format!("{shape:?} does not hold a matrix for each of {groups} groups"));
        }
        if scales.iter().any(|of| *of != ValueType::new(Element::F32, [1.into()])) {
            return Err("the scales must be f32 [1]".into());
        }
        Ok(vec![ValueType::new(Element::F32, shape.into_iter().map(Dim::Fixed).collect::<Vec<_>>())])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        let read = if flag(attrs, "accumulate") { outputs[0].bytes() } else { 0 };
        let bytes = (inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() + read) as f64;
        let m = inputs[0].shape[inputs[0].shape.len() - 1];
        Cost { flops: 2.0 * inputs[1].len() as f64 * m as f64, bytes }
    }

    fn arithmetic(&self, call: &LowerCall<'_>) -> Arithmetic {
        products(call, &[&call.inputs[0], &call.inputs[1]], true)
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (a, b, dw) = (&call.inputs[0], &call.inputs[1], &call.outputs[0]);
        assert!(dw.is_dense(), "gradients of matrices are dense: {dw}");
        let groups = call.inputs[2].len() - 1;
        let (m, k) = (a.shape[a.shape.len() - 1], b.shape[b.shape.len() - 1]);
        let accumulate = flag(call.attrs, "accumulate") as usize;
        let scaled = is_scaled(call) as usize;
        let numbers =
            [("GROUPS", groups), ("M", m), ("K", k), ("TILE", TILE), ("ACCUMULATE", accumulate), ("SCALED", scaled)];
        let args = (0..call.inputs.len()).map(Arg::Input).chain([Arg::Output(0)]).collect();
        let grid = [m.div_ceil(TILE), k.div_ceil(TILE), groups];
        let mut kernel = kernel("grouped_weight_gradient", SOURCE, grid, THREADS, &numbers, args);
        kernel.defines.extend([("A", a), ("B", b)].iter().flat_map(|(name, t)| defines_for(name, t)));
        let suits = suits_tensor_cores(call, &[a, b]);
        if suits && hopper::takes(call, &[a, b]) {
            return Lowered::Kernels(vec![hopper::weight_gradient(call)]);
        }
        if suits {
            kernel = on_tensor_cores(kernel, a.dtype, [m.div_ceil(MMA_TILE), k.div_ceil(MMA_TILE), groups]);
        }
        Lowered::Kernels(vec![kernel])
    }

    crate::reference!(weight_gradient);

    fn examples(&self) -> Vec<Example> {
        let example = |tokens: usize, groups: usize, m: usize, k: usize, accumulate: bool| {
            let (_, _, offsets) = example_groups(tokens, 2, groups);
            let inputs = vec![normal(&[1, tokens, 2, m]), normal(&[1, tokens, 2, k]), ints(&[groups + 1], offsets)];
            let attrs = Attrs::new().with("groups", groups).with("shape", vec![groups * m, k]);
            let state = ExampleInput::NormalF32 { shape: vec![groups * m, k], scale: 1.0 };
            Example::new(inputs, attrs.with("accumulate", accumulate)).with_state(vec![state])
        };
        let scaled = |mut of: Example| {
            of.inputs.extend([0.37, 3e-2].map(|value| ExampleInput::F32 { shape: vec![1], values: vec![value] }));
            of
        };
        vec![
            example(6, 4, 5, 8, false),
            example(40, 3, 70, 66, true),
            example(300, 6, 16, 24, false),
            example(200, 3, 136, 264, true),
            example(150, 40, 136, 16, false),
            example(500, 3, 16, 320, true),
            example(500, 3, 320, 24, true),
            scaled(example(40, 3, 70, 66, true)),
            scaled(example(200, 3, 136, 264, true)),
            scaled(example(500, 3, 16, 320, false)),
        ]
    }
}

fn weight_gradient<T: Real>(call: &mut Call<'_, T>) {
    let [a, b, offsets, scales @ ..] = call.inputs else { unreachable!("the shape rule requires three inputs") };
    let scale = scales.iter().map(|of| of.real()[0]).reduce(|a, b| a * b);
    let accumulate = flag(call.attrs, "accumulate");
    let ((m, k), offsets) = ((a.columns(), b.columns()), offsets.int());
    let (a, b) = (a.real(), b.real());
    let [dw] = call.outputs_mut();
    dw.real().par_chunks_mut(k).enumerate().for_each(|(row, dw)| {
        let (group, column) = (row / m, row % m);
        let mut sum = vec![T::default(); k];
        for r in offsets[group] as usize..offsets[group + 1] as usize {
            let factor = a[r * m + column];
            sum.iter_mut().zip(&b[r * k..(r + 1) * k]).for_each(|(sum, b)| *sum += factor * *b);
        }
        scale.iter().for_each(|scale| sum.iter_mut().for_each(|sum| *sum *= *scale));
        dw.iter_mut().zip(sum).for_each(|(dw, sum)| *dw = if accumulate { *dw + sum } else { sum });
    });
}

/// True if factors multiply the sums.
pub(super) fn is_scaled(call: &LowerCall<'_>) -> bool {
    call.inputs.len() > 3
}
