//! One weight as codes and scales in files, and the values of a range of its elements. Every product is one of IEEE f32, in
//! the order that the form says: the values are the same on every machine.
//!
//! Knows places in files; not names.

use tensor::storage::Block;

use super::turned::Turned;
use crate::error::DataError;
use crate::safetensors::SafeTensors;

/// Elements whose values are made at a time.
const PIECE: usize = 1 << 16;

/// A range of bytes in a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub file: usize,
    /// From the beginning of the file's data.
    pub begin: usize,
    pub length: usize,
}

impl Part {
    pub(super) fn read(&self, files: &[SafeTensors], from: usize, count: usize) -> Result<Vec<u8>, DataError> {
        debug_assert!(from + count <= self.length, "a linear's parts were checked when it was found");
        let mut bytes = vec![0; count];
        files[self.file].read(self.begin + from, &mut bytes)?;
        Ok(bytes)
    }
}

/// The layout of codes, with the value of each.
#[derive(Debug)]
pub(crate) enum Codes {
    /// One code to a byte.
    Bytes(Box<[f32; 256]>),
    /// Two to a byte, the first in the high half.
    HighFirst([f32; 16]),
    /// Two to a byte, the first in the low half.
    LowFirst([f32; 16]),
}

/// The type of a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Number {
    F32,
    BF16,
    F16,
    E8M0,
    E4M3,
}

impl Number {
    pub const ALL: [(&'static str, Number); 5] = [
        ("F32", Number::F32),
        ("BF16", Number::BF16),
        ("F16", Number::F16),
        ("F8_E8M0", Number::E8M0),
        ("F8_E4M3", Number::E4M3),
    ];

    pub const fn size(self) -> usize {
        match self {
            Number::F32 => 4,
            Number::BF16 | Number::F16 => 2,
            Number::E8M0 | Number::E4M3 => 1,
        }
    }

    fn value(self, bytes: &[u8]) -> f32 {
        let half = || u16::from_le_bytes([bytes[0], bytes[1]]);
        match self {
            Number::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            Number::BF16 => tensor::bf16_to_f32(half()),
            Number::F16 => tensor::f16_to_f32(half()),
            Number::E8M0 => tensor::small::e8m0_value(bytes[0]),
            Number::E4M3 => tensor::small::Small::E4M3.value(bytes[0]),
        }
    }

    /// The values of whole bytes.
    pub fn values(self, bytes: &[u8]) -> Vec<f32> {
        bytes.chunks_exact(self.size()).map(|bytes| self.value(bytes)).collect()
    }
}

/// The layout and the encoding of the scales of blocks.
#[derive(Debug)]
pub(crate) enum Scales {
    Plain {
        at: Part,
        number: Number,
    },
    /// map\[code\]·outer + offset, an outer one for `block` of them.
    Nested {
        at: Part,
        map: Box<[f32; 256]>,
        outer: Vec<f32>,
        block: usize,
        offset: f32,
    },
}

/// The last factor of each value, after code times scale.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Whole {
    Nothing,
    Times(f32),
    Over(f32),
}

/// A quantized weight: where its parts are, and how they make values.
#[derive(Debug)]
pub(crate) struct Linear {
    /// Shape in the file. The axes before the last are rows.
    pub shape: Vec<usize>,
    /// The transposition of matrices that are read as their transposes.
    pub turned: Option<Turned>,
    pub at: Part,
    /// Elements of a stored row, where rows are filled up to whole words.
    pub padded: Option<usize>,
    pub codes: Codes,
    pub block: Block,
    pub scales: Scales,
    pub zeros: Option<Zeros>,
    pub whole: Whole,
}

/// Zero points of the blocks of rows: in words of 32 bits, each of which holds those of neighbouring rows.
#[derive(Debug)]
pub(crate) struct Zeros {
    pub at: Part,
    pub bits: u32,
    /// The number of blocks of a row.
    pub across: usize,
}

impl Zeros {
    /// The zero points of blocks from the first of a row on, of whole rows.
    fn read(&self, files: &[SafeTensors], first: usize, count: usize) -> Result<Vec<f32>, DataError> {
        let each = 32 / self.bits as usize;
        let (from, to) = (first / self.across, (first + count) / self.across);
        let (begin, end) = (from / each, to.div_ceil(each));
        let bytes = self.at.read(files, begin * self.across * 4, (end - begin) * self.across * 4)?;
        let word = |row: usize, column: usize| {
            let at = ((row / each - begin) * self.across + column) * 4;
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let (mask, middle) = ((1u32 << self.bits) - 1, 1i32 << (self.bits - 1));
        let zero = |row: usize, column: usize| {
            let code = word(row, column) >> (self.bits as usize * (row % each)) & mask;
            (code as i32 - middle) as f32
        };
        Ok((from..to)
            .flat_map(|row| (0..self.across).map(move |column| (row, column)))
            .map(|(r, c)| zero(r, c))
            .collect())
    }
}

impl Linear {
    /// One without zero points, in rows without gaps.
    pub fn new(shape: Vec<usize>, at: Part, codes: Codes, block: Block, scales: Scales) -> Linear {
        Linear { shape, turned: None, at, padded: None, codes, block, scales, zeros: None, whole: Whole::Nothing }
    }

    /// Makes a matrix be read as its transpose.
    pub fn turn(&mut self) {
        if self.turned.is_none() && self.shape.len() == 2 {
            self.turned = Some(Turned::of(&self.shape));
        }
    }

