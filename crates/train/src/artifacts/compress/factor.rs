//! The Cholesky factor of the inverse of a matrix, in blocks of columns whose products run in parallel. All in f64.
//!
//! Knows numbers only.

use rayon::prelude::*;

use crate::engine::device::products::{Part, add_product};

/// Columns that are factored together.
const BLOCK: usize = 128;

/// Rows whose products run on one thread.
const BAND: usize = 64;

/// An upper triangle U, in rows of `size`; zeros below the diagonal.
#[derive(Clone, Debug)]
pub struct Upper {
    pub size: usize,
    values: Vec<f64>,
}

impl Upper {
    /// Row i from its diagonal on.
    pub fn row(&self, row: usize) -> &[f64] {
        &self.values[row * self.size + row..(row + 1) * self.size]
    }

    /// The rows of a range from this column on.
    pub fn part(&self, rows: std::ops::Range<usize>, column: usize) -> Part<'_, f64> {
        let of = self.values.get(rows.start * self.size + column..).unwrap_or_default();
        Part::new(of, rows.len(), self.size - column, self.size)
    }

    /// The upper Cholesky factor U of the inverse of a positive matrix H, UᵀU = H⁻¹. `at`: the elements of H.
    pub fn of_inverse(size: usize, at: impl Fn(usize, usize) -> f64 + Sync) -> Upper {
        let mut values = vec![0.0; size * size];
        // H = RRᵀ with an upper R is the usual factorization from the last row and column on; U is the inverse of R.
        values.par_chunks_mut(size).enumerate().for_each(|(row, to)| {
            let of = |column: usize| at(size - 1 - row, size - 1 - column);
            to[..=row].iter_mut().enumerate().for_each(|(column, to)| *to = of(column));
        });
        factor(&mut values, size);
        invert(&mut values, size);
        values.reverse();
        Upper { size, values }
    }
}

/// Factors a positive matrix, of which the lower triangle is read: its lower Cholesky factor takes its place.
fn factor(values: &mut [f64], size: usize) {
    for first in (0..size).step_by(BLOCK) {
        let last = size.min(first + BLOCK);
        let width = last - first;
        let (before, after) = values.split_at_mut(last * size);
        let mut own = block(&before[first * size..], first, width, size);
        factor_block(&mut own, width);
        for (row, of) in own.chunks(width).enumerate() {
            before[(first + row) * size + first..][..=row].copy_from_slice(&of[..=row]);
        }
        if last == size {
            break;
        }
        // The rows below are multiplied with the inverse of the block's transpose.
        let mut inverse = own;
        invert_block(&mut inverse, width);
        let mut panel = vec![0.0; (size - last) * width];
        let bands = after.par_chunks_mut(BAND * size).zip(panel.par_chunks_mut(BAND * width));
        bands.for_each(|(rows, panel)| {
            let count = rows.len() / size;
            add_product(
                panel,
                width,
                1.0,
                Part::new(&rows[first..], count, width, size),
                Part::new(&inverse, width, width, width).transposed(),
            );
            for (row, of) in rows.chunks_mut(size).zip(panel.chunks(width)) {
                row[first..last].copy_from_slice(of);
            }
        });
        after.par_chunks_mut(BAND * size).enumerate().for_each(|(band, rows)| {
            let (start, count) = (band * BAND, rows.len() / size);
            // The lower triangle is enough.
            let columns = start + count;
            let own = Part::new(&panel[start * width..], count, width, width);
            add_product(&mut rows[last..], size, -1.0, own, Part::new(&panel, columns, width, width).transposed());
        });
    }
    // Products reach over the diagonal.
    values.par_chunks_mut(size).enumerate().for_each(|(row, of)| of[row + 1..].fill(0.0));
}

