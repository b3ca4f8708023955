//! Tiles of keys and values in shared memory that strips of rows walk over (`strips.cuh`): their sizes.

use program::Arch;
use tensor::Attrs;

use crate::invariance::BATCH_INVARIANT;

/// Rows of a strip: as tensor cores multiply them.
pub const STRIP: usize = 16;
/// Keys of a tile at most.
const TILE: usize = 64;
/// Tiles in shared memory: one is loaded while the other is in use.
const STAGES: usize = 2;
/// Shared memory that is left to static variables, bytes.
const RESERVED: usize = 1 << 10;

/// The tiles of keys and values in shared memory, which follow from the size of the heads alone.
pub struct Tiles {
    /// Number of keys in a tile.
    pub keys: usize,
    columns: [usize; 2],
}

impl Tiles {
    /// Widest head whose sums fit into registers.
    pub const WIDEST: usize = 256;

    /// Returns the largest tiles of which a block has two, and after them the sums of up to `warps` warps; `sharers` of these
    /// work on 16 keys of a tile at least.
    pub fn of(columns: [usize; 2], sharers: usize, warps: usize, arch: &Arch) -> Option<Tiles> {
        let limit = arch.shared_per_block() - RESERVED;
        let sizes = [TILE, TILE / 2].map(|keys| Tiles { keys, columns });
        let fits = |tiles: &Tiles| tiles.keys >= STRIP * sharers && tiles.bytes(warps) <= limit;
        sizes.into_iter().find(fits)
    }

    /// Bytes of shared memory of a block with `warps` warps.
    pub fn bytes(&self, warps: usize) -> usize {
        let pitch = |columns: usize| (columns.next_multiple_of(16) + 8) * 2;
        let tiles = STAGES * self.keys * self.columns.map(pitch).into_iter().sum::<usize>();
        tiles.max(warps * STRIP * (self.columns[1] + 2) * 4)
    }
}

/// Returns true where a call on a GPU wants sums whose order follows from the sequence alone.
pub fn wants_one_order(attrs: &Attrs, arch: &Arch) -> bool {
    arch.is_gpu() && attrs.flag(BATCH_INVARIANT) == Ok(true)
}

/// Most strips of a block with one order of sums, of whole rows and over pages alike.
pub const STRIPS: usize = 2;
/// Warps that share the keys of a strip with one order of sums.
pub const SHARERS: usize = 4;

/// Returns the tiles of one order of sums.
pub fn in_one_order(columns: [usize; 2], arch: &Arch) -> Option<Tiles> {
    Tiles::of(columns, SHARERS, STRIPS * SHARERS, arch)
}
