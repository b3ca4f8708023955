//! CPU evaluation of expressions: a flat list of steps, each applied to a short run of elements at
//! a time. Equal subexpressions are computed once. Chunks of elements are independent, so the bits
//! do not depend on the number of threads.

use rayon::prelude::*;
use tensor::{DType, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};

use super::expression::{Binary, Expr, Unary};
use crate::real::Real;
use crate::vector::{Loop, vectorised};

/// Elements of one run: a register's length.
const LANES: usize = 256;
/// Number of elements in a task.
const CHUNK: usize = 64 * LANES;

/// A step writes the register of its own index from earlier ones.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Input(usize),
    Constant(f64),
    Unary(Unary, usize),
    Binary(Binary, usize, usize),
}

/// A list of expressions as steps without nesting.
#[derive(Debug)]
pub struct Tape {
    steps: Vec<Step>,
    /// The register of each result.
    results: Vec<usize>,
}

/// Rounds `x` as storage in memory as `dtype` would round it. Types as wide as f32 change nothing here: the arithmetic
/// itself is f32 when a program runs, and the f64 check is meant to see no rounding.
#[inline(always)]
pub fn round_to<T: Real>(dtype: DType, x: T) -> T {
    match dtype {
        DType::BF16 => T::from_f32(bf16_to_f32(f32_to_bf16(x.to_f32()))),
        DType::F16 => T::from_f32(f16_to_f32(f32_to_f16(x.to_f32()))),
        DType::F64 | DType::F32 | DType::I64 | DType::I32 | DType::U8 | DType::E4M3 | DType::E5M2 => x,
    }
}

impl Tape {
    pub fn new(expressions: &[Expr]) -> Tape {
        let mut tape = Tape { steps: Vec::new(), results: Vec::new() };
        for expression in expressions {
            let result = tape.add(expression);
            tape.results.push(result);
        }
        tape
    }

    fn add(&mut self, expr: &Expr) -> usize {
        let step = match expr {
            Expr::Unary(Unary::Relaxed, x) => return self.add(x),
            Expr::Mean(_) | Expr::Amax(_) | Expr::Power(..) | Expr::Count(..) => {
                unreachable!("an element-wise operation reduces nothing")
            }
            Expr::Input(index) => Step::Input(*index),
            Expr::Constant(value) => Step::Constant(*value),
            Expr::Unary(function, x) => Step::Unary(*function, self.add(x)),
            Expr::Binary(function, a, b) => {
                let a = self.add(a);
                Step::Binary(*function, a, self.add(b))
            }
        };
        self.steps.iter().position(|s| *s == step).unwrap_or_else(|| {
            self.steps.push(step);
            self.steps.len() - 1
        })
    }

    /// Functions evaluated for one element.
    pub fn functions(&self) -> usize {
        self.steps.iter().filter(|s| matches!(s, Step::Unary(..) | Step::Binary(..))).count()
    }

    /// Evaluates all results. Every slice has the same length.
    pub fn run<T: Real>(&self, inputs: &[&[T]], outputs: Vec<&mut [T]>) {
        let len = outputs.first().map_or(0, |o| o.len());
        let mut chunks: Vec<Vec<&mut [T]>> =
            (0..len.div_ceil(CHUNK)).map(|_| Vec::with_capacity(outputs.len())).collect();
        for output in outputs {
            for (chunk, part) in chunks.iter_mut().zip(output.chunks_mut(CHUNK)) {
                chunk.push(part);
            }
        }
        chunks.into_par_iter().enumerate().for_each(|(index, mut outputs)| {
            let mut registers = vec![T::default(); self.steps.len() * LANES];
            let len = outputs[0].len();
            for start in (0..len).step_by(LANES) {
                let lanes = LANES.min(len - start);
                vectorised(RunLanes, (self, inputs, index * CHUNK + start, lanes, &mut registers[..]));
                for (output, register) in outputs.iter_mut().zip(&self.results) {
                    let from = register * LANES;
                    output[start..start + lanes].copy_from_slice(&registers[from..from + lanes]);
                }
            }
        });
    }
}

/// Every step over one run of elements.
struct RunLanes;

