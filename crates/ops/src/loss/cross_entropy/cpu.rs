//! CPU reference of cross entropy and its gradient. Rows are independent; a row's exponentials are
//! summed in a fixed order.

use rayon::prelude::*;

use super::IGNORED;
use crate::call::Call;
use crate::real::Real;
use crate::vector::{Loop, largest, sum_of_exponentials, vectorised};

struct LogSumExp;

impl<'a, T: Real> Loop<&'a [T]> for LogSumExp {
    type Output = T;

    #[inline(always)]
    fn run(row: &'a [T]) -> T {
        let top = largest(row);
        top + sum_of_exponentials(row, top).ln()
    }
}

/// (exp(x − lse) − [column = target])·d of one row.
struct GradientRow;

impl<'a, T: Real> Loop<(&'a mut [T], &'a [T], usize, T, T)> for GradientRow {
    type Output = ();

    #[inline(always)]
    fn run((dx, x, target, lse, d): (&'a mut [T], &'a [T], usize, T, T)) {
        for (dx, x) in dx.iter_mut().zip(x) {
            *dx = (*x - lse).exp() * d;
        }
        if let (Some(dx), Some(x)) = (dx.get_mut(target), x.get(target)) {
            *dx = ((*x - lse).exp() - T::from_f64(1.0)) * d;
        }
    }
}

/// The loss and the log of the sum of exponentials of every row.
pub fn losses<T: Real>(columns: usize, logits: &[T], targets: &[i32], token_loss: &mut [T], lse: &mut [T]) {
    let results = token_loss.par_iter_mut().zip(lse.par_iter_mut());
    results.zip(logits.par_chunks(columns)).zip(targets).for_each(|(((loss, lse), row), target)| {
        if *target == IGNORED {
            (*loss, *lse) = (T::default(), T::default());
            return;
        }
        *lse = vectorised(LogSumExp, row);
        let hit = usize::try_from(*target).ok().and_then(|target| row.get(target));
        *loss = hit.map_or(T::from_f64(f64::NAN), |x| *lse - *x);
    });
}

/// The gradient of every row.
pub fn gradient<T: Real>(columns: usize, logits: &[T], targets: &[i32], lse: &[T], d: &[T], d_logits: &mut [T]) {
    let rows = d_logits.par_chunks_mut(columns).zip(logits.par_chunks(columns));
    rows.zip(targets).zip(lse).zip(d).for_each(|((((dx, x), target), lse), d)| {
        if *target == IGNORED {
            dx.fill(T::default());
            return;
        }
        vectorised(GradientRow, (dx, x, *target as usize, *lse, *d));
    });
}

pub fn forward<T: Real>(call: &mut Call<'_, T>) {
    let [logits, targets] = call.inputs else { unreachable!("the shape rule requires two inputs") };
    let [token_loss, lse] = call.outputs_mut();
    losses(logits.columns(), logits.real(), targets.int(), token_loss.real(), lse.real());
}

pub fn backward<T: Real>(call: &mut Call<'_, T>) {
    let [logits, targets, lse, d] = call.inputs else { unreachable!("the shape rule requires four inputs") };
    let [d_logits] = call.outputs_mut();
    gradient(logits.columns(), logits.real(), targets.int(), lse.real(), d.real(), d_logits.real());
}
