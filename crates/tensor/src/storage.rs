//! Storage of a tensor's elements: plain, each by itself, or packed, as codes with a scale for each block of them.
//! Computes the bytes of tensors. Does not know how numbers become codes.

use std::fmt;
use std::str::FromStr;

use crate::dtype::DType;
use crate::small::Small;

/// The code of one element of a packed tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// A floating-point number of few bits.
    Small(Small),
    /// One of sixteen values, those of bitsandbytes.
    Nf4,
}

impl Code {
    pub const fn bits(self) -> u32 {
        match self {
            Code::Small(small) => small.bits(),
            Code::Nf4 => 4,
        }
    }
}

/// The elements that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Block {
    /// All elements of the tensor.
    Tensor,
    /// n elements in the order of memory, across the ends of rows; the last block may be shorter.
    Flat(usize),
    /// n elements of one row, whose length is a multiple of n.
    Row(usize),
    /// A tile of rows by columns; smaller at the edges of a tensor.
    Tile(usize, usize),
}

/// The form of the scales of the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scales {
    /// One f32 for each block.
    Single,
    /// A power of two each, in one byte.
    E8M0,
    /// An E4M3 each, and one f32 for the tensor.
    E4M3,
    /// A byte for each block that selects a value of a code book, times one f32 for every n blocks, plus one f32 for
    /// the tensor. That one is stored before the 256 values of the book.
    Mapped(usize),
}

/// Values of a code book of scales.
pub const BOOK: usize = 256;

/// A packed form: code, blocks, scales and order of the last two axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Packing {
    pub code: Code,
    pub block: Block,
    pub scales: Scales,
    /// The last two axes lie the other way round in memory: its rows are the tensor's columns.
    pub transposed: bool,
}

/// Codes of E4M3 or E5M2 with one scale.
pub const fn fp8(small: Small) -> Packing {
    Packing { code: Code::Small(small), block: Block::Tensor, scales: Scales::Single, transposed: false }
}

/// E4M3 in square tiles with an f32 scale each.
pub const fn fp8_tiles(extent: usize) -> Packing {
    Packing { block: Block::Tile(extent, extent), ..fp8(Small::E4M3) }
}

/// E2M1 in blocks of 16 elements of a row.
pub const NVFP4: Packing =
    Packing { code: Code::Small(Small::E2M1), block: Block::Row(16), scales: Scales::E4M3, transposed: false };

/// E2M1 in tiles of 16 by 16.
pub const NVFP4_TILES: Packing = Packing { block: Block::Tile(16, 16), ..NVFP4 };

/// E2M1 in blocks of 32 elements of a row with powers of two.
pub const MXFP4: Packing = Packing { block: Block::Row(32), scales: Scales::E8M0, ..NVFP4 };

/// NF4 in flat blocks with an f32 each.
pub const fn nf4(block: usize) -> Packing {
    Packing { code: Code::Nf4, block: Block::Flat(block), scales: Scales::Single, transposed: false }
}

/// NF4 whose scales are quantised again, in blocks of 256.
pub const fn nf4_nested(block: usize) -> Packing {
    Packing { scales: Scales::Mapped(256), ..nf4(block) }
}

impl fmt::Display for Packing {
    /// `nf4 flat:64 mapped:256`: code, block, scales; then `transposed`, where it is.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = CODES.iter().find(|(_, code)| *code == self.code).map(|(name, _)| *name);
        f.write_str(name.expect("every code has a name"))?;
        match self.block {
            Block::Tensor => f.write_str(" tensor"),
            Block::Flat(n) => write!(f, " flat:{n}"),
            Block::Row(n) => write!(f, " row:{n}"),
            Block::Tile(r, c) => write!(f, " tile:{r}x{c}"),
        }?;
        match self.scales {
            Scales::Single => f.write_str(" f32"),
            Scales::E8M0 => f.write_str(" e8m0"),
            Scales::E4M3 => f.write_str(" e4m3"),
            Scales::Mapped(n) => write!(f, " mapped:{n}"),
        }?;
        f.write_str(if self.transposed { TRANSPOSED } else { "" })
    }
}