impl<'a, T: Real> Loop<(&'a Tape, &'a [&'a [T]], usize, usize, &'a mut [T])> for RunLanes {
    type Output = ();

    #[inline(always)]
    fn run((this, inputs, start, lanes, registers): (&'a Tape, &'a [&'a [T]], usize, usize, &'a mut [T])) {
        for (index, step) in this.steps.iter().enumerate() {
            let (earlier, rest) = registers.split_at_mut(index * LANES);
            let register = |index: usize| &earlier[index * LANES..index * LANES + lanes];
            let to = &mut rest[..lanes];
            match *step {
                Step::Input(operand) => to.copy_from_slice(&inputs[operand][start..start + lanes]),
                Step::Constant(value) => to.fill(T::from_f64(value)),
                Step::Unary(function, x) => unary(function, register(x), to),
                Step::Binary(function, a, b) => binary(function, register(a), register(b), to),
            }
        }
    }
}

/// One loop for each function, not a closure in a common one: the compiler would not take an exponential
/// into it.
#[inline(always)]
pub fn unary<T: Real>(function: Unary, x: &[T], to: &mut [T]) {
    macro_rules! each {
        ($x:ident => $value:expr) => {
            for (to, x) in to.iter_mut().zip(x) {
                let $x = *x;
                *to = $value;
            }
        };
    }
    let one = T::from_f64(1.0);
    match function {
        Unary::Negate => each!(x => -x),
        Unary::Exp => each!(x => x.exp()),
        Unary::Tanh => each!(x => x.tanh()),
        Unary::Erf => each!(x => x.erf()),
        Unary::Relu => each!(x => if x < T::default() { T::default() } else { x }),
        Unary::Step => each!(x => if x > T::default() { one } else { T::default() }),
        Unary::Sigmoid => each!(x => one / (one + (-x).exp())),
        Unary::Silu => each!(x => x / (one + (-x).exp())),
        Unary::Softplus => each!(x => x.max(T::default()) + (-x.abs()).exp().ln_1p()),
        Unary::Log => each!(x => x.ln()),
        Unary::ExpMinusOne => each!(x => x.exp_m1()),
        Unary::Rsqrt => each!(x => one / x.sqrt()),
        Unary::Relaxed => to.copy_from_slice(x),
        Unary::Round(dtype) => each!(x => round_to(dtype, x)),
    }
}

#[inline(always)]
fn binary<T: Real>(function: Binary, a: &[T], b: &[T], to: &mut [T]) {
    let pairs = to.iter_mut().zip(a.iter().zip(b));
    match function {
        Binary::Add => pairs.for_each(|(to, (a, b))| *to = *a + *b),
        Binary::Subtract => pairs.for_each(|(to, (a, b))| *to = *a - *b),
        Binary::Multiply => pairs.for_each(|(to, (a, b))| *to = *a * *b),
        Binary::Divide => pairs.for_each(|(to, (a, b))| *to = *a / *b),
        Binary::Minimum => pairs.for_each(|(to, (a, b))| *to = if *b < *a { *b } else { *a }),
        Binary::Maximum => pairs.for_each(|(to, (a, b))| *to = if *b > *a { *b } else { *a }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_parts_are_computed_once_and_lengths_need_not_be_round() {
        let x = || Expr::Input(0).sigmoid();
        let tape = Tape::new(&[x() * Expr::Input(1), x() + x()]);
        assert_eq!(tape.functions(), 3);
        let n = 2 * CHUNK + LANES + 3;
        let (a, b): (Vec<f64>, Vec<f64>) = (0..n).map(|i| ((i as f64).sin(), i as f64)).unzip();
        let (mut first, mut second) = (vec![0.0; n], vec![0.0; n]);
        tape.run(&[&a, &b], vec![&mut first, &mut second]);
        for i in 0..n {
            let sigmoid = 1.0 / (1.0 + (-a[i]).exp());
            assert_eq!((first[i], second[i]), (sigmoid * b[i], sigmoid + sigmoid));
        }
    }

    #[test]
    fn rounding_is_a_step_of_its_own() {
        let tape = Tape::new(&[(Expr::Input(0) + Expr::Input(0)).stored_as(DType::BF16) - Expr::Input(0)]);
        let x = [1.003_f32];
        let mut y = [0.0_f32];
        tape.run(&[&x], vec![&mut y]);
        assert_eq!(y[0], bf16_to_f32(f32_to_bf16(2.006)) - 1.003);
    }
}
