//! Sums over contiguous elements in a fixed order that the compiler can vectorise: the inner loops of
//! the matrix and attention references.

use crate::real::Real;

/// Independent partial sums of a dot product.
const LANES: usize = 16;

/// Σ aᵢ·bᵢ: sixteen interleaved partial sums, added pairwise, then the rest.
#[inline]
pub fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    debug_assert_eq!(a.len(), b.len(), "a dot product needs equal lengths");
    let mut lanes = [T::default(); LANES];
    let (a_blocks, b_blocks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_blocks.remainder().iter().zip(b_blocks.remainder());
    let rest: T = rest.map(|(a, b)| *a * *b).sum();
    for (a, b) in a_blocks.zip(b_blocks) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = lanes[lane] + lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0] + rest
}

/// y += a·x
#[inline]
pub fn add_scaled<T: Real>(y: &mut [T], a: T, x: &[T]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * *x;
    }
}
