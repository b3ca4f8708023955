//! Root-mean-square normalisation: y = x · r · w with r = 1/√(mean(x²) + eps), over the last axis
//! (Zhang & Sennrich 2019; `LlamaRMSNorm` in transformers). Statistics in f32.
//!
//! With `offset`, the weight acts as (1 + w), as Gemma stores it.

mod again;
mod cpu;
mod fuse;
mod gradients;
mod weight;

pub use again::RmsNormAndBackwardAdd;
pub(crate) use cpu::{backward_row, forward_row, write_weight_gradient};
pub use fuse::{AddRmsNorm, RmsNormBackwardAdd};
pub use gradients::{RmsNormGradients, RmsNormGradientsAdd};
use graph::{Element, ValueType};
use program::{Arg, TensorRef};
use tensor::Attrs;
pub use weight::RmsNormWeightGradient;
pub(crate) use weight::sum_partials;
pub(super) use weight::{kernels as weight_kernels, scratch as weight_scratch};

use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for};
use crate::layout::row_width;
use crate::op::{Attribute, Class, Example, ExampleInput, Op, Rows};

const SOURCE: &str = include_str!("rmsnorm.cu");
const HEADERS: &[(&str, &str)] = &[
    ("rows.cuh", include_str!("../../cuda/rows.cuh")),
    ("types.cuh", include_str!("../../cuda/types.cuh")),
    ("pack.cuh", include_str!("../../cuda/pack.cuh")),
    ("reduce.cuh", include_str!("../../cuda/reduce.cuh")),
];

const ATTRIBUTES: &[Attribute] = &[
    Attribute { name: "eps", kind: "float", doc: "added to the mean of squares" },
    Attribute { name: "offset", kind: "bool?", doc: "multiply with 1 + w instead of w" },
];

/// Threads of one block.
const THREADS: u32 = 256;
/// Up to this many packs a row belongs to one warp; longer rows take a whole block.
const PACKS_OF_A_WARP: usize = 256;

pub(super) fn check_weight(x: &ValueType, weight: &ValueType) -> Result<(), String> {
    if weight.shape.len() != 1 || weight.last() != x.last() || x.last().is_none() {
        return Err(format!("the weight must be [{}]", x.shape.last().map(|d| d.to_string()).unwrap_or_default()));
    }
    Ok(())
}

/// The shape of per-row statistics.
pub(super) fn row_shape(x: &ValueType) -> Vec<graph::Dim> {
    x.shape[..x.shape.len() - 1].to_vec()
}

