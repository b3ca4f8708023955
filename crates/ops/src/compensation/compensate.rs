//! The numbers of a matrix, column by column, once each has made up for the errors of the columns before it.

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::compressed::{Codes, Extent, Form, Range};
use tensor::{Attrs, DType};

use super::inverse_cholesky::{check_order, factor, mixed, positive, square};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::quantise::CODES_HEADER;
use crate::quantise::forms::{BLOCK, CODES, FORMS_HEADER, form_defines, form_of};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("compensate.cu");
const HEADERS: &[(&str, &str)] = &[("types.cuh", include_str!("../cuda/types.cuh")), CODES_HEADER, FORMS_HEADER];

/// Columns whose errors are made up for in the columns after them at once, and columns that one pass over these takes.
const TILE: usize = 64;
/// Rows of a matrix that one block of threads has; threads of a row.
const ROWS: usize = 32;
const LANES: usize = 8;

/// y = compensate(w, u, order, scales(, zeros))
pub struct Compensate;

fn form(attrs: &Attrs) -> Form {
    form_of(attrs).expect("checked by the shape rule")
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let form = form(call.attrs);
    let shape = [call.inputs[0].shape[0], call.inputs[0].shape[1]];
    let columns = shape[1];
    let [block_rows, block_columns] = form.extent.block(shape);
    let across = form.extent.scales(shape)[1];
    let (w, u) = (call.inputs[0].real(), call.inputs[1].real());
    let (order, scales) = (call.inputs[2].int(), call.inputs[3].real());
    let zeros = call.inputs.get(4).map(|of| of.real());
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(columns).zip(w.par_chunks(columns)).enumerate().for_each(|(row, (y, w))| {
        y.copy_from_slice(w);
        for (place, column) in order.iter().enumerate() {
            let column = *column as usize;
            let block = row / block_rows * across + column / block_columns;
            let zero = zeros.map_or(0.0, |zeros| zeros[block].to_f32()) as i8;
            let factor = scales[block].to_f32();
            let value = form.value(form.code(y[column].to_f32(), factor, zero), factor, zero);
            let factors = &u[place * columns..][..columns];
            let error = (y[column] - T::from_f32(value)) / factors[place];
            for (factor, later) in factors[place + 1..].iter().zip(&order[place + 1..]) {
                y[*later as usize] -= error * *factor;
            }
        }
    });
}

impl Op for Compensate {
    fn id(&self) -> OpId {
        id::COMPENSATE
    }

    fn class(&self) -> Class {
        Class::Matmul
    }

