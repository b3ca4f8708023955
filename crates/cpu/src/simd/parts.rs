//! Products of parts of matrices, f64 and f32, row after row, with the kernels of the `gemm` crate. A call runs on one thread; the
//! caller splits the work, so that sums do not depend on the number of threads.
#![allow(unsafe_code, reason = "the foreign kernel's raw pointers")]

use gemm_common::Parallelism;

/// A part of a matrix whose rows lie `stride` elements apart.
#[derive(Clone, Copy)]
pub struct Part<'a, T> {
    of: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T> Part<'a, T> {
    /// The first `rows` by `columns` elements of rows of `stride`. Panics where these are not there.
    pub fn new(of: &'a [T], rows: usize, columns: usize, stride: usize) -> Part<'a, T> {
        assert!(rows == 0 || columns == 0 || (rows - 1) * stride + columns <= of.len(), "a part outside of its matrix");
        Part { of, rows, columns, row_stride: stride, column_stride: 1 }
    }

    pub fn transposed(self) -> Part<'a, T> {
        let Part { of, rows, columns, row_stride, column_stride } = self;
        Part { of, rows: columns, columns: rows, row_stride: column_stride, column_stride: row_stride }
    }
}

macro_rules! products {
    ($name:ident, $type:ty, $kernel:path, $doc:literal) => {
        #[doc = $doc]
        pub fn $name(to: &mut [$type], stride: usize, factor: $type, a: Part<'_, $type>, b: Part<'_, $type>) {
            assert_eq!(a.columns, b.rows, "the columns of a are the rows of b");
            let (rows, columns) = (a.rows, b.columns);
            assert!(
                rows == 0 || columns == 0 || (rows - 1) * stride + columns <= to.len(),
                "a part outside of its matrix"
            );
            // The kernel wants a column-major result: it computes the transpose of the product.
            // SAFETY: all extents lie within the slices, by the checks here and in `Part::new`, and `to` is borrowed mutably.
            unsafe {
                $kernel()(
                    columns,
                    rows,
                    a.columns,
                    to.as_mut_ptr(),
                    stride as isize,
                    1,
                    true,
                    b.of.as_ptr(),
                    b.row_stride as isize,
                    b.column_stride as isize,
                    a.of.as_ptr(),
                    a.row_stride as isize,
                    a.column_stride as isize,
                    1.0,
                    factor,
                    false,
                    false,
                    false,
                    Parallelism::None,
                );
            }
        }
    };
}

products!(
    add_product,
    f64,
    gemm_f64::gemm::f64::get_gemm_fn,
    "Adds factor·a·b to the rows of `to`, which lie `stride` elements apart."
);
products!(add_product_f32, f32, gemm_f32::gemm::f32::get_gemm_fn, "The same in f32.");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_parts_are_added() {
        let noise = |i: usize| ((i * 7919 + 13) % 101) as f64 / 50.0 - 1.0;
        for (m, n, k) in [(1, 1, 1), (7, 5, 3), (33, 17, 130), (4, 4, 0)] {
            let (a, b): (Vec<f64>, Vec<f64>) =
                ((0..m * k + 9 * m).map(noise).collect(), (0..n * (k + 2)).map(noise).collect());
            let mut to: Vec<f64> = (0..m * (n + 3)).map(noise).collect();
            let before = to.clone();
            add_product(&mut to, n + 3, -0.5, Part::new(&a, m, k, k + 9), Part::new(&b, n, k, k + 2).transposed());
            for i in 0..m {
                for j in 0..n + 3 {
                    let sum: f64 = (0..k).map(|p| a[i * (k + 9) + p] * b[j.min(n - 1) * (k + 2) + p]).sum();
                    let expected = before[i * (n + 3) + j] - if j < n { 0.5 * sum } else { 0.0 };
                    assert!((to[i * (n + 3) + j] - expected).abs() < 1e-12, "{m} {n} {k}: {i} {j}");
                }
            }
        }
    }
}
