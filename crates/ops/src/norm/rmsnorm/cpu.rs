//! CPU reference of RMS normalisation and its gradients. Rows are independent; sums over rows are
//! taken in fixed chunks and in order, so the bits do not depend on the number of threads.

use rayon::prelude::*;

use crate::call::Call;
use crate::real::Real;
use crate::vector::{Loop, sum_of, sum_of_three, vectorised};

/// Rows of one chunk of a sum over rows.
const CHUNK: usize = 64;

#[inline(always)]
fn weight_at<T: Real>(w: T, offset: bool) -> T {
    if offset { T::from_f64(1.0) + w } else { w }
}

/// y of one row; gives r.
pub fn forward_row<T: Real>(x: &[T], w: &[T], eps: T, offset: bool, y: &mut [T]) -> T {
    vectorised(ForwardRow, (x, w, eps, offset, y))
}

struct ForwardRow;

impl<'a, T: Real> Loop<(&'a [T], &'a [T], T, bool, &'a mut [T])> for ForwardRow {
    type Output = T;

    #[inline(always)]
    fn run((x, w, eps, offset, y): (&'a [T], &'a [T], T, bool, &'a mut [T])) -> T {
        let mean = sum_of(x, |x| x * x) / T::from_f64(x.len() as f64);
        let r = T::from_f64(1.0) / (mean + eps).sqrt();
        for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
            *y = *x * r * weight_at(*w, offset);
        }
        r
    }
}

/// dx of one row.
pub fn backward_row<T: Real>(x: &[T], w: &[T], r: T, dy: &[T], offset: bool, dx: &mut [T]) {
    vectorised(BackwardRow, (x, w, r, dy, offset, dx));
}

struct BackwardRow;

impl<'a, T: Real> Loop<(&'a [T], &'a [T], T, &'a [T], bool, &'a mut [T])> for BackwardRow {
    type Output = ();

    #[inline(always)]
    fn run((x, w, r, dy, offset, dx): (&'a [T], &'a [T], T, &'a [T], bool, &'a mut [T])) {
        let sum = sum_of_three(x, w, dy, |x, w, dy| dy * weight_at(w, offset) * x);
        let mean = sum / T::from_f64(x.len() as f64);
        for (((dx, x), w), dy) in dx.iter_mut().zip(x).zip(w).zip(dy) {
            *dx = r * (*dy * weight_at(*w, offset) - *x * r * r * mean);
        }
    }
}

pub fn forward<T: Real>(call: &mut Call<'_, T>) {
    let eps = T::from_f64(call.attrs.float("eps").expect("checked by the shape rule"));
    let offset = call.attrs.flag("offset").expect("checked by the shape rule");
    let (x, w) = (call.inputs[0].real(), call.inputs[1].real());
    let columns = w.len();
    let [y, r] = call.outputs_mut();
    let rows = y.real().par_chunks_mut(columns).zip(r.real().par_iter_mut()).zip(x.par_chunks(columns));
    rows.for_each(|((y, r), x)| *r = forward_row(x, w, eps, offset, y));
}

pub fn backward<T: Real>(call: &mut Call<'_, T>) {
    let offset = call.attrs.flag("offset").expect("checked by the shape rule");
    let [x, w, r, dy] = call.inputs else { unreachable!("the shape rule requires four inputs") };
    let (x, w, r, dy) = (x.real(), w.real(), r.real(), dy.real());
    let columns = w.len();
    let [dx] = call.outputs_mut();
    let rows = dx.real().par_chunks_mut(columns).zip(x.par_chunks(columns)).zip(dy.par_chunks(columns)).zip(r);
    rows.for_each(|(((dx, x), dy), r)| backward_row(x, w, *r, dy, offset, dx));
}

struct AddWeightGradient;

impl<'a, T: Real> Loop<(&'a mut [T], &'a [T], &'a [T], T)> for AddWeightGradient {
    type Output = ();

    #[inline(always)]
    fn run((sum, x, dy, r): (&'a mut [T], &'a [T], &'a [T], T)) {
        for ((sum, x), dy) in sum.iter_mut().zip(x).zip(dy) {
            *sum += *dy * *x * r;
        }
    }
}

pub fn weight_gradient<T: Real>(call: &mut Call<'_, T>) {
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let [x, r, dy] = call.inputs else { unreachable!("the shape rule requires three inputs") };
    let [dw] = call.outputs_mut();
    write_weight_gradient(x.real(), r.real(), dy.real(), dw.real(), accumulate);
}

/// dw = Σ over rows of dy·x·r.
pub fn write_weight_gradient<T: Real>(x: &[T], r: &[T], dy: &[T], dw: &mut [T], accumulate: bool) {
    let columns = dw.len();
    let partials: Vec<Vec<T>> = x
        .par_chunks(columns * CHUNK)
        .zip(dy.par_chunks(columns * CHUNK))
        .zip(r.par_chunks(CHUNK))
        .map(|((x, dy), r)| {
            let mut sum = vec![T::default(); columns];
            for ((x, dy), r) in x.chunks(columns).zip(dy.chunks(columns)).zip(r) {
                vectorised(AddWeightGradient, (&mut *sum, x, dy, *r));
            }
            sum
        })
        .collect();
    for (i, dw) in dw.iter_mut().enumerate() {
        let total: T = partials.iter().map(|p| p[i]).sum();
        *dw = if accumulate { *dw + total } else { total };
    }
}
