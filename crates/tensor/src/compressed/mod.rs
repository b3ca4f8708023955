//! Weights in the number formats of compressed-tensors: scales, zero points and codes by its rules, to the bit. Every step is
//! rounded to the element type of the weight; codes are made by a division in f32. Does not know how files lay them out.

mod scales;

pub use scales::{Range, global_scale};

use crate::attrs::Attrs;
use crate::dtype::DType;
use crate::small::{Small, e2m1_code, e4m3_code};
use crate::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

/// The kind of a weight's codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codes {
    /// Whole numbers of 4 or 8 bits in two's complement; with a zero point where they are not symmetric.
    Int { bits: u32, symmetric: bool },
    /// E4M3.
    Fp8,
    /// E2M1 with an E4M3 scale for each group and one f32 for the tensor.
    Nvfp4,
    /// E2M1 with a power of two for each group.
    Mxfp4,
}

impl Codes {
    /// The kinds by the names that attributes of operations have for them.
    pub const NAMES: [(&'static str, Codes); 7] = [
        ("int4", Codes::Int { bits: 4, symmetric: true }),
        ("int4_asymmetric", Codes::Int { bits: 4, symmetric: false }),
        ("int8", Codes::Int { bits: 8, symmetric: true }),
        ("int8_asymmetric", Codes::Int { bits: 8, symmetric: false }),
        ("fp8", Codes::Fp8),
        ("nvfp4", Codes::Nvfp4),
        ("mxfp4", Codes::Mxfp4),
    ];

    /// Returns the codes of a name.
    pub fn named(name: &str) -> Option<Codes> {
        Codes::NAMES.iter().find(|(known, _)| *known == name).map(|(_, codes)| *codes)
    }

    /// The least and the largest whole number; the range of values of a float.
    pub fn range(self) -> (f32, f32) {
        match self {
            Codes::Int { bits, .. } => (-(2f32.powi(bits as i32 - 1)), 2f32.powi(bits as i32 - 1) - 1.0),
            Codes::Fp8 => (-Small::E4M3.largest(), Small::E4M3.largest()),
            Codes::Nvfp4 | Codes::Mxfp4 => (-Small::E2M1.largest(), Small::E2M1.largest()),
        }
    }

    /// True if there are zero points.
    pub const fn has_zeros(self) -> bool {
        matches!(self, Codes::Int { symmetric: false, .. })
    }
}

/// The elements of a matrix [outputs, inputs] that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extent {
    Tensor,
    /// A row: an output channel.
    Row,
    /// Elements of a row, whose number is a multiple of this.
    Group(usize),
    /// Rows by columns; smaller at the edges.
    Tile(usize, usize),
}

impl Extent {
    /// Rows and columns of a block in a matrix of this many.
    pub fn block(self, [rows, columns]: [usize; 2]) -> [usize; 2] {
        match self {
            Extent::Tensor => [rows, columns],
            Extent::Row => [1, columns],
            Extent::Group(n) => [1, n],
            Extent::Tile(r, c) => [r, c],
        }
    }

    /// Rows and columns of the matrix of scales.
    pub fn scales(self, shape: [usize; 2]) -> [usize; 2] {
        let block = self.block(shape);
        [shape[0].div_ceil(block[0].max(1)), shape[1].div_ceil(block[1].max(1))]
    }

    /// True if a matrix of this many columns is whole blocks where the format demands it.
    pub const fn fits(self, columns: usize) -> bool {
        match self {
            Extent::Group(n) => columns.is_multiple_of(n),
            Extent::Tensor | Extent::Row | Extent::Tile(..) => true,
        }
    }
}

/// A number format of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    pub codes: Codes,
    pub extent: Extent,
}

/// Returns a number rounded to a floating-point type.
pub fn round_to(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::BF16 => bf16_to_f32(f32_to_bf16(x)),
        DType::F16 => f16_to_f32(f32_to_f16(x)),
        _ => x,
    }
}

/// The scales of a matrix or of rows of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Scales {
    /// The factors of the values of codes, a row of blocks after the other.
    pub factors: Vec<f32>,
    /// Zero points of the same blocks; empty where the form has none.
    pub zeros: Vec<i8>,
    /// The codes of scales that are stored as such: E4M3 of NVFP4, exponents of MXFP4.
    pub codes: Vec<u8>,
}

