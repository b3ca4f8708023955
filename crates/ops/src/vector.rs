//! Vectorizable loops over contiguous elements, and sums in a fixed order: the inner loops of the references. Does not
//! know what they are part of.

use crate::real::Real;

/// Independent partial sums of a reduction.
const LANES: usize = 16;
/// Terms of one partial sum: long rows keep the accuracy of short ones.
const TERMS: usize = 64 * LANES;

/// A loop for [`vectorised`]. `run` and the functions that it calls must be `#[inline(always)]`: only what the
/// compiler takes into it is compiled for the processor's vector instructions. A closure, or a function passed
/// as a value, is not.
pub trait Loop<A> {
    type Output;

    fn run(arguments: A) -> Self::Output;
}

/// A loop with its arguments, to be run where the instructions are known.
struct Task<L, A>(L, A);

impl<A, L: Loop<A>> pulp::NullaryFnOnce for Task<L, A> {
    type Output = L::Output;

    #[inline(always)]
    fn call(self) -> L::Output {
        L::run(self.1)
    }
}

/// Runs a loop in the version that is compiled for this processor's vector instructions.
///
/// Nothing is reordered or contracted: the bits do not depend on the processor.
#[inline]
pub fn vectorised<A, L: Loop<A>>(body: L, arguments: A) -> L::Output {
    pulp::Arch::new().dispatch(Task(body, arguments))
}

#[inline(always)]
fn folded<T: Real>(mut lanes: [T; LANES], rest: T) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0] + rest
}

/// Σ term(xᵢ): sixteen interleaved partial sums for each stretch of 1024, added pairwise, then the rest.
#[inline(always)]
pub fn sum_of<X: Copy, T: Real>(x: &[X], term: impl Fn(X) -> T) -> T {
    let mut total = T::default();
    for part in x.chunks(TERMS) {
        let blocks = part.chunks_exact(LANES);
        let rest: T = blocks.remainder().iter().map(|x| term(*x)).sum();
        let mut lanes = [T::default(); LANES];
        for x in blocks {
            for lane in 0..LANES {
                lanes[lane] += term(x[lane]);
            }
        }
        total += folded(lanes, rest);
    }
    total
}

/// Σ e^(xᵢ − top), in the order of [`sum_of`]. No closure: the compiler would not take its exponential into the
/// loop.
#[inline(always)]
pub fn sum_of_exponentials<T: Real>(x: &[T], top: T) -> T {
    let mut total = T::default();
    for part in x.chunks(TERMS) {
        let blocks = part.chunks_exact(LANES);
        let mut rest = T::default();
        for x in blocks.remainder() {
            rest += (*x - top).exp();
        }
        let mut lanes = [T::default(); LANES];
        for x in blocks {
            for lane in 0..LANES {
                lanes[lane] += (x[lane] - top).exp();
            }
        }
        total += folded(lanes, rest);
    }
    total
}

/// Σ term(xᵢ, yᵢ, zᵢ), in the order of [`sum_of`]. The slices have one length.
#[inline(always)]
pub fn sum_of_three<T: Real>(x: &[T], y: &[T], z: &[T], term: impl Fn(T, T, T) -> T) -> T {
    let mut total = T::default();
    for ((x, y), z) in x.chunks(TERMS).zip(y.chunks(TERMS)).zip(z.chunks(TERMS)) {
        let (xs, ys, zs) = (x.chunks_exact(LANES), y.chunks_exact(LANES), z.chunks_exact(LANES));
        let rest = xs.remainder().iter().zip(ys.remainder()).zip(zs.remainder());
        let rest: T = rest.map(|((x, y), z)| term(*x, *y, *z)).sum();
        let mut lanes = [T::default(); LANES];
        for ((x, y), z) in xs.zip(ys).zip(zs) {
            for lane in 0..LANES {
                lanes[lane] += term(x[lane], y[lane], z[lane]);
            }
        }
        total += folded(lanes, rest);
    }
    total
}

/// The largest element; NaN is passed over, −∞ for none.
#[inline(always)]
pub fn largest<T: Real>(x: &[T]) -> T {
    let larger = |a: T, b: T| if b > a { b } else { a };
    let mut lanes = [T::negative_infinity(); LANES];
    let blocks = x.chunks_exact(LANES);
    let rest = blocks.remainder().iter().copied().fold(T::negative_infinity(), larger);
    for x in blocks {
        for lane in 0..LANES {
            lanes[lane] = larger(lanes[lane], x[lane]);
        }
    }
    lanes.into_iter().fold(rest, larger)
}

/// Σ aᵢ·bᵢ: sixteen interleaved partial sums, added pairwise, then the rest.
#[inline(always)]
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
    folded(lanes, rest)
}

/// Adds a·x to y, element by element.
#[inline(always)]
pub fn add_scaled<T: Real>(y: &mut [T], a: T, x: &[T]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * *x;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reductions_over_lengths_that_no_vector_divides() {
        for n in [0, 1, 15, 16, 1023, 1024, 5000] {
            let x: Vec<f64> = (0..n).map(|i| (i as f64 * 0.7).sin()).collect();
            let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
            assert!(near(sum_of(&x, |x| x * x), x.iter().map(|x| x * x).sum()));
            assert!(near(sum_of_three(&x, &x, &x, |x, y, z| x * y * z), x.iter().map(|x| x.powi(3)).sum()));
            assert_eq!(largest(&x), x.iter().copied().fold(f64::NEG_INFINITY, f64::max));
        }
    }
}