    /// The shape in which it is read.
    pub fn shape(&self) -> &[usize] {
        self.turned.as_ref().map_or(&self.shape, |turned| &turned.shape)
    }

    /// Number of elements of the weight.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of the codes and scales of all elements.
    pub fn stored(&self) -> usize {
        let (Scales::Plain { at, .. } | Scales::Nested { at, .. }) = &self.scales;
        self.at.length + at.length
    }

    /// The values from element `begin` on, as f32 in bytes.
    pub fn read(&self, files: &[SafeTensors], begin: usize, bytes: &mut [u8]) -> Result<(), DataError> {
        let stored = |begin: usize, bytes: &mut [u8]| self.read_stored(files, begin, bytes);
        match &self.turned {
            Some(turned) => turned.read(begin, bytes, stored),
            None => stored(begin, bytes),
        }
    }

    fn read_stored(&self, files: &[SafeTensors], begin: usize, bytes: &mut [u8]) -> Result<(), DataError> {
        for (number, piece) in bytes.chunks_mut(PIECE * 4).enumerate() {
            self.piece(files, begin + number * PIECE, piece)?;
        }
        Ok(())
    }

    fn piece(&self, files: &[SafeTensors], begin: usize, bytes: &mut [u8]) -> Result<(), DataError> {
        let end = begin + bytes.len() / 4;
        let columns = self.shape.last().copied().unwrap_or(1);
        let blocks = self.blocks(begin, end, columns);
        let scales = self.scales(files, blocks.start, blocks.len())?;
        let zeros = self.zeros.as_ref().map(|of| of.read(files, blocks.start, blocks.len())).transpose()?;
        let stored = |index: usize| match self.padded {
            Some(row) => index / columns * row + index % columns,
            None => index,
        };
        let (from, to) = (stored(begin), stored(end - 1) + 1);
        let (first, codes) = match self.codes {
            Codes::Bytes(_) => (from, self.at.read(files, from, to - from)?),
            Codes::HighFirst(_) | Codes::LowFirst(_) => {
                (from / 2 * 2, self.at.read(files, from / 2, to.div_ceil(2) - from / 2)?)
            }
        };
        let mut index = begin;
        while index < end {
            let (block, after) = self.run(index, columns);
            let after = after.min(end);
            let scale = scales[block - blocks.start];
            let zero = zeros.as_ref().map_or(0.0, |zeros| zeros[block - blocks.start]);
            for (index, to) in (index..after).zip(bytes[(index - begin) * 4..].chunks_exact_mut(4)) {
                let value = (self.code(&codes, stored(index) - first) - zero) * scale;
                let value = match self.whole {
                    Whole::Nothing => value,
                    Whole::Times(factor) => value * factor,
                    Whole::Over(divisor) => value / divisor,
                };
                to.copy_from_slice(&value.to_le_bytes());
            }
            index = after;
        }
        Ok(())
    }

    /// The value of a code; `index` counts from the first half of the first byte.
    fn code(&self, codes: &[u8], index: usize) -> f32 {
        match &self.codes {
            Codes::Bytes(values) => values[usize::from(codes[index])],
            Codes::HighFirst(values) => values[usize::from(codes[index / 2] >> (4 - 4 * (index % 2)) & 15)],
            Codes::LowFirst(values) => values[usize::from(codes[index / 2] >> (4 * (index % 2)) & 15)],
        }
    }

    /// The block of an element, and the element after the last that shares it without a gap.
    fn run(&self, index: usize, columns: usize) -> (usize, usize) {
        let (row, column) = (index / columns, index % columns);
        match self.block {
            Block::Tensor => (0, usize::MAX),
            Block::Flat(n) => (index / n, (index / n + 1).saturating_mul(n)),
            Block::Row(n) | Block::Tile(_, n) => {
                let rows = if let Block::Tile(rows, _) = self.block { rows } else { 1 };
                let block = row / rows * columns.div_ceil(n) + column / n;
                (block, row * columns + (column / n + 1).saturating_mul(n).min(columns))
            }
        }
    }

    /// Blocks that elements of a range may belong to: neighbours.
    fn blocks(&self, begin: usize, end: usize, columns: usize) -> std::ops::Range<usize> {
        let of_rows = |rows: usize, n: usize| {
            let (first, last) = (begin / columns / rows, (end - 1) / columns / rows);
            first * columns.div_ceil(n)..(last + 1) * columns.div_ceil(n)
        };
        match self.block {
            Block::Tensor => 0..1,
            Block::Flat(n) => begin / n..end.div_ceil(n),
            Block::Row(n) => of_rows(1, n),
            Block::Tile(rows, n) => of_rows(rows, n),
        }
    }

    /// The scales of blocks from the first on.
    pub(super) fn scales(&self, files: &[SafeTensors], first: usize, count: usize) -> Result<Vec<f32>, DataError> {
        Ok(match &self.scales {
            Scales::Plain { at, number } => {
                number.values(&at.read(files, first * number.size(), count * number.size())?)
            }
            Scales::Nested { at, map, outer, block, offset } => {
                let codes = at.read(files, first, count)?;
                let value = |(index, code): (usize, &u8)| map[usize::from(*code)] * outer[index / block] + offset;
                (first..).zip(&codes).map(value).collect()
            }
        })
    }
}
