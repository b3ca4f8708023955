//! CPU references of `distillation` and its gradient. Rows are independent; a row is summed in f64 in a fixed order.

use rayon::prelude::*;

use super::IGNORED;
use super::whole::settings;
use crate::call::Call;
use crate::real::Real;
use crate::vector::{Loop, largest, sum_of_exponentials, vectorised};

/// log Σ exp of a row.
struct LogSumExp;

impl<'a, T: Real> Loop<&'a [T]> for LogSumExp {
    type Output = T;

    #[inline(always)]
    fn run(row: &'a [T]) -> T {
        let top = largest(row);
        top + sum_of_exponentials(row, top).ln()
    }
}

/// log Σ exp of a row whose logits are multiplied by a factor.
pub(super) fn log_sum<T: Real>(row: &[T], scale: T) -> T {
    if scale == T::from_f64(1.0) {
        return vectorised(LogSumExp, row);
    }
    let scaled: Vec<T> = row.iter().map(|x| *x * scale).collect();
    vectorised(LogSumExp, &scaled)
}

/// p·x; 0 where nothing is probable, whatever its logarithm is.
pub(super) fn expected<T: Real>(p: T, x: T) -> T {
    if p > T::default() { p * x } else { T::default() }
}

/// A divergence, with its weights in the number type.
#[derive(Clone, Copy)]
struct Divergence<T> {
    beta: T,
    scale: T,
}

impl<T: Real> Divergence<T> {
    fn is_forward(&self) -> bool {
        self.beta == T::default()
    }

    /// The logarithms of the student's, the teacher's and the mixture's probability, and the first two probabilities.
    fn token(&self, x: T, y: T, lse: T, teacher_lse: T) -> (T, T, T, T, T) {
        let one = T::from_f64(1.0);
        let (s, t) = (x * self.scale - lse, y * self.scale - teacher_lse);
        let (p, q) = (s.exp(), t.exp());
        let m = if self.beta < one { (self.beta * q + (one - self.beta) * p).ln() } else { t };
        (s, t, m, p, q)
    }

    /// divergence, entropy, lse, teacher_lse and mean of a row.
    fn row(&self, x: &[T], y: &[T]) -> [T; 5] {
        let (lse, teacher_lse) = (log_sum(x, self.scale), log_sum(y, self.scale));
        let (mut of_teacher, mut of_student, mut entropy) = (0.0, 0.0, 0.0);
        for (x, y) in x.iter().zip(y) {
            let (s, t, m, p, q) = self.token(*x, *y, lse, teacher_lse);
            entropy += expected(p, -s).to_f64();
            if self.is_forward() {
                of_teacher += expected(q, t - s).to_f64();
            } else {
                of_teacher += expected(q, t - m).to_f64();
                of_student += expected(p, s - m).to_f64();
            }
        }
        let beta = self.beta.to_f64();
        let (divergence, mean) = match beta {
            0.0 => (of_teacher, 0.0),
            1.0 => (of_student, of_student),
            _ => (beta * of_teacher + (1.0 - beta) * of_student, (1.0 - beta) * of_student),
        };
        [T::from_f64(divergence), T::from_f64(entropy), lse, teacher_lse, T::from_f64(mean)]
    }

    /// The slope of the divergence in the scaled logit of a token.
    fn slope(&self, x: T, y: T, lse: T, teacher_lse: T, mean: T) -> T {
        let (s, _, m, p, q) = self.token(x, y, lse, teacher_lse);
        let one = T::from_f64(1.0);
        if self.is_forward() {
            return p - q;
        }
        let weight = if self.beta < one { one - self.beta } else { one };
        expected(p, weight * (s - m) - mean)
    }
}

fn divergence_of<T: Real>(call: &Call<'_, T>) -> Divergence<T> {
    let [beta, temperature] = settings(call.attrs).expect("checked by the shape rule");
    Divergence { beta: T::from_f64(beta), scale: T::from_f64(1.0 / temperature) }
}

pub fn forward<T: Real>(call: &mut Call<'_, T>) {
    let of = divergence_of(call);
    let [logits, teacher, targets] = call.inputs else { unreachable!("the shape rule requires three inputs") };
    let columns = logits.columns();
    let rows = logits.real().par_chunks(columns).zip(teacher.real().par_chunks(columns)).zip(targets.int());
    let of_row = |((x, y), target): ((&[T], &[T]), &i32)| match *target {
        IGNORED => [T::default(); 5],
        _ => of.row(x, y),
    };
    let all: Vec<[T; 5]> = rows.map(of_row).collect();
    for (index, output) in call.outputs.iter_mut().enumerate() {
        output.real().iter_mut().zip(&all).for_each(|(to, of)| *to = of[index]);
    }
}

pub fn backward<T: Real>(call: &mut Call<'_, T>) {
    let of = divergence_of(call);
    let [logits, teacher, targets, lse, teacher_lse, mean, d] = call.inputs else {
        unreachable!("the shape rule requires seven inputs")
    };
    let columns = logits.columns();
    let [d_logits] = call.outputs_mut();
    let matrices = logits.real().par_chunks(columns).zip(teacher.real().par_chunks(columns));
    let rows = d_logits.real().par_chunks_mut(columns).zip(matrices).zip(targets.int());
    let numbers = lse.real().par_iter().zip(teacher_lse.real()).zip(mean.real()).zip(d.real());
    rows.zip(numbers).for_each(|(((dx, (x, y)), target), (((lse, teacher_lse), mean), d))| {
        if *target == IGNORED {
            dx.fill(T::default());
            return;
        }
        let d = *d * of.scale;
        for (dx, (x, y)) in dx.iter_mut().zip(x.iter().zip(y)) {
            *dx = of.slope(*x, *y, *lse, *teacher_lse, *mean) * d;
        }
    });
}
