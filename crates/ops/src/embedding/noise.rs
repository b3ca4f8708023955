//! NEFTune: uniform noise on embeddings (Jain et al. 2023). The noise of an element is a function of (seed, micro-step,
//! index), so nothing is saved and recomputation does not change a bit.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;
use tensor::philox::{self, Purpose};

use super::HEADERS as PLAIN;
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for};
use crate::layout::row_width;
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;
use crate::seed::seed_of;
use crate::sequence::{FIRST, FIRST_PER_PART};

const SOURCE: &str = include_str!("noise.cu");
const PHILOX: (&str, &str) = ("philox.cuh", include_str!("../cuda/philox.cuh"));

const THREADS: usize = 256;
/// Elements of one block of random words.
const WORDS: usize = 4;

/// y = x + noise(document_start, micro_step)
pub struct EmbeddingNoise;

/// Index of the first element of x in the batch of which it is a part.
fn first(attrs: &Attrs) -> usize {
    attrs.optional_int("first").expect("checked by the shape rule").unwrap_or(0) as usize
}

fn alpha(attrs: &Attrs) -> f32 {
    attrs.float("alpha").expect("checked by the shape rule") as f32
}

/// The tokens of the document that each token of a row is in. Starts do not fall along a row.
fn lengths(starts: &[i32]) -> Vec<usize> {
    let mut lengths = vec![0; starts.len()];
    let mut end = starts.len();
    for place in (0..starts.len()).rev() {
        if starts.get(place + 1).is_some_and(|next| *next > starts[place]) {
            end = place + 1;
        }
        lengths[place] = end - starts[place] as usize;
    }
    lengths
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let (x, starts, step) = (call.inputs[0].real(), call.inputs[1].int(), call.inputs[2].int()[0] as u32);
    let (columns, tokens) = (call.inputs[0].columns(), call.inputs[1].columns());
    let (alpha, seed) = (T::from_f32(alpha(call.attrs)), seed_of(call.attrs).expect("checked by the shape rule"));
    let lengths: Vec<usize> = starts.chunks(tokens).flat_map(lengths).collect();
    let begin = first(call.attrs) / columns;
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(columns).zip(x.par_chunks(columns)).enumerate().for_each(|(row, (y, x))| {
        let row = begin + row;
        let bound = alpha / T::from_f32((lengths[row] * columns) as f32).sqrt();
        let first = row * columns;
        let mut words = (u64::MAX, [0; WORDS]);
        for (column, (y, x)) in y.iter_mut().zip(x).enumerate() {
            let (block, word) = (((first + column) / WORDS) as u64, (first + column) % WORDS);
            if words.0 != block {
                words = (block, philox::words(seed, Purpose::EmbeddingNoise, 0, step, block));
            }
            *y = *x + bound * T::from_f32(2.0 * philox::unit(words.1[word]) - 1.0);
        }
    });
}

impl Op for EmbeddingNoise {
    fn id(&self) -> OpId {
        id::EMBEDDING_NOISE
    }

