//! The product of two f32 matrices with the vectorized kernel of the `gemm` crate. A call runs on one thread; the
//! caller splits the work, so the bits cannot depend on the number of threads.
#![allow(unsafe_code, reason = "the foreign kernel's raw pointers")]

use gemm_common::Parallelism;

use super::matrix::{Matrix, MatrixMut};

/// D = scale·A·B, or D += scale·A·B with `accumulate`. Panics when the extents do not match.
pub fn product(d: &mut MatrixMut<'_, f32>, accumulate: bool, a: Matrix<'_>, b: Matrix<'_>, scale: f32) {
    assert!(
        d.rows() == a.rows && d.width() == b.columns && a.columns == b.rows,
        "a product of {}×{} and {}×{} is not {}×{}",
        a.rows,
        a.columns,
        b.rows,
        b.columns,
        d.rows(),
        d.width()
    );
    // The kernel wants a column-major result: it computes Dᵀ = Bᵀ·Aᵀ.
    // SAFETY: extents were checked against the slices when the matrices were made; D shares no
    // element with A or B, as it is borrowed mutably.
    unsafe {
        gemm_f32::gemm::f32::get_gemm_fn()(
            d.width(),
            d.rows(),
            a.columns,
            d.start,
            d.row_stride as isize,
            1,
            accumulate,
            b.values().as_ptr(),
            b.row_stride as isize,
            b.column_stride as isize,
            a.values().as_ptr(),
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
}
