//! CPU evaluation of forms: a flat list of steps, each one loop over a whole row, or one value for the row. Equal
//! subexpressions are computed once. Rows are independent; sums over rows are taken in fixed chunks and in order, so
//! the bits do not depend on the number of threads. Values of the whole tensor are known before its rows are computed:
//! where they need a magnitude, all rows are computed twice.

use rayon::prelude::*;
use tensor::DType;

use super::form::{Extent, Form};
use crate::call::Call;
use crate::elementwise::{Binary, Counted, Expr, Unary, apply_unary};
use crate::quantise::{counts, factor, larger};
use crate::real::Real;
use crate::vector::{Loop, sum_of, vectorised};

/// Rows of one task, and of one chunk of a sum over rows.
const CHUNK: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Input(usize),
    Constant(f64),
    Unary(Unary, usize),
    Binary(Binary, usize, usize),
    Mean(usize),
}

/// A form made flat. A step reads earlier ones.
struct Tape {
    steps: Vec<Step>,
    /// For each step the register that it fills; `None` where it has one value for the row, or is an operand.
    registers: Vec<Option<usize>>,
    /// True for steps with a value for each column.
    wide: Vec<bool>,
    /// Extent and step of each result; of the tensor: of each value whose largest magnitude is wanted.
    results: Vec<(Extent, usize)>,
}

impl Tape {
    fn new(form: &Form) -> Tape {
        let mut tape = Tape { steps: Vec::new(), registers: Vec::new(), wide: Vec::new(), results: Vec::new() };
        for (extent, expr) in &form.results {
            for expr in values_of(*extent, expr) {
                let step = tape.add(form, expr);
                tape.results.push((*extent, step));
            }
        }
        tape
    }

    fn add(&mut self, form: &Form, expr: &Expr) -> usize {
        let step = match expr {
            // The arithmetic itself is f32 when a program runs, and f64 in a check that is meant to see no rounding.
            Expr::Unary(Unary::Relaxed | Unary::Round(DType::F32), x) => return self.add(form, x),
            Expr::Input(index) => Step::Input(*index),
            Expr::Constant(value) => Step::Constant(*value),
            Expr::Unary(function, x) => Step::Unary(*function, self.add(form, x)),
            Expr::Binary(function, a, b) => {
                let a = self.add(form, a);
                Step::Binary(*function, a, self.add(form, b))
            }
            Expr::Mean(x) => Step::Mean(self.add(form, x)),
            Expr::Amax(_) | Expr::Power(..) | Expr::Count(..) => {
                unreachable!("what is one for the tensor is an operand of its rows")
            }
        };
        if let Some(known) = self.steps.iter().position(|s| *s == step) {
            return known;
        }
        let wide = match step {
            Step::Input(index) => !matches!(form.operands[index], Extent::Row | Extent::Tensor),
            Step::Constant(_) | Step::Mean(_) => false,
            Step::Unary(_, x) => self.wide[x],
            Step::Binary(_, a, b) => self.wide[a] || self.wide[b],
        };
        let filled = self.registers.iter().flatten().count();
        self.registers.push((wide && !matches!(step, Step::Input(_))).then_some(filled));
        self.wide.push(wide);
        self.steps.push(step);
        self.steps.len() - 1
    }
}

/// Returns the expressions that the rows have to be computed for: a result, or the values whose magnitude is needed.
/// Other results that the tensor has one of need no row.
fn values_of(extent: Extent, expr: &Expr) -> Vec<&Expr> {
    match expr {
        Expr::Amax(all) if extent == Extent::Tensor => all.iter().collect(),
        _ if extent == Extent::Tensor => Vec::new(),
        _ => vec![expr],
    }
}

/// The result of a step for one row.
#[derive(Clone, Copy)]
enum Value<'a, T> {
    Wide(&'a [T]),
    Single(T),
}

/// The memory of one task.
struct Registers<T> {
    wide: Vec<T>,
    single: Vec<T>,
    columns: usize,
}

/// All steps of one row.
struct RunRow;

