//! The steps from products to weights of a softmax, row by row.

use ops::{Loop, Real, largest, sum_of};

/// The step from raw scores to capped ones, c·tanh(s/c); gives their slopes, 1 − tanh².
pub struct Capped;

impl<'a> Loop<(&'a mut [f32], f32, &'a mut [f32])> for Capped {
    type Output = ();

    #[inline(always)]
    fn run((scores, cap, slopes): (&'a mut [f32], f32, &'a mut [f32])) {
        for (s, slope) in scores.iter_mut().zip(slopes) {
            let t = Real::tanh(*s / cap);
            (*s, *slope) = (cap * t, 1.0 - t * t);
        }
    }
}

/// The step from scores to exponentials of their distance to the largest, including the sink; gives their sum and the
/// largest.
pub struct WeightsOf;

impl<'a> Loop<(&'a mut [f32], Option<f32>)> for WeightsOf {
    type Output = (f32, f32);

    #[inline(always)]
    fn run((row, sink): (&'a mut [f32], Option<f32>)) -> (f32, f32) {
        let top = Real::max(largest(row), sink.unwrap_or(f32::NEG_INFINITY));
        for x in &mut *row {
            *x = Real::exp(*x - top);
        }
        (sum_of(row, |x| x) + sink.map_or(0.0, |sink| Real::exp(sink - top)), top)
    }
}
