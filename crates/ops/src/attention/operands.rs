//! The operands of an attention call: extents, attributes, optional inputs. Used by the shape rule, the lowering and
//! both CPU implementations.

use graph::ValueType;
use program::TensorRef;

use super::mask::Mask;
use super::reading::Reading;
use crate::call::{Call, Input};
use crate::real::Real;

/// Inputs before the optional ones: q, k, v, document_start, and in the backward pass o, lse, d_o.
pub const FORWARD_INPUTS: usize = 4;
pub const BACKWARD_INPUTS: usize = 7;

/// The extents of one call.
#[derive(Clone, Copy)]
pub struct Extents {
    pub batch: usize,
    pub tokens: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// Columns of q and k.
    pub head_dim: usize,
    /// Columns of v and o.
    pub value_dim: usize,
}

impl Extents {
    pub fn of(q: &[usize], k: &[usize], v: &[usize]) -> Self {
        Extents { batch: q[0], tokens: q[1], heads: q[2], kv_heads: k[2], head_dim: q[3], value_dim: v[3] }
    }

    /// Returns the extents of a call of either pass.
    pub fn of_call(inputs: &[TensorRef]) -> Self {
        Extents::of(&inputs[0].shape, &inputs[1].shape, &inputs[2].shape)
    }

    /// Query heads that share one key head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Pairs of query and key that see each other, over all heads, when every row is one document; what
    /// `last_key` adds and `last_query` hides is data and not counted.
    pub fn pairs(&self, reading: &Reading) -> f64 {
        let tokens = self.tokens as f64;
        let window = reading.window.map_or(tokens, |window| (window as f64).min(tokens));
        let after = if reading.bidirectional { tokens * (tokens - 1.0) / 2.0 } else { 0.0 };
        (self.batch * self.heads) as f64 * (window * (window + 1.0) / 2.0 + (tokens - window) * window + after)
    }

    /// Returns the multiplications and additions of `by_head` products over q's columns and `by_value` products over
    /// v's.
    pub fn flops(&self, reading: &Reading, by_head: f64, by_value: f64) -> f64 {
        2.0 * (by_head * self.head_dim as f64 + by_value * self.value_dim as f64) * self.pairs(reading)
    }
}

/// An operand as far as the number of its axes goes.
pub trait Axes {
    fn axes(&self) -> usize;
}

impl Axes for ValueType {
    fn axes(&self) -> usize {
        self.shape.len()
    }
}

impl Axes for TensorRef {
    fn axes(&self) -> usize {
        self.shape.len()
    }
}

impl<T> Axes for Input<'_, T> {
    fn axes(&self) -> usize {
        self.shape.len()
    }
}

/// Returns the number of inputs before the optional ones, in the pass with `outputs` results.
fn required(outputs: usize) -> usize {
    if outputs == 3 { BACKWARD_INPUTS } else { FORWARD_INPUTS }
}

/// Places of the optional inputs among a call's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Optional {
    /// The input that limits what is seen, i32 [B, T]: `last_key`, with `branches` `last_query`.
    pub limit: Option<usize>,
    /// The input with the sink of each head, [heads].
    pub sink: Option<usize>,
}

impl Optional {
    /// Finds the optional inputs after the first `required`: the limit, then the sink, distinguished by their axes.
    pub fn of<T: Axes>(inputs: &[T], required: usize) -> Result<Self, String> {
        let axes: Vec<usize> = inputs[required.min(inputs.len())..].iter().map(Axes::axes).collect();
        let (limit, sink) = match axes[..] {
            [] => (None, None),
            [2] => (Some(required), None),
            [1] => (None, Some(required)),
            [2, 1] => (Some(required), Some(required + 1)),
            _ => return Err("after document_start it takes last_key [B, T] and then a sink [heads], at most".into()),
        };
        Ok(Optional { limit, sink })
    }

    /// Finds the optional inputs of a call of either pass that passed the shape rule.
    pub fn of_call<T: Axes>(inputs: &[T], outputs: usize) -> Self {
        Self::of(inputs, required(outputs)).expect("checked by the shape rule")
    }
}

/// The function that turns the product q·k of one head into a score.
#[derive(Clone, Copy)]
pub struct Scoring<T> {
    pub scale: T,
    pub soft_cap: Option<T>,
    /// A score that joins the sum of the exponentials alone.
    pub sink: Option<T>,
}

impl<T: Real> Scoring<T> {
    pub fn of_head(reading: &Reading, sink: Option<&Input<'_, T>>, h: usize) -> Self {
        Scoring {
            scale: T::from_f64(reading.scale),
            soft_cap: reading.soft_cap.map(T::from_f64),
            sink: sink.map(|sink| sink.real()[h]),
        }
    }

    /// The score, and its derivative by the product.
    pub fn score(&self, product: T) -> (T, T) {
        let s = self.scale * product;
        let Some(cap) = self.soft_cap else { return (s, self.scale) };
        let t = (s / cap).tanh();
        (cap * t, self.scale * (T::from_f64(1.0) - t * t))
    }
}

/// The operands of both passes besides q, k and v.
pub struct Operands<'a, T> {
    pub e: Extents,
    pub reading: Reading,
    pub starts: &'a [i32],
    /// `last_key`, with `branches` `last_query`.
    pub limit: Option<&'a [i32]>,
    pub sink: Option<&'a Input<'a, T>>,
}

impl<'a, T: Real> Operands<'a, T> {
    pub fn of(call: &Call<'a, T>) -> Self {
        let (inputs, outputs) = (call.inputs, call.outputs.len());
        let e = Extents::of(inputs[0].shape, inputs[1].shape, inputs[2].shape);
        let optional = Optional::of_call(inputs, outputs);
        Operands {
            e,
            reading: Reading::checked(call.attrs, e.head_dim),
            starts: inputs[required(outputs) - 1].int(),
            limit: optional.limit.map(|at| inputs[at].int()),
            sink: optional.sink.map(|at| &inputs[at]),
        }
    }

    pub fn mask(&self, b: usize) -> Mask<'a> {
        Mask::of_row(b, self.e.tokens, self.starts, self.limit, &self.reading)
    }

    pub fn scoring(&self, h: usize) -> Scoring<T> {
        Scoring::of_head(&self.reading, self.sink, h)
    }
}
