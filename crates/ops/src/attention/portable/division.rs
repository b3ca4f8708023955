//! The division of the work of one call among blocks and warps: by the size of a head and the shared memory of the GPU.
//! No launches here. The orders of preference were measured on an H200 (those for 99 KiB with one block on each of its
//! SMs, as such GPUs have it). Those for 64 KiB, the least of all GPUs, were not measured; the widest heads have none.

use super::RECORD;
use crate::attention::Extents;

/// Bytes from one row of a tile to the next: an odd number of 16-byte chunks.
const fn pitch(columns: usize) -> usize {
    (columns + 8) * 2
}

/// Queries that own their sums, in strips of 16 · `row_tiles`, and walk over tiles of `keys`: the forward pass and dq.
#[derive(Clone, Copy)]
pub struct ByQuery {
    strips: usize,
    row_tiles: usize,
    keys: usize,
    /// Warps that share a strip, each with its part of the columns.
    parts: usize,
    blocks: usize,
}

impl ByQuery {
    pub fn rows(&self) -> usize {
        self.strips * self.row_tiles * 16
    }

    pub fn threads(&self) -> usize {
        self.strips * self.parts * 32
    }

    fn pitches(&self, e: &Extents) -> (usize, usize) {
        let padded = |columns: usize| columns.next_multiple_of(16 * self.parts);
        (pitch(padded(e.head_dim)), pitch(padded(e.value_dim)))
    }

    fn forward_shared(&self, e: &Extents) -> usize {
        let (q, v) = self.pitches(e);
        let partner = if self.parts > 1 { self.threads() * self.row_tiles * self.keys * 2 } else { 0 };
        self.rows() * q + self.keys * (q + v) + self.rows() * 8 + partner
    }

    fn gradient_shared(&self, e: &Extents) -> usize {
        let (q, v) = self.pitches(e);
        (self.rows() + self.keys) * (q + v) + self.threads() * self.row_tiles * self.keys * 4
    }

    pub fn defines(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("STRIPS", self.strips),
            ("MT", self.row_tiles),
            ("KEYS", self.keys),
            ("PARTS", self.parts),
            ("MIN_BLOCKS", self.blocks),
        ]
    }
}

const fn by_query([strips, row_tiles, keys]: [usize; 3], [parts, blocks]: [usize; 2]) -> ByQuery {
    ByQuery { strips, row_tiles, keys, parts, blocks }
}

/// Keys that own their sums and walk over blocks of queries: dk and dv, and with `turns` dq too.
#[derive(Clone, Copy)]
pub struct ByKey {
    warps: usize,
    /// Number of keys in a block.
    pub rows: usize,
    pub queries: usize,
    /// Strips of keys into which the warps that compute scores are divided; `score_parts` warps share each.
    score_strips: usize,
    score_parts: usize,
    /// Warps that share a strip of keys in the sums, each with its part of the columns.
    parts: usize,
    blocks: usize,
    /// dq is summed over the tiles of keys in turns; otherwise another kernel makes it.
    pub turns: Option<Turns>,
}

#[derive(Clone, Copy)]
pub struct Turns {
    /// Strips of warps that share a block of queries.
    dq_strips: usize,
    /// Query heads of a turn, at most: handing over costs the more the shorter a step is, and waiting at the start the
    /// longer a turn is.
    heads: usize,
}

const fn turns(dq_strips: usize, heads: usize) -> Option<Turns> {
    Some(Turns { dq_strips, heads })
}

const fn by_key(
    [warps, rows, queries]: [usize; 3],
    [score_strips, score_parts, parts]: [usize; 3],
    blocks: usize,
    turns: Option<Turns>,
) -> ByKey {
    ByKey { warps, rows, queries, score_strips, score_parts, parts, blocks, turns }
}

impl ByKey {
    pub fn threads(&self) -> usize {
        self.warps * 32
    }

    /// Columns of q as the tiles hold them.
    pub fn padded(&self, columns: usize) -> usize {
        columns.next_multiple_of(16 * self.parts)
    }

