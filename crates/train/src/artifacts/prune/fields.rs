//! The configuration of a smaller model.

use serde_json::{Value, json};
use tensor::DType;

use super::axes::{self, Axes};
use super::kept::{Kept, Sizes};
use crate::model::source::ModelSource;

/// The fields with the number of experts, as architectures name it.
const EXPERTS: [&str; 4] = ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"];

/// The configuration of the result, and the sizes that changed.
pub(super) fn fields(
    source: &ModelSource,
    dtype: DType,
    sizes: &Sizes,
    axes: &Axes,
    kept: &Kept,
) -> (Value, Vec<(String, usize, usize)>) {
    let first = axes.layers.iter().find_map(|of| of.heads.as_ref());
    let heads = kept.heads.iter().map(Vec::len).max().unwrap_or(0);
    let groups = kept.key_value_heads.iter().map(Vec::len).max().unwrap_or(0);
    let fewer = sizes.heads.is_some() || sizes.key_value_heads.is_some();
    let all = [
        (["num_hidden_layers", "n_layer"], axes.layers.len(), sizes.layers),
        (["hidden_size", "n_embd"], axes.hidden_size, sizes.hidden),
        (["intermediate_size", "n_inner"], axes::mlp_size(axes, &source.model), sizes.intermediate),
        (["num_attention_heads", "n_head"], first.map_or(0, |of| of.count), fewer.then_some(heads)),
        (["num_key_value_heads"; 2], first.map_or(0, |of| of.key_count), sizes.key_value_heads.map(|_| groups)),
    ];
    let mut config = source.config.with_dtype(dtype);
    let of_gpt2 = config.has("n_embd");
    let mut changed = Vec::new();
    let experts = axes.layers.iter().find_map(|of| of.experts.as_ref()).map_or(0, |of| of.count);
    for name in EXPERTS.into_iter().filter(|name| config.has(name)).collect::<Vec<_>>() {
        if let Some(now) = sizes.experts.filter(|now| *now != experts) {
            config = config.with(name, json!(now));
            changed.push((name.to_owned(), experts, now));
        }
    }
    for ([usual, other], before, now) in all {
        let Some(now) = now.filter(|now| *now != before) else { continue };
        let name = if of_gpt2 { other } else { usual };
        config = config.with(name, json!(now));
        changed.push((name.to_owned(), before, now));
    }
    let follows = |(name, _, _): &(String, usize, usize)| name.contains("head") || name.contains("hidden_size");
    if let Some(of) = first.filter(|_| !config.has("head_dim") && changed.iter().any(follows)) {
        config = config.with("head_dim", json!(of.head_dim));
    }
    if kept.layers.len() < axes.layers.len() {
        config = config.with_layers(axes.layers.len(), &kept.layers);
    }
    (config.0, changed)
}
