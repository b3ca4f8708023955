//! The sum of squares of a flat tensor, added to a scalar: the gradient's norm is its root over all
//! trained tensors.

use graph::{Element, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::vector::{Loop, sum_of, vectorised};

const SOURCE: &str = include_str!("sum_squares.cu");
const HEADERS: &[(&str, &str)] =
    &[("types.cuh", include_str!("../../cuda/types.cuh")), ("reduce.cuh", include_str!("../../cuda/reduce.cuh"))];

const THREADS: usize = 512;
/// Elements that one block takes before there is another block, up to `MOST_BLOCKS`.
const ELEMENTS_PER_BLOCK: usize = THREADS * 16;
const MOST_BLOCKS: usize = 1024;

/// Elements of one partial sum on the CPU.
const CHUNK: usize = 4096;

/// sum += Σ x²
pub struct SumSquares;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let squares = sum_of_squares(call.inputs[0].real());
    let [sum] = call.outputs_mut();
    let sum = &mut sum.real()[0];
    *sum = T::from_f64(sum.to_f64() + squares);
}

/// Σ x² in f64, in an order that does not depend on the number of threads.
pub(super) fn sum_of_squares<T: Real>(x: &[T]) -> f64 {
    let partials: Vec<f64> = x.par_chunks(CHUNK).map(|chunk| vectorised(SquaresOf, chunk)).collect();
    partials.iter().sum()
}

struct SquaresOf;

impl<'a, T: Real> Loop<&'a [T]> for SquaresOf {
    type Output = f64;

    #[inline(always)]
    fn run(chunk: &'a [T]) -> f64 {
        sum_of(chunk, |x| x.to_f64() * x.to_f64())
    }
}

fn blocks_for(count: usize) -> usize {
    count.div_ceil(ELEMENTS_PER_BLOCK).clamp(1, MOST_BLOCKS)
}

fn spec(entry: &'static str, define: (&str, usize), count: usize, blocks: usize, args: Vec<Arg>) -> KernelSpec {
    KernelSpec {
        entry,
        source: SOURCE.to_owned(),
        headers: HEADERS.to_vec(),
        defines: vec![
            (define.0.to_owned(), define.1.to_string()),
            ("COUNT".to_owned(), format!("{count}ull")),
            ("THREADS".to_owned(), THREADS.to_string()),
        ],
        grid: [blocks as u32, 1, 1],
        block: [THREADS as u32, 1, 1],
        shared_bytes: 0,
        args,
    }
}

impl Op for SumSquares {
    fn name(&self) -> &'static str {
        "sum_squares"
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "sum += Σ x². x f32 [n] → sum f32 [1]."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        match inputs {
            [x] if x.dtype == Element::F32 && x.shape.len() == 1 => Ok(vec![ValueType::new(Element::F32, [1.into()])]),
            _ => Err("takes one flat f32 tensor".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    fn cost(&self, inputs: &[TensorRef], _outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        Cost { flops: 2.0 * inputs[0].len() as f64, bytes: inputs[0].bytes() as f64 }
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        blocks_for(call.inputs[0].len()) * 4
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let x = &call.inputs[0];
        assert!(x.is_dense(), "gradients lie densely: {x}");
        let (count, blocks) = (x.len(), blocks_for(x.len()));
        let partial_args = vec![Arg::Input(0), Arg::Scratch(0)];
        let total_args = vec![Arg::Scratch(0), Arg::Output(0)];
        Lowered::Kernels(vec![
            spec("sum_squares_partial", ("PARTIAL", 1), count, blocks, partial_args),
            spec("sum_squares_total", ("PARTS", blocks), count, 1, total_args),
        ])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |n: usize| {
            let state = ExampleInput::UniformF32 { shape: vec![1], low: 0.0, high: 1.0 };
            Example::new(vec![ExampleInput::NormalF32 { shape: vec![n], scale: 0.1 }], Attrs::new())
                .with_state(vec![state])
        };
        vec![example(7), example(100_003)]
    }
}
