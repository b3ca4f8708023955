//! The division of work in Hopper's kernels whose blocks own queries, by the size of a head. Measured on an H200.

use crate::attention::operands::Extents;

/// Keys of a query from which wider tiles of keys pay in the forward pass.
const VERY_LONG: usize = 16384;

/// The division of work of a kernel whose blocks own queries.
#[derive(Clone, Copy)]
pub struct Division {
    /// Number of warpgroups, of four warps: each owns 64 rows.
    pub warpgroups: usize,
    /// Query heads that share a block, and a key head.
    pub heads: usize,
    /// Number of keys in a tile.
    pub keys: usize,
    /// Stages of queries' tiles, and of values'; keys have two.
    pub q_stages: usize,
    pub v_stages: usize,
    /// True if all warpgroups visit all tiles of keys of a block's queries, one after the other, also those that only others see.
    pub joint: bool,
}

impl Division {
    /// `span`: keys that a query sees at most. `intervals`: neighbouring queries see the same keys, as those of one image do.
    pub fn forward(e: &Extents, span: usize, packed: bool, intervals: bool) -> Division {
        let (w, wv) = widths(e);
        let heads = if e.group().is_multiple_of(2) { 2 } else { 1 };
        let joint = intervals && e.group() == 1;
        let of = |keys: usize, q_stages: usize| Division { warpgroups: 2, heads, keys, q_stages, v_stages: 2, joint };
        match () {
            () if w + wv > 384 => of(if heads == 2 { 80 } else { 64 }, 1),
            () if w.max(wv) > 128 => of(if w + wv > 320 { 96 } else { 128 }, 1),
            () if w + wv > 128 && span >= VERY_LONG => of(160, 1),
            () if w + wv > 128 => of(128, 2),
            () if heads == 1 && e.group().is_multiple_of(3) => Division { warpgroups: 3, heads: 3, ..of(128, 2) },
            () => of(if packed && !joint { 96 } else { 192 }, 2),
        }
    }

    pub fn gradient_q(e: &Extents) -> Division {
        let (w, wv) = widths(e);
        let heads = if e.group().is_multiple_of(2) { 2 } else { 1 };
        let of =
            |keys: usize, q_stages: usize| Division { warpgroups: 2, heads, keys, q_stages, v_stages: 2, joint: false };
        match () {
            () if w + wv > 384 => Division { v_stages: 1, ..of(48, 1) },
            () if w.max(wv) > 128 => of(if w + wv > 320 { 48 } else { 64 }, 1),
            () if w + wv > 128 => of(64, 2),
            () if heads == 1 && e.group().is_multiple_of(3) => Division { warpgroups: 3, heads: 3, ..of(64, 2) },
            () => of(128, 2),
        }
    }

    pub fn defines(&self, e: &Extents) -> Vec<(&'static str, usize)> {
        vec![
            ("WARPGROUPS", self.warpgroups),
            ("HEADS_PER_BLOCK", self.heads),
            ("JOINT", usize::from(self.joint)),
            ("KEYS", self.keys),
            ("STAGES", 2),
            ("V_STAGES", self.v_stages),
            ("Q_STAGES", self.q_stages),
            ("SECTION", e.batch * e.kv_heads),
        ]
    }

    pub fn threads(&self) -> usize {
        128 * (self.warpgroups + 1)
    }

    /// Bytes of the tiles of keys and values.
    pub fn tiles(&self, (w, wv): (usize, usize)) -> usize {
        self.keys * (2 * w + self.v_stages * wv) * 2
    }
}

/// Columns of q and v as they are in shared memory.
pub fn widths(e: &Extents) -> (usize, usize) {
    (e.head_dim.next_multiple_of(64), e.value_dim.next_multiple_of(64))
}
