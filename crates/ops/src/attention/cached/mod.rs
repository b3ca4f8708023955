//! Attention over keys and values of earlier tokens, which are kept in pages: how a model generates text.
//!
//! A cache holds the keys (or values) of one layer, [pages, page, kv_heads, D]. A row of the batch is a sequence; its
//! row of the table says which page holds its tokens 0 … page − 1, which the next ones, so that long and short
//! sequences share memory. Does not know who gives pages out.

mod cpu;
mod examples;
mod read;
mod strips;
mod write;

use graph::{Dim, Element, ValueType};
use tensor::Attrs;

use crate::op::Attribute;

pub use cpu::Sequences;
pub use read::CachedAttention;
pub use write::CacheWrite;

const PAGES: Attribute = Attribute { name: "pages", kind: "int", doc: "pages of a cache" };
const PAGE: Attribute = Attribute { name: "page", kind: "int", doc: "tokens of a page" };
const CACHE_TYPE: Attribute =
    Attribute { name: "dtype", kind: "string?", doc: "element type of the caches; absent for that of k" };

/// Inputs of the attention before the optional ones: q, both caches, the positions and the table.
const PLACED_INPUTS: usize = 5;

/// Checks positions i32 [B, T] and the table i32 [B, M] of an operand [B, T, …].
fn check_places(of: &ValueType, positions: &ValueType, table: &ValueType) -> Result<(), String> {
    let rows = &of.shape[..2];
    if positions.dtype != Element::I32 || positions.shape != rows {
        return Err(format!("the positions must be i32 [{}, {}]", rows[0], rows[1]));
    }
    match table.shape.as_slice() {
        [batch, Dim::Fixed(1..)] if *batch == rows[0] && table.dtype == Element::I32 => Ok(()),
        _ => Err(format!("the table must be i32 [{}, pages of a sequence]", rows[0])),
    }
}

/// (pages, tokens of a page) of the attributes.
fn sizes(attrs: &Attrs) -> Result<(usize, usize), String> {
    let (pages, page) = (attrs.size("pages")?, attrs.size("page")?);
    match pages * page {
        0 => Err("`pages` and `page` must be 1 or more".into()),
        _ => Ok((pages, page)),
    }
}
