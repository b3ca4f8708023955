//! The matrix product inside the attention reference: small, generic over the number type, with a
//! fixed order of additions. The right operand is packed into panels, so that the inner loop reads
//! memory in one direction and the compiler can keep a tile of the result in vector registers.

use std::ops::Range;

use crate::real::Real;

/// Number of columns in a panel.
pub const LANES: usize = 8;
/// Rows of the result that share one pass over a panel.
const LINES: usize = 4;

/// A matrix [rows, columns] as panels [rows, LANES], zero beyond the last column.
pub struct Panels<T> {
    data: Vec<T>,
    rows: usize,
}

impl<T: Real> Panels<T> {
    pub fn pack(rows: usize, columns: usize, at: impl Fn(usize, usize) -> T) -> Self {
        let mut data = Vec::with_capacity(columns.next_multiple_of(LANES) * rows);
        for first in (0..columns).step_by(LANES) {
            for row in 0..rows {
                data.extend((first..first + LANES).map(|c| if c < columns { at(row, c) } else { T::default() }));
            }
        }
        Panels { data, rows }
    }

    /// Some rows of one panel.
    fn part(&self, panel: usize, rows: &Range<usize>) -> &[T] {
        let start = panel * self.rows;
        &self.data[(start + rows.start) * LANES..(start + rows.end) * LANES]
    }
}

/// A left operand: element (i, p) is at `i·row + p·step`.
#[derive(Clone, Copy)]
pub struct Left<'a, T> {
    pub data: &'a [T],
    pub row: usize,
    pub step: usize,
}

/// c += a·b over some rows of b and from panel `panels.start` on. c is dense with `width` columns,
/// no more than the panels have.
pub fn add_product<T: Real>(
    c: &mut [T],
    width: usize,
    a: Left<'_, T>,
    b: &Panels<T>,
    rows: Range<usize>,
    panels: Range<usize>,
) {
    let lines = c.len() / width;
    for (block, c) in c.chunks_mut(LINES * width).enumerate() {
        // A short last block repeats its last line; what it computes twice is not stored.
        let line = |r: usize| &a.data[(block * LINES + r).min(lines - 1) * a.row..];
        let a_lines: [&[T]; LINES] = std::array::from_fn(line);
        for (index, panel) in panels.clone().enumerate() {
            let sums = tile(a_lines, a.step, b.part(panel, &rows));
            let columns = index * LANES..((index + 1) * LANES).min(width);
            for (c, sums) in c.chunks_mut(width).zip(&sums) {
                c[columns.clone()].iter_mut().zip(sums).for_each(|(c, sum)| *c += *sum);
            }
        }
    }
}

#[inline]
fn tile<T: Real>(a: [&[T]; LINES], step: usize, b: &[T]) -> [[T; LANES]; LINES] {
    let mut sums = [[T::default(); LANES]; LINES];
    for (p, b) in b.chunks_exact(LANES).enumerate() {
        for r in 0..LINES {
            let x = a[r][p * step];
            for lane in 0..LANES {
                sums[r][lane] += x * b[lane];
            }
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_odd_sizes_and_parts() {
        let (m, k, n) = (7, 5, 11);
        let a: Vec<f64> = (0..m * k).map(|i| i as f64 - 9.0).collect();
        let b = |p: usize, c: usize| (p * n + c) as f64 * 0.5;
        let panels = Panels::pack(k, n, b);
        let expected =
            |i: usize, c: usize, first: usize| (first..k).map(|p| a[i * k + p - first] * b(p, c)).sum::<f64>();
        let mut c = vec![1.0; m * n];
        add_product(&mut c, n, Left { data: &a, row: k, step: 1 }, &panels, 0..k, 0..2);
        assert!((0..m * n).all(|i| c[i] == 1.0 + expected(i / n, i % n, 0)));
        let mut part = vec![0.0; m * 3];
        add_product(&mut part, 3, Left { data: &a, row: k, step: 1 }, &panels, 2..k, 1..2);
        assert!((0..m * 3).all(|i| part[i] == expected(i / 3, 8 + i % 3, 2)));
        let transposed: Vec<f64> = (0..m * k).map(|i| a[i % m * k + i / m]).collect();
        let mut again = vec![1.0; m * n];
        add_product(&mut again, n, Left { data: &transposed, row: 1, step: m }, &panels, 0..k, 0..2);
        assert_eq!(c, again);
    }
}
