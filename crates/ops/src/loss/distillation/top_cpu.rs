//! CPU references of `distillation_top` and its gradient. Rows are independent; a row is summed in f64 in a fixed order.

use rayon::prelude::*;

use super::IGNORED;
use super::cpu::{expected, log_sum};
use super::top::settings;
use crate::call::Call;
use crate::real::Real;

/// The least probability of all other tokens: its logarithm is finite.
pub(super) const LEAST: f64 = 1e-7;

/// Sums over a row's tokens of the teacher.
struct Kept {
    /// log Σ of the student's and of the teacher's probabilities of the tokens.
    student: f64,
    teacher: f64,
    /// Σ q·(ln q − ln p)
    cross: f64,
}

/// The teacher's tokens of a row with the logarithms of the student's and the teacher's probability.
fn tokens_of<'a, T: Real>(
    row: &'a [T],
    ids: &'a [i32],
    logps: &'a [T],
    lse: T,
    scale: T,
) -> impl Iterator<Item = (usize, T, T)> + 'a {
    let nowhere = T::from_f64(f64::NAN);
    ids.iter().zip(logps).filter(|(id, _)| **id >= 0).map(move |(id, q)| {
        let id = *id as usize;
        (id, row.get(id).map_or(nowhere, |x| *x * scale - lse), *q)
    })
}

fn kept<T: Real>(tokens: impl Iterator<Item = (usize, T, T)>) -> Kept {
    let tokens: Vec<(f64, f64)> = tokens.map(|(_, p, q)| (p.to_f64(), q.to_f64())).collect();
    let log_sum = |of: fn(&(f64, f64)) -> f64| {
        let top = tokens.iter().map(of).fold(f64::NEG_INFINITY, f64::max);
        if tokens.is_empty() {
            f64::NEG_INFINITY
        } else {
            top + tokens.iter().map(|x| (of(x) - top).exp()).sum::<f64>().ln()
        }
    };
    let cross = tokens.iter().map(|(p, q)| expected(q.exp(), q - p)).sum();
    Kept { student: log_sum(|of| of.0), teacher: log_sum(|of| of.1), cross }
}

impl Kept {
    fn divergence(&self, tail: bool) -> f64 {
        if self.teacher == f64::NEG_INFINITY {
            return 0.0;
        }
        if !tail {
            return self.cross / self.teacher.exp() - self.teacher + self.student;
        }
        let [student, teacher] = [self.student, self.teacher].map(others);
        self.cross + teacher * (teacher.ln() - student.ln())
    }

    /// The factors of the student's probability in the slopes of the teacher's tokens and of all others, and that of the
    /// teacher's.
    fn factors(&self, tail: bool) -> [f64; 3] {
        if self.teacher == f64::NEG_INFINITY {
            return [0.0; 3];
        }
        if !tail {
            return [(-self.student).exp(), 0.0, (-self.teacher).exp()];
        }
        let [student, teacher] = [self.student, self.teacher].map(others);
        let moved = if student > LEAST { teacher } else { 0.0 };
        let mass = self.teacher.exp() + moved;
        [mass, mass - moved / student, 1.0]
    }
}

/// The probability of all tokens but those of a log-probability.
fn others(log_sum: f64) -> f64 {
    f64::max(1.0 - log_sum.exp(), LEAST)
}

pub fn forward<T: Real>(call: &mut Call<'_, T>) {
    let (tail, scale) = settings(call.attrs);
    let scale = T::from_f64(scale);
    let [logits, ids, logps, targets] = call.inputs else { unreachable!("the shape rule requires four inputs") };
    let (columns, count) = (logits.columns(), ids.columns());
    let of_row = |(((row, ids), logps), target): (((&[T], &[i32]), &[T]), &i32)| {
        if *target == IGNORED {
            return [T::default(); 3];
        }
        let lse = log_sum(row, scale);
        let of_token = |x: &T| expected((*x * scale - lse).exp(), lse - *x * scale).to_f64();
        let entropy = row.iter().map(of_token).sum::<f64>();
        let divergence = kept(tokens_of(row, ids, logps, lse, scale)).divergence(tail);
        [T::from_f64(divergence), T::from_f64(entropy), lse]
    };
    let rows = logits.real().par_chunks(columns).zip(ids.int().par_chunks(count));
    let rows = rows.zip(logps.real().par_chunks(count)).zip(targets.int());
    let all: Vec<[T; 3]> = rows.map(of_row).collect();
    for (index, output) in call.outputs.iter_mut().enumerate() {
        output.real().iter_mut().zip(&all).for_each(|(to, of)| *to = of[index]);
    }
}

pub fn backward<T: Real>(call: &mut Call<'_, T>) {
    let (tail, scale) = settings(call.attrs);
    let scale = T::from_f64(scale);
    let [logits, ids, logps, targets, lse, d] = call.inputs else { unreachable!("the shape rule requires six inputs") };
    let (columns, count) = (logits.columns(), ids.columns());
    let [d_logits] = call.outputs_mut();
    let rows = d_logits.real().par_chunks_mut(columns).zip(logits.real().par_chunks(columns));
    let tokens = ids.int().par_chunks(count).zip(logps.real().par_chunks(count));
    let numbers = lse.real().par_iter().zip(d.real());
    rows.zip(tokens).zip(targets.int()).zip(numbers).for_each(|((((dx, row), (ids, logps)), target), (lse, d))| {
        if *target == IGNORED {
            dx.fill(T::default());
            return;
        }
        let factors = kept(tokens_of(row, ids, logps, *lse, scale)).factors(tail);
        let [own, other, of_teacher] = factors.map(T::from_f64);
        let d = *d * scale;
        for (dx, x) in dx.iter_mut().zip(row) {
            *dx = (*x * scale - *lse).exp() * other * d;
        }
        for (id, p, q) in tokens_of(row, ids, logps, *lse, scale).filter(|(id, _, _)| *id < columns) {
            dx[id] = (p.exp() * own - q.exp() * of_teacher) * d;
        }
    });
}
