//! NVFP4 (arXiv 2509.25149): E2M1 with an E4M3 scale for each block and an f32 for the tensor. Every step is one of IEEE
//! f32, in the order that is written here: NVIDIA's reference has the same bits.

use super::{Packed, Scaled, block_of, blocks_of};
use crate::small::{Small, amax, e2m1_code, e4m3_code};
use crate::storage::{NVFP4, Packing};

/// The E2M1 value to which the largest magnitude of a block is scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// 6, the top of E2M1.
    Six,
    /// 6 or 4, the one that leaves the smaller squared error: four over six (arXiv 2512.02010).
    FourOrSix,
}

/// Rows and columns of a tile.
const EXTENT: usize = 16;

/// The largest magnitude below which a tensor is not scaled.
const LEAST: f32 = f32::from_bits((127 - 100) << 23);

/// The scale S of a tensor of this largest magnitude.
pub fn tensor_scale(amax: f32, target: Target) -> f32 {
    let top = if target == Target::Six { 2688.0 } else { 1536.0 };
    if amax < LEAST { 1.0 } else { top / amax }
}

/// Returns the factor of a block's elements before they are rounded, from the block's `scale` and the tensor's factor
/// g.
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

/// Quantizes blocks of 16 that follow one another in a tensor of scale S, in the layout of memory: two codes in a byte,
/// one scale for each block.
pub fn row_blocks(x: &[f32], s: f32, target: Target, packed: &mut [u8], scales: &mut [u8]) {
    for ((x, packed), scale) in x.chunks(16).zip(packed.chunks_mut(8)).zip(scales) {
        let (code, codes) = code_block(x, s, target);
        *scale = code;
        packed.iter_mut().zip(codes.chunks(2)).for_each(|(byte, pair)| *byte = pair[1] << 4 | pair[0]);
    }
}

/// Rows of whole tiles in a tensor of scale S, as they are in memory: two codes in a byte, a scale for each tile. The last
/// tiles may have fewer rows; columns are whole tiles. The largest value of a tile becomes 6.
pub fn tile_blocks(x: &[f32], columns: usize, s: f32, packed: &mut [u8], scales: &mut [u8]) {
    let g = 1.0 / s;
    let (mut largest, mut factors) = (vec![0; columns / EXTENT], vec![0.0; columns / EXTENT]);
    let bands = x.chunks(EXTENT * columns).zip(packed.chunks_mut(EXTENT * columns / 2));
    for ((x, packed), scales) in bands.zip(scales.chunks_mut(columns / EXTENT)) {
        largest.fill(0);
        for row in x.chunks(columns) {
            let tiles = largest.iter_mut().zip(row.chunks(EXTENT));
            tiles.for_each(|(largest, x)| *largest = amax(x).to_bits().max(*largest));
        }
        for ((scale, factor), largest) in scales.iter_mut().zip(&mut factors).zip(&largest) {
            *scale = block_scale(f32::from_bits(*largest), s);
            *factor = reciprocal(*scale, g);
        }
        let tiles = x.chunks(EXTENT).zip(packed.chunks_mut(EXTENT / 2)).zip(factors.iter().cycle());
        for ((x, packed), factor) in tiles {
            let code = |x: f32| e2m1_code(x * factor);
            packed.iter_mut().zip(x.chunks(2)).for_each(|(byte, pair)| *byte = code(pair[1]) << 4 | code(pair[0]));
        }
    }
}

/// Quantises in blocks of a row or in tiles: [`NVFP4`] or [`crate::storage::NVFP4_TILES`].
pub fn nvfp4(packing: Packing, x: &[f32], shape: &[usize], target: Target) -> Packed {
    nvfp4_within(packing, x, shape, amax(x), target)
}

