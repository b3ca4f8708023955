//! The reference: matrix by matrix, its rows on all threads, sums of a row and over rows in a fixed order.

use rayon::prelude::*;

use crate::call::Call;
use crate::optimizer::rule::{self, Rounding};
use crate::real::Real;
use crate::vector::{Loop, sum_of, vectorised};

/// Elements of one task, a multiple of four.
const CHUNK: usize = 4096;

/// The numbers of one call.
struct Numbers<T> {
    beta2: T,
    rest2: T,
    epsilon: T,
    rate: T,
    kept: T,
    cautious: bool,
}

struct SquaresOf;

impl<'a, T: Real> Loop<&'a [T]> for SquaresOf {
    type Output = T;

    #[inline(always)]
    fn run(row: &'a [T]) -> T {
        sum_of(row, |x| x * x)
    }
}

pub fn reference<T: Real>(call: &mut Call<'_, T>) {
    let number = |name: &str| call.attrs.float(name).expect("checked by the shape rule");
    let (rate, applied) = (call.inputs[1].real()[0], call.inputs[2].real()[0]);
    let rate = rate * T::from_f64(rule::rate(call.attrs).expect("checked by the shape rule"));
    if applied == T::default() {
        return;
    }
    let numbers = Numbers {
        beta2: T::from_f64(number("beta2")),
        rest2: T::from_f64(1.0 - number("beta2")),
        epsilon: T::from_f64(number("epsilon")),
        rate,
        kept: T::from_f64(1.0) - rate * T::from_f64(number("weight_decay")),
        cautious: call.attrs.flag("cautious").expect("checked by the shape rule"),
    };
    let rounding = Rounding::of(call.attrs, call.inputs[3].int()[0], call.outputs[0].storage());
    let (direction, shape) = (call.inputs[0].real(), call.inputs[0].shape);
    let (rows, columns) = (shape[1], shape[2]);
    let elements = rows * columns;
    let scale = T::from_f64(number("scale") * (elements as f64).sqrt());
    let [weight, means] = call.outputs_mut();
    let matrices = weight.real().chunks_mut(elements).zip(means.real().chunks_mut(rows));
    for (index, ((weight, means), direction)) in matrices.zip(direction.chunks(elements)).enumerate() {
        let (inverse, squares) = even_out(direction, means, columns, &numbers);
        let norm = T::from_f64(squares.sqrt());
        let factor = if norm == T::default() { norm } else { numbers.rate * scale / norm };
        let step = Step { inverse: &inverse, columns, factor, numbers: &numbers };
        let chunks = weight.par_chunks_mut(CHUNK).zip(direction.par_chunks(CHUNK)).enumerate();
        chunks.for_each(|(chunk, (weight, direction))| {
            let start = chunk * CHUNK;
            step.take(weight, direction, start);
            if let Some(rounding) = rounding {
                // Every matrix has blocks of random words of its own.
                rounding.round(weight, index * elements.next_multiple_of(4) + start);
            }
        });
    }
}

/// Updates the means of one matrix; returns 1/(√v + epsilon) of every row, and ‖Ô‖².
fn even_out<T: Real>(direction: &[T], means: &mut [T], columns: usize, numbers: &Numbers<T>) -> (Vec<T>, f64) {
    let rows = means.par_iter_mut().zip(direction.par_chunks(columns));
    let parts: Vec<(T, T)> = rows
        .map(|(mean, row)| {
            let squares = vectorised(SquaresOf, row);
            *mean = numbers.beta2 * *mean + numbers.rest2 * (squares / T::from_f64(columns as f64));
            let inverse = T::from_f64(1.0) / (mean.sqrt() + numbers.epsilon);
            (inverse, squares * inverse * inverse)
        })
        .collect();
    let squares = parts.iter().map(|(_, squares)| squares.to_f64()).sum();
    (parts.into_iter().map(|(inverse, _)| inverse).collect(), squares)
}

/// The step of one matrix.
struct Step<'a, T> {
    inverse: &'a [T],
    columns: usize,
    factor: T,
    numbers: &'a Numbers<T>,
}

impl<T: Real> Step<'_, T> {
    /// Subtracts the step from the weights of a chunk that begins at element `start`, row by row.
    fn take(&self, weight: &mut [T], direction: &[T], start: usize) {
        let mut done = 0;
        while done < weight.len() {
            let (row, column) = ((start + done) / self.columns, (start + done) % self.columns);
            let end = (done + self.columns - column).min(weight.len());
            let part = (&mut weight[done..end], &direction[done..end]);
            vectorised(Take, (part.0, part.1, self.inverse[row], self.factor, self.numbers));
            done = end;
        }
    }
}

struct Take;

impl<'a, T: Real> Loop<(&'a mut [T], &'a [T], T, T, &'a Numbers<T>)> for Take {
    type Output = ();

    #[inline(always)]
    fn run((weight, direction, inverse, factor, numbers): (&'a mut [T], &'a [T], T, T, &'a Numbers<T>)) {
        for (w, o) in weight.iter_mut().zip(direction) {
            let o = *o * inverse;
            let decays = !numbers.cautious || o * *w >= T::default();
            let decayed = if decays { *w * numbers.kept } else { *w };
            *w = decayed - factor * o;
        }
    }
}
