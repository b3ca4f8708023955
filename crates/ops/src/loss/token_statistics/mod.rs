//! Statistics of each token's distribution that metrics and weights are made of. No gradient flows through them.

use graph::{Element, OpId, ValueType};
use program::{Cost, TensorRef};
use tensor::Attrs;

use super::batch_kernel;
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered, defines_for};
use crate::op::{Class, Example, ExampleInput, Op, Rows};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("token_statistics.cu");
const HEADERS: &[(&str, &str)] =
    &[("types.cuh", include_str!("../../cuda/types.cuh")), ("reduce.cuh", include_str!("../../cuda/reduce.cuh"))];
const THREADS: usize = 512;

/// entropy, mean, collision, hit = token_statistics(logits, targets)
pub struct TokenStatistics;

/// The four numbers of a row.
fn statistics<T: Real>(row: &[T], target: usize) -> [f64; 4] {
    let top = row.iter().map(|x| x.to_f64()).fold(f64::NEG_INFINITY, f64::max);
    let (mut sum, mut weighted, mut squares, mut total) = (0.0, 0.0, 0.0, 0.0);
    for x in row.iter().map(|x| x.to_f64()) {
        let e = (x - top).exp();
        (sum, weighted, squares, total) = (sum + e, weighted + e * (x - top), squares + e * e, total + x);
    }
    let first = row.iter().position(|x| x.to_f64() == top);
    let hit = f64::from(u8::from(first == Some(target)));
    [sum.ln() - weighted / sum, total / row.len() as f64, squares.ln() - 2.0 * sum.ln(), hit]
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let (logits, targets) = (call.inputs[0], call.inputs[1].int());
    let rows = logits.real().chunks(logits.columns()).zip(targets);
    let of_row = |(row, target): (&[T], &i32)| usize::try_from(*target).map_or([0.0; 4], |t| statistics(row, t));
    let all: Vec<[f64; 4]> = rows.map(of_row).collect();
    for (index, output) in call.outputs.iter_mut().enumerate() {
        output.real().iter_mut().zip(&all).for_each(|(to, of)| *to = T::from_f64(of[index]));
    }
}

impl Op for TokenStatistics {
    fn id(&self) -> OpId {
        id::TOKEN_STATISTICS
    }

    fn class(&self) -> Class {
        Class::Loss
    }

    fn doc(&self) -> &'static str {
        "Of p = softmax(logits) of each token: entropy −Σ p·ln p, the mean of the logits, collision ln Σ p², and hit, 1 where \
         the target is the first of the largest logits; all 0 where the target is −100. No gradient. logits […, V], targets \
         i32 […] → four of f32 […]."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [logits, targets] = inputs else { return Err("takes logits and targets".into()) };
        let rows = logits.shape.split_last().map(|(_, rows)| rows);
        if !logits.dtype.is_float() || logits.last().is_none() {
            return Err("the logits must be floating point, with a known number of columns".into());
        }
        if targets.dtype != Element::I32 || Some(targets.shape.as_slice()) != rows {
            return Err("the targets must be i32, one for each row of the logits".into());
        }
        Ok(vec![ValueType::new(Element::F32, targets.shape.clone()); 4])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        Gradients::Inputs(vec![None; call.node.inputs.len()])
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: (8 * inputs[0].len()) as f64, bytes }
    }

    fn row_by_row(&self, inputs: &[TensorRef], _attrs: &Attrs) -> Option<Rows> {
        Some(Rows { axes: inputs[1].shape.len(), whole: Vec::new() })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let logits = &call.inputs[0];
        let columns = *logits.shape.last().expect("the shape rule requires an axis");
        let rows = call.inputs[1].len();
        let per_row = LowerCall { inputs: &call.inputs[1..], ..*call };
        let mut kernel = batch_kernel(
            "token_statistics",
            SOURCE,
            HEADERS,
            [rows, THREADS],
            &[("COLUMNS", columns), ("THREADS", THREADS)],
            &per_row,
        );
        kernel.defines.extend(defines_for("X", logits));
        let operands = (0..2).map(program::Arg::Input).chain((0..4).map(program::Arg::Output));
        kernel.args = operands.collect();
        Lowered::Kernels(vec![kernel])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |columns: usize| {
            let targets = vec![0, -100, columns as i32 - 1, columns as i32 / 2];
            let logits = ExampleInput::Normal { shape: vec![2, 2, columns], scale: 3.0 };
            Example::new(vec![logits, ExampleInput::Ints { shape: vec![2, 2], values: targets }], Attrs::new())
        };
        let ties = ExampleInput::F32 { shape: vec![1, 3, 3], values: vec![1., 2., 2., 2., 2., 1., 0., 0., 0.] };
        let ties =
            Example::new(vec![ties, ExampleInput::Ints { shape: vec![1, 3], values: vec![1, 1, 0] }], Attrs::new());
        vec![example(64), example(37), example(32_000), ties]
    }
}