impl<'a, T: Real> Loop<(&'a Tape, &'a [Value<'a, T>], &'a mut Registers<T>)> for RunRow {
    type Output = ();

    #[inline(always)]
    fn run((tape, operands, registers): (&'a Tape, &'a [Value<'a, T>], &'a mut Registers<T>)) {
        let columns = registers.columns;
        for (index, step) in tape.steps.iter().enumerate() {
            let first = tape.registers[index].map_or(registers.wide.len(), |register| register * columns);
            let (earlier, rest) = registers.wide.split_at_mut(first);
            let value = |step: usize| match (tape.steps[step], tape.registers[step]) {
                (Step::Input(operand), _) => operands[operand],
                (_, Some(register)) => Value::Wide(&earlier[register * columns..][..columns]),
                (_, None) => Value::Single(registers.single[step]),
            };
            let single = match *step {
                Step::Input(_) => continue,
                Step::Constant(constant) => T::from_f64(constant),
                Step::Mean(x) => match value(x) {
                    Value::Wide(x) => sum_of(x, |x| x) / T::from_f64(columns as f64),
                    Value::Single(x) => x,
                },
                Step::Unary(function, x) => match value(x) {
                    Value::Wide(x) => {
                        apply_unary(function, x, &mut rest[..columns]);
                        continue;
                    }
                    Value::Single(x) => {
                        let mut y = [T::default()];
                        apply_unary(function, &[x], &mut y);
                        y[0]
                    }
                },
                Step::Binary(function, a, b) => match (value(a), value(b)) {
                    (Value::Single(a), Value::Single(b)) => {
                        let mut y = [T::default()];
                        binary(function, Value::Wide(&[a]), Value::Single(b), &mut y);
                        y[0]
                    }
                    (a, b) => {
                        binary(function, a, b, &mut rest[..columns]);
                        continue;
                    }
                },
            };
            registers.single[index] = single;
        }
    }
}

#[inline(always)]
fn binary<T: Real>(function: Binary, a: Value<'_, T>, b: Value<'_, T>, to: &mut [T]) {
    macro_rules! each {
        ($a:ident, $b:ident => $value:expr) => {
            match (a, b) {
                (Value::Wide(a), Value::Wide(b)) => {
                    for (to, ($a, $b)) in to.iter_mut().zip(a.iter().copied().zip(b.iter().copied())) {
                        *to = $value;
                    }
                }
                (Value::Wide(a), Value::Single($b)) => {
                    for (to, $a) in to.iter_mut().zip(a.iter().copied()) {
                        *to = $value;
                    }
                }
                (Value::Single($a), Value::Wide(b)) => {
                    for (to, $b) in to.iter_mut().zip(b.iter().copied()) {
                        *to = $value;
                    }
                }
                (Value::Single(_), Value::Single(_)) => unreachable!("one value for a row is computed once"),
            }
        };
    }
    match function {
        Binary::Add => each!(x, y => x + y),
        Binary::Subtract => each!(x, y => x - y),
        Binary::Multiply => each!(x, y => x * y),
        Binary::Divide => each!(x, y => x / y),
        Binary::Minimum => each!(x, y => if y < x { y } else { x }),
        Binary::Maximum => each!(x, y => if y > x { y } else { x }),
    }
}

/// Adds a row to a sum over rows.
struct AddRow;

impl<'a, T: Real> Loop<(&'a mut [T], &'a [T])> for AddRow {
    type Output = ();

    #[inline(always)]
    fn run((sum, x): (&'a mut [T], &'a [T])) {
        for (sum, x) in sum.iter_mut().zip(x) {
            *sum += *x;
        }
    }
}

