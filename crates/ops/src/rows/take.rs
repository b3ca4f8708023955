//! Rows of one tensor at the places of another: what an image became, at the places that a text has for it.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for};
use crate::op::{Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("take.cu");
const HEADERS: &[(&str, &str)] = &[("types.cuh", include_str!("../cuda/types.cuh"))];

const THREADS: u32 = 128;

/// y = take_rows(x, index, inverse)
pub struct TakeRows;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let [x, index, inverse] = call.inputs else { unreachable!("the shape rule requires three inputs") };
    let (rows, x) = (inverse.int().len(), x.real());
    let columns = x.len() / rows.max(1);
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(columns).zip(index.int()).for_each(|(y, index)| match usize::try_from(*index) {
        Ok(row) if row < rows => y.copy_from_slice(&x[row * columns..][..columns]),
        _ => y.fill(T::default()),
    });
}

impl Op for TakeRows {
    fn id(&self) -> OpId {
        id::TAKE_ROWS
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "Rows by index: y[i] = x[index[i]] with all axes of x but the last counted as one, zeros where the index is −1. \
         Each row of x is taken at most once: `inverse` has for it the place in y, or −1. x […, N], index i32 […], \
         inverse i32 like the rows of x → y [index, N]. If x has the axes of the inverse alone, a row is an element."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, index, inverse] = inputs else { return Err("takes x, the index and its inverse".into()) };
        let (rows, columns) = match x.shape.as_slice() {
            all if *all == inverse.shape[..] => (all, None),
            [rows @ .., columns @ Dim::Fixed(_)] => (rows, Some(columns)),
            _ => return Err("x must be […, N], N known".into()),
        };
        if !x.dtype.is_float() || [index, inverse].iter().any(|of| of.dtype != Element::I32) {
            return Err("x must be floating point, the index and its inverse i32".into());
        }
        if inverse.shape[..] != *rows {
            return Err("the inverse must have one number for each row of x".into());
        }
        let shape: Vec<Dim> = index.shape.iter().chain(columns).cloned().collect();
        Ok(vec![ValueType::new(x.dtype, shape)])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let inputs = [call.dy(), call.input(2), call.input(1)];
        Gradients::Inputs(vec![call.wanted(0, id::TAKE_ROWS, &inputs, Attrs::new()), None, None])
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        Cost { flops: 0.0, bytes: (inputs[1].bytes() + 2 * outputs[0].bytes()) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        // An element is a row of one column.
        let of_rows = |at: &TensorRef| match call.inputs[0].shape.len() == call.inputs[2].shape.len() {
            true => TensorRef {
                shape: at.shape.iter().copied().chain([1]).collect(),
                strides: at.strides.iter().copied().chain([1]).collect(),
                ..at.clone()
            },
            false => at.clone(),
        };
        let (x, y) = (&of_rows(&call.inputs[0]), &of_rows(&call.outputs[0]));
        let columns = *x.shape.last().expect("the shape rule requires columns");
        let numbers = [("ROWS", x.len() / columns), ("COLUMNS", columns), ("THREADS", THREADS as usize)];
        let mut defines: Vec<_> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
        defines.extend(defines_for("X", x).into_iter().chain(defines_for("Y", y)));
        Lowered::Kernels(vec![KernelSpec {
            entry: "take_rows",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines,
            grid: [(y.len() / columns) as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Input(1), Arg::Output(0)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |x: &[usize], index: (&[usize], Vec<i32>)| {
            let rows: usize = x[..x.len() - 1].iter().product();
            let place = |row| index.1.iter().position(|of| *of == row).map_or(-1, |place| place as i32);
            let inverse = (0..rows as i32).map(place).collect();
            let inputs = vec![
                ExampleInput::Normal { shape: x.to_vec(), scale: 1.0 },
                ExampleInput::Ints { shape: index.0.to_vec(), values: index.1 },
                ExampleInput::Ints { shape: x[..x.len() - 1].to_vec(), values: inverse },
            ];
            Example::new(inputs, Attrs::new())
        };
        vec![
            example(&[1, 4, 24], (&[2, 3], vec![-1, 3, 0, 2, -1, -1])).differentiate(&[0]),
            example(&[2, 3, 300], (&[1, 4], vec![5, 0, -1, 2])).differentiate(&[0]),
            // Elements are taken.
            Example::new(
                vec![
                    ExampleInput::Normal { shape: vec![2, 5], scale: 1.0 },
                    ExampleInput::Ints { shape: vec![1, 4], values: vec![7, 0, -1, 3] },
                    ExampleInput::Ints { shape: vec![2, 5], values: vec![1, -1, -1, 3, -1, -1, -1, 0, -1, -1] },
                ],
                Attrs::new(),
            )
            .differentiate(&[0]),
            // Nothing is taken.
            example(&[1, 2, 8], (&[1, 3], vec![-1, -1, -1])),
        ]
    }
}
