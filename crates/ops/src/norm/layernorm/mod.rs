//! Layer normalisation: y = (x − mean)·r·w + b with r = 1/√(var + eps), over the last axis (Ba, Kiros &
//! Hinton 2016; `torch.nn.LayerNorm`). Statistics in f32, the variance from the differences.

mod cpu;
mod fuse;
mod weight;

use graph::{Element, ValueType};
use program::{Arg, TensorRef};
use tensor::Attrs;

pub use fuse::{AddLayerNorm, LayerNormBackwardAdd};
pub use weight::LayerNormWeightGradient;

use super::rmsnorm::{check_weight, row_shape, rows_of, spec};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};

const SOURCE: &str = include_str!("layernorm.cu");

const ATTRIBUTES: &[Attribute] = &[Attribute { name: "eps", kind: "float", doc: "added to the variance" }];

/// The kernel over all inputs and outputs of a call, in their order.
fn kernel(entry: &'static str, call: &LowerCall<'_>, tensors: &[(&str, &TensorRef)]) -> Lowered {
    let kernel = spec(entry, call, tensors, rows_of(&call.inputs[0]));
    let args = (0..call.inputs.len()).map(Arg::Input).chain((0..call.outputs.len()).map(Arg::Output));
    Lowered::Kernels(vec![KernelSpec { source: SOURCE.to_owned(), args: args.collect(), ..kernel }])
}

fn check_eps(attrs: &Attrs) -> Result<(), String> {
    let eps = attrs.float("eps").map_err(|e| e.0)?;
    if eps >= 0.0 && eps.is_finite() { Ok(()) } else { Err(format!("`eps` is {eps}, expected a number from 0")) }
}

/// Checks the inputs of the backward operations: x, w, mean, r, dy.
fn check_backward(inputs: &[ValueType]) -> Result<(), String> {
    let [x, weight, mean, r, dy, ..] = inputs else { return Err("takes x, the weight, mean, r and dy".into()) };
    check_weight(x, weight)?;
    if dy.shape != x.shape || mean.shape != row_shape(x) || r.shape != row_shape(x) {
        return Err("dy must be shaped like x, mean and r like its rows".into());
    }
    Ok(())
}

fn normal(shape: &[usize]) -> ExampleInput {
    ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 }
}

/// x, w, mean, r and dy of an example of a backward operation.
fn backward_inputs(rows: usize, columns: usize) -> Vec<ExampleInput> {
    let mean = ExampleInput::UniformF32 { shape: vec![rows], low: -0.5, high: 0.5 };
    let r = ExampleInput::UniformF32 { shape: vec![rows], low: 0.5, high: 1.5 };
    vec![normal(&[rows, columns]), normal(&[columns]), mean, r, normal(&[rows, columns])]
}

/// y, mean, r = layernorm(x, w, b)
pub struct LayerNorm;

impl Op for LayerNorm {
    fn name(&self) -> &'static str {
        "layernorm"
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "y = (x − mean)·r·w + b, r = 1/√(var + eps), mean and variance over the last axis. x […, H], w, b [H] → y […, \
         H], mean f32 […], r f32 […]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, weight, bias] = inputs else { return Err("takes x, the weight and the bias".into()) };
        check_weight(x, weight)?;
        if bias.shape != weight.shape {
            return Err("the bias must have the shape of the weight".into());
        }
        check_eps(attrs)?;
        let statistic = ValueType::new(Element::F32, row_shape(x));
        Ok(vec![x.clone(), statistic.clone(), statistic])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let (x, w, mean, r, dy) = (call.input(0), call.input(1), call.output(1), call.output(2), call.dy());
        let dx = call.wanted(0, "layernorm_backward", &[x, w, mean, r, dy], Attrs::new());
        let dw = call.wanted(1, "layernorm_weight_gradient", &[x, mean, r, dy], Attrs::new());
        let db = call.wanted(2, "sum_rows", &[dy], Attrs::new());
        Gradients::Inputs(vec![dx, dw, db])
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let [x, w, b] = call.inputs else { unreachable!("the shape rule requires three inputs") };
        kernel("layernorm", call, &[("X", x), ("W", w), ("BIAS", b), ("Y", &call.outputs[0])])
    }

    crate::reference!(cpu::forward);

    fn examples(&self) -> Vec<Example> {
        let example = |shape: &[usize], eps: f64| {
            let columns = [*shape.last().expect("shapes here have axes")];
            let inputs = vec![normal(shape), normal(&columns), normal(&columns)];
            Example::new(inputs, Attrs::new().with("eps", eps)).differentiate(&[0, 1, 2])
        };
        vec![example(&[2, 3, 64], 1e-5), example(&[5, 40], 1e-3), example(&[3, 1024], 1e-5), example(&[2, 33], 1e-6)]
    }
}

/// dx = r·(g − mean(g) − n·mean(g·n)) with g = dy·w and n = (x − mean)·r
pub struct LayerNormBackward;

impl Op for LayerNormBackward {
    fn name(&self) -> &'static str {
        "layernorm_backward"
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "Input gradient of `layernorm`: dx = r·(g − mean(g) − n·mean(g·n)) with g = dy·w and n = (x − mean)·r. x, w, \
         mean, r, dy → dx like x."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        check_backward(inputs)?;
        if inputs.len() != 5 {
            return Err("takes x, the weight, mean, r and dy".into());
        }
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let [x, w, _, _, dy] = call.inputs else { unreachable!("the shape rule requires five inputs") };
        kernel("layernorm_backward", call, &[("X", x), ("W", w), ("DY", dy), ("DX", &call.outputs[0])])
    }

    crate::reference!(cpu::backward);

    fn examples(&self) -> Vec<Example> {
        let example = |rows: usize, columns: usize| Example::new(backward_inputs(rows, columns), Attrs::new());
        vec![example(6, 64), example(3, 40), example(2, 2048)]
    }
}
