//! Eight bits with powers of two as scales: multiplying is exact, so a value is rounded once.

use super::{Packed, Scaled, block_of};
use crate::small::{Small, amax, e4m3_code, power, scaling_exponent};
use crate::storage::{Code, Packing, fp8, fp8_tiles};

/// The top of E4M3 as an exponent: 448 = 1.75·2^8.
const TOP: i32 = 8;

fn packed(packing: Packing, x: &[f32], shape: &[usize], exponents: &[i32]) -> Packed {
    let Code::Small(small) = packing.code else { unreachable!("eight bits are small numbers") };
    let columns = shape.last().copied().unwrap_or(1);
    let exponent = |index: usize| exponents[block_of(packing.block, index, columns)];
    let code = |(index, x): (usize, &f32)| small.code(f64::from(*x) * power(exponent(index)));
    Packed {
        packing,
        shape: shape.to_vec(),
        codes: x.iter().enumerate().map(code).collect(),
        scales: Scaled::Single(exponents.iter().map(|k| power(-k) as f32).collect()),
    }
}

/// x·2^`exponent` in one format; the value of a code is code·2^−`exponent`.
pub fn scaled(small: Small, x: &[f32], shape: &[usize], exponent: i32) -> Packed {
    packed(fp8(small), x, shape, &[exponent])
}

/// Rows of whole tiles: their codes, one to a byte, and the scales of the tiles, which are 2^−k of each exponent k.
pub fn tile_rows(x: &[f32], columns: usize, extent: usize, codes: &mut [u8], scales: &mut [f32]) {
    let across = columns.div_ceil(extent);
    let mut factors = vec![0.0; across];
    for (band, (x, codes)) in x.chunks(extent * columns).zip(codes.chunks_mut(extent * columns)).enumerate() {
        for (tile, factor) in factors.iter_mut().enumerate() {
            let part = |row: &[f32]| amax(&row[tile * extent..columns.min((tile + 1) * extent)]).to_bits();
            let largest = f32::from_bits(x.chunks(columns).map(part).max().unwrap_or(0));
            let exponent = scaling_exponent(largest, TOP);
            *factor = 2f32.powi(exponent);
            scales[band * across + tile] = 2f32.powi(-exponent);
        }
        for (x, codes) in x.chunks(columns).zip(codes.chunks_mut(columns)) {
            for ((x, codes), factor) in x.chunks(extent).zip(codes.chunks_mut(extent)).zip(&factors) {
                codes.iter_mut().zip(x).for_each(|(code, x)| *code = e4m3_code(x * factor));
            }
        }
    }
}

/// E4M3 in square tiles, each with the exponent of its own largest magnitude.
pub fn tiles(x: &[f32], shape: &[usize], extent: usize) -> Packed {
    let packing = fp8_tiles(extent);
    let (mut codes, mut scales) = (vec![0; x.len()], vec![0.0; packing.blocks(shape)]);
    tile_rows(x, shape.last().copied().unwrap_or(1), extent, &mut codes, &mut scales);
    Packed { packing, shape: shape.to_vec(), codes, scales: Scaled::Single(scales) }
}
