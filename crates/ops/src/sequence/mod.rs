//! Turns attention over the parts of a sequence into attention over some of its heads, and back (Ulysses:
//! DeepSpeed-Ulysses, arXiv 2309.14509): ranks that have n tokens with all heads each partition their heads, exchange,
//! and have all tokens with some heads each. What all of them have, such as numbers of heads, each takes its part of.
//! Knows tokens, heads and parts; not attention, and not who the ranks are.

mod deal;
mod exchange;
mod own_part;

use graph::{Axis, Dim};

use crate::op::Attribute;

pub use deal::{CollectHeads, DealHeads};
pub use exchange::Exchange;
pub use own_part::{OwnPart, OwnPartBackward};

/// The index at which a part of a tensor begins.
pub(crate) const FIRST: Attribute =
    Attribute { name: "first", kind: "int?", doc: "index of the first element in the tensor of which x is a part" };
/// The growth of that index from part to part: a program for all ranks gives it instead of the index.
pub(crate) const FIRST_PER_PART: Attribute =
    Attribute { name: "first_per_part", kind: "int?", doc: "how much larger that is for each next part of a sequence" };

/// Returns `count` rows of these tokens: an axis of the batch where the tokens are.
fn rows_of(tokens: &Dim, count: usize) -> Dim {
    if tokens.axis().is_some() { Dim::Named(Axis::Rows, count) } else { Dim::Fixed(count) }
}
