//! Causal softmax attention inside documents, and its gradients.
//!
//! On a GPU, bf16 calls become instructions that the backend realises with its library, but for what `hopper`
//! does better; what the library does not take (f32, windows, large heads) runs on the plain kernels here:
//! `library` decides. The CPU always takes the instruction.

mod backward;
mod cpu;
mod forward;
mod hopper;
mod kernels;
mod library;
mod panels;
#[cfg(test)]
mod tests;

use graph::{Dim, Element, ValueType};
use tensor::Attrs;

use crate::op::{Attribute, ExampleInput};

pub use backward::AttentionBackward;
pub use forward::Attention;

const ATTRIBUTES: &[Attribute] = &[
    Attribute { name: "scale", kind: "float", doc: "factor of the scores q·k" },
    Attribute {
        name: "window",
        kind: "int?",
        doc: "keys that a query sees, itself included; absent for all before it",
    },
    Attribute {
        name: "dropout",
        kind: "float?",
        doc: "probability of dropping a weight of the softmax; the compiler takes it off where nothing drops",
    },
];

/// Largest head that the kernels here hold in registers.
const MAX_HEAD_DIM: usize = 256;

/// The attributes of a call, read.
#[derive(Clone, Copy)]
struct Reading {
    scale: f64,
    window: Option<usize>,
}

impl Reading {
    fn of(attrs: &Attrs) -> Result<Self, String> {
        let scale = attrs.float("scale").map_err(|e| e.0)?;
        let window = match attrs.optional_int("window").map_err(|e| e.0)? {
            None => None,
            Some(window) if window > 0 => Some(window as usize),
            Some(window) => return Err(format!("`window` is {window}, expected 1 or more")),
        };
        Ok(Reading { scale, window })
    }

    fn checked(attrs: &Attrs) -> Self {
        Self::of(attrs).expect("checked by the shape rule")
    }
}

/// Extents of one call.
#[derive(Clone, Copy)]
struct Extents {
    batch: usize,
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Extents {
    fn of(q: &[usize], k: &[usize]) -> Self {
        Extents { batch: q[0], tokens: q[1], heads: q[2], kv_heads: k[2], head_dim: q[3] }
    }

    /// Query heads that share one key head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Pairs of query and key that see each other, over all heads, when every row is one document.
    fn pairs(&self, window: Option<usize>) -> f64 {
        let (tokens, window) = (self.tokens as f64, window.unwrap_or(self.tokens).min(self.tokens) as f64);
        (self.batch * self.heads) as f64 * (window * (window + 1.0) / 2.0 + (tokens - window) * window)
    }
}

/// Checks q, k, v and document_start; gives the type of lse.
fn check(q: &ValueType, k: &ValueType, v: &ValueType, document_start: &ValueType) -> Result<ValueType, String> {
    let [batch, tokens, Dim::Fixed(heads), Dim::Fixed(head_dim)] = q.shape.as_slice() else {
        return Err("q must be [B, T, heads, D], heads and D known".into());
    };
    let [k_batch, k_tokens, Dim::Fixed(kv_heads), Dim::Fixed(k_dim)] = k.shape.as_slice() else {
        return Err("k must be [B, T, kv_heads, D], kv_heads and D known".into());
    };
    if (k_batch, k_tokens, k_dim) != (batch, tokens, head_dim) || v.shape != k.shape {
        return Err("k and v must have the batch, the tokens and the head_dim of q".into());
    }
    if *kv_heads == 0 || heads % kv_heads != 0 {
        return Err(format!("{heads} heads cannot share {kv_heads} key heads evenly"));
    }
    if [q, k, v].iter().any(|t| !t.dtype.is_float()) {
        return Err("q, k and v must be floating point".into());
    }
    let rows = [batch.clone(), tokens.clone()];
    if document_start.dtype != Element::I32 || document_start.shape != rows {
        return Err(format!("document_start must be i32 [{batch}, {tokens}]"));
    }
    Ok(ValueType::new(Element::F32, [batch.clone(), Dim::Fixed(*heads), tokens.clone()]))
}

/// The calls that forward and backward examples share: shapes (B, T, heads, kv_heads, D), documents of
/// each row, attributes.
fn example_calls() -> Vec<([usize; 5], Vec<i32>, Attrs)> {
    let attrs = |scale: f64| Attrs::new().with("scale", scale);
    vec![
        ([2, 5, 4, 2, 8], vec![0; 10], attrs(0.35)),
        ([2, 6, 2, 1, 16], vec![0, 0, 0, 3, 3, 5, 0, 1, 1, 1, 4, 4], attrs(0.25)),
        ([1, 9, 3, 3, 8], vec![0, 0, 0, 0, 0, 5, 5, 5, 5], attrs(0.4).with("window", 3)),
        ([1, 70, 2, 1, 40], (0..70).map(|i| if i < 37 { 0 } else { 37 }).collect(), attrs(0.2)),
        // Five tiles of keys for Hopper's backward pass: three lead, two follow, and two heads share them.
        ([1, 600, 2, 1, 128], vec![0; 600], attrs(0.09)),
        ([1, 20, 2, 1, 132], (0..20).map(|i| if i < 11 { 0 } else { 11 }).collect(), attrs(0.1).with("window", 6)),
    ]
}

/// q, k, v and document_start of an example.
fn example_inputs(shape: [usize; 5], starts: &[i32]) -> Vec<ExampleInput> {
    let [batch, tokens, heads, kv_heads, head_dim] = shape;
    let normal = |heads: usize| ExampleInput::Normal { shape: vec![batch, tokens, heads, head_dim], scale: 1.0 };
    let starts = ExampleInput::Ints { shape: vec![batch, tokens], values: starts.to_vec() };
    vec![normal(heads), normal(kv_heads), normal(kv_heads), starts]
}
