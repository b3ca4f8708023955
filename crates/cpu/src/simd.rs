//! Matrices in memory and their product: the door to the vectorised kernel of the `gemm` crate.
//! One call runs on one thread; dividing work is the caller's business, so that bits cannot depend
//! on the number of threads.
#![allow(unsafe_code, reason = "disjoint tiles of one matrix, and the foreign kernel's raw pointers")]

use std::marker::PhantomData;
use std::ops::Range;

use gemm_common::Parallelism;

/// A matrix to read, any strides.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Row-major with `row_stride` elements from row to row. Panics when `data` is too short.
    pub fn new(data: &'a [f32], rows: usize, columns: usize, row_stride: usize) -> Self {
        let matrix = Matrix { data, rows, columns, row_stride, column_stride: 1 };
        assert!(matrix.extent() <= data.len(), "a {rows}×{columns} matrix does not fit into {} elements", data.len());
        matrix
    }

    /// Elements from the first to behind the last.
    fn extent(&self) -> usize {
        if self.rows == 0 || self.columns == 0 {
            return 0;
        }
        (self.rows - 1) * self.row_stride + (self.columns - 1) * self.column_stride + 1
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

    /// Number of columns.
    pub fn width(&self) -> usize {
        self.columns
    }

    /// The elements behind one another from the first: a vector when there is one row.
    pub fn values(&self) -> &'a [f32] {
        self.data
    }

    /// A part of the matrix. Panics when it is not inside.
    pub fn block(&self, rows: Range<usize>, columns: Range<usize>) -> Matrix<'a> {
        assert!(rows.end <= self.rows && columns.end <= self.columns, "a block leaves its matrix");
        let (height, width) = (rows.len(), columns.len());
        let start = (rows.start * self.row_stride + columns.start * self.column_stride).min(self.data.len());
        Matrix { data: &self.data[start..], rows: height, columns: width, ..*self }
    }
}

/// A matrix to write, row-major, whose rows do not overlap. It owns its rows' elements but not the
/// gaps between them, so tiles of one matrix can be written by different threads.
pub struct MatrixMut<'a, T> {
    start: *mut T,
    rows: usize,
    columns: usize,
    row_stride: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: a matrix has exclusive access to its elements, like `&mut [T]`.
unsafe impl<T: Send> Send for MatrixMut<'_, T> {}

impl<'a, T> MatrixMut<'a, T> {
    /// Panics when `data` is too short or rows overlap.
    pub fn new(data: &'a mut [T], rows: usize, columns: usize, row_stride: usize) -> Self {
        assert!(rows <= 1 || row_stride >= columns, "rows of {columns} elements overlap at a stride of {row_stride}");
        let extent = if rows == 0 || columns == 0 { 0 } else { (rows - 1) * row_stride + columns };
        assert!(extent <= data.len(), "a {rows}×{columns} matrix does not fit into {} elements", data.len());
        MatrixMut { start: data.as_mut_ptr(), rows, columns, row_stride, lifetime: PhantomData }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
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

/// D = scale·A·B, or D += scale·A·B with `accumulate`. Panics when the extents do not match.
pub fn product(d: &mut MatrixMut<'_, f32>, accumulate: bool, a: Matrix<'_>, b: Matrix<'_>, scale: f32) {
    assert!(
        d.rows == a.rows && d.columns == b.columns && a.columns == b.rows,
        "a product of {}×{} and {}×{} is not {}×{}",
        a.rows,
        a.columns,
        b.rows,
        b.columns,
        d.rows,
        d.columns
    );
    // The kernel wants a column-major result: it computes Dᵀ = Bᵀ·Aᵀ.
    // SAFETY: extents were checked against the slices when the matrices were made; D shares no
    // element with A or B, as it is borrowed mutably.
    unsafe {
        gemm_f32::gemm::f32::get_gemm_fn()(
            d.columns,
            d.rows,
            a.columns,
            d.start,
            d.row_stride as isize,
            1,
            accumulate,
            b.data.as_ptr(),
            b.row_stride as isize,
            b.column_stride as isize,
            a.data.as_ptr(),
            a.row_stride as isize,
            a.column_stride as isize,
            1.0,
            scale,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn naive(a: &[f32], b: &[f32], m: usize, n: usize, k: usize, at: bool, bt: bool) -> Vec<f32> {
        let mut d = vec![0.0; m * n];
        for i in 0..m {
            for j in 0..n {
                let x = |p: usize| if at { a[p * m + i] } else { a[i * k + p] };
                let y = |p: usize| if bt { b[j * k + p] } else { b[p * n + j] };
                d[i * n + j] = (0..k).map(|p| x(p) as f64 * y(p) as f64).sum::<f64>() as f32;
            }
        }
        d
    }

    fn values(n: usize, seed: u32) -> Vec<f32> {
        (0..n as u32)
            .map(|i| ((i.wrapping_mul(2654435761).wrapping_add(seed) >> 8) % 2001) as f32 / 1000.0 - 1.0)
            .collect()
    }

    #[test]
    fn products_match_in_every_layout_and_size() {
        for (m, n, k) in [(1, 1, 1), (1, 70, 33), (70, 1, 33), (5, 7, 0), (33, 65, 130), (64, 48, 1), (130, 17, 2)] {
            for (at, bt) in [(false, false), (false, true), (true, false), (true, true)] {
                let (a, b) = (values(m * k, 1), values(k * n, 2));
                let mut d = vec![9.0; m * n];
                let a_matrix = if at { Matrix::new(&a, k, m, m) } else { Matrix::new(&a, m, k, k) }.transposed_if(at);
                let b_matrix = if bt { Matrix::new(&b, n, k, k) } else { Matrix::new(&b, k, n, n) }.transposed_if(bt);
                product(&mut MatrixMut::new(&mut d, m, n, n), false, a_matrix, b_matrix, 1.0);
                let expected = naive(&a, &b, m, n, k, at, bt);
                for (x, y) in d.iter().zip(&expected) {
                    assert!((x - y).abs() < 1e-4, "{m} {n} {k} {at} {bt}: {x} {y}");
                }
                product(&mut MatrixMut::new(&mut d, m, n, n), true, a_matrix, b_matrix, -0.5);
                for (x, y) in d.iter().zip(&expected) {
                    assert!((x - 0.5 * y).abs() < 1e-4, "{m} {n} {k} {at} {bt} accumulated");
                }
            }
        }
    }

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
}
