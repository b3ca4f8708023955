//! Tensors as codes: of eight bits with one power of two for each tensor, of four bits with scales for blocks of
//! elements. The own magnitude of a tensor, its codes, products of codes, the numbers of codes, and the histories of
//! magnitudes from which the next step's powers follow.
//!
//! Does not know which tensors are quantised.

mod amax;
mod blocks;
mod codes;
pub mod fake;
pub(crate) mod forms;
mod history;
mod numbers;
mod product;
mod rotate;
mod rounding;
mod transpose;

use graph::ValueType;
use program::TensorRef;
use rayon::prelude::*;
use tensor::small::{e4m3_code, scaling_exponent};
use tensor::{Attrs, DType};

use crate::op::Attribute;
use crate::real::Real;

pub use amax::{OwnAmax, PARTS};
pub use blocks::QuantiseBlocks;
pub use codes::{Quantise, padded_rows};
pub use fake::FakeQuantise;
pub use history::AmaxHistory;
pub use numbers::Decode;
pub(crate) use numbers::is_codes;
pub use product::MatmulCodes;
pub use rotate::Rotate;
pub use transpose::TransposeCodes;

pub(crate) const CODES_HEADER: (&str, &str) = ("codes.cuh", include_str!("codes.cuh"));

const HEADERS: &[(&str, &str)] = &[("types.cuh", include_str!("../cuda/types.cuh")), CODES_HEADER];

/// The header of kernels that transpose tiles of codes, the rows and columns of a tile, and its threads.
const TRANSPOSE_HEADER: (&str, &str) = ("transpose.cuh", include_str!("transpose.cuh"));
const TILE: usize = 128;
const TILE_THREADS: u32 = 256;

/// The headers of kernels with random numbers.
const SMALL_HEADERS: &[(&str, &str)] = &[HEADERS[0], HEADERS[1], ("philox.cuh", include_str!("../cuda/philox.cuh"))];

/// The headers of kernels for operands of units of four bits.
const OPERAND_HEADERS: &[(&str, &str)] =
    &[SMALL_HEADERS[0], SMALL_HEADERS[1], SMALL_HEADERS[2], ("operand.cuh", include_str!("operand.cuh"))];

/// Rows and columns with all axes but the last folded.
fn matrix(shape: &[usize]) -> (usize, usize) {
    let columns = *shape.last().expect("tensors have axes");
    (shape.iter().rev().skip(1).product(), columns)
}

const GROUPS: Attribute = Attribute {
    name: "groups",
    kind: "int?",
    doc: "G, matrices one after another, each scaled by itself; 1 if absent",
};

fn groups_of(attrs: &Attrs) -> Result<usize, String> {
    match attrs.get("groups") {
        Some(_) => attrs.size("groups").map_err(|e| e.0),
        None => Ok(1),
    }
}

/// Checks that a tensor of known extents divides into `groups` stacked matrices.
fn check_groups(x: &ValueType, groups: usize) -> Result<(), String> {
    let rows: usize = x.extents().map_or(0, |shape| matrix(&shape).0);
    match groups > 0 && rows.is_multiple_of(groups) {
        true => Ok(()),
        false => Err(format!("{rows} rows are not those of {groups} matrices")),
    }
}

/// True if every 16 neighbors of a row can be read as two packs of 16 bytes.
fn in_packs(x: &TensorRef) -> bool {
    let steps = x.shape.iter().zip(&x.strides).rev().skip(1);
    let rows = steps.filter(|(extent, _)| **extent != 1).all(|(_, stride)| stride.is_multiple_of(8));
    x.dtype == DType::BF16 && x.offset.is_multiple_of(16) && rows
}

/// The format that an attribute names.
fn format_of(attrs: &Attrs) -> Result<DType, String> {
    let name = attrs.text("format").map_err(|e| e.0)?;
    let dtype = name.parse::<DType>().ok().filter(|dtype| dtype.small().is_some());
    dtype.ok_or_else(|| format!("`format` is `{name}`, expected e4m3 or e5m2"))
}

/// 2^k for the largest k that takes an `amax` to 1.75·2^`top` at most.
pub(crate) fn factor(amax: f32, top: i64) -> f32 {
    2f64.powi(scaling_exponent(amax, top as i32)) as f32
}

/// Returns the count of numbers that are not 0, and of those of them that a power of two makes 0 in E4M3.
pub(crate) fn counts<T: Real>(x: &[T], power: f32) -> [usize; 2] {
    // Decided by the code itself: values of at most half the smallest number become 0.
    let flushed = |x: f32| x != 0.0 && e4m3_code(x * power) & 0x7f == 0;
    let count = |what: &(dyn Fn(f32) -> bool + Sync)| x.par_iter().filter(|x| what(x.to_f32())).count();
    [count(&|x| x != 0.0), count(&flushed)]
}

/// The larger of two magnitudes by their bits: NaN above infinity above what is finite.
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    f32::from_bits(a.to_bits().max(b.to_bits() & 0x7fff_ffff))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn magnitudes_are_ordered_by_their_bits() {
        let all = [0.0, -1.0, 2.0, f32::NEG_INFINITY, f32::NAN];
        for pair in all.windows(2) {
            assert_eq!(larger(pair[0].abs(), pair[1]).to_bits(), pair[1].abs().to_bits());
            assert_eq!(larger(pair[1].abs(), pair[0]).to_bits(), pair[1].abs().to_bits());
        }
        assert_eq!((factor(448.0, 8), factor(449.0, 8), factor(0.0, 8)), (1.0, 0.5, 1.0));
    }
}
