//! The quantization of a tensor's elements to codes of four bits: in blocks of 16 of a row, or in tiles of 16 by 16,
//! rounded to nearest or stochastically.

use rayon::prelude::*;
use tensor::packed::{Target, block_scale, reciprocal, tensor_scale};
use tensor::philox::{Purpose, words};
use tensor::small::{amax, e2m1_code, e2m1_code_stochastic};
use tensor::storage::Planes;

use super::larger;
use crate::real::Real;

/// Elements of a block, and rows and columns of a tile.
pub const BLOCK: usize = 16;

/// Random numbers of a call: those of a matrix of `width` columns, of which x begins at element `first`.
#[derive(Clone, Copy)]
pub struct Dice {
    pub seed: u64,
    pub stream: u32,
    pub first: usize,
    pub width: usize,
}

/// The random bytes of a block, by the place of its first element.
fn random_bytes(dice: Dice, step: i32, row: usize, column: usize) -> [u8; BLOCK] {
    let element = dice.first + row * dice.width + column;
    let drawn = words(dice.seed, Purpose::Codes, dice.stream, step as u32, (element / BLOCK) as u64);
    std::array::from_fn(|i| drawn[i / 4].to_le_bytes()[i % 4])
}

/// The rounding of the elements of a tensor of scale S to codes.
pub struct Rounding {
    tiles: bool,
    /// The numbers of stochastic rounding, with the micro-step.
    dice: Option<(Dice, i32)>,
    s: f32,
    /// The reciprocal 1/S of the tensor's scale.
    pub g: f32,
}

impl Rounding {
    /// Returns the rounding of a tensor whose parts have these largest magnitudes.
    pub fn new<T: Real>(tiles: bool, dice: Option<(Dice, i32)>, parts: &[T]) -> Rounding {
        let most = parts.iter().fold(0.0, |most, part| larger(most, part.to_f32()));
        let s = tensor_scale(most, Target::Six);
        Rounding { tiles, dice, s, g: 1.0 / s }
    }

    /// The bytes of a packed tensor.
    pub fn pack<T: Real>(&self, x: &[T], columns: usize, planes: &Planes, bytes: &mut [u8]) {
        bytes[planes.codes.bytes..planes.scales.offset].fill(0);
        bytes[planes.scales.offset + planes.scales.bytes..planes.tensor.offset].fill(0);
        let (tensor, after) = bytes[planes.tensor.offset..].split_at_mut(planes.tensor.bytes);
        tensor.copy_from_slice(&self.g.to_le_bytes());
        after.fill(0);
        let (codes, rest) = bytes.split_at_mut(planes.scales.offset);
        self.quantise(x, columns, &mut codes[..planes.codes.bytes], &mut rest[..planes.scales.bytes]);
    }

    /// Returns the number of rows in a block.
    pub fn height(&self) -> usize {
        if self.tiles { BLOCK } else { 1 }
    }

    /// Codes, two in a byte, and a scale for each block, both in the order of the tensor.
    pub fn quantise<T: Real>(&self, x: &[T], columns: usize, codes: &mut [u8], scales: &mut [u8]) {
        let (height, across) = (self.height(), columns / BLOCK);
        let bands = codes.par_chunks_mut((height * columns / 2).max(1));
        let scales = scales.par_chunks_mut(across.max(1));
        bands.zip(scales).enumerate().for_each(|(band, (codes, scales))| {
            let x = &x[band * height * columns..][..2 * codes.len()];
            for (block, scale) in scales.iter_mut().enumerate() {
                let element = |i: usize| i / BLOCK * columns + block * BLOCK + i % BLOCK;
                let values: Vec<f32> = (0..height * BLOCK).map(|i| x[element(i)].to_f32()).collect();
                *scale = block_scale(amax(&values), self.s);
                let r = reciprocal(*scale, self.g);
                let random = self.dice.map(|(dice, step)| random_bytes(dice, step, band, block * BLOCK));
                let code = |i: usize| match random {
                    Some(random) => e2m1_code_stochastic(values[i] * r, random[i]),
                    None => e2m1_code(values[i] * r),
                };
                for i in (0..values.len()).step_by(2) {
                    codes[element(i) / 2] = code(i + 1) << 4 | code(i);
                }
            }
        });
    }
}