    fn class(&self) -> Class {
        // Reads the element's index, which no expression does: not fused with neighbours.
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "y = x + alpha/√(L·H)·u, where u is uniform in [−1, 1) and decided by (seed, micro_step, index of the element), \
         and L is the number of tokens of the document. The gradient of x is that of y. x [B, T, H], document_start i32 \
         [B, T], micro_step i32 [1] → y like x. Where x [1, N, H] is a part of the batch's tokens, `first` is the index of its \
         first element."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "alpha", kind: "float", doc: "strength of the noise" },
            Attribute { name: "seed", kind: "int", doc: "key of the random numbers" },
            FIRST,
            FIRST_PER_PART,
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, start, step] = inputs else { return Err("takes x, document_start and the micro-step".into()) };
        if !x.dtype.is_float() || *step != ValueType::new(Element::I32, [1.into()]) {
            return Err("x must be floating point, the micro-step i32[1]".into());
        }
        let ([rows, tokens, columns], [_, _]) = (&x.shape[..], &start.shape[..]) else {
            return Err("x must be [B, T, H], document_start [B, T]".into());
        };
        let firsts = [attrs.optional_int("first")?, attrs.optional_int("first_per_part")?];
        let whole = firsts == [None, None];
        let is_part = || {
            let extents = [&start.shape[0], &start.shape[1], tokens, columns].map(Dim::fixed);
            let [Some(wide), Some(long), Some(tokens), Some(columns)] = extents else { return false };
            let at_token = |first: &i64| usize::try_from(*first).is_ok_and(|first| first.is_multiple_of(columns));
            rows.fixed() == Some(1) && (wide * long).is_multiple_of(tokens) && firsts.iter().flatten().all(at_token)
        };
        if start.dtype != Element::I32 || !(if whole { x.shape[..2] == start.shape } else { is_part() }) {
            return Err("x must be [B, T, H] or a part of its tokens, document_start i32 [B, T]".into());
        }
        let alpha = attrs.float("alpha")?;
        if !(alpha.is_finite() && alpha >= 0.0) {
            return Err(format!("attribute `alpha` is {alpha}, expected a number from 0"));
        }
        seed_of(attrs)?;
        Ok(vec![x.clone()])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let dy = call.dy();
        Gradients::Inputs(vec![call.wanted[0].then_some(dy), None, None])
    }

    /// A block of random words costs about 60 integer operations.
    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let elements = outputs[0].len() as f64;
        Cost { flops: 18.0 * elements, bytes: (inputs[0].bytes() + outputs[0].bytes()) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, start, y) = (&call.inputs[0], &call.inputs[1], &call.outputs[0]);
        assert!(start.is_dense(), "starts of documents come as a batch has them: {start}");
        let (columns, tokens) = (x.shape[2], start.shape[1]);
        let width = if row_width(&[x, y]) >= WORDS { WORDS } else { 1 };
        let first = match call.attrs.optional_int("first_per_part").expect("checked by the shape rule") {
            Some(step) => Arg::PerPart { step },
            None => Arg::I64(first(call.attrs) as i64),
        };
        let mut defines: Vec<(String, String)> = [
            ("COUNT", format!("{}ull", x.len())),
            ("COLUMNS", columns.to_string()),
            ("TOKENS", tokens.to_string()),
            ("WIDTH", width.to_string()),
            ("ALPHA", format!("{:e}f", alpha(call.attrs))),
            ("SEED", format!("{}ull", seed_of(call.attrs).expect("checked by the shape rule"))),
            ("THREADS", THREADS.to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        defines.extend(defines_for("X", x));
        defines.extend(defines_for("Y", y));
        Lowered::Kernels(vec![KernelSpec {
            entry: "embedding_noise",
            source: SOURCE.to_owned(),
            headers: PLAIN.iter().copied().chain([PHILOX]).collect(),
            defines,
            // One block of random words more where the part begins within one.
            grid: [(x.len() + WORDS - width).div_ceil(THREADS * WORDS) as u32, 1, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Input(1), Arg::Input(2), Arg::Output(0), first],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |columns: usize, starts: [[i32; 6]; 2], alpha: f64, seed: u64| {
            let x = ExampleInput::Normal { shape: vec![2, 6, columns], scale: 1.0 };
            let start = ExampleInput::Ints { shape: vec![2, 6], values: starts.concat() };
            let step = ExampleInput::Ints { shape: vec![1], values: vec![7] };
            Example::new(vec![x, start, step], Attrs::new().with("alpha", alpha).with("seed", seed)).differentiate(&[0])
        };
        let part = |columns: usize, token: usize| {
            let mut part = example(columns, [[0, 0, 0, 3, 3, 3], [0, 1, 1, 1, 1, 5]], 5.0, 3);
            part.inputs[0] = ExampleInput::Normal { shape: vec![1, 4, columns], scale: 1.0 };
            part.attrs = part.attrs.with("first", token * columns);
            part
        };
        vec![
            example(64, [[0; 6], [0, 0, 2, 2, 2, 5]], 5.0, 42),
            example(33, [[0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 4, 4]], 15.0, u64::MAX),
            part(64, 4),
            part(33, 8),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    fn noise(step: i32, seed: u64, starts: &[i32], columns: usize) -> Vec<f32> {
        let attrs = Attrs::new().with("alpha", 5.0).with("seed", seed);
        let tokens = starts.len();
        let x = Array::Real(vec![0.0f32; tokens * columns]);
        let (starts, step) = (Array::Int(starts.to_vec()), Array::Int(vec![step]));
        let mut y = [(vec![1, tokens, columns], Array::Real(vec![0.0; tokens * columns]))];
        let inputs: [(&[usize], &Array<f32>); 3] =
            [(&[1, tokens, columns], &x), (&[1, tokens], &starts), (&[1], &step)];
        apply(&EmbeddingNoise, &attrs, &inputs, &mut y);
        y[0].1.real().to_vec()
    }

    #[test]
    fn a_document_s_noise_is_uniform_within_a_bound_of_its_own_length() {
        let columns = 10_000;
        let y = noise(3, 9, &[0, 1, 1, 1, 1], columns);
        for (token, length) in [(0, 1.0f64), (1, 4.0), (4, 4.0)] {
            let bound = 5.0 / (length * columns as f64).sqrt();
            let values: Vec<f64> = y[token * columns..][..columns].iter().map(|v| f64::from(*v) / bound).collect();
            let mean = values.iter().sum::<f64>() / columns as f64;
            let variance = values.iter().map(|v| v * v).sum::<f64>() / columns as f64;
            let largest = values.iter().fold(0.0f64, |m, v| m.max(v.abs()));
            assert!(mean.abs() < 0.03 && (variance - 1.0 / 3.0).abs() < 0.02, "{token}: {mean} {variance}");
            assert!(largest <= 1.0 + 1e-6 && largest > 0.99, "{token}: {largest}");
        }
    }

    #[test]
    fn seed_and_micro_step_decide() {
        let starts = [0, 0, 0];
        assert_eq!(noise(3, 9, &starts, 8), noise(3, 9, &starts, 8));
        assert!(
            noise(3, 9, &starts, 8) != noise(4, 9, &starts, 8) && noise(3, 9, &starts, 8) != noise(3, 8, &starts, 8)
        );
    }

    #[test]
    fn lengths_are_those_of_documents() {
        assert_eq!(lengths(&[0, 0, 0]), [3, 3, 3]);
        assert_eq!(lengths(&[0, 1, 1, 3]), [1, 2, 2, 1]);
    }
}