impl Form {
    /// Returns the attributes of operations that name it: `codes`, and `block` unless the whole tensor shares a scale.
    pub fn attrs(&self) -> Attrs {
        let name = Codes::NAMES.iter().find(|(_, codes)| *codes == self.codes).map(|(name, _)| *name);
        let attrs = Attrs::new().with("codes", name.expect("a kind of codes that is listed"));
        match self.extent {
            Extent::Tensor => attrs,
            Extent::Row => attrs.with("block", vec![1, 0usize]),
            Extent::Group(n) => attrs.with("block", vec![1, n]),
            Extent::Tile(rows, columns) => attrs.with("block", vec![rows, columns]),
        }
    }

    /// The scales of whole rows of blocks. `x` holds rows of `columns` elements; `whole` is the range of all that shares a
    /// scale beyond these rows: of the tensor, or of the matrices that share the scale of NVFP4. `dtype`: the type of the
    /// weight, which every step is rounded to.
    pub fn scales(&self, x: &[f32], columns: usize, dtype: DType, whole: Range) -> Scales {
        match self.extent {
            Extent::Tensor => self.scales_of(&[whole], dtype, whole),
            _ => self.scales_of(&self.ranges(x, columns), dtype, whole),
        }
    }

    /// The ranges of blocks of the same rows.
    pub fn ranges(&self, x: &[f32], columns: usize) -> Vec<Range> {
        let shape = [x.len() / columns.max(1), columns];
        let [block_rows, block_columns] = self.extent.block(shape);
        let across = self.extent.scales(shape)[1];
        let mut found = Vec::new();
        for band in x.chunks((block_rows * columns).max(1)) {
            for block in 0..across {
                let columns_of = block * block_columns..columns.min((block + 1) * block_columns);
                let of_row = |row: &[f32]| Range::of(&row[columns_of.clone()]);
                found.push(band.chunks(columns).map(of_row).fold(Range::default(), Range::with));
            }
        }
        found
    }

    /// The scales of blocks by their ranges.
    pub fn scales_of(&self, ranges: &[Range], dtype: DType, whole: Range) -> Scales {
        let mut made = Scales { factors: Vec::new(), zeros: Vec::new(), codes: Vec::new() };
        for range in ranges {
            let scale = scales::scale(self.codes, *range, dtype, whole);
            made.factors.push(scale.factor);
            made.zeros.extend(scale.zero);
            made.codes.extend(scale.code);
        }
        made
    }

    /// The differences of a block's numbers from their values with a scale of this range, each to a power, summed. The scale of
    /// NVFP4 counts before it becomes a code.
    pub fn error(&self, x: &[f32], range: Range, dtype: DType, power: f32) -> f32 {
        let scale = scales::scale(self.codes, range, dtype, range);
        let factor = match self.codes {
            Codes::Nvfp4 => scales::plain_factor(range, dtype),
            _ => scale.factor,
        };
        let zero = scale.zero.unwrap_or(0);
        let of = |x: &f32| (x - self.value(self.code(*x, factor, zero), factor, zero)).abs().powf(power);
        x.iter().map(of).sum()
    }

    /// The codes of the same rows, one to a byte.
    pub fn encode(&self, x: &[f32], columns: usize, scales: &Scales) -> Vec<u8> {
        let mut codes = Vec::with_capacity(x.len());
        self.each(x.len(), columns, |index, block| {
            codes.push(self.code(x[index], scales.factors[block], scales.zeros.get(block).copied().unwrap_or(0)));
        });
        codes
    }

    /// The values of codes in f32, before they are rounded to the type of the weight.
    pub fn decode(&self, codes: &[u8], columns: usize, scales: &Scales) -> Vec<f32> {
        let mut values = Vec::with_capacity(codes.len());
        self.each(codes.len(), columns, |index, block| {
            let zero = scales.zeros.get(block).copied().unwrap_or(0);
            values.push(self.value(codes[index], scales.factors[block], zero));
        });
        values
    }

