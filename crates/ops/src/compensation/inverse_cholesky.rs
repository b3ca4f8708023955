//! The Cholesky factor of the inverse of a matrix.

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("inverse_cholesky.cu");
const HEADERS: &[(&str, &str)] = &[("types.cuh", include_str!("../cuda/types.cuh"))];

/// Rows and columns of a tile.
const TILE: usize = 64;
const THREADS: usize = 256;

/// u = inverse_cholesky(h, order): the upper Cholesky factor of h⁻¹
pub struct InverseCholesky;

/// The upper factor U of the inverse of a positive matrix of `n` rows, UᵀU = H⁻¹.
pub(super) fn factor(h: &[f64], n: usize) -> Vec<f64> {
    // H = RRᵀ with an upper R is the usual factorization from the last row and column on; U is the inverse of R.
    let mut l = vec![0.0; n * n];
    for row in 0..n {
        for column in 0..=row {
            let dot: f64 = (0..column).map(|k| l[row * n + k] * l[column * n + k]).sum();
            let rest = h[(n - 1 - row) * n + n - 1 - column] - dot;
            l[row * n + column] = if row == column { rest.sqrt() } else { rest / l[column * n + column] };
        }
    }
    let mut inverse = vec![0.0; n * n];
    for column in 0..n {
        for row in column..n {
            let dot: f64 = (column..row).map(|k| l[row * n + k] * inverse[k * n + column]).sum();
            inverse[row * n + column] = (f64::from(u8::from(row == column)) - dot) / l[row * n + row];
        }
    }
    inverse.reverse();
    inverse
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let n = call.inputs[0].shape[0];
    let (h, order) = (call.inputs[0].real(), call.inputs[1].int());
    let at = |row: i32, column: i32| h[row.max(column) as usize * n + row.min(column) as usize].to_f64();
    let h: Vec<f64> = order.iter().flat_map(|row| order.iter().map(|column| at(*row, *column))).collect();
    let [u] = call.outputs_mut();
    u.real().iter_mut().zip(factor(&h, n)).for_each(|(u, x)| *u = T::from_f64(x));
}

/// Rows of a matrix that is square and f32.
pub(super) fn square(x: &ValueType) -> Result<usize, String> {
    match x.extents().as_deref() {
        Some([rows, columns]) if rows == columns && *rows > 0 && x.dtype == Element::F32 => Ok(*rows),
        _ => Err(format!("{x} is no square f32 matrix")),
    }
}

pub(super) fn check_order(order: &ValueType, columns: usize) -> Result<(), String> {
    match *order == ValueType::new(Element::I32, vec![columns.into()]) {
        true => Ok(()),
        false => Err(format!("{order} is no order of {columns} columns")),
    }
}

impl Op for InverseCholesky {
    fn id(&self) -> OpId {
        id::INVERSE_CHOLESKY
    }

    fn class(&self) -> Class {
        Class::Matmul
    }