/// Quantizes a tensor that is scaled by a magnitude not below its own largest: that of several tensors.
pub fn nvfp4_within(packing: Packing, x: &[f32], shape: &[usize], largest: f32, target: Target) -> Packed {
    assert_eq!((packing.code, packing.scales), (NVFP4.code, NVFP4.scales), "a packing of E2M1 with E4M3 scales");
    let s = tensor_scale(largest, target);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::NVFP4_TILES;
    use crate::{bf16_to_f32, f32_to_bf16};

    /// Tiles with this share of the tensors' largest magnitude or more have the scale and the codes of their values. Below
    /// it scales have the two smallest values of E4M3, and the largest code of a tile need not be 6.
    const STABLE: f32 = 1.0 / 137_000.0;

    fn rounded(x: f32, narrow: bool) -> f32 {
        if narrow { bf16_to_f32(f32_to_bf16(x)) } else { x }
    }

    fn drawn(elements: usize, of: impl Fn(usize) -> f32) -> Vec<f32> {
        let mut state = 0x9e37_79b9u32;
        let mut draw = |index: usize| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * of(index)
        };
        (0..elements).map(&mut draw).collect()
    }

    fn scales(of: &Packed) -> (&[u8], f32) {
        let Scaled::E4M3 { codes, tensor } = &of.scales else { unreachable!("the scales of NVFP4") };
        (codes, *tensor)
    }

    fn largest(tensors: &[Vec<f32>]) -> f32 {
        tensors.iter().map(|x| amax(x)).fold(0.0, f32::max)
    }

    /// Quantised twice in tiles is quantised once: tensors that share a magnitude, with rows of tiles of every size.
    #[test]
    fn values_of_tiles_have_the_codes_that_they_come_from() {
        let (shape, across) = ([21, 640], 640 / 16);
        let sizes = |index: usize| 2f32.powi(-(((index / 16) % across + index / (16 * 640)) as i32 % 23));
        for (narrow, times) in [(true, 1.0), (false, 1.0), (true, 0.0371), (false, 0.0371), (false, 3e7)] {
            let tensors = [1.0, 0.06].map(|size| drawn(21 * 640, |index| times * size * sizes(index)));
            let tensors = tensors.map(|x| x.into_iter().map(|x| rounded(x, narrow)).collect::<Vec<_>>());
            let quantised = |tensors: &[Vec<f32>]| {
                let most = largest(tensors);
                let of = |x: &Vec<f32>| nvfp4_within(NVFP4_TILES, x, &shape, most, Target::Six);
                tensors.iter().map(of).collect::<Vec<_>>()
            };
            let once = quantised(&tensors);
            let values: Vec<Vec<f32>> =
                once.iter().map(|of| of.values().into_iter().map(|x| rounded(x, narrow)).collect()).collect();
            let twice = quantised(&values);
            let (mut stable, mut others) = (0, 0);
            for (x, (once, twice)) in tensors.iter().zip(once.iter().zip(&twice)) {
                let ((before, factor), (after, again)) = (scales(once), scales(twice));
                // Of bf16 numbers the largest comes back exactly; in f32 it may be the next number.
                let off = (factor / again - 1.0).abs();
                assert!(if narrow { off == 0.0 } else { off < 2f32.powi(-22) }, "{off:e}");
                let codes = |of: &Packed| {
                    blocks_of(NVFP4_TILES, &of.codes.iter().map(|c| *c as f32).collect::<Vec<_>>(), &shape)
                };
                let blocks = blocks_of(NVFP4_TILES, x, &shape);
                for (number, (before_codes, after_codes)) in codes(once).into_iter().zip(codes(twice)).enumerate() {
                    let is_stable = amax(&blocks[number]) >= STABLE * largest(&tensors);
                    let same = before[number] == after[number] && before_codes == after_codes;
                    assert!(same || !is_stable, "{narrow} {times}: tile {number}");
                    *(if is_stable { &mut stable } else { &mut others }) += 1;
                }
            }
            assert!(stable > 100 && others > 10, "{stable} {others}");
        }
    }

    /// The bound is where it is said to be: right below it are tiles that change.
    #[test]
    fn tiles_that_change_are_those_with_the_smallest_scales() {
        let changes = |share: f32| {
            let mut x = vec![0.0; 16 * 32];
            (x[0], x[16]) = (1.0, share);
            let once = nvfp4(NVFP4_TILES, &x, &[16, 32], Target::Six);
            let twice = nvfp4(NVFP4_TILES, &once.values(), &[16, 32], Target::Six);
            (&once.codes, scales(&once).0) != (&twice.codes, scales(&twice).0)
        };
        let shares = (0..40_000).map(|step| 2f32.powf(-24.0 + step as f32 / 2000.0));
        let most = shares.filter(|share| changes(*share)).fold(0.0, f32::max);
        assert!(most < STABLE && most > 0.99 * STABLE, "1 / {}", 1.0 / most);
    }

    #[test]
    fn bands_of_tiles_are_those_of_the_whole() {
        let shape = [37, 48];
        let x = drawn(37 * 48, |index| 1.0 + index as f32);
        let whole = nvfp4_within(NVFP4_TILES, &x, &shape, 2e4, Target::Six);
        let (mut codes, mut of_tiles) = (vec![0; x.len() / 2], vec![0; 9]);
        tile_blocks(&x, 48, tensor_scale(2e4, Target::Six), &mut codes, &mut of_tiles);
        assert!(codes == whole.packed_codes() && of_tiles == scales(&whole).0);
    }
}
