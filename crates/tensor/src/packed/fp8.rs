//! Eight bits with powers of two as scales: multiplying is exact, so a value is rounded once.

use super::{Packed, Scaled, block_of, blocks_of};
use crate::small::{Small, amax, scaling_exponent};
use crate::storage::{Code, Packing, fp8, fp8_tiles};

/// The top of E4M3 as an exponent: 448 = 1.75·2^8.
const TOP: i32 = 8;

fn packed(packing: Packing, x: &[f32], shape: &[usize], exponents: &[i32]) -> Packed {
    let Code::Small(small) = packing.code else { unreachable!("eight bits are small numbers") };
    let columns = shape.last().copied().unwrap_or(1);
    let exponent = |index: usize| exponents[block_of(packing.block, index, columns)];
    let code = |(index, x): (usize, &f32)| small.code(f64::from(*x) * 2f64.powi(exponent(index)));
    Packed {
        packing,
        shape: shape.to_vec(),
        codes: x.iter().enumerate().map(code).collect(),
        scales: Scaled::Single(exponents.iter().map(|k| 2f64.powi(-k) as f32).collect()),
    }
}

/// x·2^`exponent` in one format; the value of a code is code·2^−`exponent`.
pub fn scaled(small: Small, x: &[f32], shape: &[usize], exponent: i32) -> Packed {
    packed(fp8(small), x, shape, &[exponent])
}

/// E4M3 in square tiles, each with the exponent of its own largest magnitude.
pub fn tiles(x: &[f32], shape: &[usize], extent: usize) -> Packed {
    let packing = fp8_tiles(extent);
    let exponents: Vec<i32> = blocks_of(packing, x, shape).iter().map(|x| scaling_exponent(amax(x), TOP)).collect();
    packed(packing, x, shape, &exponents)
}