    /// The values of codes in the order in which readers compute them; `global`: the scale of scales of NVFP4, which comes last.
    pub fn values(&self, codes: &[u8], columns: usize, scales: &Scales, global: f32) -> Vec<f32> {
        if self.codes != Codes::Nvfp4 {
            return self.decode(codes, columns, scales);
        }
        let mut values = Vec::with_capacity(codes.len());
        self.each(codes.len(), columns, |index, block| {
            values.push(Small::E2M1.value(codes[index]) * Small::E4M3.value(scales.codes[block]) / global);
        });
        values
    }

    fn each(&self, elements: usize, columns: usize, mut visit: impl FnMut(usize, usize)) {
        let shape = [elements / columns.max(1), columns];
        let [block_rows, block_columns] = self.extent.block(shape);
        let across = self.extent.scales(shape)[1];
        for index in 0..elements {
            let (row, column) = (index / columns, index % columns);
            visit(index, row / block_rows * across + column / block_columns);
        }
    }

    /// The code of a number. Divided in f32, clamped, then rounded to nearest, ties to even.
    #[inline]
    pub fn code(&self, x: f32, factor: f32, zero: i8) -> u8 {
        let (least, most) = self.codes.range();
        match self.codes {
            Codes::Int { .. } => {
                // NaN has no code, and is refused before: `as` would make it 0.
                (x / factor + f32::from(zero)).clamp(least, most).round_ties_even() as i8 as u8
            }
            Codes::Fp8 => e4m3_code((x / factor).clamp(least, most)),
            Codes::Nvfp4 | Codes::Mxfp4 => e2m1_code(x / factor),
        }
    }

    /// The value of a code.
    #[inline]
    pub fn value(&self, code: u8, factor: f32, zero: i8) -> f32 {
        match self.codes {
            Codes::Int { .. } => (f32::from(code as i8) - f32::from(zero)) * factor,
            Codes::Fp8 => Small::E4M3.value(code) * factor,
            Codes::Nvfp4 | Codes::Mxfp4 => Small::E2M1.value(code) * factor,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extreme_of_a_symmetric_group_is_a_tie_that_goes_to_the_even_code() {
        let form = Form { codes: Codes::Int { bits: 4, symmetric: true }, extent: Extent::Group(4) };
        let x = [7.5, -7.5, 0.5, 1.5, 0.0, 0.0, 0.0, 0.0];
        let scales = form.scales(&x, 4, DType::F32, Range::default());
        assert_eq!(scales.factors, [1.0, f32::EPSILON]);
        let codes: Vec<i8> = form.encode(&x, 4, &scales).into_iter().map(|code| code as i8).collect();
        assert_eq!(codes, [7, -8, 0, 2, 0, 0, 0, 0]);
    }

    #[test]
    fn one_sided_groups_use_all_codes_with_a_zero_point() {
        let form = Form { codes: Codes::Int { bits: 4, symmetric: false }, extent: Extent::Row };
        let x = [0.0, 1.0, 2.0, 15.0];
        let scales = form.scales(&x, 4, DType::F32, Range::default());
        assert_eq!((scales.factors[0], scales.zeros[0]), (1.0, -8));
        assert_eq!(form.decode(&form.encode(&x, 4, &scales), 4, &scales), x);
    }

    #[test]
    fn tiles_at_the_edges_are_smaller() {
        let form = Form { codes: Codes::Fp8, extent: Extent::Tile(2, 3) };
        let x: Vec<f32> = (0..15).map(|i| i as f32).collect();
        let scales = form.scales(&x, 5, DType::F32, Range::default());
        let largest = [7.0f32, 9.0, 12.0, 14.0];
        assert_eq!(scales.factors, largest.map(|x| x / 448.0));
    }

    #[test]
    fn exponents_leave_room_for_what_rounds_up() {
        let form = Form { codes: Codes::Mxfp4, extent: Extent::Group(1) };
        let scales = form.scales(&[6.0, 6.99, 7.0, 8.0, 0.0], 5, DType::F32, Range::default());
        assert_eq!(scales.codes, [127, 127, 128, 128, 0]);
    }
}
