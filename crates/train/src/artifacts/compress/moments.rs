//! Sums of the products of activations with themselves: what methods know of a matrix's inputs.

use std::cmp::Ordering;

use rayon::prelude::*;
use tensor::HostTensor;

use crate::engine::device::products::{Part, add_product_f32};

/// The share of the mean moment that is added to each.
pub(super) const DAMPING: f64 = 0.01;

/// Rows of activations that are summed in f32 before they are added in f64.
const PIECE: usize = 256;

/// Columns whose moments are summed on one thread.
const TOGETHER: usize = 64;

/// Σ xᵀx over rows of activations.
#[derive(Clone, Debug)]
pub struct Moments {
    pub(super) size: usize,
    sums: Vec<f64>,
    /// Number of rows whose products are in the sum.
    pub rows: usize,
}

impl Moments {
    pub fn new(size: usize) -> Moments {
        Moments { size, sums: vec![0.0; size * size], rows: 0 }
    }

    /// Adds the products of the elements of each row of `size` numbers.
    pub fn add(&mut self, x: &[f32]) {
        let size = self.size;
        self.rows += x.len() / size;
        for piece in x.chunks(PIECE * size) {
            let rows = piece.len() / size;
            self.sums.par_chunks_mut(TOGETHER * size).enumerate().for_each_init(
                || vec![0.0f32; TOGETHER * size],
                |made, (band, to)| {
                    let (first, count) = (band * TOGETHER, to.len() / size);
                    // The lower triangle is enough.
                    let width = first + count;
                    let made = &mut made[..count * width];
                    made.fill(0.0);
                    let own = Part::new(&piece[first..], rows, count, size).transposed();
                    add_product_f32(made, width, 1.0, own, Part::new(piece, rows, width, size));
                    for (to, made) in to.chunks_mut(size).zip(made.chunks(width)) {
                        to.iter_mut().zip(made).for_each(|(to, sum)| *to += f64::from(*sum));
                    }
                },
            );
        }
    }

    /// Adds products that were summed elsewhere, f32 [size, size], over this many rows.
    pub fn add_products(&mut self, made: &HostTensor, rows: usize) {
        let size = self.size;
        self.rows += rows;
        let lines = self.sums.par_chunks_mut(size).zip(made.bytes.par_chunks(4 * size)).enumerate();
        lines.for_each(|(row, (to, made))| {
            let made = made.as_chunks::<4>().0[..=row].iter();
            to.iter_mut().zip(made).for_each(|(to, made)| *to += f64::from(f32::from_le_bytes(*made)));
        });
    }

    pub(super) fn at(&self, row: usize, column: usize) -> f64 {
        self.sums[row.max(column) * self.size + row.min(column)]
    }

    /// A moment of a column with itself; 1 of a column that is always zero.
    pub(super) fn own(&self, column: usize) -> f64 {
        match self.at(column, column) {
            0.0 => 1.0,
            moment => moment,
        }
    }

    /// Returns the number that is added to the moments of columns with themselves.
    pub(super) fn damping(&self) -> f64 {
        DAMPING * (0..self.size).map(|column| self.own(column)).sum::<f64>() / self.size as f64
    }

    /// The lower triangle of the damped moments as f32 [size, size].
    pub(super) fn damped_bytes(&self) -> Vec<u8> {
        let (size, damping) = (self.size, self.damping());
        f32_bytes(size * size, |i| {
            let (row, column) = (i / size, i % size);
            match row.cmp(&column) {
                Ordering::Greater => self.sums[i] as f32,
                Ordering::Equal => (self.own(row) + damping) as f32,
                Ordering::Less => 0.0,
            }
        })
    }
}

/// The bytes of numbers that are made in parallel.
pub(super) fn f32_bytes(count: usize, of: impl Fn(usize) -> f32 + Sync) -> Vec<u8> {
    const EACH: usize = 1 << 14;
    let mut bytes = vec![0u8; 4 * count];
    bytes.par_chunks_mut(4 * EACH).enumerate().for_each(|(chunk, to)| {
        for (i, to) in to.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *to = of(chunk * EACH + i).to_le_bytes();
        }
    });
    bytes
}