    fn doc(&self) -> &'static str {
        "The upper Cholesky factor of the inverse of a positive definite matrix with its rows and columns in an order, uᵀ·u = h⁻¹, \
         computed in f64. h f32 [K, K], of which the lower triangle is read, order i32 [K] → u f32 [K, K], with zeros below the \
         diagonal. Of a matrix that is not positive definite numbers are NaN."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [h, order] = inputs else { return Err("takes a matrix and an order".into()) };
        check_order(order, square(h)?)?;
        Ok(vec![h.clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of a solver")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let flops = (inputs[0].shape[0] as f64).powi(3) * 2.0 / 3.0;
        Cost { flops, bytes: (inputs[0].bytes() + outputs[0].bytes()) as f64 }
    }

    /// The matrix in f64, the inverses of the tiles on its diagonal, and a row of tiles.
    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        let n = call.inputs[0].shape[0];
        let tiles = n.div_ceil(TILE);
        8 * (n * n + tiles * TILE * TILE + TILE * tiles * TILE)
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (h, u) = (&call.inputs[0], &call.outputs[0]);
        assert!(h.is_dense() && u.is_dense(), "matrices lie densely: {h}, {u}");
        let n = h.shape[0];
        let tiles = n.div_ceil(TILE);
        let inverses = Arg::Scratch(8 * n * n);
        let row = Arg::Scratch(8 * (n * n + tiles * TILE * TILE));
        let matrix = Arg::Scratch(0);
        let kernel = |entry: &'static str, grid: [usize; 2], args: Vec<Arg>| KernelSpec {
            entry,
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines: [("N", n), ("TILE", TILE), ("THREADS", THREADS)]
                .map(|(name, value)| (name.to_owned(), value.to_string()))
                .to_vec(),
            grid: [grid[0] as u32, grid[1] as u32, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args,
        };
        let whole = [n, n.div_ceil(THREADS)];
        let mut kernels = vec![kernel("reverse_in", whole, vec![Arg::Input(0), Arg::Input(1), matrix.clone()])];
        for tile in 0..tiles {
            let (at, below) = (Arg::I32(tile as i32), tiles - tile - 1);
            let args = |list: &[&Arg]| list.iter().map(|arg| (*arg).clone()).collect::<Vec<Arg>>();
            kernels.push(kernel("factor_tile", [1, 1], args(&[&matrix, &inverses, &at])));
            if below > 0 {
                kernels.push(kernel("factor_panel", [below, 1], args(&[&matrix, &inverses, &at])));
                kernels.push(kernel("factor_rest", [below, below], args(&[&matrix, &at])));
            }
        }
        for tile in 0..tiles {
            let at = Arg::I32(tile as i32);
            if tile > 0 {
                let args = vec![matrix.clone(), row.clone(), at.clone()];
                kernels.push(kernel("invert_sums", [tile, 1], args));
            }
            let args = vec![matrix.clone(), inverses.clone(), row.clone(), at];
            kernels.push(kernel("invert_row", [tile + 1, 1], args));
        }
        kernels.push(kernel("reverse_out", whole, vec![matrix, Arg::Output(0)]));
        Lowered::Kernels(kernels)
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |n: usize| {
            let h = ExampleInput::F32 { shape: vec![n, n], values: positive(n) };
            Example::new(vec![h, ExampleInput::Ints { shape: vec![n], values: mixed(n) }], Attrs::new())
        };
        vec![example(1), example(24), example(64), example(150)]
    }
}

/// An order of `n` columns, no multiple of 7.
pub(super) fn mixed(n: usize) -> Vec<i32> {
    (0..n).map(|place| (place * 7 % n) as i32).collect()
}

/// A positive definite matrix of `n` rows whose entries differ in size.
pub(super) fn positive(n: usize) -> Vec<f32> {
    let noise = |i: usize| ((i * 7919 + 13) % 101) as f64 / 50.0 - 1.0;
    let at = |a: usize, b: usize| {
        let size = (1.0 + (a % 5) as f64) * (1.0 + (b % 5) as f64);
        let dot: f64 = (0..20).map(|k| noise(a * 31 + k) * noise(b * 31 + k)).sum();
        size * (dot + if a == b { 4.0 } else { 0.0 })
    };
    (0..n * n).map(|i| at(i / n, i % n) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factor_is_that_of_the_inverse() {
        let n = 30;
        let h: Vec<f64> = positive(n).into_iter().map(f64::from).collect();
        let u = factor(&h, n);
        assert!((0..n).all(|row| u[row * n..row * n + row].iter().all(|x| *x == 0.0)));
        for a in 0..n {
            for b in 0..n {
                let inverse = |k: usize| (0..n).map(|m| u[m * n + a] * u[m * n + k]).sum::<f64>();
                let product: f64 = (0..n).map(|k| inverse(k) * h[k * n + b]).sum();
                assert!((product - f64::from(u8::from(a == b))).abs() < 1e-9, "{a} {b}: {product}");
            }
        }
    }
}
