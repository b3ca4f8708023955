//! Attention over pages on the tensor cores: the calls that it takes, and the division of their work.

use program::TensorRef;
use tensor::DType;

use super::read::Extents;
use crate::attention::Reading;
use crate::attention::launch::is_aligned;
use crate::kernel::LowerCall;

/// Rows of a strip: as tensor cores multiply them.
const STRIP: usize = 16;
/// Number of warps in a block.
const WARPS: usize = 4;
/// Widest head whose sums fit into registers.
const MAX_HEAD_DIM: usize = 256;
/// Keys of a tile at most.
const TILE: usize = 64;
/// Tiles in shared memory: one is loaded while the other is in use.
const STAGES: usize = 2;
/// Shared memory that is left to static variables, bytes.
const RESERVED: usize = 1 << 10;
/// Blocks for each multiprocessor that keep the memory busy, where a single token reads its sequence.
const BLOCKS_PER_UNIT: usize = 8;

/// The division of a call over blocks and warps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strips {
    /// Number of strips in a block.
    pub strips: usize,
    /// Warps of a strip, each with its part of a tile of keys.
    pub sharers: usize,
    /// Number of keys in a tile.
    pub tile: usize,
    /// Parts that the keys are divided into.
    pub splits: usize,
    pub grid: [u32; 3],
    pub shared_bytes: usize,
}

impl Strips {
    pub const THREADS: usize = 32 * WARPS;

    /// Returns the division; `None` where tensor cores do not take the call.
    pub fn of(call: &LowerCall<'_>) -> Option<Strips> {
        if !call.machine.arch.is_gpu() {
            return None;
        }
        let (e, q) = (Extents::of(call.inputs), &call.inputs[0]);
        let caches = &call.inputs[1..3];
        let pairs = |t: &TensorRef| {
            t.strides.iter().take(3).all(|stride| stride.is_multiple_of(2)) && t.offset.is_multiple_of(4)
        };
        let suits = |columns: usize| columns.is_multiple_of(8) && columns <= MAX_HEAD_DIM;
        let one_type = matches!(q.dtype, DType::BF16 | DType::F16) && caches.iter().all(|t| t.dtype == q.dtype);
        if !one_type || !caches.iter().all(is_aligned) || !pairs(q) || ![e.head_dim, e.value_dim].into_iter().all(suits)
        {
            return None;
        }
        let rows = e.tokens * (e.heads / e.kv_heads);
        let strips = rows.div_ceil(STRIP).next_power_of_two().min(WARPS);
        let sharers = WARPS / strips;
        let pitch = |columns: usize| (columns.next_multiple_of(16) + 8) * 2;
        let stage = |tile: usize| STAGES * tile * (pitch(e.head_dim) + pitch(e.value_dim));
        let found = sharers * strips * STRIP * (e.value_dim + 2) * 4;
        let limit = call.machine.arch.shared_per_block() - RESERVED;
        // Every warp works on 16 keys at least.
        let tiles = [TILE, TILE / 2].into_iter().filter(|tile| *tile >= STRIP * sharers);
        let tile = tiles.into_iter().find(|tile| stage(*tile).max(found) <= limit)?;
        let blocks_of_rows = rows.div_ceil(STRIP * strips);
        let blocks = e.batch * blocks_of_rows * e.kv_heads;
        let longest = e.longest(&Reading::checked(call.attrs, e.head_dim));
        let units = call.machine.units;
        let wanted = if e.tokens == 1 { BLOCKS_PER_UNIT * units } else { units };
        let splits = (wanted / blocks).clamp(1, longest.div_ceil(tile));
        Some(Strips {
            strips,
            sharers,
            tile,
            splits,
            grid: [splits, e.kv_heads, e.batch * blocks_of_rows].map(|n| n as u32),
            shared_bytes: stage(tile).max(found),
        })
    }

    pub fn defines(&self) -> [(&'static str, usize); 4] {
        [("STRIPS", self.strips), ("SHARERS", self.sharers), ("TILE", self.tile), ("SPLITS", self.splits)]
    }
}
