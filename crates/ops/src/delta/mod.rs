//! The gated delta rule (Yang et al. 2024, arXiv 2412.06464): linear attention whose state forgets, and is corrected
//! towards each value instead of only added to. The rule and its gradients, the convolution over tokens before it
//! (`causal_conv`), and its decay (`delta_decay`). Without the correction, the same recurrence is the scan of a
//! state-space model (Mamba-2; Dao & Gu 2024, arXiv 2405.21060).
//!
//! Documents of a packed row never see each other: the convolution ends and the state is empty again where
//! `document_start` says that one starts. Does not know how queries, keys and gates come about.

mod backward;
mod cached;
mod conv;
mod cpu;
mod decay;
mod examples;
mod forward;
mod launch;
mod tensor_cores;

use graph::{Dim, Element, ValueType};
use tensor::Attrs;

use crate::op::Attribute;

pub use backward::GatedDeltaBackward;
pub use cached::{CachedConv, CachedDelta};
pub use conv::{CausalConv, CausalConvBackward, CausalConvWeightGradient};
pub use decay::{DELTA_DECAY, DELTA_DECAY_BACKWARD, DELTA_DECAY_GRADIENTS};
pub use forward::GatedDelta;

/// Widest head: a lane of the kernels holds a quarter of a column of the state in registers.
const MAX_HEAD_DIM: usize = 128;

/// Tokens between the states that the backward pass computes its gradients from.
const CHUNK: usize = 64;

const ATTRIBUTES: &[Attribute] = &[
    Attribute { name: "scale", kind: "float?", doc: "factor of the queries; absent for 1/√DK" },
    Attribute { name: "additive", kind: "bool?", doc: "add values to the state without the correction by kᵀS" },
];

/// The extents of a call.
#[derive(Clone, Copy, Debug)]
struct Extents {
    batch: usize,
    tokens: usize,
    key_heads: usize,
    heads: usize,
    key_dim: usize,
    value_dim: usize,
}

impl Extents {
    /// Returns the extents of k and v.
    fn of(k: &[usize], v: &[usize]) -> Extents {
        let ([batch, tokens, key_heads, key_dim], [_, _, heads, value_dim]) = (k, v) else {
            unreachable!("the shape rule requires four axes")
        };
        let (batch, tokens, key_heads, heads) = (*batch, *tokens, *key_heads, *heads);
        Extents { batch, tokens, key_heads, heads, key_dim: *key_dim, value_dim: *value_dim }
    }

    fn chunks(&self) -> usize {
        self.tokens.div_ceil(CHUNK)
    }

    /// Operations on elements of the state, `passes` for each of them and token.
    fn flops(&self, passes: f64) -> f64 {
        (self.batch * self.tokens * self.heads * self.key_dim * self.value_dim) as f64 * passes
    }
}

/// True if values are added to the state as they are.
fn additive(attrs: &Attrs) -> bool {
    attrs.flag("additive").expect("checked by the shape rule")
}

/// The factor of the queries.
fn scale(attrs: &Attrs, key_dim: usize) -> Result<f64, String> {
    let scale = attrs.optional_float("scale")?.unwrap_or((key_dim as f64).powf(-0.5));
    if scale.is_finite() { Ok(scale) } else { Err(format!("`scale` is {scale}, expected a finite number")) }
}

/// Checks q, k, v, g, beta and document_start; returns the type of o.
fn check([q, k, v, g, beta, document_start]: [&ValueType; 6], attrs: &Attrs) -> Result<ValueType, String> {
    let o = check_rows([q, k, v, g, beta], attrs)?;
    check_starts(document_start, &k.shape[..2])?;
    Ok(o)
}

/// Checks q, k, v, g and beta; returns the type of o.
fn check_rows([q, k, v, g, beta]: [&ValueType; 5], attrs: &Attrs) -> Result<ValueType, String> {
    let [batch, tokens, Dim::Fixed(key_heads), Dim::Fixed(key_dim)] = k.shape.as_slice() else {
        return Err("k must be [B, T, key_heads, DK], key_heads and DK known".into());
    };
    let [.., Dim::Fixed(heads), Dim::Fixed(value_dim)] = v.shape.as_slice() else {
        return Err("v must be [B, T, heads, DV], heads and DV known".into());
    };
    let rows = [batch.clone(), tokens.clone()];
    if q.shape != k.shape || v.shape.len() != 4 || v.shape[..2] != rows {
        return Err("q must be shaped like k, v must have the batch and the tokens of k".into());
    }
    if *key_heads == 0 || heads % key_heads != 0 {
        return Err(format!("{heads} heads cannot share {key_heads} key heads evenly"));
    }
    if let Some(dim) = [*key_dim, *value_dim].into_iter().find(|dim| !(1..=MAX_HEAD_DIM).contains(dim)) {
        return Err(format!("heads have 1 to {MAX_HEAD_DIM} columns, not {dim}"));
    }
    let of_heads = [batch.clone(), tokens.clone(), Dim::Fixed(*heads)];
    if g.shape != of_heads || beta.shape != of_heads {
        return Err(format!("g and beta must be [{batch}, {tokens}, {heads}]"));
    }
    if [q, k, v, g, beta].into_iter().any(|t| !t.dtype.is_float()) {
        return Err("q, k, v, g and beta must be floating point".into());
    }
    scale(attrs, *key_dim)?;
    attrs.flag("additive")?;
    Ok(v.clone())
}

fn check_starts(document_start: &ValueType, rows: &[Dim]) -> Result<(), String> {
    match document_start.dtype == Element::I32 && document_start.shape == rows {
        true => Ok(()),
        false => Err(format!("document_start must be i32 [{}, {}]", rows[0], rows[1])),
    }
}
