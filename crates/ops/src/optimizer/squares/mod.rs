//! The sum of squares of the gradients, whose root is their norm: first per block of elements, then over the blocks.
//! Blocks end at tensor boundaries, so a tensor's sums do not depend on where it is or when they are computed: after
//! the backward pass for all, or for each as soon as it is complete.

mod total;

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::{Attrs, HostTensor};

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;
use crate::vector::{Loop, sum_of, vectorised};

pub use total::TotalSquares;

const SOURCE: &str = include_str!("squares.cu");
const HEADERS: &[(&str, &str)] =
    &[("types.cuh", include_str!("../../cuda/types.cuh")), ("reduce.cuh", include_str!("../../cuda/reduce.cuh"))];

const THREADS: usize = 512;

/// Blocks begin on multiples of this many elements, as tensors of flat arenas do.
const UNIT: usize = 256;

/// Elements of a block at most: 64 of each thread. Fewer blocks for the sum of the sums, enough for every
/// SM where ten million elements are trained.
const BLOCK: usize = 32_768;

/// Elements of one partial sum on the CPU.
const CHUNK: usize = 4096;

/// sums = block_squares(x, blocks)
pub struct BlockSquares;

/// Returns the number of blocks in a tensor of `elements` elements.
pub fn block_count(elements: usize) -> usize {
    elements.div_ceil(BLOCK)
}

/// The blocks of tensors that begin at these elements and have this many: the second operand of
/// [`BlockSquares`], i32 [blocks, 2] of a beginning in units of 256 elements and a number of elements.
pub fn blocks_of(tensors: impl Iterator<Item = (usize, usize)>) -> HostTensor {
    let table = table_of(tensors);
    HostTensor::from_i32([table.len() / 2, 2], &table)
}

fn table_of(tensors: impl Iterator<Item = (usize, usize)>) -> Vec<i32> {
    let mut table = Vec::new();
    for (start, elements) in tensors {
        assert!(start.is_multiple_of(UNIT), "tensors begin on multiples of {UNIT} elements, not at {start}");
        for first in (0..elements).step_by(BLOCK) {
            let unit = i32::try_from((start + first) / UNIT).expect("arenas have fewer units than an i32 counts");
            table.extend([unit, BLOCK.min(elements - first) as i32]);
        }
    }
    table
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let (x, blocks) = (call.inputs[0].real(), call.inputs[1].int());
    let [sums] = call.outputs_mut();
    sums.real().par_iter_mut().zip(blocks.par_chunks(2)).for_each(|(sum, block)| {
        let (start, elements) = (block[0] as usize * UNIT, block[1] as usize);
        *sum = T::from_f64(squares(&x[start..start + elements]).iter().sum());
    });
}

/// Σ x² in f64, in an order that does not depend on the number of threads.
pub(super) fn sum_of_squares<T: Real>(x: &[T]) -> f64 {
    x.par_chunks(CHUNK * 16).map(squares).collect::<Vec<_>>().concat().iter().sum()
}

fn squares<T: Real>(x: &[T]) -> Vec<f64> {
    x.chunks(CHUNK).map(|chunk| vectorised(SquaresOf, chunk)).collect()
}

struct SquaresOf;

impl<'a, T: Real> Loop<&'a [T]> for SquaresOf {
    type Output = f64;

    #[inline(always)]
    fn run(chunk: &'a [T]) -> f64 {
        sum_of(chunk, |x| x.to_f64() * x.to_f64())
    }
}

fn spec(entry: &'static str, threads: usize, count: usize, grid: usize, args: Vec<Arg>) -> KernelSpec {
    KernelSpec {
        entry,
        source: SOURCE.to_owned(),
        headers: HEADERS.to_vec(),
        defines: vec![
            (entry.to_uppercase(), "1".to_owned()),
            ("COUNT".to_owned(), count.to_string()),
            ("THREADS".to_owned(), threads.to_string()),
        ],
        grid: [grid as u32, 1, 1],
        block: [threads as u32, 1, 1],
        shared_bytes: 0,
        args,
    }
}

impl Op for BlockSquares {
    fn id(&self) -> OpId {
        id::BLOCK_SQUARES
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "Σ x² of each block. x f32 [n]; blocks i32 [blocks, 2], of each its first element in units of 256 and its \
         number of elements → sums f32 [blocks]."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        match inputs {
            [x, blocks]
                if x.dtype == Element::F32
                    && x.shape.len() == 1
                    && blocks.dtype == Element::I32
                    && blocks.shape.len() == 2
                    && blocks.shape[1] == 2.into() =>
            {
                Ok(vec![ValueType::new(Element::F32, [blocks.shape[0].clone()])])
            }
            _ => Err("takes a flat f32 tensor and its blocks, i32 [blocks, 2]".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    fn cost(&self, inputs: &[TensorRef], _outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        Cost { flops: 2.0 * inputs[0].len() as f64, bytes: inputs[0].bytes() as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, sums) = (&call.inputs[0], &call.outputs[0]);
        assert!(x.is_dense() && x.offset.is_multiple_of(16), "gradients lie densely on 16 bytes: {x}");
        let args = vec![Arg::Input(0), Arg::Input(1), Arg::Output(0)];
        // The number of blocks is that of the grid: one kernel for all tensors.
        Lowered::Kernels(vec![spec("block_squares", THREADS, 0, sums.len(), args)])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |tensors: &[(usize, usize)]| {
            let values = table_of(tensors.iter().copied());
            let n = tensors.iter().map(|(start, elements)| start + elements).max().unwrap_or(0);
            let x = ExampleInput::NormalF32 { shape: vec![n], scale: 0.1 };
            Example::new(vec![x, ExampleInput::Ints { shape: vec![values.len() / 2, 2], values }], Attrs::new())
        };
        vec![example(&[(0, 7)]), example(&[(0, 100_003), (100_096, 1), (100_352, 32_768), (133_120, 5)])]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_end_with_their_tensors() {
        let tensors = [(0, 40_000), (40_192, 3)];
        assert_eq!(table_of(tensors.into_iter()), [0, 32_768, 128, 7_232, 157, 3]);
        assert_eq!(blocks_of(tensors.into_iter()).shape[..], [3, 2]);
    }
}
