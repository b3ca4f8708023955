//! NVFP4 as units of four bits read an operand of a product: codes in rows along the sum, and one E4M3 scale for every 16 of
//! a row, in tiles. cuBLASLt calls it `CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3`.
//!
//! A tile of scales is that of 128 rows by 4 blocks of a row, 512 contiguous bytes. Tiles of the same rows follow one
//! another. Whatever a tile has beyond the matrix is zero.

use crate::small::Small;

/// Elements that share a scale.
pub const BLOCK: usize = 16;

/// Elements of a row are filled up to a multiple of this: 16 bytes.
pub const WIDTH: usize = 32;

/// Rows and blocks of a tile of scales.
const TILE: (usize, usize) = (128, 4);
/// Number of rows in each group of a tile of scales; rows of the same place in their groups lie next to one another.
const GROUP: usize = 32;

/// Elements that a row of codes has room for.
pub const fn width(columns: usize) -> usize {
    columns.next_multiple_of(WIDTH)
}

/// Rows and blocks of a row that whole tiles of scales have.
pub const fn scale_extents(rows: usize, blocks: usize) -> (usize, usize) {
    (rows.next_multiple_of(TILE.0), blocks.next_multiple_of(TILE.1))
}

/// Returns the bytes of the scales of `rows` rows with `blocks` blocks each, filled up to whole tiles.
pub const fn scale_bytes(rows: usize, blocks: usize) -> usize {
    let (rows, blocks) = scale_extents(rows, blocks);
    rows * blocks
}

/// Returns the byte offset of the scale of one block of one row.
pub const fn scale_at(row: usize, block: usize, blocks: usize) -> usize {
    let tile = row / TILE.0 * blocks.div_ceil(TILE.1) + block / TILE.1;
    let within = row % GROUP * (TILE.0 / GROUP * TILE.1) + row % TILE.0 / GROUP * TILE.1 + block % TILE.1;
    tile * TILE.0 * TILE.1 + within
}

/// The numbers of one row: codes times the scales of their blocks. `codes` are the row's bytes, `scales` those of the matrix.
pub fn row_values(codes: &[u8], scales: &[u8], row: usize, out: &mut [f32]) {
    let blocks = out.len().div_ceil(BLOCK);
    for (block, out) in out.chunks_mut(BLOCK).enumerate() {
        let scale = Small::E4M3.value(scales[scale_at(row, block, blocks)]);
        for (i, out) in out.iter_mut().enumerate() {
            let byte = codes[(block * BLOCK + i) / 2];
            *out = Small::E2M1.value(if i % 2 == 0 { byte & 15 } else { byte >> 4 }) * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every scale has a place of its own, and the places are those that cuBLASLt's documentation draws.
    #[test]
    fn scales_fill_their_tiles() {
        for (rows, blocks) in [(1, 1), (128, 4), (300, 6), (129, 5), (16, 2)] {
            let mut seen = vec![false; scale_bytes(rows, blocks)];
            for (row, block) in (0..rows).flat_map(|row| (0..blocks).map(move |block| (row, block))) {
                assert!(!std::mem::replace(&mut seen[scale_at(row, block, blocks)], true), "{row} {block}");
            }
        }
        assert_eq!(scale_bytes(129, 5), 2 * 2 * 512);
        let at = |row, block| scale_at(row, block, 6);
        assert_eq!([at(0, 0), at(0, 3), at(1, 0), at(31, 0), at(32, 0), at(33, 1)], [0, 3, 16, 496, 4, 21]);
        assert_eq!([at(96, 0), at(127, 3), at(0, 4), at(128, 0)], [12, 511, 512, 1024]);
    }

    #[test]
    fn values_are_codes_times_the_scale_of_their_block() {
        // 1 and −6; blocks of scale 2 and 0.5, the second row's.
        let mut scales = vec![0; scale_bytes(2, 2)];
        scales[scale_at(1, 0, 2)] = 0x40;
        scales[scale_at(1, 1, 2)] = 0x30;
        let mut out = [0.0; 32];
        row_values(&[0xF2; 16], &scales, 1, &mut out);
        assert_eq!((out[0], out[1], out[16], out[31]), (2.0, -12.0, 0.5, -3.0));
        assert_eq!((width(16), width(32), width(33)), (32, 32, 64));
    }
}