/// A kernel over rows. All of `tensors` have the columns of the first input.
pub(super) fn spec(
    entry: &'static str,
    call: &LowerCall<'_>,
    tensors: &[(&str, &TensorRef)],
    rows: usize,
) -> KernelSpec {
    let columns = *call.inputs[0].shape.last().expect("the shape rule requires an axis");
    let eps = call.attrs.float("eps").unwrap_or(0.0);
    let offset = call.attrs.flag("offset").expect("checked by the shape rule");
    let width = row_width(&tensors.iter().map(|(_, tensor)| *tensor).collect::<Vec<_>>());
    let lanes = if columns / width <= PACKS_OF_A_WARP { 32 } else { THREADS as usize };
    let numbers =
        [("COLUMNS", columns), ("ROWS", rows), ("WIDTH", width), ("LANES", lanes), ("THREADS", THREADS as usize)];
    let mut defines: Vec<(String, String)> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
    defines.push(("EPS".to_owned(), format!("{eps:e}f")));
    defines.push(("OFFSET".to_owned(), (offset as u32).to_string()));
    for (name, tensor) in tensors {
        defines.extend(defines_for(name, tensor));
    }
    KernelSpec {
        entry,
        source: SOURCE.to_owned(),
        headers: HEADERS.to_vec(),
        defines,
        grid: [rows.div_ceil(THREADS as usize / lanes) as u32, 1, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: Vec::new(),
    }
}

pub(super) fn rows_of(tensor: &TensorRef) -> usize {
    tensor.shape.iter().rev().skip(1).product()
}

/// y, r = rmsnorm(x, w)
pub struct RmsNorm;

impl Op for RmsNorm {
    fn name(&self) -> &'static str {
        "rmsnorm"
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "y = x·r·w, r = 1/√(mean(x²) + eps) over the last axis. x […, H], w [H] → y […, H], r f32 […]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, weight] = inputs else { return Err("takes x and the weight".into()) };
        check_weight(x, weight)?;
        let eps = attrs.float("eps").map_err(|e| e.0)?;
        if !(eps >= 0.0 && eps.is_finite()) {
            return Err(format!("`eps` is {eps}, expected a number from 0"));
        }
        attrs.flag("offset").map_err(|e| e.0)?;
        Ok(vec![x.clone(), ValueType::new(Element::F32, row_shape(x))])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let (x, w, r, dy) = (call.input(0), call.input(1), call.output(1), call.dy());
        let attrs = call.node.attrs.clone();
        let offset = Attrs::new().with("offset", attrs.flag("offset").unwrap_or(false));
        if call.wanted == [true, true] {
            let both = call.emit.emit("rmsnorm_gradients", &[x, w, r, dy], offset);
            return Gradients::Inputs(both.into_iter().map(Some).collect());
        }
        let dx = call.wanted(0, "rmsnorm_backward", &[x, w, r, dy], offset);
        let dw = call.wanted(1, "rmsnorm_weight_gradient", &[x, r, dy], Attrs::new());
        Gradients::Inputs(vec![dx, dw])
    }

    fn row_by_row(&self, inputs: &[TensorRef]) -> Option<Rows> {
        Some(Rows { axes: inputs[0].shape.len().checked_sub(1)?, whole: &[1] })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, y) = (&call.inputs[0], &call.outputs[0]);
        let mut kernel = spec("rmsnorm", call, &[("X", x), ("W", &call.inputs[1]), ("Y", y)], rows_of(x));
        kernel.args = vec![Arg::Input(0), Arg::Input(1), Arg::Output(0), Arg::Output(1)];
        Lowered::Kernels(vec![kernel])
    }

    crate::reference!(cpu::forward);

    fn examples(&self) -> Vec<Example> {
        let example = |shape: Vec<usize>, attrs: Attrs| {
            let weight = vec![*shape.last().expect("shapes here have axes")];
            Example::new(
                vec![ExampleInput::Normal { shape, scale: 1.0 }, ExampleInput::Normal { shape: weight, scale: 1.0 }],
                attrs,
            )
            .differentiate(&[0, 1])
        };
        vec![
            example(vec![2, 3, 64], Attrs::new().with("eps", 1e-6)),
            example(vec![5, 40], Attrs::new().with("eps", 1e-5).with("offset", true)),
            example(vec![3, 1024], Attrs::new().with("eps", 1e-6)),
        ]
    }
}

/// dx = r·(dy·w − x·r²·mean(dy·w·x))
pub struct RmsNormBackward;

impl Op for RmsNormBackward {
    fn name(&self) -> &'static str {
        "rmsnorm_backward"
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "Input gradient of `rmsnorm`: dx = r·(dy·w − x·r²·mean(dy·w·x)). x, w, r, dy → dx like x."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &ATTRIBUTES[1..]
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, weight, r, dy] = inputs else { return Err("takes x, the weight, r and dy".into()) };
        check_weight(x, weight)?;
        if dy.shape != x.shape || r.shape != row_shape(x) {
            return Err("dy must be shaped like x, r like its rows".into());
        }
        Ok(vec![x.clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn row_by_row(&self, inputs: &[TensorRef]) -> Option<Rows> {
        Some(Rows { axes: inputs[0].shape.len().checked_sub(1)?, whole: &[1] })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let [x, w, _, dy] = call.inputs else { unreachable!("the shape rule requires four inputs") };
        let tensors = [("X", x), ("W", w), ("DY", dy), ("DX", &call.outputs[0])];
        let mut kernel = spec("rmsnorm_backward", call, &tensors, rows_of(x));
        kernel.args = vec![Arg::Input(0), Arg::Input(1), Arg::Input(2), Arg::Input(3), Arg::Output(0)];
        Lowered::Kernels(vec![kernel])
    }

    crate::reference!(cpu::backward);

    fn examples(&self) -> Vec<Example> {
        let example = |rows: usize, columns: usize, offset: bool| {
            Example::new(
                vec![
                    ExampleInput::Normal { shape: vec![rows, columns], scale: 1.0 },
                    ExampleInput::Normal { shape: vec![columns], scale: 1.0 },
                    ExampleInput::UniformF32 { shape: vec![rows], low: 0.5, high: 1.5 },
                    ExampleInput::Normal { shape: vec![rows, columns], scale: 1.0 },
                ],
                Attrs::new().with("offset", offset),
            )
        };
        vec![example(6, 64, false), example(3, 40, true), example(2, 2048, false)]
    }
}
