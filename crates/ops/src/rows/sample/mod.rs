//! The token that is sampled from each row of logits: the logits need not leave the device.

pub mod sampling;

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::{Attrs, DType};

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for};
use crate::layout::row_width;
use crate::op::{Class, Example, ExampleInput, Op, Rows};
use crate::real::Real;
use crate::registry::id;

use sampling::{Draw, sample};

const SOURCE: &str = include_str!("sample_token.cu");
const HEADERS: &[(&str, &str)] = &[
    ("types.cuh", include_str!("../../cuda/types.cuh")),
    ("pack.cuh", include_str!("../../cuda/pack.cuh")),
    device::DEPENDENT_LAUNCH,
];

const THREADS: u32 = 512;

/// ids, logps = sample_token(logits, sampling)
pub struct SampleToken;

impl Draw {
    /// Numbers of one row of `sampling`.
    pub const WIDTH: usize = 5;

    /// A row of `sampling`.
    pub fn to_row(&self) -> [f32; Draw::WIDTH] {
        [self.temperature, self.top_k as f32, self.top_p, self.min_p, self.number]
    }

    fn of_row<T: Real>(row: &[T]) -> Draw {
        let of = |index: usize| row[index].to_f32();
        Draw { temperature: of(0), top_k: of(1) as usize, top_p: of(2), min_p: of(3), number: of(4) }
    }
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let [logits, sampling] = call.inputs else { unreachable!("the shape rule requires two inputs") };
    let [ids, logps] = call.outputs_mut();
    let rows = logits.real().par_chunks(logits.columns()).zip(sampling.real().par_chunks(Draw::WIDTH));
    rows.zip(ids.int().par_iter_mut().zip(logps.real())).for_each(|((row, how), (id, logp))| {
        let (drawn, of) = sample(row, &Draw::of_row(how));
        (*id, *logp) = (drawn as i32, of);
    });
}

impl Op for SampleToken {
    fn id(&self) -> OpId {
        id::SAMPLE_TOKEN
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "A token drawn from every row of logits, and the logarithm of its probability among all at the temperature. A row of \
         `sampling` is temperature (0: the likeliest token, its probability at 1), top-k (0: all), top-p, min-p and the number \
         in [0, 1) whose place in the cumulative sum of probabilities is the token. No gradient. logits […, N], sampling f32 \
         […, 5] → ids i32 […], logps f32 […]."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [logits, sampling] = inputs else { return Err("takes logits and sampling".into()) };
        let (Some((Dim::Fixed(_), rows)), Some((Dim::Fixed(Draw::WIDTH), others))) =
            (logits.shape.split_last(), sampling.shape.split_last())
        else {
            return Err("logits must be […, N], N known, and sampling […, 5]".into());
        };
        if rows.is_empty() || rows != others || !logits.dtype.is_float() || sampling.dtype != Element::F32 {
            return Err("logits must be floating point and sampling f32, a row of it for each row of logits".into());
        }
        Ok([Element::I32, Element::F32].map(|element| ValueType::new(element, rows.to_vec())).to_vec())
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        Gradients::Inputs(vec![None; call.node.inputs.len()])
    }

    fn cost(&self, inputs: &[TensorRef], _outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        // The largest, the sum and the token are found one after another.
        Cost { flops: 8.0 * inputs[0].len() as f64, bytes: 2.0 * inputs[0].bytes() as f64 }
    }

    fn row_by_row(&self, inputs: &[TensorRef], _attrs: &Attrs) -> Option<Rows> {
        Some(Rows { axes: inputs[0].shape.len() - 1, whole: Vec::new() })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let logits = &call.inputs[0];
        for tensor in call.inputs[1..].iter().chain(call.outputs) {
            assert!(tensor.is_dense(), "what belongs to a row lies densely: {tensor}");
        }
        let columns = logits.shape[logits.shape.len() - 1];
        // Numbers of sixteen bits have no more in their keys.
        let bits = if logits.dtype == DType::BF16 { 16 } else { 32 };
        let numbers =
            [("COLUMNS", columns), ("WIDTH", row_width(&[logits])), ("THREADS", THREADS as usize), ("BITS", bits)];
        let mut defines: Vec<_> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
        defines.extend(defines_for("LOGITS", logits));
        Lowered::Kernels(vec![KernelSpec {
            entry: "sample_token",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines,
            grid: [(logits.len() / columns) as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Input(1), Arg::Output(0), Arg::Output(1)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let all = Draw::ALL;
        let bounds = [
            all,
            Draw { temperature: 0.0, ..all },
            Draw { temperature: 0.7, number: 0.35, ..all },
            Draw { temperature: 2.0, number: 0.999, ..all },
            Draw { top_k: 1, number: 0.9, ..all },
            Draw { top_k: 20, number: 0.6, ..all },
            Draw { temperature: 0.8, top_p: 0.9, number: 0.8, ..all },
            Draw { top_k: 50, top_p: 0.5, number: 0.95, ..all },
            Draw { min_p: 0.3, number: 0.7, ..all },
            Draw { temperature: 1.5, top_k: 300, top_p: 0.95, min_p: 0.05, number: 0.45 },
        ];
        // Numbers that all types store, so that the same tokens follow from them.
        let falling =
            |columns: usize| move |i: usize| ((i * 7919 % columns) as f32 * 90.0 / columns as f32).floor() / 8.0;
        let peaked = |i: usize| if i % 997 == 500 { 6.0 } else { -((i * 31 % 64) as f32) / 4.0 };
        let masked = |i: usize| if i.is_multiple_of(3) { f32::NEG_INFINITY } else { (i % 8) as f32 / 2.0 };
        vec![
            example(&[1, 1], 40, &bounds[1..2], masked),
            example(&[10, 1], 1000, &bounds, falling(1000)),
            example(&[2, 5], 32_003, &bounds, peaked),
            example(&[10], 9000, &bounds, falling(9000)),
            example(&[10, 1], 61, &bounds, masked),
            example(&[1, 2], 1, &bounds[4..6], |_| -3.0),
        ]
    }
}

/// An example with rows of logits that all types store. The number of each row is moved to the middle of its token's
/// stretch of the sum, where rounding changes no token.
fn example(rows: &[usize], columns: usize, draws: &[Draw], logit: impl Fn(usize) -> f32) -> Example {
    let logits: Vec<f32> = (0..draws.len() * columns).map(|i| logit(i * 13 / 11 + i % columns)).collect();
    let middle = |(row, how): (&[f32], &Draw)| {
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |x: &f32| (f64::from(*x - top) / f64::from(how.temperature)).exp();
        let kept = match how.temperature {
            0.0 => Vec::new(),
            _ => sampling::kept(&row.iter().map(weight).collect::<Vec<f64>>(), how),
        };
        let total: f64 = kept.iter().map(|(weight, _)| weight).sum();
        let mut sum = 0.0;
        let of = kept.iter().find_map(|(weight, _)| {
            sum += weight;
            (sum > f64::from(how.number) * total).then_some((sum - weight / 2.0) / total)
        });
        Draw { number: of.unwrap_or_default() as f32, ..*how }.to_row()
    };
    let sampling = logits.chunks(columns).zip(draws).flat_map(middle).collect();
    let shape = |last: usize| rows.iter().copied().chain([last]).collect();
    let inputs = vec![
        ExampleInput::F32 { shape: shape(columns), values: logits },
        ExampleInput::F32 { shape: shape(Draw::WIDTH), values: sampling },
    ];
    Example::new(inputs, Attrs::new())
}
