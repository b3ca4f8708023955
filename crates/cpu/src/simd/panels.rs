//! Packing for the tile kernels: lines of a matrix, interleaved along the axis of summation. Does not know which
//! operand it packs.
//!
//! A panel of width w is [units][w]. A unit is 32 bits: one f32, or a pair of bf16 that are adjacent along the summed
//! axis, the first in the low half.
#![allow(unsafe_code, reason = "transposition of blocks in registers")]

use ops::{Loop, vectorised};

use super::level::Level;
use super::matrix::Matrix;

/// An element type of panels.
pub trait Unit: Copy + Send + Sync {
    /// Number of elements of one unit.
    const DEPTH: usize;

    /// A unit of up to `DEPTH` elements; those that are missing are zero.
    fn join(first: Self, second: Option<Self>) -> u32;
}

impl Unit for f32 {
    const DEPTH: usize = 1;

    #[inline(always)]
    fn join(first: f32, _second: Option<f32>) -> u32 {
        first.to_bits()
    }
}

/// Elements of bf16, stored as its bits.
impl Unit for u16 {
    const DEPTH: usize = 2;

    #[inline(always)]
    fn join(first: u16, second: Option<u16>) -> u32 {
        first as u32 | (second.unwrap_or(0) as u32) << 16
    }
}

/// Number of units of `k` elements.
pub fn units_of<T: Unit>(k: usize) -> usize {
    k.div_ceil(T::DEPTH)
}

/// Packs the rows of `lines` as the lines of a panel of width `out.len() / units`; lines beyond the rows are
/// zero. Panics when there are more rows than that.
pub fn pack<T: Unit>(lines: Matrix<'_, T>, out: &mut [u32]) {
    let units = units_of::<T>(lines.columns);
    if units == 0 {
        return;
    }
    let width = out.len() / units;
    assert!(lines.rows <= width && width * units == out.len(), "{} lines in a panel of {width}", lines.rows);
    if lines.rows < width {
        out.fill(0);
    }
    if lines.column_stride == 1 && lines.row_stride != 1 {
        across(lines, width, out);
    } else {
        vectorised(Along, (lines, width, out));
    }
}

/// A copy with any strides; fast where the lines are side by side.
struct Along;

impl<'a, T: Unit> Loop<(Matrix<'a, T>, usize, &'a mut [u32])> for Along {
    type Output = ();

    #[inline(always)]
    fn run((m, width, out): (Matrix<'a, T>, usize, &'a mut [u32])) {
        for (p, out) in out.chunks_exact_mut(width).enumerate() {
            let first = &m.values()[p * T::DEPTH * m.column_stride..];
            let paired = T::DEPTH == 2 && p * T::DEPTH + 1 < m.columns;
            let second = if paired { &m.values()[(p * T::DEPTH + 1) * m.column_stride..] } else { first };
            let out = &mut out[..m.rows];
            if m.row_stride == 1 {
                let lines = out.iter_mut().zip(&first[..m.rows]).zip(&second[..m.rows]);
                for ((out, first), second) in lines {
                    *out = T::join(*first, paired.then_some(*second));
                }
            } else {
                for (i, out) in out.iter_mut().enumerate() {
                    *out = T::join(first[i * m.row_stride], paired.then(|| second[i * m.row_stride]));
                }
            }
        }
    }
}

/// Packs lines whose elements are adjacent: blocks of 8 lines and 8 units are transposed in registers.
fn across<T: Unit>(lines: Matrix<'_, T>, width: usize, out: &mut [u32]) {
    let whole = lines.columns / T::DEPTH / 8 * 8;
    let turned = if Level::here() >= Level::Avx2 { lines.rows / 8 * 8 } else { 0 };
    #[cfg(target_arch = "x86_64")]
    for first in (0..turned).step_by(8) {
        let part = lines.block(first..first + 8, 0..whole * T::DEPTH);
        assert!(whole == 0 || (whole - 1) * width + first + 8 <= out.len(), "a panel ends before its lines");
        // SAFETY: the processor has AVX2. Eight lines of `whole` units are read, which `block` has
        // checked; units [0, whole) of the eight lines from `first` on are written: checked above.
        unsafe { turn::<T>(part, width, whole, out.as_mut_ptr().add(first)) }
    }
    for line in 0..lines.rows {
        let start = if line < turned { whole } else { 0 };
        let row = &lines.values()[line * lines.row_stride..][..lines.columns];
        for (p, pair) in row.chunks(T::DEPTH).enumerate().skip(start) {
            out[p * width + line] = T::join(pair[0], pair.get(1).copied());
        }
    }
}

