//! Each matrix of a batch divided by its Frobenius norm.

use graph::{Element, OpId, ValueType};
use program::{Arg, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use super::super::squares::sum_of_squares;
use super::matrices;
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("unit.cu");
const HEADERS: &[(&str, &str)] =
    &[("types.cuh", include_str!("../../cuda/types.cuh")), ("reduce.cuh", include_str!("../../cuda/reduce.cuh"))];

const THREADS: usize = 256;
/// Elements that one block takes before a matrix gets another, up to `MOST_BLOCKS`.
const ELEMENTS_PER_BLOCK: usize = THREADS * 16;
const MOST_BLOCKS: usize = 128;

/// Elements that one task divides on the CPU.
const CHUNK: usize = 4096;

/// y = x/(‖x‖ + epsilon) for each matrix
pub struct UnitMatrices;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let epsilon = call.attrs.float("epsilon").expect("checked by the shape rule");
    let (x, shape) = (call.inputs[0].real(), call.inputs[0].shape);
    let [y] = call.outputs_mut();
    let elements = (shape[1] * shape[2]).max(1);
    for (x, y) in x.chunks(elements).zip(y.real().chunks_mut(elements)) {
        let below = T::from_f64(sum_of_squares(x).sqrt() + epsilon);
        let chunks = y.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK));
        chunks.for_each(|(y, x)| y.iter_mut().zip(x).for_each(|(y, x)| *y = *x / below));
    }
}

fn blocks_for(x: &TensorRef) -> usize {
    (x.shape[1] * x.shape[2]).div_ceil(ELEMENTS_PER_BLOCK).clamp(1, MOST_BLOCKS)
}

impl Op for UnitMatrices {
    fn id(&self) -> OpId {
        id::UNIT_MATRICES
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "Each matrix divided by its norm: yᵢ = xᵢ/(‖xᵢ‖ + epsilon), the root of the sum of its squares. x f32 \
         [count, m, n] → [count, m, n]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "epsilon", kind: "float", doc: "added to the norm" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x] = inputs else { return Err("takes one batch of matrices".into()) };
        matrices(x)?;
        attrs.float("epsilon")?;
        if x.dtype != Element::F32 {
            return Err("the matrices must be f32".into());
        }
        Ok(vec![ValueType::new(Element::Float, x.shape.clone())])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    /// Partial sums of each matrix.
    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        call.inputs[0].shape[0] * blocks_for(&call.inputs[0]) * 4
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, y) = (&call.inputs[0], &call.outputs[0]);
        let inside = |t: &TensorRef| t.strides[2] == 1 && t.strides[1] == t.shape[2];
        assert!(inside(x) && inside(y), "matrices lie densely: {x}, {y}");
        let (count, elements, blocks) = (x.shape[0], x.shape[1] * x.shape[2], blocks_for(x));
        let epsilon = call.attrs.float("epsilon").expect("checked by the shape rule");
        let kernel = |entry: &'static str, args: Vec<Arg>| {
            let defines = [
                ("ELEMENTS", elements.to_string()),
                ("X_STRIDE", format!("{}ull", x.strides[0])),
                ("Y_STRIDE", format!("{}ull", y.strides[0])),
                ("Y_T", device_type(y.dtype).to_owned()),
                ("PARTS", blocks.to_string()),
                ("EPSILON", format!("{:e}f", epsilon as f32)),
                ("THREADS", THREADS.to_string()),
            ];
            KernelSpec {
                entry,
                source: SOURCE.to_owned(),
                headers: HEADERS.to_vec(),
                defines: defines.map(|(name, value)| (name.to_owned(), value)).to_vec(),
                grid: [blocks as u32, count as u32, 1],
                block: [THREADS as u32, 1, 1],
                shared_bytes: 0,
                args,
            }
        };
        Lowered::Kernels(vec![
            kernel("matrix_squares", vec![Arg::Input(0), Arg::Scratch(0)]),
            kernel("matrix_divide", vec![Arg::Input(0), Arg::Scratch(0), Arg::Output(0)]),
        ])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let attrs = || Attrs::new().with("epsilon", 1e-7);
        let example = |shape: [usize; 3]| {
            Example::new(vec![ExampleInput::NormalF32 { shape: shape.to_vec(), scale: 0.01 }], attrs())
        };
        // Before the first gradient there is nothing to divide.
        let zero = ExampleInput::F32 { shape: vec![1, 2, 3], values: vec![0.0; 6] };
        vec![example([3, 5, 7]), example([2, 96, 130]), Example::new(vec![zero], attrs())]
    }
}
