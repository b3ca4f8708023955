//! The weight gradient of layer normalisation: the sums over rows of RMS normalisation's, of centered rows.

use graph::{Element, ValueType};
use program::Arg;
use tensor::Attrs;

use super::super::rmsnorm::{weight_kernels, weight_scratch};
use super::{cpu, normal, row_shape};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};

/// dw = Σ over rows of dy·(x − mean)·r
pub struct LayerNormWeightGradient;

impl Op for LayerNormWeightGradient {
    fn name(&self) -> &'static str {
        "layernorm_weight_gradient"
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "Weight gradient of `layernorm`: dw = Σ rows dy·(x − mean)·r, in f32. x, mean, r, dy → dw f32 [H]. With \
         `accumulate`, added to."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "accumulate", kind: "bool?", doc: "add to the result instead of overwriting it" }]
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, mean, r, dy] = inputs else { return Err("takes x, mean, r and dy".into()) };
        if dy.shape != x.shape || mean.shape != row_shape(x) || r.shape != row_shape(x) {
            return Err("dy must be shaped like x, mean and r like its rows".into());
        }
        Ok(vec![ValueType::new(Element::F32, [x.shape[x.shape.len() - 1].clone()])])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        weight_scratch(call, &call.inputs[3])
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let args = (0..4).map(Arg::Input).collect();
        Lowered::Kernels(weight_kernels(call, &call.inputs[3], args, true))
    }

    crate::reference!(cpu::weight_gradient);

    fn examples(&self) -> Vec<Example> {
        let example = |rows: usize, columns: usize, attrs: Attrs| {
            let mean = ExampleInput::UniformF32 { shape: vec![rows], low: -0.5, high: 0.5 };
            let r = ExampleInput::UniformF32 { shape: vec![rows], low: 0.5, high: 1.5 };
            let x = || normal(&[rows, columns]);
            Example::new(vec![x(), mean, r, x()], attrs)
                .with_state(vec![ExampleInput::NormalF32 { shape: vec![columns], scale: 1.0 }])
        };
        vec![
            example(150, 64, Attrs::new()),
            example(7, 300, Attrs::new().with("accumulate", true)),
            example(40, 33, Attrs::new()),
        ]
    }
}
