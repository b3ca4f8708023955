//! Σ aᵀb over rows of activations of two values: how what the results of a matrix lack goes with what it is multiplied with.
//!
//! Knows numbers only.

use rayon::prelude::*;

use crate::engine::device::products::{Part, add_product, add_product_f32};

/// Rows that are summed in f32 before they are added in f64.
const PIECE: usize = 256;

/// Columns of a, or outputs of a matrix, whose products are summed on one thread.
const TOGETHER: usize = 64;

/// Σ aᵀb: for each column of a the sums of its products with the columns of b.
#[derive(Clone, Debug)]
pub struct Cross {
    widths: [usize; 2],
    sums: Vec<f64>,
}

impl Cross {
    pub fn new(widths: [usize; 2]) -> Cross {
        Cross { widths, sums: vec![0.0; widths[0] * widths[1]] }
    }

    /// Adds the products of rows of a with the same rows of b.
    pub fn add(&mut self, a: &[f32], b: &[f32]) {
        let [of_a, of_b] = self.widths;
        for (a, b) in a.chunks(PIECE * of_a).zip(b.chunks(PIECE * of_b)) {
            let rows = a.len() / of_a;
            self.sums.par_chunks_mut(TOGETHER * of_b).enumerate().for_each_init(
                || vec![0.0f32; TOGETHER * of_b],
                |made, (band, to)| {
                    let count = to.len() / of_b;
                    let made = &mut made[..to.len()];
                    made.fill(0.0);
                    let own = Part::new(&a[band * TOGETHER..], rows, count, of_a).transposed();
                    add_product_f32(made, of_b, 1.0, own, Part::new(b, rows, of_b, of_b));
                    to.iter_mut().zip(made).for_each(|(to, sum)| *to += f64::from(*sum));
                },
            );
        }
    }

    /// Adds to `to` [outputs, columns of a] the products of a matrix [outputs, columns of b] with the sums.
    pub fn times(&self, matrix: &[f32], to: &mut [f64]) {
        let [of_a, of_b] = self.widths;
        let sums = Part::new(&self.sums, of_a, of_b, of_b).transposed();
        to.par_chunks_mut(TOGETHER * of_a).zip(matrix.par_chunks(TOGETHER * of_b)).for_each(|(to, rows)| {
            let rows: Vec<f64> = rows.iter().map(|x| f64::from(*x)).collect();
            add_product(to, of_a, 1.0, Part::new(&rows, rows.len() / of_b, of_b, of_b), sums);
        });
    }

    /// Adds the sums to `to` [columns of b, columns of a].
    pub fn turned(&self, to: &mut [f64]) {
        let [of_a, of_b] = self.widths;
        to.par_chunks_mut(of_a).enumerate().for_each(|(column, to)| {
            to.iter_mut().enumerate().for_each(|(row, to)| *to += self.sums[row * of_b + column]);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_products() {
        let (of_a, of_b, rows) = (6, 5, 300);
        let noise = |i: usize| ((i * 7919 + 13) % 10_007) as f32 / 5e3 - 1.0;
        let a: Vec<f32> = (0..rows * of_a).map(noise).collect();
        let b: Vec<f32> = (0..rows * of_b).map(|i| noise(i + 77)).collect();
        let mut cross = Cross::new([of_a, of_b]);
        cross.add(&a, &b);
        let mut turned = vec![0.0; of_b * of_a];
        cross.turned(&mut turned);
        let matrix: Vec<f32> = (0..2 * of_b).map(|i| noise(3 * i)).collect();
        let mut product = vec![1.0; 2 * of_a];
        cross.times(&matrix, &mut product);
        for i in 0..of_a {
            let of = |j: usize| (0..rows).map(|t| f64::from(a[t * of_a + i]) * f64::from(b[t * of_b + j])).sum::<f64>();
            for j in 0..of_b {
                assert!((turned[j * of_a + i] - of(j)).abs() < 1e-3);
            }
            for o in 0..2 {
                let expected = 1.0 + (0..of_b).map(|j| f64::from(matrix[o * of_b + j]) * of(j)).sum::<f64>();
                assert!((product[o * of_a + i] - expected).abs() < 1e-3);
            }
        }
    }
}
