//! The ways of packing weights that an engine offers, as values: which packed form they lead to. Does not quantise.

use super::Target;
use crate::storage::{NVFP4, NVFP4_TILES, Packing, fp8_tiles, nf4, nf4_nested};

/// The form of the codes that a weight is quantized to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantisation {
    /// NF4 in flat blocks; `nested`: their scales are quantised too.
    Nf4 { block: usize, nested: bool },
    /// E4M3 codes in square tiles of `extent` rows and columns.
    Fp8 { extent: usize },
    /// NVFP4 in blocks of rows.
    Fp4 { target: Target },
    /// NVFP4 in tiles, whose largest value becomes 6: the form in which a recipe of four bits multiplies weights.
    Fp4Tiles,
}

impl Quantisation {
    pub const fn packing(self) -> Packing {
        match self {
            Quantisation::Nf4 { block, nested: false } => nf4(block),
            Quantisation::Nf4 { block, nested: true } => nf4_nested(block),
            Quantisation::Fp8 { extent } => fp8_tiles(extent),
            Quantisation::Fp4 { .. } => NVFP4,
            Quantisation::Fp4Tiles => NVFP4_TILES,
        }
    }

    /// True if weights of this shape can take the form: NVFP4 needs whole blocks in each row.
    pub fn fits(self, shape: &[usize]) -> bool {
        let columns = shape.last().copied().unwrap_or(0);
        let is_matrix = matches!(shape.len(), 2 | 3);
        // No tile has rows of two matrices.
        let has_tiles_of = |extent: usize| shape.len() == 2 || shape[1].is_multiple_of(extent);
        is_matrix
            && match self {
                Quantisation::Nf4 { .. } => true,
                Quantisation::Fp8 { extent } => has_tiles_of(extent),
                Quantisation::Fp4 { .. } => columns.is_multiple_of(16),
                Quantisation::Fp4Tiles => columns.is_multiple_of(16) && has_tiles_of(16),
            }
    }
}
