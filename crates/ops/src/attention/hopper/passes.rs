//! The number of passes in which Hopper's kernels make the gradients, and the places of the parts of their workspace.

use program::Documents;

use super::division::widths;
use crate::attention::operands::Extents;
use crate::attention::reading::Reading;
use crate::kernel::LowerCall;

/// Window from which the gradients in one pass are the faster for whole rows: below, tiles wait for each other too
/// long.
const WIDE_WINDOW: usize = 1024;
/// Keys that a query of a whole row sees in the mean from which rows are examined one by one.
const LONG: f64 = 512.0;

/// Share of what it would see of a whole row that a query must see in the mean for one pass to be the faster: each
/// document begins a chain of tiles that wait for one another. Where both ways take as long, in rows of 4096 to 32768
/// tokens: 0.12 to 0.4 with heads of 128, 0.35 to 0.8 with heads of 64 (H200 and H100).
fn least_share((w, wv): (usize, usize)) -> f64 {
    if w + wv > 128 { 0.4 } else { 0.6 }
}

/// Keys that a query of a whole row sees in the mean: no document lets it see more, `last_key` may.
fn keys_of_whole_rows(call: &LowerCall<'_>) -> f64 {
    let e = Extents::of_call(call.inputs);
    e.pairs(&Reading::checked(call.attrs, e.head_dim)) / (e.batch * e.heads * e.tokens) as f64
}

/// Keys in the mean from which a row's gradients are made in one pass.
pub fn keys_for_one_pass(call: &LowerCall<'_>) -> usize {
    (least_share(widths(&Extents::of_call(call.inputs))) * keys_of_whole_rows(call)) as usize
}

/// Rows of the statistics of a head.
pub fn padded(e: &Extents) -> usize {
    e.tokens.next_multiple_of(64) + 64
}

/// The passes that make the gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passes {
    /// One pass for all, with dq summed over the tiles of keys by turns: for long intervals.
    One,
    /// Two passes, dq and then dk and dv: for short intervals and wide heads.
    Two,
    /// The faster of both for every row of the batch, as the statistics find its documents: kernels of both are
    /// launched, and those without rows end at once.
    ByRow,
}

impl Passes {
    pub fn of(call: &LowerCall<'_>) -> Passes {
        let e = Extents::of_call(call.inputs);
        let (w, wv) = widths(&e);
        let window = Reading::checked(call.attrs, e.head_dim).hiding_window(e.tokens);
        match () {
            () if w.max(wv) > 128 => Passes::Two,
            () if call.documents == Documents::Rows && window.is_none_or(|window| window >= WIDE_WINDOW) => Passes::One,
            () if call.documents == Documents::Rows || keys_of_whole_rows(call) < LONG => Passes::Two,
            () => Passes::ByRow,
        }
    }

    /// Returns the numbers by which a kernel draws its work: a ticket, and where rows are shared their count and their
    /// indices.
    pub fn drawing(self, e: &Extents) -> usize {
        if self == Passes::ByRow { 2 + e.batch } else { 1 }
    }
}

/// Returns 2 where one block for the longest tile of keys would take longer than all blocks in the mean, as with few
/// key heads; else 1. A window makes the tiles alike.
fn shares(call: &LowerCall<'_>) -> usize {
    let e = Extents::of_call(call.inputs);
    let reading = Reading::checked(call.attrs, e.head_dim);
    let (pairs, tiles) = (e.batch * e.kv_heads, e.tokens.div_ceil(128));
    let of_mean = if reading.bidirectional { 2 * tiles } else { tiles + 1 };
    let is_long = pairs * of_mean < 2 * call.machine.units;
    let alike = reading.hiding_window(e.tokens).is_some();
    if e.group().is_multiple_of(2) && is_long && !alike { 2 } else { 1 }
}

/// The first bytes of the parts of the backward pass's scratch, and its size.
pub struct Scratch {
    pub passes: Passes,
    /// Blocks that share the query heads of a key head in one pass.
    pub shares: usize,
    /// f32 [B, heads, blocks of 64 queries, 64, columns], where there may be one pass.
    pub dq_sums: usize,
    /// f32 [B, key heads, tiles of 128 keys, 128, columns of dk and dv], where two share: what the first leaves the second.
    pub sums_of_shares: usize,
    /// i32 [B, padded, 2]; the statistics, f32 [B, heads, padded, 2], come first.
    pub intervals: usize,
    /// i32: what the kernels draw their work by, in their order, and in one pass a turn for every block of queries.
    pub drawings: [usize; 3],
    pub turns: usize,
    /// Two for each half of a tile of keys.
    pub ready_shares: usize,
    /// Number of all tickets together.
    pub ticket_count: usize,
    pub bytes: usize,
}

impl Scratch {
    pub fn of(call: &LowerCall<'_>) -> Scratch {
        let e = Extents::of_call(call.inputs);
        let blocks = e.batch * e.heads * e.tokens.div_ceil(64);
        let passes = Passes::of(call);
        let drawing = passes.drawing(&e);
        let (kernels, turns) = match passes {
            Passes::One => (1, blocks),
            Passes::Two => (2, 0),
            Passes::ByRow => (3, blocks),
        };
        let intervals = e.batch * e.heads * padded(&e) * 8;
        let shares = if turns > 0 { shares(call) } else { 1 };
        let shared_tiles = if shares > 1 { e.batch * e.kv_heads * e.tokens.div_ceil(128) } else { 0 };
        let (w, wv) = widths(&e);
        let dq_sums = intervals + e.batch * padded(&e) * 8;
        let sums_of_shares = dq_sums + turns * 64 * w * 4;
        let tickets = sums_of_shares + shared_tiles * 128 * (w + wv) * 4;
        let ticket_count = kernels * drawing + turns + shared_tiles * 4;
        Scratch {
            passes,
            shares,
            dq_sums,
            sums_of_shares,
            intervals,
            drawings: [0, 1, 2].map(|kernel| tickets + kernel * drawing * 4),
            turns: tickets + kernels * drawing * 4,
            ready_shares: tickets + if shares > 1 { (kernels * drawing + turns) * 4 } else { 0 },
            ticket_count,
            bytes: tickets + ticket_count * 4,
        }
    }

    /// The parameters passed to kernels.
    pub fn by_row(&self) -> Vec<(&'static str, usize)> {
        vec![("BY_ROW", (self.passes == Passes::ByRow) as usize)]
    }
}
