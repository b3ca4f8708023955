//! The inner GEMM kernel: one tile of the result in registers, operands from packed panels. Knows neither the matrices
//! nor how the work is split.
//!
//! An f32 tile is a chain of fused multiply-adds per element, in the order of the units: AVX2 and AVX-512 give the same
//! bits. A bf16 tile adds the two products of a pair to the f32 sum with `vdpbf16ps`: products are exact, the processor
//! defines how the pair is rounded, and denormal operands and results count as zero. A machine without that instruction
//! takes another path and differs in the last bits.
#![allow(unsafe_code, reason = "vector instructions, called where they were found")]

use super::level::Level;
use super::panels::Unit;

/// Number of rows of a tile.
pub const HEIGHT: usize = 8;
/// Maximal number of columns of a tile: three vectors.
pub const WIDTH: usize = 48;
/// Units of one chain of additions: longer sums are made of several, which keeps the accuracy of short ones.
pub const CHAIN: usize = 512;
/// Number of elements of one vector.
const LANES: usize = 16;

/// A tile of the result, rows of [`WIDTH`] elements.
#[repr(align(64))]
pub struct Tile(pub [f32; HEIGHT * WIDTH]);

impl Default for Tile {
    fn default() -> Self {
        Tile([0.0; HEIGHT * WIDTH])
    }
}

/// Proof that this processor multiplies tiles of T.
#[derive(Clone, Copy, Debug)]
pub struct Tiles<T> {
    element: std::marker::PhantomData<T>,
}

impl<T: Unit> Tiles<T> {
    /// `None` where the instructions are missing.
    pub fn here() -> Option<Self> {
        let needed = if T::DEPTH == 2 { Level::Avx512Bf16 } else { Level::Avx2 };
        (Level::here() >= needed).then_some(Tiles { element: std::marker::PhantomData })
    }

    /// Width of a panel that holds this many columns: whole vectors.
    pub fn panel_width(columns: usize) -> usize {
        columns.min(WIDTH).next_multiple_of(LANES)
    }

    /// c += scale·a·b, where a is a panel of [`HEIGHT`] lines and b one of `width` lines, a multiple of 16 of at most
    /// [`WIDTH`], with the same number of units. Panics when they do not fit.
    pub fn multiply(self, a: &[u32], b: &[u32], width: usize, scale: f32, c: &mut Tile) {
        assert!(a.len() * width == b.len() * HEIGHT, "panels of different lengths");
        for (a, b) in a.chunks(CHAIN * HEIGHT).zip(b.chunks(CHAIN * width)) {
            self.chain(a, b, width, scale, c);
        }
    }