/// Computes a form over all rows of a call. With `accumulate`, sums over rows are added to what is there.
pub fn evaluate<T: Real>(form: &Form, accumulate: bool, call: &mut Call<'_, T>) {
    let (columns, rows) = (call.inputs[0].columns(), call.inputs[0].rows());
    let inputs: Vec<&[T]> = call.inputs.iter().map(|input| input.real()).collect();
    let powers = form.powers();
    let values: Vec<[T; 1]> =
        powers.iter().map(|power| [T::from_f32(known(form, power, &inputs, rows, columns))]).collect();
    let place = |part: &Expr| powers.iter().position(|power| *power == part).map(|i| Expr::Input(inputs.len() + i));
    let (mut results, mut outputs) = (Vec::new(), Vec::new());
    for (output, (extent, expr)) in call.outputs.iter_mut().zip(&form.results) {
        if let Expr::Count(which, power, all) = expr {
            let value = powers.iter().position(|known| **known == **power).map(|index| values[index][0]);
            let value = value.expect("all powers were collected").to_f32();
            let found = count(form, (*which, power, all), value, &inputs, (rows, columns));
            output.real()[0] += T::from_f64(found as f64);
            continue;
        }
        results.push((*extent, expr.replace(&place)));
        outputs.push(output.real());
    }
    let operands = [form.operands.clone(), vec![Extent::Tensor; powers.len()]].concat();
    let all: Vec<&[T]> = inputs.iter().copied().chain(values.iter().map(|value| &value[..])).collect();
    of_tensor(&Form { operands, results }, accumulate, &all, (rows, columns), outputs);
}

/// A number of elements; 0 where the factor of the power is known.
fn count<T: Real>(
    form: &Form,
    (which, power, all): (Counted, &Expr, &[Expr]),
    value: f32,
    inputs: &[&[T]],
    (rows, columns): (usize, usize),
) -> usize {
    let Expr::Power(known, ..) = power else { unreachable!("the form was checked") };
    if single::<T>(known, inputs).to_f32() != 0.0 {
        return 0;
    }
    let of = |expr: &Expr| {
        let form = Form { operands: form.operands.clone(), results: vec![(Extent::Element, expr.clone())] };
        let mut x = vec![T::default(); rows * columns];
        of_tensor(&form, false, inputs, (rows, columns), vec![&mut x]);
        let [nonzero, flushed] = counts(&x, value);
        if which == Counted::Nonzero { nonzero } else { flushed }
    };
    all.iter().map(of).sum()
}

/// The value of a power: the factor, or what the tensor's own magnitude asks for.
fn known<T: Real>(form: &Form, power: &Expr, inputs: &[&[T]], rows: usize, columns: usize) -> f32 {
    let Expr::Power(known, amax, top) = power else { unreachable!("only powers are collected") };
    match single::<T>(known, inputs).to_f32() {
        0.0 => {
            let form = Form { operands: form.operands.clone(), results: vec![(Extent::Tensor, (**amax).clone())] };
            let mut most = [T::default()];
            of_tensor(&form, false, inputs, (rows, columns), vec![&mut most]);
            factor(most[0].to_f32(), i64::from(*top))
        }
        factor => factor,
    }
}

/// A value that the tensor has one of, of operands that it has one of.
fn single<T: Real>(expr: &Expr, inputs: &[&[T]]) -> T {
    let mut y = [T::default()];
    match expr {
        Expr::Input(index) => return inputs[*index][0],
        Expr::Constant(value) => return T::from_f64(*value),
        Expr::Unary(function, x) => apply_unary(*function, &[single(x, inputs)], &mut y),
        Expr::Binary(function, a, b) => {
            let (a, b) = ([single(a, inputs)], single(b, inputs));
            binary(*function, Value::Wide(&a), Value::Single(b), &mut y);
        }
        Expr::Mean(_) | Expr::Amax(_) | Expr::Power(..) | Expr::Count(..) => unreachable!("the form was checked"),
    }
    y[0]
}

/// Sums over some rows, and largest magnitudes.
type Partial<T> = (Vec<Vec<T>>, Vec<f32>);

