//! Cross entropy of each token: log Σ exp(logits) − logits[target], in f32. The log of the sum is
//! kept: with it the gradient needs one more read of the logits and nothing else.

mod cpu;
mod with_gradient;

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use tensor::Attrs;
pub use with_gradient::CrossEntropyWithGradient;

use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for};
use crate::layout::row_width;
use crate::op::{Class, Example, ExampleInput, Op, Rows};
use crate::registry::id;

/// The target of a token that is not trained.
const IGNORED: i32 = -100;

const SOURCE: &str = include_str!("cross_entropy.cu");
const HEADERS: &[(&str, &str)] = &[
    ("types.cuh", include_str!("../../cuda/types.cuh")),
    ("pack.cuh", include_str!("../../cuda/pack.cuh")),
    ("reduce.cuh", include_str!("../../cuda/reduce.cuh")),
];

/// Threads of one block; one block works on one row.
const THREADS: u32 = 512;

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

fn spec(entry: &'static str, half: &str, call: &LowerCall<'_>, tensors: &[(&str, &TensorRef)]) -> KernelSpec {
    let logits = &call.inputs[0];
    let per_row = call.inputs[1..].iter().chain(call.outputs.iter().filter(|t| t.shape != logits.shape));
    for tensor in per_row {
        assert!(tensor.is_dense(), "values of cross entropy that belong to rows lie densely: {tensor}");
    }
    let columns = *logits.shape.last().expect("the shape rule requires an axis");
    let matrices: Vec<&TensorRef> = tensors.iter().map(|(_, t)| *t).collect();
    let mut defines = vec![
        (half.to_owned(), "1".to_owned()),
        ("COLUMNS".to_owned(), columns.to_string()),
        ("IGNORED".to_owned(), format!("({IGNORED})")),
        ("THREADS".to_owned(), THREADS.to_string()),
        ("WIDTH".to_owned(), row_width(&matrices).to_string()),
    ];
    tensors.iter().for_each(|(name, tensor)| defines.extend(defines_for(name, tensor)));
    let args = (0..call.inputs.len()).map(Arg::Input).chain((0..call.outputs.len()).map(Arg::Output));
    KernelSpec {
        entry,
        source: SOURCE.to_owned(),
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

/// Logits of a few rows with targets at both ends, in the middle and ignored.
fn example_inputs(columns: usize) -> Vec<ExampleInput> {
    let targets = vec![0, IGNORED, columns as i32 - 1, columns as i32 / 2];
    vec![
        ExampleInput::Normal { shape: vec![2, 2, columns], scale: 3.0 },
        ExampleInput::Ints { shape: vec![2, 2], values: targets },
    ]
}

/// A number for each row of an example.
fn row_values(low: f64, high: f64) -> ExampleInput {
    ExampleInput::UniformF32 { shape: vec![2, 2], low, high }
}

/// token_loss, lse = cross_entropy(logits, targets)
pub struct CrossEntropy;

impl Op for CrossEntropy {
    fn id(&self) -> OpId {
        id::CROSS_ENTROPY
    }

    fn class(&self) -> Class {
        Class::Loss
    }

    fn doc(&self) -> &'static str {
        "lse = log Σ exp(logits), token_loss = lse − logits[target]; both 0 where the target is −100. \
         logits […, V], targets i32 […] → token_loss f32 […], lse f32 […]."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [logits, targets] = inputs else { return Err("takes logits and targets".into()) };
        check(logits, targets)?;
        Ok(vec![ValueType::new(Element::F32, targets.shape.clone()); 2])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let (logits, targets, lse, dy) = (call.input(0), call.input(1), call.output(1), call.dy());
        let d_logits = call.wanted(0, id::CROSS_ENTROPY_BACKWARD, &[logits, targets, lse, dy], Attrs::new());
        Gradients::Inputs(vec![d_logits, None])
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        cost_of(inputs, outputs, 3)
    }

    fn row_by_row(&self, inputs: &[TensorRef], _attrs: &Attrs) -> Option<Rows> {
        Some(Rows { axes: inputs[1].shape.len(), whole: Vec::new() })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        Lowered::Kernels(vec![spec("cross_entropy", "FORWARD", call, &[("LOGITS", &call.inputs[0])])])
    }

    crate::reference!(cpu::forward);

    fn examples(&self) -> Vec<Example> {
        let example = |columns| Example::new(example_inputs(columns), Attrs::new()).differentiate(&[0]);
        vec![example(64), example(37), example(32_000)]
    }
}

/// d_logits = (softmax(logits) − onehot(target)) · d_token_loss
pub struct CrossEntropyBackward;

impl Op for CrossEntropyBackward {
    fn id(&self) -> OpId {
        id::CROSS_ENTROPY_BACKWARD
    }

    fn class(&self) -> Class {
        Class::Loss
    }

    fn doc(&self) -> &'static str {
        "Gradient of `cross_entropy`: d_logits = (exp(logits − lse) − [column = target])·d_token_loss, 0 where the \
         target is −100. logits […, V], targets i32 […], lse f32 […], d_token_loss f32 […] → like logits. May take \
         the place of the logits."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [logits, targets, lse, d] = inputs else {
            return Err("takes logits, targets, lse and d_token_loss".into());
        };
        check(logits, targets)?;
        if lse.shape != targets.shape || d.shape != targets.shape {
            return Err("lse and d_token_loss must be shaped like the targets".into());
        }
        if lse.dtype != Element::F32 || d.dtype != Element::F32 {
            return Err("lse and d_token_loss must be f32".into());
        }
        Ok(vec![logits.clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        cost_of(inputs, outputs, 4)
    }

    fn row_by_row(&self, inputs: &[TensorRef], _attrs: &Attrs) -> Option<Rows> {
        Some(Rows { axes: inputs[1].shape.len(), whole: Vec::new() })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let tensors = [("LOGITS", &call.inputs[0]), ("D_LOGITS", &call.outputs[0])];
        Lowered::Kernels(vec![spec("cross_entropy_backward", "BACKWARD", call, &tensors)])
    }

    fn in_place(&self) -> Option<(usize, usize)> {
        Some((0, 0))
    }

    crate::reference!(cpu::backward);

    fn examples(&self) -> Vec<Example> {
        let example = |columns| {
            let rows = [row_values(8.0, 9.0), row_values(-0.5, 1.5)];
            Example::new(example_inputs(columns).into_iter().chain(rows).collect(), Attrs::new())
        };
        vec![example(64), example(37), example(32_000)]
    }
}