    fn doc(&self) -> &'static str {
        "Numbers of a matrix, each as it is when its code is chosen. The columns of w are taken in an order. A column's error, its \
         difference from the values of its nearest codes, is divided by u[i, i], multiplied by u[i, j], and taken from every column j \
         that follows. w f32 [N, K], u f32 [K, K], upper, in that order, order i32 [K], scales and, with zero points, zeros f32, one \
         for each block of w → y f32 [N, K], whose nearest codes are the result."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[CODES, BLOCK]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let form = form_of(attrs)?;
        let zeros = usize::from(form.codes.has_zeros());
        if inputs.len() != 4 + zeros {
            return Err(format!("takes {} inputs", 4 + zeros));
        }
        let (w, u, order) = (&inputs[0], &inputs[1], &inputs[2]);
        let Some([rows, columns]) = w.extents().as_deref().and_then(|shape| <[usize; 2]>::try_from(shape).ok()) else {
            return Err(format!("{w} is no matrix of known extents"));
        };
        if w.dtype != Element::F32 || square(u)? != columns {
            return Err(format!("{u} does not belong to the columns of {w}"));
        }
        check_order(order, columns)?;
        let of_blocks = form.extent.scales([rows, columns]).map(Into::into).to_vec();
        let of_blocks = ValueType::new(Element::F32, of_blocks);
        match inputs[3..].iter().find(|of| **of != of_blocks) {
            Some(other) => Err(format!("{other} has not one number for each block, as {of_blocks}")),
            None => Ok(vec![w.clone()]),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of a solver")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let [rows, columns] = [inputs[0].shape[0], inputs[0].shape[1]];
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: rows as f64 * columns as f64 * columns as f64, bytes }
    }

    /// The matrix with its columns in order.
    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        call.inputs[0].bytes()
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let is_dense = |of: &TensorRef| assert!(of.is_dense(), "matrices lie densely: {of}");
        call.inputs.iter().chain(call.outputs).for_each(is_dense);
        let form = form(call.attrs);
        let shape = [call.inputs[0].shape[0], call.inputs[0].shape[1]];
        let [rows, columns] = shape;
        let [block_rows, block_columns] = form.extent.block(shape);
        let mut defines: Vec<(String, String)> = [
            ("N", rows),
            ("K", columns),
            ("BLOCK_ROWS", block_rows),
            ("BLOCK_COLUMNS", block_columns),
            ("ACROSS", form.extent.scales(shape)[1]),
            ("TILE", TILE),
            ("ROWS", ROWS),
            ("LANES", LANES),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_string()))
        .to_vec();
        defines.extend(form_defines(form.codes));
        let mut args = vec![Arg::Input(1), Arg::Input(2), Arg::Input(3)];
        if let Codes::Int { symmetric: false, .. } = form.codes {
            defines.push(("ZEROS".to_owned(), ", const float* __restrict__ zeros".to_owned()));
            args.push(Arg::Input(4));
        }
        args.extend([Arg::Scratch(0), Arg::Output(0)]);
        let threads = ROWS * LANES;
        let kernel = |entry: &'static str, grid: [usize; 2], args: Vec<Arg>| KernelSpec {
            entry,
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines: defines.clone(),
            grid: [grid[0] as u32, grid[1] as u32, 1],
            block: [threads as u32, 1, 1],
            shared_bytes: 0,
            args,
        };
        let ordered = vec![Arg::Input(0), Arg::Input(2), Arg::Scratch(0)];
        Lowered::Kernels(vec![
            kernel("in_order", [rows, columns.div_ceil(threads)], ordered),
            kernel("compensate", [rows.div_ceil(ROWS), 1], args),
        ])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let noise = |i: usize| ((i * 7919 + 13) % 10_007) as f32 / 5e3 - 1.0;
        let of = |codes: &str, extent: Extent, [rows, columns]: [usize; 2]| {
            let form = Form { codes: Codes::named(codes).expect("a name of the list"), extent };
            let w: Vec<f32> = (0..rows * columns).map(noise).collect();
            let u = factor(&positive(columns).into_iter().map(f64::from).collect::<Vec<_>>(), columns);
            let scales = form.scales(&w, columns, DType::F32, Range::of(&w));
            let shape = form.extent.scales([rows, columns]).to_vec();
            let zeros = scales.zeros.iter().map(|zero| f32::from(*zero)).collect::<Vec<f32>>();
            let f32 = |shape: &[usize], values: Vec<f32>| ExampleInput::F32 { shape: shape.to_vec(), values };
            let mut inputs = vec![
                f32(&[rows, columns], w),
                f32(&[columns, columns], u.into_iter().map(|x| x as f32).collect()),
                ExampleInput::Ints { shape: vec![columns], values: mixed(columns) },
                f32(&shape, scales.factors),
            ];
            inputs.extend(form.codes.has_zeros().then(|| f32(&shape, zeros)));
            Example::new(inputs, form.attrs())
        };
        vec![
            of("int4", Extent::Group(32), [5, 96]),
            of("int4_asymmetric", Extent::Group(16), [37, 144]),
            of("int8", Extent::Row, [3, 20]),
            of("fp8", Extent::Tile(2, 16), [7, 48]),
            of("fp8", Extent::Tensor, [4, 40]),
            of("nvfp4", Extent::Group(16), [2, 64]),
            of("mxfp4", Extent::Group(32), [33, 64]),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    #[test]
    fn errors_go_to_later_columns_alone() {
        // Two columns, the second one first: its error 0.3 goes to the first, divided by 2 and times 4.
        let form = Form { codes: Codes::named("int8").unwrap(), extent: Extent::Row };
        let inputs = [
            (&[1usize, 2][..], Array::Real(vec![5.0f32, 2.3])),
            (&[2, 2], Array::Real(vec![2.0, 4.0, 0.0, 1.0])),
            (&[2], Array::Int(vec![1, 0])),
            (&[1, 1], Array::Real(vec![1.0])),
        ];
        let inputs: Vec<(&[usize], &Array<f32>)> = inputs.iter().map(|(shape, of)| (*shape, of)).collect();
        let mut outputs = [(vec![1, 2], Array::Real(vec![0.0f32; 2]))];
        apply(&Compensate, &form.attrs(), &inputs, &mut outputs);
        let found = outputs[0].1.real();
        assert!((found[0] - 4.4).abs() < 1e-5 && found[1] == 2.3, "{found:?}");
    }
}