/// Writes eight lines of `units` units (a multiple of 8) as a strip of a panel of this width.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn turn<T: Unit>(lines: Matrix<'_, T>, width: usize, units: usize, out: *mut u32) {
    use std::arch::x86_64::*;
    let start = lines.values().as_ptr();
    for p in (0..units).step_by(8) {
        // SAFETY: the caller's promise; loads and stores need no alignment.
        unsafe {
            let load = |i: usize| _mm256_loadu_ps(start.add(i * lines.row_stride + p * T::DEPTH).cast());
            let x: [__m256; 8] = [load(0), load(1), load(2), load(3), load(4), load(5), load(6), load(7)];
            let pairs = |a, b| (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let (a0, a1) = pairs(x[0], x[1]);
            let (a2, a3) = pairs(x[2], x[3]);
            let (a4, a5) = pairs(x[4], x[5]);
            let (a6, a7) = pairs(x[6], x[7]);
            let low = |a, b| _mm256_shuffle_ps::<0x44>(a, b);
            let high = |a, b| _mm256_shuffle_ps::<0xee>(a, b);
            let upper = [low(a0, a2), high(a0, a2), low(a1, a3), high(a1, a3)];
            let lower = [low(a4, a6), high(a4, a6), low(a5, a7), high(a5, a7)];
            for i in 0..4 {
                let near = _mm256_permute2f128_ps::<0x20>(upper[i], lower[i]);
                let far = _mm256_permute2f128_ps::<0x31>(upper[i], lower[i]);
                _mm256_storeu_ps(out.add((p + i) * width).cast(), near);
                _mm256_storeu_ps(out.add((p + i + 4) * width).cast(), far);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<T: Unit>(lines: Matrix<'_, T>, at: impl Fn(usize, usize) -> T, rows: usize, k: usize, width: usize) {
        let units = units_of::<T>(k);
        let mut out = vec![7; units * width];
        pack(lines, &mut out);
        for (p, out) in out.chunks(width).enumerate() {
            for (line, unit) in out.iter().enumerate() {
                let second = (T::DEPTH == 2 && 2 * p + 1 < k).then(|| at(line.min(rows - 1), 2 * p + 1));
                let expected = if line < rows { T::join(at(line, p * T::DEPTH), second) } else { 0 };
                assert_eq!(*unit, expected, "line {line}, unit {p} of {rows}×{k} in {width}");
            }
        }
    }

    #[test]
    fn both_directions_pack_every_line() {
        for (rows, k, width) in [(8, 16, 8), (5, 33, 8), (48, 40, 48), (19, 7, 32), (1, 1, 16)] {
            let narrow: Vec<u16> = (0..rows * k).map(|i| i as u16 + 1).collect();
            let wide: Vec<f32> = (0..rows * k).map(|i| i as f32 + 1.0).collect();
            check(Matrix::new(&narrow, rows, k, k), |i, p| narrow[i * k + p], rows, k, width);
            check(Matrix::new(&wide, rows, k, k), |i, p| wide[i * k + p], rows, k, width);
            let turned = Matrix::new(&narrow, k, rows, rows).transposed_if(true);
            check(turned, |i, p| narrow[p * rows + i], rows, k, width);
            let turned = Matrix::new(&wide, k, rows, rows).transposed_if(true);
            check(turned, |i, p| wide[p * rows + i], rows, k, width);
        }
    }
}
