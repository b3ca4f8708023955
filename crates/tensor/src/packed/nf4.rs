//! NF4 (Dettmers et al. 2023): the nearest of sixteen values, the quantiles of a normal distribution, in flat blocks
//! scaled by their largest magnitude; the scales may be quantised again.

use super::{Packed, Scaled};
use crate::small::amax;
use crate::storage::{nf4, nf4_nested};

/// The sixteen values of bitsandbytes.
pub const NF4: [f32; 16] = [
    -1.0,
    -0.6961928,
    -0.52507305,
    -0.3949175,
    -0.28444138,
    -0.18477343,
    -0.091050036,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.33791524,
    0.44070983,
    0.562617,
    0.72295684,
    1.0,
];

/// Scales of one outer block.
const OUTER: usize = 256;

/// The midpoints between neighboring values of [`NF4`].
const MIDPOINTS: [f32; 15] = {
    let mut midpoints = [0.0; 15];
    let mut index = 0;
    while index < 15 {
        midpoints[index] = ((NF4[index] as f64 + NF4[index + 1] as f64) / 2.0) as f32;
        index += 1;
    }
    midpoints
};

/// Writes the codes of one block, one to a byte, and returns its scale.
fn code_block(x: &[f32], codes: &mut [u8]) -> f32 {
    let scale = amax(x);
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    for (code, x) in codes.iter_mut().zip(x) {
        let u = x * inverse;
        *code = MIDPOINTS.iter().map(|midpoint| u8::from(*midpoint < u)).sum();
    }
    scale
}

/// Quantizes whole flat blocks to the form in memory: two codes in a byte, and one of `scales` for each block.
pub fn flat_blocks(x: &[f32], block: usize, packed: &mut [u8], scales: &mut [f32]) {
    assert!(block.is_multiple_of(2), "a block begins with a byte");
    let mut codes = vec![0; block];
    for ((x, packed), scale) in x.chunks(block).zip(packed.chunks_mut(block / 2)).zip(scales) {
        *scale = code_block(x, &mut codes[..x.len()]);
        codes[x.len()..].fill(0);
        packed.iter_mut().zip(codes.chunks(2)).for_each(|(byte, pair)| *byte = pair[0] << 4 | pair[1]);
    }
}

/// Returns scales as codes of a book of ascending values, around their mean.
pub fn nest(scales: &[f32], map: &[f32]) -> Scaled {
    let midpoints: Vec<f32> =
        map.windows(2).map(|pair| ((f64::from(pair[0]) + f64::from(pair[1])) / 2.0) as f32).collect();
    let sum: f64 = scales.iter().map(|s| f64::from(*s)).sum();
    let offset = (sum / scales.len().max(1) as f64) as f32;
    let (mut codes, mut outer) = (Vec::with_capacity(scales.len()), Vec::new());
    for part in scales.chunks(OUTER) {
        let off: Vec<f32> = part.iter().map(|s| s - offset).collect();
        let amax = amax(&off);
        let inverse = if amax == 0.0 { 0.0 } else { 1.0 / amax };
        codes.extend(off.iter().map(|x| midpoints.partition_point(|midpoint| *midpoint < x * inverse) as u8));
        outer.push(amax);
    }
    Scaled::Mapped { codes, outer, offset, map: map.to_vec() }
}

/// Returns a tensor in flat blocks with an f32 scale each.
pub fn normal(x: &[f32], shape: &[usize], block: usize) -> Packed {
    let mut codes = vec![0; x.len()];
    let scales = x.chunks(block).zip(codes.chunks_mut(block)).map(|(x, codes)| code_block(x, codes)).collect();
    Packed { packing: nf4(block), shape: shape.to_vec(), codes, scales: Scaled::Single(scales) }
}

/// Returns a tensor in flat blocks whose scales are codes around their mean, of the 256 ascending values of `map`.
pub fn nested(x: &[f32], shape: &[usize], block: usize, map: &[f32]) -> Packed {
    let plain = normal(x, shape, block);
    let Scaled::Single(scales) = &plain.scales else { unreachable!("plain blocks have f32 scales") };
    Packed { packing: nf4_nested(block), scales: nest(scales, map), ..plain }
}
