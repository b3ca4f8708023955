//! The transposition of a matrix: `transpose`. For parameters of experts that files keep with the number of the expert
//! last.

use graph::{Dim, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("transpose.cu");
const HEADERS: &[(&str, &str)] = &[("types.cuh", include_str!("../cuda/types.cuh"))];

const THREADS: usize = 256;
/// Rows and columns of a block's tile.
const TILE: usize = 32;

/// y = xᵀ, x as a matrix of some columns
pub struct Transpose;

fn elements(x: &ValueType) -> Result<usize, String> {
    let fixed: Option<usize> = x.shape.iter().map(Dim::fixed).product();
    fixed.ok_or_else(|| "all extents of x must be known".into())
}

impl Op for Transpose {
    fn id(&self) -> OpId {
        id::TRANSPOSE
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "The transpose of x, whose elements are taken as a matrix of `columns` columns; the result, of as many rows, has the \
         shape `shape`. With `accumulate`, added to."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "columns", kind: "int", doc: "of x as a matrix" },
            Attribute { name: "shape", kind: "list of int", doc: "of the result" },
            Attribute { name: "accumulate", kind: "bool?", doc: "add to the result instead of overwriting it" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x] = inputs else { return Err("takes one input".into()) };
        let (columns, shape, of_x) = (attrs.size("columns")?, attrs.sizes("shape")?, elements(x)?);
        attrs.flag("accumulate")?;
        if !x.dtype.is_float() || columns == 0 || !of_x.is_multiple_of(columns) {
            return Err(format!("x must be floating point, a matrix of {columns} columns"));
        }
        if shape.iter().product::<usize>() != of_x {
            return Err(format!("{shape:?} does not have the {of_x} elements of x"));
        }
        Ok(vec![ValueType::new(x.dtype, shape.into_iter().map(Dim::Fixed).collect::<Vec<_>>())])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let x = call.emit.value(call.input(0)).shape.clone();
        let columns = call.node.attrs.size("columns").expect("checked by the shape rule");
        let attrs = Attrs::new().with("columns", x.iter().product::<usize>() / columns).with("shape", x);
        let dy = call.dy();
        Gradients::Inputs(vec![call.wanted(0, id::TRANSPOSE, &[dy], attrs)])
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        Cost { flops: 0.0, bytes: (inputs[0].bytes() + outputs[0].bytes()) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, y) = (&call.inputs[0], &call.outputs[0]);
        assert!(x.is_dense() && y.is_dense(), "matrices that are turned over lie densely: {x}, {y}");
        let columns = call.attrs.size("columns").expect("checked by the shape rule");
        let rows = x.len() / columns;
        let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule") as usize;
        let numbers =
            [("ROWS", rows), ("COLUMNS", columns), ("TILE", TILE), ("THREADS", THREADS), ("ACCUMULATE", accumulate)];
        let types = [("X_T", x), ("Y_T", y)].map(|(name, of)| (name.to_owned(), device_type(of.dtype).to_owned()));
        Lowered::Kernels(vec![KernelSpec {
            entry: "transpose",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines: numbers.map(|(name, n)| (name.to_owned(), n.to_string())).into_iter().chain(types).collect(),
            grid: [columns.div_ceil(TILE) as u32, rows.div_ceil(TILE) as u32, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Output(0)],
        }])
    }

    crate::reference!(transpose);

    fn examples(&self) -> Vec<Example> {
        let example = |shape: [usize; 2], columns: usize, result: &[usize]| {
            let x = ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 };
            Example::new(vec![x], Attrs::new().with("columns", columns).with("shape", result.to_vec()))
        };
        let state = ExampleInput::NormalF32 { shape: vec![70, 33], scale: 1.0 };
        let mut added = example([33, 70], 70, &[70, 33]).with_state(vec![state]);
        added.inputs[0] = ExampleInput::NormalF32 { shape: vec![33, 70], scale: 1.0 };
        added.attrs = added.attrs.with("accumulate", true);
        vec![
            example([5, 12], 4, &[20, 3]).differentiate(&[0]),
            example([1, 7], 7, &[7, 1]).differentiate(&[0]),
            example([65, 96], 3, &[3, 65, 32]),
            added,
        ]
    }
}

fn transpose<T: Real>(call: &mut Call<'_, T>) {
    let columns = call.attrs.size("columns").expect("checked by the shape rule");
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let x = call.inputs[0].real();
    let rows = x.len() / columns;
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(rows).enumerate().for_each(|(column, y)| {
        for (row, y) in y.iter_mut().enumerate() {
            let value = x[row * columns + column];
            *y = if accumulate { *y + value } else { value };
        }
    });
}