/// The suffix of the name of a transposed form.
const TRANSPOSED: &str = " transposed";

/// The names of the codes in a form's text.
const CODES: [(&str, Code); 4] = [
    ("nf4", Code::Nf4),
    ("e2m1", Code::Small(Small::E2M1)),
    ("e4m3", Code::Small(Small::E4M3)),
    ("e5m2", Code::Small(Small::E5M2)),
];

/// A text that names no packed form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownPacking(pub String);

impl fmt::Display for UnknownPacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` names no packed form, such as `nf4 flat:64 mapped:256`", self.0)
    }
}

impl std::error::Error for UnknownPacking {}

impl FromStr for Packing {
    type Err = UnknownPacking;

    /// Parses the text that a [`Packing`] is displayed as.
    fn from_str(text: &str) -> Result<Packing, UnknownPacking> {
        let number = |text: &str| text.parse::<usize>().ok().filter(|n| *n > 0);
        let read = || -> Option<Packing> {
            let plain = text.strip_suffix(TRANSPOSED);
            let transposed = plain.is_some();
            let [code, block, scales] = plain.unwrap_or(text).split(' ').collect::<Vec<_>>().try_into().ok()?;
            let code = CODES.iter().find(|(name, _)| *name == code)?.1;
            let block = match block.split_once(':') {
                None if block == "tensor" => Block::Tensor,
                Some(("flat", n)) => Block::Flat(number(n)?),
                Some(("row", n)) => Block::Row(number(n)?),
                Some(("tile", of)) => {
                    let (rows, columns) = of.split_once('x')?;
                    Block::Tile(number(rows)?, number(columns)?)
                }
                _ => return None,
            };
            let scales = match (scales, scales.split_once(':')) {
                ("f32", _) => Scales::Single,
                ("e8m0", _) => Scales::E8M0,
                ("e4m3", _) => Scales::E4M3,
                (_, Some(("mapped", n))) => Scales::Mapped(number(n)?),
                _ => return None,
            };
            Some(Packing { code, block, scales, transposed })
        };
        read().ok_or_else(|| UnknownPacking(text.to_owned()))
    }
}

/// The contiguous memory of one kind of a packed tensor's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plane {
    /// From the tensor's first byte.
    pub offset: usize,
    pub bytes: usize,
}

/// Planes begin at multiples of this many bytes.
const ALIGNMENT: usize = 256;

/// The planes of a packed tensor, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planes {
    pub codes: Plane,
    /// The scale of each block.
    pub scales: Plane,
    /// The factors of groups of scales; empty for most forms.
    pub outer: Plane,
    /// Numbers of the whole tensor; empty for most forms.
    pub tensor: Plane,
}

impl Packing {
    /// The shape in which the codes of a tensor of this shape lie.
    pub fn in_memory(&self, shape: &[usize]) -> Vec<usize> {
        let mut shape = shape.to_vec();
        if let [.., rows, columns] = &mut shape[..]
            && self.transposed
        {
            std::mem::swap(rows, columns);
        }
        shape
    }

    /// The same form of the codes as they lie in memory.
    pub fn plain(self) -> Packing {
        Packing { transposed: false, ..self }
    }

    /// Blocks of a tensor of this shape. The axes before the last are rows.
    pub fn blocks(&self, shape: &[usize]) -> usize {
        let shape = self.in_memory(shape);
        let columns = shape.last().copied().unwrap_or(1);
        let elements: usize = shape.iter().product();
        let rows = elements.checked_div(columns).unwrap_or(0);
        match self.block {
            Block::Tensor => 1,
            Block::Flat(n) => elements.div_ceil(n),
            Block::Row(n) => rows * columns.div_ceil(n),
            Block::Tile(r, c) => rows.div_ceil(r) * columns.div_ceil(c),
        }
    }

    pub fn planes(&self, shape: &[usize]) -> Planes {
        let (elements, blocks) = (shape.iter().product::<usize>(), self.blocks(shape));
        let (each, outer, tensor) = match self.scales {
            Scales::Single => (4, 0, 0),
            Scales::E8M0 => (1, 0, 0),
            Scales::E4M3 => (1, 0, 4),
            Scales::Mapped(n) => (1, 4 * blocks.div_ceil(n), 4 * (1 + BOOK)),
        };
        let mut end = 0usize;
        let mut plane = |bytes: usize| {
            let offset = end.next_multiple_of(ALIGNMENT);
            end = offset + bytes;
            Plane { offset, bytes }
        };
        let codes = plane((elements * self.code.bits() as usize).div_ceil(8));
        Planes { codes, scales: plane(each * blocks), outer: plane(outer), tensor: plane(tensor) }
    }

    /// Bytes of a tensor of this shape, all planes: a multiple of their alignment, so that equal tensors may be
    /// contiguous.
    pub fn bytes(&self, shape: &[usize]) -> usize {
        let planes = self.planes(shape);
        let end = |plane: Plane| if plane.bytes == 0 { 0 } else { plane.offset + plane.bytes };
        let ends = [planes.codes, planes.scales, planes.outer, planes.tensor].map(end);
        ends.into_iter().max().unwrap_or(0).next_multiple_of(ALIGNMENT)
    }
}

/// The storage of a tensor: plain elements or a packed form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Storage {
    Plain(DType),
    Packed(Packing),
}

impl Storage {
    /// Bytes of a tensor of this shape.
    pub fn bytes(&self, shape: &[usize]) -> usize {
        match self {
            Storage::Plain(dtype) => shape.iter().product::<usize>() * dtype.size(),
            Storage::Packed(packing) => packing.bytes(shape),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_packed_tensors() {
        let bytes = |packing: Packing, shape: &[usize]| Storage::Packed(packing).bytes(shape);
        assert_eq!(bytes(fp8(Small::E4M3), &[64, 128]), 64 * 128 + 256, "the scale has a plane of its own, filled up");
        // 200 × 150 in tiles of 64: 4 × 3 of them.
        assert_eq!(bytes(fp8_tiles(64), &[200, 150]), 30_208 + 256);
        // Half a byte each, a scale for 16, one for the tensor.
        assert_eq!(bytes(NVFP4, &[64, 128]), 4096 + 512 + 256);
        assert_eq!(NVFP4_TILES.blocks(&[48, 64]), 12);
        assert_eq!(bytes(MXFP4, &[2, 96, 64]), 6144 + 512);
        // An odd number of elements: the last byte is half used.
        assert_eq!(bytes(nf4(64), &[7, 33]), 256 + 256);
        assert_eq!(nf4(64).planes(&[7, 33]).codes.bytes, 116);
        let nested = nf4_nested(64).planes(&[1024, 64]);
        assert_eq!([nested.scales.bytes, nested.outer.bytes, nested.tensor.bytes], [1024, 16, 4 + 1024]);
        let text = nf4_nested(64).to_string();
        assert_eq!(text, "nf4 flat:64 mapped:256");
        let transposed = Packing { transposed: true, ..MXFP4 };
        assert_eq!(transposed.to_string(), "e2m1 row:32 e8m0 transposed");
        assert_eq!(transposed.in_memory(&[2, 64, 5]), [2, 5, 64]);
        assert_eq!((transposed.blocks(&[2, 64, 5]), MXFP4.blocks(&[2, 64, 5])), (20, 128));
        let others = [fp8(Small::E5M2), fp8_tiles(128), NVFP4, NVFP4_TILES, MXFP4, nf4(512), nf4_nested(64)];
        for packing in others.into_iter().chain([transposed]) {
            assert_eq!(packing.to_string().parse(), Ok(packing));
        }
        for wrong in [
            "",
            "nf4",
            "nf4 flat:0 f32",
            "nf4 flat:64 f16",
            "nf4 flat:64 f32 ",
            "nf4 flat:64 f32 transposed ",
            "int8 tensor f32",
        ] {
            assert!(wrong.parse::<Packing>().is_err(), "{wrong}");
        }
        assert_eq!(Storage::Plain(DType::BF16).bytes(&[3, 5]), 30);
        assert_eq!(bytes(nf4(64), &[0, 33]), 0);
    }
}