    fn shared_bytes(&self, e: &Extents) -> usize {
        let row = pitch(self.padded(e.head_dim)) + pitch(self.padded(e.value_dim));
        // ds and p, where they go from warp to warp.
        let handed = if self.score_parts > 1 || self.parts > 1 { 2 } else { self.turns.is_some() as usize };
        self.rows * (row + handed * pitch(self.queries)) + self.queries * (row + RECORD)
    }

    pub fn query_blocks(&self, e: &Extents) -> usize {
        e.tokens.div_ceil(self.queries)
    }

    /// Query heads that hand on their turn together: they divide a group evenly.
    pub fn turn_heads(&self, e: &Extents) -> usize {
        let most = self.turns.map_or(1, |turns| turns.heads);
        (1..=most).rev().find(|heads| e.group().is_multiple_of(*heads)).expect("one divides every number")
    }

    pub fn defines(&self, e: &Extents) -> Vec<(&'static str, usize)> {
        vec![
            ("WARPS", self.warps),
            ("ROWS", self.rows),
            ("QUERIES", self.queries),
            ("SCORE_STRIPS", self.score_strips),
            ("SCORE_PARTS", self.score_parts),
            ("PARTS", self.parts),
            ("MIN_BLOCKS", self.blocks),
            ("TURNS", self.turns.is_some() as usize),
            ("DQ_STRIPS", self.turns.map_or(1, |turns| turns.dq_strips)),
            ("TURN_HEADS", self.turn_heads(e)),
        ]
    }
}

/// The first division whose blocks fit an SM, with its shared memory; `None` where no block of this work fits. A block
/// costs a KiB besides its own.
fn first_fitting<C: Copy>(
    divisions: &[C],
    limit: usize,
    bytes: impl Fn(&C) -> usize,
    blocks: impl Fn(&C) -> usize,
) -> Option<(C, usize)> {
    let fits = |(_, bytes, blocks): &(C, usize, usize)| *bytes <= limit && (bytes + 1024) * blocks <= limit + 1024;
    let candidates = divisions.iter().map(|c| (*c, bytes(c), blocks(c)));
    let (division, bytes, _) = candidates.into_iter().find(fits)?;
    Some((division, bytes))
}

/// The wider of a head's two sizes, as the tiles hold it.
fn widest(e: &Extents) -> usize {
    e.head_dim.max(e.value_dim).next_multiple_of(16)
}

pub fn forward_division(e: &Extents, limit: usize) -> Option<(ByQuery, usize)> {
    let narrow_values = e.value_dim.next_multiple_of(16) <= 128;
    let divisions: &[ByQuery] = match widest(e) {
        ..=64 => &[by_query([4, 2, 64], [1, 3]), by_query([4, 2, 64], [1, 2]), by_query([4, 1, 64], [1, 2])],
        65..=128 => &[by_query([4, 2, 64], [1, 2]), by_query([4, 2, 64], [1, 1]), by_query([4, 1, 64], [1, 1])],
        129..=256 if narrow_values => &[
            by_query([4, 2, 64], [1, 2]),
            by_query([4, 2, 32], [1, 2]),
            by_query([4, 1, 64], [1, 2]),
            by_query([4, 1, 32], [1, 2]),
            by_query([8, 1, 16], [1, 1]),
            by_query([4, 1, 32], [1, 1]),
        ],
        129..=256 => &[
            by_query([4, 1, 64], [1, 2]),
            by_query([4, 1, 32], [1, 2]),
            by_query([8, 1, 16], [1, 1]),
            by_query([4, 1, 16], [1, 1]),
        ],
        _ => &[
            by_query([4, 1, 48], [2, 1]),
            by_query([4, 1, 32], [2, 1]),
            by_query([2, 1, 16], [2, 1]),
            by_query([1, 1, 16], [2, 1]),
        ],
    };
    first_fitting(divisions, limit, |c| c.forward_shared(e), |c| c.blocks)
}

/// dq of heads whose gradients one kernel cannot make.
pub fn q_division(e: &Extents, limit: usize) -> Option<(ByQuery, usize)> {
    let divisions = [by_query([2, 1, 16], [2, 1]), by_query([1, 1, 16], [2, 1])];
    first_fitting(&divisions, limit, |c| c.gradient_shared(e), |c| c.blocks)
}

