//! Turns attention over the parts of a sequence into attention over some of its heads, and back (Ulysses: DeepSpeed-Ulysses,
//! arXiv 2309.14509): ranks that have n tokens with all heads each deal their heads out, exchange, and have all tokens with
//! some heads each. Knows tokens, heads and parts; not attention, and not who the ranks are.

mod deal;
mod exchange;

use graph::{Axis, Dim};

pub use deal::{CollectHeads, DealHeads};
pub use exchange::Exchange;

/// So many rows of these tokens: an axis of the batch where the tokens are.
fn rows_of(tokens: &Dim, count: usize) -> Dim {
    if tokens.axis().is_some() { Dim::Named(Axis::Rows, count) } else { Dim::Fixed(count) }
}
