//! Columns of a tensor behind one another, 16 neighbours of each rotated by a fixed matrix: what spreads an outlier over
//! its block before a tensor is quantised along its rows. The matrix is diag(σ)·H16/4, which a product of two tensors
//! that are rotated alike does not notice.

use graph::{OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use super::{HEADERS, matrix, padded_rows};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type, row_offset};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("rotate.cu");

const BLOCK: usize = 16;
/// Columns of a kernel's block; its rows are four times 16.
const COLUMNS: usize = 64;
const ROWS: usize = 64;
const THREADS: u32 = 256;

/// Where σ is −1, as bits.
const NEGATIVE: u32 = 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 12 | 1 << 14 | 1 << 15;

/// y = rotate(x)
pub struct Rotate;

/// Sixteen values times diag(σ)·H16/4, in this order of sums.
fn rotated<T: Real>(mut x: [T; BLOCK]) -> [T; BLOCK] {
    for (_, x) in x.iter_mut().enumerate().filter(|(i, _)| NEGATIVE >> i & 1 == 1) {
        *x = -*x;
    }
    let mut apart = 1;
    while apart < BLOCK {
        for i in (0..BLOCK).filter(|i| i & apart == 0) {
            (x[i], x[i + apart]) = (x[i] + x[i + apart], x[i] - x[i + apart]);
        }
        apart *= 2;
    }
    x.map(|x| x * T::from_f32(0.25))
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let (x, rows, columns) = (call.inputs[0].real(), call.inputs[0].rows(), call.inputs[0].columns());
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(padded_rows(rows).max(1)).enumerate().for_each(|(column, y)| {
        for (block, y) in y.chunks_mut(BLOCK).enumerate() {
            let of = |i: usize| if i < rows { x[i * columns + column] } else { T::default() };
            y.copy_from_slice(&rotated(std::array::from_fn(|i| of(block * BLOCK + i))));
        }
    });
}

impl Op for Rotate {
    fn id(&self) -> OpId {
        id::ROTATE
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "The transpose of x, 16 neighbours of its rows times diag(σ)·H/4 with the Hadamard matrix H and fixed signs σ; \
         rows of x are filled up with zeros. x […, K] → [K, rows up to a multiple of 16]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[]
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x] = inputs else { return Err("takes x".into()) };
        match x.extents().filter(|shape| shape.len() >= 2 && x.dtype.is_float()) {
            Some(shape) => {
                let (rows, columns) = matrix(&shape);
                Ok(vec![ValueType::new(x.dtype, [columns.into(), padded_rows(rows).into()])])
            }
            None => Err("x must be floating point, a matrix or more, of known extents".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of a precision recipe, behind differentiation")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        Cost { flops: 5.0 * outputs[0].len() as f64, bytes: (inputs[0].bytes() + outputs[0].bytes()) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, y) = (&call.inputs[0], &call.outputs[0]);
        let (rows, columns) = matrix(&x.shape);
        let padded = padded_rows(rows);
        assert!(x.strides.last().is_none_or(|s| *s == 1) && y.is_dense(), "rows without gaps: {x}, {y}");
        Lowered::Kernels(vec![KernelSpec {
            entry: "rotate",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines: vec![
                ("X_T".to_owned(), device_type(x.dtype).to_owned()),
                ("Y_T".to_owned(), device_type(y.dtype).to_owned()),
                ("X_AT(row)".to_owned(), row_offset(x)),
                ("COLUMNS".to_owned(), columns.to_string()),
                ("ROWS".to_owned(), rows.to_string()),
                ("PADDED".to_owned(), padded.to_string()),
                ("NEGATIVE".to_owned(), format!("{NEGATIVE}u")),
                ("THREADS".to_owned(), THREADS.to_string()),
                ("FORMAT".to_owned(), "0".to_owned()),
            ],
            grid: [columns.div_ceil(COLUMNS) as u32, padded.div_ceil(ROWS).max(1) as u32, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Output(0)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |shape: &[usize]| {
            Example::new(vec![ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 }], Attrs::new())
        };
        vec![example(&[2, 24, 32]), example(&[7, 80]), example(&[3, 67, 48])]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rotation_is_orthogonal_and_spreads_one_value() {
        let mut x = [0f64; BLOCK];
        x[3] = 2.0;
        assert!(rotated(x).iter().all(|y| y.abs() == 0.5) && rotated(x)[0] == -0.5);
        let draw = |seed: usize| std::array::from_fn(|i| ((i * 7 + seed) * 37 % 101) as f64 / 50.0 - 1.0);
        let dot = |a: [f64; BLOCK], b: [f64; BLOCK]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let (a, b) = (draw(1), draw(9));
        assert!((dot(rotated(a), rotated(b)) - dot(a, b)).abs() < 1e-12);
    }
}
