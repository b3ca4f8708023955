//! Embeddings that are output heads, too.

use graph::{Item, Model, OpId};
use ops::id;

/// The table that tokens are looked up in, where the head multiplies with the same.
pub fn tied(model: &Model) -> Option<&str> {
    let weights = |of: OpId| {
        let nodes = model.body.iter().filter_map(move |item| match item {
            Item::Node(node) if node.op == of.name() => node.inputs.get(1),
            Item::Node(_) | Item::Repeat(_) => None,
        });
        nodes.map(String::as_str)
    };
    weights(id::EMBEDDING).find(|table| weights(id::LINEAR).any(|weight| weight == *table))
}