pub fn key_division(e: &Extents, limit: usize) -> Option<(ByKey, usize)> {
    // A warp's part of dq is a multiple of 8 columns.
    let shared_by_eight = turns(if e.head_dim.next_multiple_of(32).is_multiple_of(64) { 2 } else { 4 }, 2);
    let keys_and_values = e.head_dim <= 192 && e.value_dim <= 128;
    let divisions: &[ByKey] = match widest(e) {
        ..=64 => &[
            by_key([4, 128, 32], [4, 1, 1], 2, turns(2, 4)),
            by_key([8, 128, 64], [8, 1, 1], 1, turns(4, 4)),
            by_key([4, 128, 32], [4, 1, 1], 1, turns(2, 4)),
        ],
        65..=128 => &[
            by_key([8, 128, 64], [4, 2, 2], 1, shared_by_eight),
            by_key([4, 64, 64], [2, 2, 2], 1, turns(2, 2)),
            by_key([4, 64, 32], [2, 2, 2], 1, turns(2, 2)),
        ],
        129..=192 if keys_and_values => &[
            by_key([8, 128, 32], [4, 2, 4], 1, turns(2, 1)),
            by_key([8, 64, 32], [4, 2, 4], 1, turns(2, 1)),
            by_key([8, 32, 32], [2, 2, 8], 1, turns(2, 1)),
        ],
        129..=256 => &[
            by_key([8, 64, 64], [2, 4, 4], 1, turns(2, 1)),
            by_key([8, 64, 32], [4, 2, 4], 1, turns(2, 1)),
            by_key([8, 32, 32], [2, 2, 8], 1, turns(2, 1)),
            by_key([8, 32, 16], [2, 1, 8], 1, turns(1, 1)),
        ],
        _ => &[
            by_key([8, 32, 64], [1, 4, 8], 1, None),
            by_key([8, 32, 32], [1, 2, 8], 1, None),
            by_key([8, 32, 16], [2, 1, 8], 1, None),
            by_key([8, 16, 16], [1, 1, 8], 1, None),
        ],
    };
    first_fitting(divisions, limit, |c| c.shared_bytes(e), |c| c.blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_head_has_divisions_that_the_kernels_can_use_on_every_gpu() {
        let sizes = || (8..=512).step_by(8);
        for limit in [64 << 10, 99 << 10, 160 << 10, 163 << 10, 227 << 10] {
            for (head_dim, value_dim) in sizes().flat_map(|d| sizes().map(move |v| (d, v))) {
                let e = Extents { batch: 1, tokens: 100, heads: 6, kv_heads: 2, head_dim, value_dim };
                let (forward, bytes) = forward_division(&e, limit).unwrap();
                assert!(bytes <= limit && forward.keys.is_multiple_of(16), "{head_dim}/{value_dim}");
                let Some((keys, bytes)) = key_division(&e, limit) else {
                    assert!(limit == 64 << 10 && head_dim.max(value_dim) > 384, "{head_dim}/{value_dim}");
                    continue;
                };
                assert!(bytes <= limit, "{head_dim}/{value_dim}");
                // Warps share keys, queries and columns evenly, columns in groups of 8 and scores in pairs of those.
                assert!((keys.rows / 16).is_multiple_of(keys.score_strips), "{head_dim}/{value_dim}");
                assert!((keys.rows / 16 * keys.parts).is_multiple_of(keys.warps), "{head_dim}/{value_dim}");
                assert!(keys.queries.is_multiple_of(16 * keys.score_parts), "{head_dim}/{value_dim}");
                let Some(turns) = keys.turns else {
                    assert!(q_division(&e, limit).unwrap().1 <= limit, "{head_dim}/{value_dim}");
                    continue;
                };
                let columns = keys.padded(head_dim) * turns.dq_strips;
                assert!(columns.is_multiple_of(8 * keys.warps), "{head_dim}/{value_dim}");
                assert!((keys.queries / 16).is_multiple_of(turns.dq_strips), "{head_dim}/{value_dim}");
                assert_eq!(keys.turn_heads(&e), if turns.heads < 3 { 1 } else { 3 }, "{head_dim}/{value_dim}");
            }
        }
    }
}
