//! Attention over pages on the tensor cores: the calls that it takes, and the division of their work.

use program::TensorRef;
use tensor::DType;

use super::read::Extents;
use crate::attention::Reading;
use crate::attention::launch::is_aligned;
use crate::attention::tiles::{SHARERS, STRIP, STRIPS, Tiles, in_one_order, wants_one_order};
use crate::kernel::LowerCall;

/// Number of warps in a block.
const WARPS: usize = 4;
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
    /// True if tiles begin at multiples of their size, whatever a window hides.
    aligned: bool,
    pub grid: [u32; 3],
    pub shared_bytes: usize,
}

impl Strips {
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
        let suits = |columns: usize| columns.is_multiple_of(8) && columns <= Tiles::WIDEST;
        let one_type = matches!(q.dtype, DType::BF16 | DType::F16) && caches.iter().all(|t| t.dtype == q.dtype);
        if !one_type || !caches.iter().all(is_aligned) || !pairs(q) || ![e.head_dim, e.value_dim].into_iter().all(suits)
        {
            return None;
        }
        let rows = e.tokens * (e.heads / e.kv_heads);
        let needed = rows.div_ceil(STRIP).next_power_of_two();
        let (arch, columns) = (&call.machine.arch, [e.head_dim, e.value_dim]);
        let aligned = wants_one_order(call.attrs, arch);
        let (strips, sharers, tiles) = match aligned {
            true => (needed.min(STRIPS), SHARERS, in_one_order(columns, arch)?),
            false => {
                let strips = needed.min(WARPS);
                let sharers = WARPS / strips;
                (strips, sharers, Tiles::of(columns, sharers, WARPS, arch)?)
            }
        };
        let blocks_of_rows = rows.div_ceil(STRIP * strips);
        let blocks = e.batch * blocks_of_rows * e.kv_heads;
        let longest = e.longest(&Reading::checked(call.attrs, e.head_dim));
        let units = call.machine.units;
        let wanted = if e.tokens == 1 { BLOCKS_PER_UNIT * units } else { units };
        let splits = if aligned { 1 } else { (wanted / blocks).clamp(1, longest.div_ceil(tiles.keys)) };
        Some(Strips {
            strips,
            sharers,
            tile: tiles.keys,
            splits,
            aligned,
            grid: [splits, e.kv_heads, e.batch * blocks_of_rows].map(|n| n as u32),
            shared_bytes: tiles.bytes(strips * sharers),
        })
    }

    pub fn threads(&self) -> usize {
        32 * self.strips * self.sharers
    }

    pub fn defines(&self) -> [(&'static str, usize); 5] {
        [
            ("STRIPS", self.strips),
            ("SHARERS", self.sharers),
            ("TILE", self.tile),
            ("SPLITS", self.splits),
            ("ALIGNED", self.aligned as usize),
        ]
    }
}