/// Computes all rows, where the values of the whole tensor are among the operands.
fn of_tensor<T: Real>(
    form: &Form,
    accumulate: bool,
    inputs: &[&[T]],
    (rows, columns): (usize, usize),
    outputs: Vec<&mut [T]>,
) {
    let tape = Tape::new(form);
    let mut chunks: Vec<Vec<&mut [T]>> = (0..rows.div_ceil(CHUNK)).map(|_| Vec::new()).collect();
    let (mut sums, mut amaxes): (Vec<&mut [T]>, Vec<(&mut [T], usize)>) = (Vec::new(), Vec::new());
    for (output, (extent, expr)) in outputs.into_iter().zip(&form.results) {
        let width = match (extent, expr) {
            (Extent::Element, _) => columns,
            (Extent::Row, _) => 1,
            (Extent::Column, _) => {
                sums.push(output);
                continue;
            }
            (Extent::Tensor, Expr::Amax(all)) => {
                amaxes.push((output, all.len()));
                continue;
            }
            (Extent::Tensor, expr) => {
                output[0] = single(expr, inputs);
                continue;
            }
        };
        let parts = output.chunks_mut((CHUNK * width).max(1));
        chunks.iter_mut().zip(parts).for_each(|(chunk, part)| chunk.push(part));
    }
    let run = |(chunk, outputs): (usize, Vec<&mut [T]>)| {
        let first = chunk * CHUNK;
        of_rows(&tape, form, inputs, columns, first..(first + CHUNK).min(rows), outputs)
    };
    let partials: Vec<Partial<T>> = chunks.into_par_iter().enumerate().map(run).collect();
    for (index, sum) in sums.into_iter().enumerate() {
        for (column, sum) in sum.iter_mut().enumerate() {
            let total: T = partials.iter().map(|(sums, _)| sums[index][column]).sum();
            *sum = if accumulate { *sum + total } else { total };
        }
    }
    let mut first = 0;
    for (output, count) in amaxes {
        let parts = partials.iter().flat_map(|(_, largest)| &largest[first..first + count]);
        output[0] = T::from_f32(parts.fold(output[0].to_f32(), |most, part| larger(most, *part)));
        first += count;
    }
}

/// Computes some rows, and returns their sums and largest magnitudes. `outputs` are the other results.
fn of_rows<T: Real>(
    tape: &Tape,
    form: &Form,
    inputs: &[&[T]],
    columns: usize,
    rows: std::ops::Range<usize>,
    mut outputs: Vec<&mut [T]>,
) -> Partial<T> {
    let wide = tape.registers.iter().flatten().count() * columns;
    let mut registers =
        Registers { wide: vec![T::default(); wide], single: vec![T::default(); tape.steps.len()], columns };
    let count = |of: Extent| tape.results.iter().filter(|(extent, _)| *extent == of).count();
    let mut sums = vec![vec![T::default(); columns]; count(Extent::Column)];
    let mut largest = vec![0.0; count(Extent::Tensor)];
    let mut operands = Vec::with_capacity(inputs.len());
    for (place, row) in rows.enumerate() {
        operands.clear();
        operands.extend(inputs.iter().zip(&form.operands).map(|(x, extent)| match extent {
            Extent::Element => Value::Wide(&x[row * columns..][..columns]),
            Extent::Row => Value::Single(x[row]),
            Extent::Column => Value::Wide(x),
            Extent::Tensor => Value::Single(x[0]),
        }));
        vectorised(RunRow, (tape, &operands[..], &mut registers));
        let (mut output, mut sum, mut most) = (outputs.iter_mut(), sums.iter_mut(), largest.iter_mut());
        for (extent, step) in &tape.results {
            let value = match (tape.steps[*step], tape.registers[*step]) {
                (Step::Input(operand), _) => operands[operand],
                (_, Some(register)) => Value::Wide(&registers.wide[register * columns..][..columns]),
                (_, None) => Value::Single(registers.single[*step]),
            };
            let next = "there is a place for each result";
            match (extent, value) {
                (Extent::Row, Value::Single(x)) => output.next().expect(next)[place] = x,
                (Extent::Row, Value::Wide(_)) => unreachable!("the shape rule wants one value for a row"),
                (Extent::Element, Value::Wide(x)) => {
                    output.next().expect(next)[place * columns..][..columns].copy_from_slice(x)
                }
                (Extent::Element, Value::Single(x)) => output.next().expect(next)[place * columns..][..columns].fill(x),
                (Extent::Column, Value::Wide(x)) => vectorised(AddRow, (&mut sum.next().expect(next)[..], x)),
                (Extent::Column, Value::Single(x)) => {
                    sum.next().expect(next).iter_mut().for_each(|sum| *sum += x);
                }
                (Extent::Tensor, value) => {
                    let x = match &value {
                        Value::Wide(x) => x,
                        Value::Single(x) => std::slice::from_ref(x),
                    };
                    let most = most.next().expect(next);
                    *most = x.iter().fold(*most, |most, x| larger(most, x.to_f32()));
                }
            }
        }
    }
    (sums, largest)
}
