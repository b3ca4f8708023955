//! NVFP4 (arXiv 2509.25149): E2M1 with an E4M3 scale for each block and an f32 for the tensor. Every step is one of IEEE
//! f32, in the order that is written here: NVIDIA's reference has the same bits.

use super::{Packed, Scaled, block_of, blocks_of};
use crate::small::{Small, amax, e2m1_code, e4m3_code};
use crate::storage::{NVFP4, Packing};

/// What the largest value of a block becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// 6, the top of E2M1.
    Six,
    /// 6 or 4, the one that leaves the smaller squared error: four over six (arXiv 2512.02010).
    FourOrSix,
}

/// Below this a tensor is not scaled.
const LEAST: f32 = f32::from_bits((127 - 100) << 23);

/// The scale S of a tensor of this largest magnitude.
pub fn tensor_scale(amax: f32, target: Target) -> f32 {
    let top = if target == Target::Six { 2688.0 } else { 1536.0 };
    if amax < LEAST { 1.0 } else { top / amax }
}

/// What the elements of a block are multiplied with before they are rounded, by its scale and the tensor's factor g.
pub fn reciprocal(scale: u8, g: f32) -> f32 {
    let divisor = Small::E4M3.value(scale) * g;
    if divisor == 0.0 { 0.0 } else { (1.0 / divisor).min(f32::MAX) }
}

/// The scale of a block with this largest magnitude, in a tensor of scale S.
pub fn block_scale(largest: f32, s: f32) -> u8 {
    e4m3_code(largest * (s * (1.0 / 6.0)))
}

/// Codes of one block at a scale, and their squared error against the block.
fn coded(x: &[f32], scale: u8, g: f32) -> (Vec<u8>, f64) {
    let r = reciprocal(scale, g);
    let scale = Small::E4M3.value(scale);
    let codes: Vec<u8> = x.iter().map(|x| e2m1_code(x * r)).collect();
    let error = |(x, code): (&f32, &u8)| {
        let off = f64::from(Small::E2M1.value(*code) * scale * g) - f64::from(*x);
        off * off
    };
    let error = x.iter().zip(&codes).map(error).sum();
    (codes, error)
}

/// The scale of a block and its codes, in a tensor of scale S.
fn code_block(x: &[f32], s: f32, target: Target) -> (u8, Vec<u8>) {
    let (g, largest) = (1.0 / s, amax(x));
    match target {
        Target::Six => {
            let code = block_scale(largest, s);
            (code, coded(x, code, g).0)
        }
        Target::FourOrSix => {
            let c = largest / 6.0 * s;
            let [(six, of_six), (four, of_four)] =
                [e4m3_code(c), e4m3_code(1.5 * c)].map(|code| (code, coded(x, code, g)));
            if of_four.1 < of_six.1 { (four, of_four.0) } else { (six, of_six.0) }
        }
    }
}

/// Blocks of 16 behind one another in a tensor of scale S, as they are in memory: two codes in a byte, a scale for each.
pub fn row_blocks(x: &[f32], s: f32, target: Target, packed: &mut [u8], scales: &mut [u8]) {
    for ((x, packed), scale) in x.chunks(16).zip(packed.chunks_mut(8)).zip(scales) {
        let (code, codes) = code_block(x, s, target);
        *scale = code;
        packed.iter_mut().zip(codes.chunks(2)).for_each(|(byte, pair)| *byte = pair[1] << 4 | pair[0]);
    }
}

/// Quantises in blocks of a row or in tiles: [`NVFP4`] or [`crate::storage::NVFP4_TILES`].
pub fn nvfp4(packing: Packing, x: &[f32], shape: &[usize], target: Target) -> Packed {
    assert_eq!((packing.code, packing.scales), (NVFP4.code, NVFP4.scales), "a packing of E2M1 with E4M3 scales");
    let s = tensor_scale(amax(x), target);
    let blocks = blocks_of(packing, x, shape).into_iter().map(|block| code_block(&block, s, target));
    let (scales, coded): (Vec<u8>, Vec<Vec<u8>>) = blocks.unzip();
    let mut coded: Vec<_> = coded.into_iter().map(Vec::into_iter).collect();
    let columns = shape.last().copied().unwrap_or(1);
    let next = |index: usize| coded[block_of(packing.block, index, columns)].next().expect("as many codes");
    Packed {
        packing,
        shape: shape.to_vec(),
        codes: (0..x.len()).map(next).collect(),
        scales: Scaled::E4M3 { codes: scales, tensor: 1.0 / s },
    }
}
