//! Matrices that files keep transposed: a matrix is read as a whole, and what was requested is copied from it.
//!
//! Knows shapes; not codes.

use std::sync::{Mutex, PoisonError};

use crate::error::DataError;

/// Rows that are read of the file at a time: one line of the cache of every row that they become columns of.
const BAND: usize = 16;

/// Bytes of an element: f32.
const SIZE: usize = 4;

/// The last two axes change places.
#[derive(Debug)]
pub(crate) struct Turned {
    /// The shape in which it is read.
    pub shape: Vec<usize>,
    last: Mutex<Option<Matrix>>,
}

/// The matrix that was requested last. It is kept until all of it was.
#[derive(Debug)]
struct Matrix {
    number: usize,
    values: Vec<u8>,
    /// Bytes that were not requested yet.
    left: usize,
}

impl Turned {
    /// The transposition of a tensor that the file has in this shape, of two axes or more.
    pub fn of(stored: &[usize]) -> Turned {
        let mut shape = stored.to_vec();
        let axes = shape.len();
        shape.swap(axes - 2, axes - 1);
        Turned { shape, last: Mutex::default() }
    }

    /// Elements from `begin` on, f32 in bytes. `stored` reads such of the tensor as the file has it.
    pub fn read(
        &self,
        begin: usize,
        bytes: &mut [u8],
        stored: impl Fn(usize, &mut [u8]) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let whole = self.shape[self.shape.len() - 2..].iter().product::<usize>() * SIZE;
        let (mut at, mut rest) = (begin * SIZE, bytes);
        while !rest.is_empty() {
            let (number, inside) = (at / whole, at % whole);
            let (part, after) = rest.split_at_mut(rest.len().min(whole - inside));
            let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            if last.as_ref().is_none_or(|matrix| matrix.number != number) {
                *last = Some(Matrix { number, values: self.matrix(number, &stored)?, left: whole });
            }
            if let Some(matrix) = last.as_mut() {
                part.copy_from_slice(&matrix.values[inside..inside + part.len()]);
                matrix.left = matrix.left.saturating_sub(part.len());
            }
            last.take_if(|matrix| matrix.left == 0);
            at += part.len();
            rest = after;
        }
        Ok(())
    }

    fn matrix(
        &self,
        number: usize,
        stored: &impl Fn(usize, &mut [u8]) -> Result<(), DataError>,
    ) -> Result<Vec<u8>, DataError> {
        let [rows, columns] = [self.shape[self.shape.len() - 2], self.shape[self.shape.len() - 1]];
        let mut values = vec![0; rows * columns * SIZE];
        let mut band = vec![0; BAND.min(columns) * rows * SIZE];
        for first in (0..columns).step_by(BAND) {
            let count = BAND.min(columns - first);
            stored((number * columns + first) * rows, &mut band[..count * rows * SIZE])?;
            for (row, to) in values.chunks_exact_mut(columns * SIZE).enumerate() {
                for (column, to) in to[first * SIZE..(first + count) * SIZE].chunks_exact_mut(SIZE).enumerate() {
                    to.copy_from_slice(&band[(column * rows + row) * SIZE..][..SIZE]);
                }
            }
        }
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_those_of_the_transposes_and_nothing_is_kept_in_the_end() {
        let (matrices, rows, columns) = (3, 37, 5);
        let stored = |begin: usize, bytes: &mut [u8]| {
            for (i, to) in bytes.chunks_exact_mut(SIZE).enumerate() {
                to.copy_from_slice(&((begin + i) as f32).to_le_bytes());
            }
            Ok(())
        };
        let turned = Turned::of(&[matrices, rows, columns]);
        assert_eq!(turned.shape, [matrices, columns, rows]);
        for step in [1, 7, rows * columns, 300, matrices * rows * columns] {
            let mut found = Vec::new();
            for begin in (0..matrices * rows * columns).step_by(step) {
                let mut bytes = vec![0; step.min(matrices * rows * columns - begin) * SIZE];
                turned.read(begin, &mut bytes, stored).unwrap();
                found.extend(bytes.chunks_exact(SIZE).map(|x| f32::from_le_bytes(x.try_into().unwrap())));
            }
            for (index, value) in found.iter().enumerate() {
                let (matrix, column, row) = (index / (rows * columns), index / rows % columns, index % rows);
                assert_eq!(*value, ((matrix * rows + row) * columns + column) as f32, "{step}: {index}");
            }
            assert!(turned.last.lock().unwrap().is_none(), "{step}");
        }
    }
}