/// Inverts a lower triangle in place.
fn invert(values: &mut [f64], size: usize) {
    let firsts: Vec<usize> = (0..size).step_by(BLOCK).collect();
    for first in firsts.into_iter().rev() {
        let last = size.min(first + BLOCK);
        let width = last - first;
        let mut own = block(&values[first * size..], first, width, size);
        invert_block(&mut own, width);
        let below: Vec<f64> =
            values[last * size..].chunks(size).flat_map(|row| row[first..last].iter().copied()).collect();
        // −(the inverse of what is below)·(the rows below)·(the inverse of the block)
        values[last * size..].par_chunks_mut(BAND * size).enumerate().for_each(|(band, rows)| {
            let (start, count) = (band * BAND, rows.len() / size);
            let reach = start + count;
            let mut made = vec![0.0; count * width];
            add_product(
                &mut made,
                width,
                1.0,
                Part::new(&rows[last..], count, reach, size),
                Part::new(&below, reach, width, width),
            );
            let mut product = vec![0.0; count * width];
            add_product(
                &mut product,
                width,
                -1.0,
                Part::new(&made, count, width, width),
                Part::new(&own, width, width, width),
            );
            for (row, of) in rows.chunks_mut(size).zip(product.chunks(width)) {
                row[first..last].copy_from_slice(of);
            }
        });
        for (row, of) in own.chunks(width).enumerate() {
            values[(first + row) * size + first..][..width].copy_from_slice(of);
        }
    }
}

/// A square on the diagonal, from rows that begin with its own.
fn block(rows: &[f64], first: usize, width: usize, size: usize) -> Vec<f64> {
    rows.chunks(size).take(width).flat_map(|row| row[first..first + width].iter().copied()).collect()
}

/// [`factor`] of one block; zeros above the diagonal.
fn factor_block(values: &mut [f64], size: usize) {
    for row in 0..size {
        let (before, own) = values.split_at_mut(row * size);
        for column in 0..row {
            let other = &before[column * size..][..=column];
            let sum: f64 = own[..column].iter().zip(other).map(|(a, b)| a * b).sum();
            own[column] = (own[column] - sum) / other[column];
        }
        let square: f64 = own[..row].iter().map(|x| x * x).sum();
        own[row] = (own[row] - square).sqrt();
        own[row + 1..size].fill(0.0);
    }
}

/// [`invert`] of one block.
fn invert_block(values: &mut [f64], size: usize) {
    let factor = values.to_vec();
    for column in 0..size {
        for row in column..size {
            let own = &factor[row * size..];
            let sum: f64 = (column..row).map(|step| own[step] * values[step * size + column]).sum();
            values[row * size + column] = (f64::from(u8::from(row == column)) - sum) / own[row];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factor_is_that_of_the_inverse_in_every_number_of_blocks() {
        for size in [1, 2, 63, 128, 129, 300] {
            // Σ of outer products and a diagonal: positive.
            let noise = |i: usize| ((i * 7919 + 13) % 101) as f64 / 50.0 - 1.0;
            let at = |a: usize, b: usize| {
                let of = |k: usize| noise(a * 31 + k) * noise(b * 31 + k);
                (0..20).map(of).sum::<f64>() + if a == b { 4.0 + (a % 3) as f64 } else { 0.0 }
            };
            let upper = Upper::of_inverse(size, at);
            // UᵀU·H is the identity: for a unit vector e of H's columns, Uᵀ(U·h) = e.
            for column in [0, size / 2, size - 1] {
                let h: Vec<f64> = (0..size).map(|row| at(row, column)).collect();
                let product: Vec<f64> =
                    (0..size).map(|row| upper.row(row).iter().zip(&h[row..]).map(|(u, h)| u * h).sum()).collect();
                for row in 0..size {
                    let found: f64 = (0..=row).map(|k| upper.row(k)[row - k] * product[k]).sum();
                    let expected = f64::from(u8::from(row == column));
                    assert!((found - expected).abs() < 1e-9, "{size}: {row} {column} {found}");
                }
            }
        }
    }
}
