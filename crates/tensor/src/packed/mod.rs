//! Tensors in packed forms: numbers to codes and back, as the reference of every backend has them, bit for bit. Does
//! not know files, devices, or which tensor takes which form.

mod book;
mod fp8;
mod nf4;
mod nvfp4;
pub mod operand;
mod quantisation;
mod stored;

pub use book::dynamic_map;
pub use fp8::{scaled, tile_rows, tiles};
pub use nf4::{NF4, flat_blocks, nest, nested, normal};
pub use nvfp4::{Target, block_scale, nvfp4, nvfp4_within, reciprocal, row_blocks, tensor_scale, tile_blocks};
pub use quantisation::Quantisation;
pub use stored::Stored;

use crate::small::{Small, e8m0_value};
use crate::storage::{Block, Code, Packing, Scales};

/// A packed tensor in host memory. Codes are one to a byte here, in the order of the memory; [`Packed::packed_codes`] are as
/// they are there.
#[derive(Clone, Debug, PartialEq)]
pub struct Packed {
    pub packing: Packing,
    pub shape: Vec<usize>,
    pub codes: Vec<u8>,
    /// The scale of each block, in the form that the packing says: f32 values, E8M0 or E4M3 codes, or indices into the
    /// code book.
    pub scales: Scaled,
}

/// The scales of a tensor's blocks.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaled {
    /// The f32 factor of each block's values.
    Single(Vec<f32>),
    E8M0(Vec<u8>),
    /// E4M3 codes, and the factor of the product of a code and its element's number.
    E4M3 {
        codes: Vec<u8>,
        tensor: f32,
    },
    /// The scale of a block is `map[code]·outer + offset`; several blocks share one `outer`.
    Mapped {
        codes: Vec<u8>,
        outer: Vec<f32>,
        offset: f32,
        map: Vec<f32>,
    },
}

impl Packed {
    /// The codes as they are in memory: two of four bits in a byte, the first in the low half; of NF4 in the high one.
    pub fn packed_codes(&self) -> Vec<u8> {
        match (self.packing.code.bits(), self.packing.code) {
            (8, _) => self.codes.clone(),
            (_, code) => self
                .codes
                .chunks(2)
                .map(|pair| {
                    let (first, second) = (pair[0], pair.get(1).copied().unwrap_or(0));
                    if code == Code::Nf4 { first << 4 | second } else { second << 4 | first }
                })
                .collect(),
        }
    }

    /// The values in f32. A product of a code with its scale and with the tensor's is rounded after each.
    pub fn values(&self) -> Vec<f32> {
        let in_memory = self.packing.in_memory(&self.shape);
        let columns = in_memory.last().copied().unwrap_or(1);
        let code = |code: u8| match self.packing.code {
            Code::Small(small) => small.value(code),
            Code::Nf4 => NF4[usize::from(code)],
        };
        let block = |index: usize| block_of(self.packing.block, index, columns);
        let value = |(index, element): (usize, &u8)| {
            let (x, block) = (code(*element), block(index));
            match &self.scales {
                Scaled::Single(scales) => x * scales[block],
                Scaled::E8M0(scales) => x * e8m0_value(scales[block]),
                Scaled::E4M3 { codes, tensor } => x * Small::E4M3.value(codes[block]) * tensor,
                Scaled::Mapped { codes, outer, offset, map } => {
                    let Scales::Mapped(n) = self.packing.scales else { unreachable!("scales are of the packing") };
                    x * (map[usize::from(codes[block])] * outer[block / n] + offset)
                }
            }
        };
        let values: Vec<f32> = self.codes.iter().enumerate().map(value).collect();
        let [.., rows, columns] = in_memory[..] else { return values };
        if !self.packing.transposed {
            return values;
        }
        let column =
            |matrix: &[f32], column: usize| (0..rows).map(|row| matrix[row * columns + column]).collect::<Vec<_>>();
        values.chunks(rows * columns).flat_map(|matrix| (0..columns).flat_map(move |of| column(matrix, of))).collect()
    }
}

/// Returns the block that an element belongs to, in a tensor of `columns` columns.
fn block_of(block: Block, index: usize, columns: usize) -> usize {
    let (row, column) = (index / columns.max(1), index % columns.max(1));
    match block {
        Block::Tensor => 0,
        Block::Flat(n) => index / n,
        Block::Row(n) => row * columns.div_ceil(n) + column / n,
        Block::Tile(r, c) => row / r * columns.div_ceil(c) + column / c,
    }
}

/// The elements of each block.
fn blocks_of(packing: Packing, x: &[f32], shape: &[usize]) -> Vec<Vec<f32>> {
    let columns = shape.last().copied().unwrap_or(1);
    let mut blocks = vec![Vec::new(); packing.blocks(shape)];
    for (index, x) in x.iter().enumerate() {
        blocks[block_of(packing.block, index, columns)].push(*x);
    }
    blocks
}
