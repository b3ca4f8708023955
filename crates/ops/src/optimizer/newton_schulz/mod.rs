//! The operations between the products of a Newton-Schulz iteration: scaling matrices to norm 1 before it, and the
//! polynomial of each iteration. X ← (a·I + b·A + c·A²)·X with A = X·Xᵀ drives all singular values towards 1.

mod polynomial;
mod unit;

pub use polynomial::NewtonSchulzPolynomial;
pub use unit::UnitMatrices;

use graph::{Dim, ValueType};

/// The three extents of a batch of matrices [count, rows, columns].
pub fn matrices(x: &ValueType) -> Result<[usize; 3], String> {
    match x.shape.as_slice() {
        [Dim::Fixed(count), Dim::Fixed(rows), Dim::Fixed(columns)] if x.dtype.is_float() => {
            Ok([*count, *rows, *columns])
        }
        _ => Err(format!("{x} is no batch of matrices of known extents")),
    }
}
