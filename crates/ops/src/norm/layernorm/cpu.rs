//! CPU reference of layer normalisation and its gradients. Rows are independent; sums over rows are
//! taken in fixed chunks and in order, so the bits do not depend on the number of threads.

use rayon::prelude::*;

use crate::call::Call;
use crate::real::Real;
use crate::vector::{Loop, sum_of, sum_of_three, vectorised};

/// Rows of one chunk of a sum over rows.
const CHUNK: usize = 64;

/// y of one row; gives (mean, r).
pub fn forward_row<T: Real>(x: &[T], w: &[T], b: &[T], eps: T, y: &mut [T]) -> (T, T) {
    vectorised(ForwardRow, (x, w, b, eps, y))
}

struct ForwardRow;

impl<'a, T: Real> Loop<(&'a [T], &'a [T], &'a [T], T, &'a mut [T])> for ForwardRow {
    type Output = (T, T);

    #[inline(always)]
    fn run((x, w, b, eps, y): (&'a [T], &'a [T], &'a [T], T, &'a mut [T])) -> (T, T) {
        let count = T::from_f64(x.len() as f64);
        let mean = sum_of(x, |x| x) / count;
        let variance = sum_of(x, |x| (x - mean) * (x - mean)) / count;
        let r = T::from_f64(1.0) / (variance + eps).sqrt();
        for ((y, x), (w, b)) in y.iter_mut().zip(x).zip(w.iter().zip(b)) {
            *y = (*x - mean) * r * *w + *b;
        }
        (mean, r)
    }
}

/// dx of one row.
pub fn backward_row<T: Real>(x: &[T], w: &[T], statistics: (T, T), dy: &[T], dx: &mut [T]) {
    vectorised(BackwardRow, (x, w, statistics, dy, dx));
}

struct BackwardRow;

impl<'a, T: Real> Loop<(&'a [T], &'a [T], (T, T), &'a [T], &'a mut [T])> for BackwardRow {
    type Output = ();

    #[inline(always)]
    fn run((x, w, (mean, r), dy, dx): (&'a [T], &'a [T], (T, T), &'a [T], &'a mut [T])) {
        let count = T::from_f64(x.len() as f64);
        let along_ones = sum_of_three(x, w, dy, |_, w, dy| dy * w) / count;
        let along_x = sum_of_three(x, w, dy, |x, w, dy| dy * w * ((x - mean) * r)) / count;
        for (((dx, x), w), dy) in dx.iter_mut().zip(x).zip(w).zip(dy) {
            *dx = r * (*dy * *w - along_ones - (*x - mean) * r * along_x);
        }
    }
}

pub fn forward<T: Real>(call: &mut Call<'_, T>) {
    let eps = T::from_f64(call.attrs.float("eps").expect("checked by the shape rule"));
    let [x, w, b] = call.inputs else { unreachable!("the shape rule requires three inputs") };
    let (x, w, b) = (x.real(), w.real(), b.real());
    let columns = w.len();
    let [y, mean, r] = call.outputs_mut();
    let rows = y.real().par_chunks_mut(columns).zip(mean.real()).zip(r.real()).zip(x.par_chunks(columns));
    rows.for_each(|(((y, mean), r), x)| (*mean, *r) = forward_row(x, w, b, eps, y));
}

pub fn backward<T: Real>(call: &mut Call<'_, T>) {
    let [x, w, mean, r, dy] = call.inputs else { unreachable!("the shape rule requires five inputs") };
    let (x, w, mean, r, dy) = (x.real(), w.real(), mean.real(), r.real(), dy.real());
    let columns = w.len();
    let [dx] = call.outputs_mut();
    let rows = dx.real().par_chunks_mut(columns).zip(x.par_chunks(columns)).zip(dy.par_chunks(columns));
    rows.zip(mean.par_iter().zip(r)).for_each(|(((dx, x), dy), (mean, r))| backward_row(x, w, (*mean, *r), dy, dx));
}

pub fn weight_gradient<T: Real>(call: &mut Call<'_, T>) {
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let [x, mean, r, dy] = call.inputs else { unreachable!("the shape rule requires four inputs") };
    let columns = x.columns();
    let rows = x.real().par_chunks(columns * CHUNK).zip(dy.real().par_chunks(columns * CHUNK));
    let partials: Vec<Vec<T>> = rows
        .zip(mean.real().par_chunks(CHUNK).zip(r.real().par_chunks(CHUNK)))
        .map(|((x, dy), (mean, r))| {
            let mut sum = vec![T::default(); columns];
            for ((x, dy), (mean, r)) in x.chunks(columns).zip(dy.chunks(columns)).zip(mean.iter().zip(r)) {
                for ((s, x), dy) in sum.iter_mut().zip(x).zip(dy) {
                    *s += *dy * (*x - *mean) * *r;
                }
            }
            sum
        })
        .collect();
    let [dw] = call.outputs_mut();
    for (i, dw) in dw.real().iter_mut().enumerate() {
        let total: T = partials.iter().map(|p| p[i]).sum();
        *dw = if accumulate { *dw + total } else { total };
    }
}
