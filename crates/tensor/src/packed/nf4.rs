//! NF4 (Dettmers et al. 2023): the nearest of sixteen values, the quantiles of a normal distribution, in flat blocks
//! scaled by their largest magnitude; the scales may be quantised again.

use super::{Packed, Scaled, blocks_of};
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

/// How many midpoints of the ascending values are below u: the nearest one, the lower at a tie.
fn nearest(values: &[f32], u: f32) -> u8 {
    let midpoint = |pair: &[f32]| ((f64::from(pair[0]) + f64::from(pair[1])) / 2.0) as f32;
    values.windows(2).filter(|pair| midpoint(pair) < u).count() as u8
}

/// u = x·(1/amax) of each block, 0 where that is 0.
fn normalised(block: &[f32], amax: f32) -> impl Iterator<Item = f32> {
    let inverse = if amax == 0.0 { 0.0 } else { 1.0 / amax };
    block.iter().map(move |x| x * inverse)
}

/// With an f32 for each block.
pub fn normal(x: &[f32], shape: &[usize], block: usize) -> Packed {
    let blocks = blocks_of(nf4(block), x, shape);
    let scales: Vec<f32> = blocks.iter().map(|block| amax(block)).collect();
    let codes = blocks.iter().zip(&scales).flat_map(|(block, amax)| normalised(block, *amax).map(|u| nearest(&NF4, u)));
    Packed { packing: nf4(block), shape: shape.to_vec(), codes: codes.collect(), scales: Scaled::Single(scales) }
}

/// The same with scales in a code book, of which `map` are the 256 ascending values, around their mean.
pub fn nested(x: &[f32], shape: &[usize], block: usize, map: &[f32]) -> Packed {
    let plain = normal(x, shape, block);
    let Scaled::Single(scales) = &plain.scales else { unreachable!("plain blocks have f32 scales") };
    let sum: f64 = scales.iter().map(|s| f64::from(*s)).sum();
    let offset = (sum / scales.len().max(1) as f64) as f32;
    let (mut codes, mut outer) = (Vec::new(), Vec::new());
    for part in scales.chunks(OUTER) {
        let off: Vec<f32> = part.iter().map(|s| s - offset).collect();
        let amax = amax(&off);
        codes.extend(normalised(&off, amax).map(|u| nearest(map, u)));
        outer.push(amax);
    }
    let scales = Scaled::Mapped { codes, outer, offset, map: map.to_vec() };
    Packed { packing: nf4_nested(block), scales, ..plain }
}
