//! Views of matrices in memory: reading with any strides, writing rows that do not overlap. Knows nothing of products.
#![allow(unsafe_code, reason = "disjoint tiles of one matrix")]

use std::marker::PhantomData;
use std::ops::Range;

/// A matrix to read, any strides.
#[derive(Clone, Copy)]
pub struct Matrix<'a, T = f32> {
    data: &'a [T],
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
}

impl<'a, T: Copy> Matrix<'a, T> {
    /// Row-major with `row_stride` elements from row to row. Panics when `data` is too short.
    pub fn new(data: &'a [T], rows: usize, columns: usize, row_stride: usize) -> Self {
        let matrix = Matrix { data, rows, columns, row_stride, column_stride: 1 };
        assert!(matrix.extent() <= data.len(), "a {rows}×{columns} matrix does not fit into {} elements", data.len());
        matrix
    }

    /// Number of elements from the first to the end of the last.
    fn extent(&self) -> usize {
        if self.rows == 0 || self.columns == 0 {
            return 0;
        }
        let below = (self.rows - 1).checked_mul(self.row_stride);
        let across = (self.columns - 1).checked_mul(self.column_stride);
        let last = below.zip(across).and_then(|(below, across)| below.checked_add(across)?.checked_add(1));
        last.expect("a matrix lies in memory, so that its extent is a number")
    }

    pub fn transposed_if(self, transpose: bool) -> Self {
        if !transpose {
            return self;
        }
        Matrix {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// Number of rows in the view.
    pub fn height(&self) -> usize {
        self.rows
    }

    /// Number of columns in the view.
    pub fn width(&self) -> usize {
        self.columns
    }

    /// Returns the adjacent elements from the first on: a vector when there is one row.
    pub fn values(&self) -> &'a [T] {
        self.data
    }

    /// A part of the matrix. Panics when it is not inside.
    pub fn block(&self, rows: Range<usize>, columns: Range<usize>) -> Matrix<'a, T> {
        assert!(rows.end <= self.rows && columns.end <= self.columns, "a block leaves its matrix");
        let (height, width) = (rows.len(), columns.len());
        let start = (rows.start * self.row_stride + columns.start * self.column_stride).min(self.data.len());
        Matrix { data: &self.data[start..], rows: height, columns: width, ..*self }
    }
}

/// A matrix to write, row-major, whose rows do not overlap. It owns its rows' elements but not the
/// gaps between them, so tiles of one matrix can be written by different threads.
pub struct MatrixMut<'a, T> {
    pub(super) start: *mut T,
    rows: usize,
    columns: usize,
    pub(super) row_stride: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: a matrix has exclusive access to its elements, like `&mut [T]`.
unsafe impl<T: Send> Send for MatrixMut<'_, T> {}

impl<'a, T> MatrixMut<'a, T> {
    /// Wraps row-major data. Panics when `data` is too short or rows overlap.
    pub fn new(data: &'a mut [T], rows: usize, columns: usize, row_stride: usize) -> Self {
        assert!(rows <= 1 || row_stride >= columns, "rows of {columns} elements overlap at a stride of {row_stride}");
        let extent = if rows == 0 || columns == 0 { 0 } else { (rows - 1) * row_stride + columns };
        assert!(extent <= data.len(), "a {rows}×{columns} matrix does not fit into {} elements", data.len());
        MatrixMut { start: data.as_mut_ptr(), rows, columns, row_stride, lifetime: PhantomData }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns in the view.
    pub fn width(&self) -> usize {
        self.columns
    }

    pub fn row(&mut self, index: usize) -> &mut [T] {
        assert!(index < self.rows, "row {index} of {}", self.rows);
        // SAFETY: the row lies inside the slice given to `new`; the borrow of self excludes others.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(index * self.row_stride), self.columns) }
    }

    /// The columns of a range, for as long as self is borrowed.
    pub fn columns(&mut self, columns: Range<usize>) -> MatrixMut<'_, T> {
        assert!(columns.end <= self.columns, "columns {columns:?} of {}", self.columns);
        // SAFETY: an offset within the matrix; when there are no rows it is not dereferenced.
        let start = if self.rows == 0 { self.start } else { unsafe { self.start.add(columns.start) } };
        MatrixMut { start, columns: columns.len(), lifetime: PhantomData, ..*self }
    }

    /// Divides into tiles of at most this many rows and columns, each with its first row and column.
    pub fn tiles(self, height: usize, width: usize) -> Vec<(usize, usize, MatrixMut<'a, T>)> {
        let mut tiles = Vec::new();
        for row in (0..self.rows).step_by(height) {
            for column in (0..self.columns).step_by(width) {
                let rows = height.min(self.rows - row);
                let columns = width.min(self.columns - column);
                // SAFETY: tiles lie inside the matrix and share no element, since rows do not
                // overlap; self is consumed.
                let start = unsafe { self.start.add(row * self.row_stride + column) };
                let tile = MatrixMut { start, rows, columns, row_stride: self.row_stride, lifetime: PhantomData };
                tiles.push((row, column, tile));
            }
        }
        tiles
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_leave_gaps_alone() {
        let mut data = vec![0.0f32; 5 * 10];
        let matrix = MatrixMut::new(&mut data, 5, 7, 10);
        for (row, column, mut tile) in matrix.tiles(2, 3) {
            for i in 0..tile.rows() {
                for (j, x) in tile.row(i).iter_mut().enumerate() {
                    *x += (100 * (row + i) + column + j + 1) as f32;
                }
            }
        }
        for (i, x) in data.iter().enumerate() {
            let expected = if i % 10 < 7 { (100 * (i / 10) + i % 10 + 1) as f32 } else { 0.0 };
            assert_eq!(*x, expected);
        }
    }

    /// Twice 2⁶³ elements from the first row to the third wrap to none.
    #[test]
    #[should_panic(expected = "its extent is a number")]
    fn a_matrix_of_which_the_extent_wraps_is_none() {
        Matrix::new(&[0.0f32; 4], 3, 1, 1 << 63);
    }
}