    /// The same with one chain of additions for each element, whatever its length.
    pub fn chain(self, a: &[u32], b: &[u32], width: usize, scale: f32, c: &mut Tile) {
        let units = a.len() / HEIGHT;
        assert!(a.len() == units * HEIGHT && b.len() == units * width, "a panel holds whole units");
        let vectors = width / LANES;
        assert!(
            width.is_multiple_of(LANES) && (1..=WIDTH / LANES).contains(&vectors),
            "a panel is one to three vectors wide, not {width} lines"
        );
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `self` proves the instructions; the panels were checked to have `units` units of
        // HEIGHT and of `width` lines, and the tile has room for three vectors in each row.
        unsafe {
            let (a, b, c) = (a.as_ptr(), b.as_ptr(), c.0.as_mut_ptr());
            if T::DEPTH == 1 && Level::here() < Level::Avx512 {
                return x86::halves(units, width, a, b, scale, c);
            }
            match (T::DEPTH, vectors) {
                (1, 1) => x86::single::<1>(units, a, b, scale, c),
                (1, 2) => x86::single::<2>(units, a, b, scale, c),
                (1, 3) => x86::single::<3>(units, a, b, scale, c),
                (_, 1) => x86::paired::<1>(units, a, b, scale, c),
                (_, 2) => x86::paired::<2>(units, a, b, scale, c),
                (_, 3) => x86::paired::<3>(units, a, b, scale, c),
                _ => unreachable!("the width was checked"),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("nothing proves instructions of another architecture: {scale} {}", c.0[0]);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{HEIGHT, LANES, WIDTH};

    macro_rules! kernel {
        ($name:ident, $features:literal, $line:ident => $broadcast:expr, $lines:ident => $load:expr, $step:expr) => {
            #[target_feature(enable = $features)]
            pub unsafe fn $name<const VECTORS: usize>(
                units: usize,
                a: *const u32,
                b: *const u32,
                scale: f32,
                c: *mut f32,
            ) {
                let mut sums = [[_mm512_setzero_ps(); VECTORS]; HEIGHT];
                // SAFETY: the caller's promise: `units` units of HEIGHT and of VECTORS vectors.
                unsafe {
                    for p in 0..units {
                        let row = b.add(p * VECTORS * LANES);
                        let right: [_; VECTORS] = std::array::from_fn(|j| {
                            let $lines = row.add(j * LANES);
                            $load
                        });
                        for (i, sums) in sums.iter_mut().enumerate() {
                            let $line = a.add(p * HEIGHT + i);
                            let left = $broadcast;
                            for (sum, right) in sums.iter_mut().zip(right) {
                                *sum = $step(*sum, left, right);
                            }
                        }
                    }
                    let scale = _mm512_set1_ps(scale);
                    for (i, sums) in sums.iter().enumerate() {
                        for (j, sum) in sums.iter().enumerate() {
                            let to = c.add(i * WIDTH + j * LANES);
                            _mm512_storeu_ps(to, _mm512_fmadd_ps(scale, *sum, _mm512_loadu_ps(to)));
                        }
                    }
                }
            }
        };
    }

    kernel!(single, "avx512f,avx512bw,avx512dq,avx512vl", x => _mm512_set1_ps(x.cast::<f32>().read()),
        x => _mm512_loadu_ps(x.cast()), |sum, left, right| _mm512_fmadd_ps(left, right, sum));
    kernel!(paired, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16",
        x => std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(x.cast::<i32>().read())),
        x => std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(x.cast())),
        |sum, left, right| _mm512_dpbf16_ps(sum, left, right));

    /// The same f32 sums with AVX2: its 16 registers hold the sums of four rows and 16 columns.
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn halves(units: usize, width: usize, a: *const u32, b: *const u32, scale: f32, c: *mut f32) {
        const ROWS: usize = 4;
        const HALF: usize = LANES / 2;
        for (column, first) in (0..width).step_by(LANES).flat_map(|j| (0..HEIGHT).step_by(ROWS).map(move |i| (j, i))) {
            let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
            // SAFETY: the caller's promise: `units` units of HEIGHT and of `width`, a multiple of LANES up to WIDTH.
            unsafe {
                for p in 0..units {
                    let right = b.add(p * width + column).cast::<f32>();
                    let right = [_mm256_loadu_ps(right), _mm256_loadu_ps(right.add(HALF))];
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let left = _mm256_set1_ps(a.add(p * HEIGHT + first + i).cast::<f32>().read());
                        sums[0] = _mm256_fmadd_ps(left, right[0], sums[0]);
                        sums[1] = _mm256_fmadd_ps(left, right[1], sums[1]);
                    }
                }
                let scale = _mm256_set1_ps(scale);
                for (i, sums) in sums.iter().enumerate() {
                    for (j, sum) in sums.iter().enumerate() {
                        let to = c.add((first + i) * WIDTH + column + j * HALF);
                        _mm256_storeu_ps(to, _mm256_fmadd_ps(scale, *sum, _mm256_loadu_ps(to)));
                    }
                }
            }
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    type Kernel = unsafe fn(usize, *const u32, *const u32, f32, *mut f32);

    #[test]
    fn vector_instructions_give_the_bits_of_fused_chains() {
        let number = |i: usize, seed: u32| ((i as u32 ^ seed).wrapping_mul(2654435761) >> 8) as f32 / 8e6 - 1.0;
        let panel = |n: usize, seed| -> Vec<u32> { (0..n).map(|i| number(i, seed).to_bits()).collect() };
        for (units, width) in [(0, 16), (1, 48), (7, 32), (512, 16), (512, 48)] {
            let (a, b) = (panel(units * HEIGHT, 1), panel(units * width, 2));
            let (start, scale) = (Tile(std::array::from_fn(|i| number(i, 3))), 0.3);
            let mut chains = start.0;
            for (i, j) in (0..HEIGHT).flat_map(|i| (0..width).map(move |j| (i, j))) {
                let of = |p: usize| (f32::from_bits(a[p * HEIGHT + i]), f32::from_bits(b[p * width + j]));
                let sum = (0..units).map(of).fold(0.0, |sum, (left, right)| left.mul_add(right, sum));
                chains[i * WIDTH + j] = f32::mul_add(scale, sum, chains[i * WIDTH + j]);
            }
            let check = |run: &dyn Fn(*mut f32)| {
                let mut found = start.0;
                run(found.as_mut_ptr());
                assert_eq!(found.map(f32::to_bits), chains.map(f32::to_bits), "{units} units of {width} columns");
            };
            // SAFETY: the processor's level is asked first; the panels have this number of units and columns.
            if Level::here() >= Level::Avx2 {
                check(&|c| unsafe { x86::halves(units, width, a.as_ptr(), b.as_ptr(), scale, c) });
            }
            if Level::here() >= Level::Avx512 {
                let kernels: [Kernel; 3] = [x86::single::<1>, x86::single::<2>, x86::single::<3>];
                check(&|c| unsafe { kernels[width / LANES - 1](units, a.as_ptr(), b.as_ptr(), scale, c) });
            }
        }
    }
}
