//! The inner GEMM kernel: one tile of the result in registers, operands from packed panels. Knows neither the matrices
//! nor how the work is split.
//!
//! An f32 tile is a chain of fused multiply-adds per element, in the order of the units: AVX2 and AVX-512 give the same
//! bits. A bf16 tile adds the two
//! products of a pair to the f32 sum with `vdpbf16ps`: products are exact, the processor defines how the pair is
//! rounded, and denormal operands and results count as zero. A machine without that instruction takes another path and
//! differs in the last bits.
#![allow(unsafe_code, reason = "vector instructions, called where they were found")]

use super::level::Level;
use super::panels::Unit;

/// Number of rows of a tile.
pub const HEIGHT: usize = 8;
/// Maximal number of columns of a tile: three vectors.
pub const WIDTH: usize = 48;
/// Units of one chain of additions: longer sums are made of several, which keeps the accuracy of short ones.
const CHAIN: usize = 512;
/// Number of elements of one vector.
const LANES: usize = 16;

const WRONG_WIDTH: &str = "a panel is one to three vectors wide";

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

    fn chain(self, a: &[u32], b: &[u32], width: usize, scale: f32, c: &mut Tile) {
        let units = a.len() / HEIGHT;
        assert!(a.len() == units * HEIGHT && b.len() == units * width, "a panel holds whole units");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `self` proves the instructions; the panels were checked to have `units` units of
        // HEIGHT and of `width` lines, and the tile has room for three vectors in each row.
        unsafe {
            let (a, b, c) = (a.as_ptr(), b.as_ptr(), c.0.as_mut_ptr());
            if T::DEPTH == 1 && Level::here() < Level::Avx512 {
                assert!((1..=WIDTH / LANES).contains(&(width / LANES)), "{WRONG_WIDTH}, not {width} lines");
                return x86::halves(units, width, a, b, scale, c);
            }
            match (T::DEPTH, width / LANES) {
                (1, 1) => x86::single::<1>(units, a, b, scale, c),
                (1, 2) => x86::single::<2>(units, a, b, scale, c),
                (1, 3) => x86::single::<3>(units, a, b, scale, c),
                (_, 1) => x86::paired::<1>(units, a, b, scale, c),
                (_, 2) => x86::paired::<2>(units, a, b, scale, c),
                (_, 3) => x86::paired::<3>(units, a, b, scale, c),
                _ => panic!("{WRONG_WIDTH}, not {width} lines"),
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
