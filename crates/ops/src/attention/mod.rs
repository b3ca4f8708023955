//! Softmax attention in which every query sees an interval of keys, less those of other branches, and its gradients.
//!
//! Causal rows, documents, sliding windows, prefixes and spans that see each other are all such intervals (`mask`). The
//! kernel variant of a call on a GPU is chosen in `library`; on the CPU there is one.

mod backward;
mod cached;
mod cpu;
mod examples;
mod forward;
mod hopper;
mod kernels;
mod launch;
mod library;
mod mask;
mod operands;
mod panels;
mod portable;
mod reading;
mod sink;
#[cfg(test)]
mod tests;
mod tiles;

use graph::{Dim, Element, ValueType};
use tensor::Attrs;

use crate::invariance::{self, BATCH_INVARIANT};
use crate::op::Attribute;

pub use backward::AttentionBackward;
pub use cached::{CacheWrite, CachedAttention, Sequences};
pub use forward::Attention;
pub use mask::Mask;
pub use operands::{Extents, Operands, Scoring};
pub use reading::Reading;
pub use sink::AttentionSinkGradient;

use operands::{BACKWARD_INPUTS, FORWARD_INPUTS, Optional};

/// Attributes of attention over pages, the first of those of whole rows.
const OF_PAGES: usize = 4;
const ATTRIBUTES: &[Attribute] = &[
    Attribute { name: "scale", kind: "float?", doc: "factor of the scores q·k; absent for 1/√D" },
    Attribute {
        name: "window",
        kind: "int?",
        doc: "keys up to itself that a query sees, itself included; absent for all of its document",
    },
    Attribute { name: "soft_cap", kind: "float?", doc: "c: the score s becomes c·tanh(s/c)" },
    Attribute { name: BATCH_INVARIANT, kind: "bool?", doc: invariance::DOC },
    Attribute {
        name: "bidirectional",
        kind: "bool?",
        doc: "queries see keys after them, to the end of the row; where rows end or hold documents, `last_key` says it",
    },
    Attribute {
        name: "branches",
        kind: "bool?",
        doc: "documents hold branches of a common beginning: after document_start comes `last_query`, not `last_key`",
    },
    Attribute {
        name: "dropout",
        kind: "float?",
        doc: "probability of dropping a weight of the softmax; the compiler takes it off where nothing drops",
    },
];

/// Most columns that a head may have.
pub const MAX_HEAD_DIM: usize = 512;

/// Checks q, k, v, document_start and the optional inputs; returns the types of o and lse.
fn check(
    [q, k, v, document_start]: [&ValueType; 4],
    limit: Option<&ValueType>,
    sink: Option<&ValueType>,
    attrs: &Attrs,
) -> Result<[ValueType; 2], String> {
    let [batch, tokens, Dim::Fixed(heads), Dim::Fixed(head_dim)] = q.shape.as_slice() else {
        return Err("q must be [B, T, heads, D], heads and D known".into());
    };
    let [k_batch, k_tokens, Dim::Fixed(kv_heads), Dim::Fixed(k_dim)] = k.shape.as_slice() else {
        return Err("k must be [B, T, kv_heads, D], kv_heads and D known".into());
    };
    let [.., Dim::Fixed(value_dim)] = v.shape.as_slice() else {
        return Err("v must be [B, T, kv_heads, DV], DV known".into());
    };
    if (k_batch, k_tokens, k_dim) != (batch, tokens, head_dim) || v.shape[..v.shape.len() - 1] != k.shape[..3] {
        return Err("k must have the batch, the tokens and the head_dim of q, v the batch, the tokens and the heads \
                    of k"
            .into());
    }
    if *kv_heads == 0 || heads % kv_heads != 0 {
        return Err(format!("{heads} heads cannot share {kv_heads} key heads evenly"));
    }
    if let Some(dim) = [*head_dim, *value_dim].into_iter().find(|dim| !(1..=MAX_HEAD_DIM).contains(dim)) {
        return Err(format!("heads have 1 to {MAX_HEAD_DIM} columns, not {dim}"));
    }
    if [q, k, v].into_iter().chain(sink).any(|t| !t.dtype.is_float()) {
        return Err("q, k, v and a sink must be floating point".into());
    }
    let rows = [batch.clone(), tokens.clone()];
    let reading = Reading::of(attrs, *head_dim)?;
    let limits = if reading.branches { "last_query" } else { "last_key" };
    for (name, given) in [("document_start", Some(document_start)), (limits, limit)] {
        if given.is_some_and(|given| given.dtype != Element::I32 || given.shape != rows) {
            return Err(format!("{name} must be i32 [{batch}, {tokens}]"));
        }
    }
    if sink.is_some_and(|sink| sink.shape != [Dim::Fixed(*heads)]) {
        return Err(format!("the sink must be [{heads}], one number for each head"));
    }
    if reading.branches && limit.is_none() {
        return Err("`branches` take `last_query`, the last query that sees each key".into());
    }
    if reading.bidirectional && limit.is_some() {
        return Err("`bidirectional` and `last_key` both say which later keys a query sees: give one".into());
    }
    let o = ValueType::new(q.dtype, [batch.clone(), tokens.clone(), Dim::Fixed(*heads), Dim::Fixed(*value_dim)]);
    Ok([o, ValueType::new(Element::F32, [batch.clone(), Dim::Fixed(*heads), tokens.clone()])])
}
