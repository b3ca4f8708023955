//! NVFP4 (arXiv 2509.25149): E2M1 with an E4M3 scale for each block and an f32 for the tensor. Every step is one of IEEE
//! f32, in the order that is written here: NVIDIA's reference has the same bits.

use super::{Packed, Scaled, block_of, blocks_of};
use crate::small::{Small, amax};
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

/// The scale of a tensor: its largest magnitude becomes `top`.
fn tensor_scale(x: &[f32], top: f32) -> f32 {
    let amax = amax(x);
    if amax < LEAST { 1.0 } else { top / amax }
}

/// Codes of one block at a scale, and their squared error against the block.
fn coded(x: &[f32], scale: u8, g: f32) -> (Vec<u8>, f64) {
    let scale = Small::E4M3.value(scale);
    let divisor = scale * g;
    let r = if divisor == 0.0 { 0.0 } else { (1.0 / divisor).min(f32::MAX) };
    let codes: Vec<u8> = x.iter().map(|x| Small::E2M1.code(f64::from(x * r))).collect();
    let error = |(x, code): (&f32, &u8)| {
        let off = f64::from(Small::E2M1.value(*code) * scale * g) - f64::from(*x);
        off * off
    };
    let error = x.iter().zip(&codes).map(error).sum();
    (codes, error)
}

/// Quantises in blocks of a row or in tiles: [`NVFP4`] or [`crate::storage::NVFP4_TILES`].
pub fn nvfp4(packing: Packing, x: &[f32], shape: &[usize], target: Target) -> Packed {
    assert_eq!((packing.code, packing.scales), (NVFP4.code, NVFP4.scales), "a packing of E2M1 with E4M3 scales");
    let s = tensor_scale(x, if target == Target::Six { 2688.0 } else { 1536.0 });
    let g = 1.0 / s;
    let scale = |x: f32| Small::E4M3.code(f64::from(x));
    let blocks = blocks_of(packing, x, shape);
    let (mut scales, mut coded_blocks) = (Vec::new(), Vec::new());
    for block in &blocks {
        let largest = amax(block);
        let (code, codes) = match target {
            Target::Six => {
                let code = scale(largest * (s * (1.0 / 6.0)));
                (code, coded(block, code, g).0)
            }
            Target::FourOrSix => {
                let c = largest / 6.0 * s;
                let [(six, of_six), (four, of_four)] =
                    [scale(c), scale(1.5 * c)].map(|code| (code, coded(block, code, g)));
                if of_four.1 < of_six.1 { (four, of_four.0) } else { (six, of_six.0) }
            }
        };
        scales.push(code);
        coded_blocks.push(codes.into_iter());
    }
    let columns = shape.last().copied().unwrap_or(1);
    let next = |index: usize| coded_blocks[block_of(packing.block, index, columns)].next().expect("as many codes");
    Packed {
        packing,
        shape: shape.to_vec(),
        codes: (0..x.len()).map(next).collect(),
        scales: Scaled::E4M3 { codes: scales, tensor: g },
    }
}
