//! CPU reference of cross entropy and its gradient. Rows are independent; a row's exponentials are
//! summed in fixed chunks.

use rayon::prelude::*;

use super::IGNORED;
use crate::call::Call;
use crate::real::Real;

/// Elements of one partial sum: long rows keep the accuracy of short ones.
const CHUNK: usize = 256;

fn log_sum_exp<T: Real>(row: &[T]) -> T {
    let top = row.iter().copied().fold(T::negative_infinity(), T::max);
    let total: T = row.chunks(CHUNK).map(|part| part.iter().map(|x| (*x - top).exp()).sum::<T>()).sum();
    top + total.ln()
}

pub fn forward<T: Real>(call: &mut Call<'_, T>) {
    let (columns, logits, targets) = (call.inputs[0].columns(), call.inputs[0].real(), call.inputs[1].int());
    let [token_loss, lse] = call.outputs_mut();
    let results = token_loss.real().par_iter_mut().zip(lse.real().par_iter_mut());
    results.zip(logits.par_chunks(columns)).zip(targets).for_each(|(((loss, lse), row), target)| {
        if *target == IGNORED {
            (*loss, *lse) = (T::default(), T::default());
            return;
        }
        *lse = log_sum_exp(row);
        let hit = usize::try_from(*target).ok().and_then(|target| row.get(target));
        *loss = hit.map_or(T::from_f64(f64::NAN), |x| *lse - *x);
    });
}

pub fn backward<T: Real>(call: &mut Call<'_, T>) {
    let [logits, targets, lse, d] = call.inputs else { unreachable!("the shape rule asks for four inputs") };
    let (columns, logits, targets, lse, d) = (logits.columns(), logits.real(), targets.int(), lse.real(), d.real());
    let [d_logits] = call.outputs_mut();
    let rows = d_logits.real().par_chunks_mut(columns).zip(logits.par_chunks(columns));
    rows.zip(targets).zip(lse).zip(d).for_each(|((((dx, x), target), lse), d)| {
        if *target == IGNORED {
            dx.fill(T::default());
            return;
        }
        for (i, (dx, x)) in dx.iter_mut().zip(x).enumerate() {
            let hit = if i as i64 == *target as i64 { T::from_f64(1.0) } else { T::default() };
            *dx = ((*x - *lse).exp() - hit) * *d;
        }
    });
}
