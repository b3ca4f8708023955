//! The divergence of a student's distribution of each token from a teacher's: knowledge distillation (Hinton et al. 2015,
//! arXiv:1503.02531) with the divergences of GKD (Agarwal et al. 2023, arXiv:2306.13649).
//!
//! The teacher gives logits of the whole vocabulary (`whole.rs`) or its likeliest tokens (`top.rs`), which `logps.rs` finds.

mod cpu;
mod logps;
mod top;
mod top_cpu;
mod whole;

use graph::{Element, ValueType};
use program::{Arg, Cost, TensorRef};
use tensor::Attrs;

pub use logps::TopLogps;
pub use top::{TopDistillation, TopDistillationBackward};
pub use whole::{Distillation, DistillationBackward};

use crate::kernel::{KernelSpec, LowerCall, defines_for};
use crate::layout::row_width;
use crate::op::{Attribute, ExampleInput};

/// The target of a token that is not trained.
const IGNORED: i32 = -100;

const HEADERS: &[(&str, &str)] = &[
    ("types.cuh", include_str!("../../cuda/types.cuh")),
    ("pack.cuh", include_str!("../../cuda/pack.cuh")),
    ("reduce.cuh", include_str!("../../cuda/reduce.cuh")),
];

/// Threads of one block; one block works on one row.
const THREADS: u32 = 512;

const TEMPERATURE: Attribute =
    Attribute { name: "temperature", kind: "float", doc: "the logits are divided by it, above 0" };

fn temperature(attrs: &Attrs) -> Result<f64, String> {
    let temperature = attrs.float("temperature")?;
    let is_valid = temperature > 0.0 && temperature.is_finite();
    if is_valid { Ok(temperature) } else { Err(format!("`temperature` is {temperature}, expected a number above 0")) }
}

/// Checks logits [..., V] and targets [...].
fn check(logits: &ValueType, targets: &ValueType) -> Result<(), String> {
    let Some((_, rows)) = logits.shape.split_last() else { return Err("the logits need an axis".into()) };
    if !logits.dtype.is_float() || logits.last().is_none() {
        return Err("the logits must be floating point, with a known number of columns".into());
    }
    if targets.dtype != Element::I32 || targets.shape != rows {
        return Err("the targets must be i32, one for each row of the logits".into());
    }
    Ok(())
}

/// Checks f32 values of rows.
fn check_rows(values: &[&ValueType], targets: &ValueType, names: &str) -> Result<(), String> {
    match values.iter().all(|of| of.dtype == Element::F32 && of.shape == targets.shape) {
        true => Ok(()),
        false => Err(format!("{names} must be f32, one for each row of the logits")),
    }
}

/// A number as a constant of a kernel.
fn literal(x: f64) -> String {
    format!("{:?}f", x as f32)
}

/// A kernel of a block for each row of the logits. `matrices` have their columns; other operands lie densely.
fn row_kernel(
    entry: &'static str,
    source: &str,
    constants: &[(&str, String)],
    matrices: &[(&str, &TensorRef)],
    call: &LowerCall<'_>,
) -> KernelSpec {
    let logits = &call.inputs[0];
    let columns = *logits.shape.last().expect("the shape rule requires an axis");
    let wide: Vec<&TensorRef> = matrices.iter().map(|(_, tensor)| *tensor).collect();
    let per_row = call.inputs.iter().chain(call.outputs).filter(|of| of.shape.len() + 1 == logits.shape.len());
    for tensor in per_row {
        assert!(tensor.is_dense(), "values that belong to rows lie densely: {tensor}");
    }
    let numbers = [
        ("COLUMNS", columns.to_string()),
        ("IGNORED", format!("({IGNORED})")),
        ("THREADS", THREADS.to_string()),
        ("WIDTH", row_width(&wide).to_string()),
    ];
    let mut defines: Vec<(String, String)> =
        numbers.iter().chain(constants).map(|(name, of)| ((*name).to_owned(), of.clone())).collect();
    matrices.iter().for_each(|(name, tensor)| defines.extend(defines_for(name, tensor)));
    let args = (0..call.inputs.len()).map(Arg::Input).chain((0..call.outputs.len()).map(Arg::Output));
    KernelSpec {
        entry,
        source: source.to_owned(),
        headers: HEADERS.to_vec(),
        defines,
        grid: [(logits.len() / columns) as u32, 1, 1],
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: args.collect(),
    }
}

fn cost_of(inputs: &[TensorRef], outputs: &[TensorRef], flops_per_logit: usize) -> Cost {
    let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
    Cost { flops: (flops_per_logit * inputs[0].len()) as f64, bytes }
}

/// Targets of four rows, one of which is not trained.
fn example_targets(columns: usize) -> ExampleInput {
    ExampleInput::Ints { shape: vec![2, 2], values: vec![0, IGNORED, columns as i32 - 1, columns as i32 / 2] }
}
