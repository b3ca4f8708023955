//! A block of queries against all keys that any of them sees: the matrix products shared by forward and backward. Does
//! not know softmax.

use std::ops::Range;

use ops::attention::{MAX_HEAD_DIM, Mask};

use super::column_panels;
use crate::simd::{HEIGHT, Matrix, MatrixMut, Tile, Tiles, WIDTH, pack};

/// Number of queries of one block.
pub const QUERIES: usize = 64;

/// One block of queries with its keys.
pub struct Block<'a> {
    mask: &'a Mask<'a>,
    pub queries: Range<usize>,
    /// Keys that any of the queries sees, from a panel's edge on.
    pub keys: Range<usize>,
    /// Columns of a row of scores: whole panels.
    pub width: usize,
}

impl<'a> Block<'a> {
    pub fn of(index: usize, tokens: usize, mask: &'a Mask<'a>) -> Self {
        let queries = index * QUERIES..((index + 1) * QUERIES).min(tokens);
        let seen = mask.visible_to(&queries);
        let first = seen.start / WIDTH;
        let width = (seen.end.div_ceil(WIDTH) - first) * WIDTH;
        Block { mask, keys: first * WIDTH..seen.end, queries, width }
    }

    /// The columns of a row of scores that query `i` sees.
    pub fn seen(&self, i: usize) -> Range<usize> {
        let keys = self.mask.visible(i);
        keys.start - self.keys.start..keys.end - self.keys.start
    }

    /// Sets the scores of keys of other branches than that of query `i` to −∞; `scores` are those that it sees.
    pub fn hide(&self, i: usize, scores: &mut [f32]) {
        self.mask.hide(i, scores);
    }

    /// The columns up to the last that any of the block's first queries sees, up to `end`.
    fn columns_before(&self, end: usize) -> usize {
        self.mask.visible(end - 1).end - self.keys.start
    }

    /// scores = scale · rows of the block · every key, `keys` by token. Columns after the last key of a group of rows
    /// are left as they are: no query of the group sees them.
    pub fn scores(&self, tiles: Tiles<f32>, rows: Matrix<'_>, keys: &[u32], scale: f32, scores: &mut [f32]) {
        let columns = rows.width();
        let mut left = [0; HEIGHT * MAX_HEAD_DIM];
        assert!(columns <= MAX_HEAD_DIM, "a head of {columns} columns passed the shape rule");
        let left = &mut left[..HEIGHT * columns];
        for (group, scores) in scores.chunks_mut(HEIGHT * self.width).enumerate() {
            let first = self.queries.start + group * HEIGHT;
            let last = (first + HEIGHT).min(self.queries.end);
            pack(rows.block(first..last, 0..columns), left);
            let panels = keys[self.keys.start * columns..].chunks(WIDTH * columns);
            let wanted = self.columns_before(last).div_ceil(WIDTH);
            for (panel, keys) in panels.take(wanted).enumerate() {
                let mut tile = Tile::default();
                tiles.multiply(left, keys, WIDTH, scale, &mut tile);
                for (scores, tile) in scores.chunks_mut(self.width).zip(tile.0.chunks(WIDTH)) {
                    scores[panel * WIDTH..(panel + 1) * WIDTH].copy_from_slice(tile);
                }
            }
        }
    }

    /// out[query] = weights of the query · keys, `keys` by column: all keys, of heads of `head_dim`.
    pub fn sums_by_query(
        &self,
        tiles: Tiles<f32>,
        weights: &[f32],
        (keys, head_dim): (&[u32], usize),
        left: &mut Vec<u32>,
        out: &mut MatrixMut<'_, f32>,
    ) {
        let tokens = keys.len() / column_panels(head_dim).map(|(_, width)| width).sum::<usize>();
        left.resize(HEIGHT * self.width, 0);
        for (group, weights) in weights.chunks(HEIGHT * self.width).enumerate() {
            let first = group * HEIGHT;
            let rows = weights.len() / self.width;
            let units = self.columns_before(self.queries.start + first + rows);
            let left = &mut left[..HEIGHT * units];
            pack(Matrix::new(weights, rows, units, self.width), left);
            let mut panels = keys;
            for (column, width) in column_panels(head_dim) {
                let (panel, rest) = panels.split_at(tokens * width);
                panels = rest;
                let mut tile = Tile::default();
                let part = &panel[self.keys.start * width..][..units * width];
                tiles.multiply(left, part, width, 1.0, &mut tile);
                let columns = column..(column + width).min(head_dim);
                for (i, tile) in tile.0.chunks(WIDTH).take(rows).enumerate() {
                    out.row(first + i)[columns.clone()].copy_from_slice(&tile[..columns.len()]);
                }
            }
        }
    }

    /// out[key] += weights of the key over the queries · queries, `queries` by column; out is [T, head_dim].
    pub fn add_sums_by_key(
        &self,
        tiles: Tiles<f32>,
        weights: &[f32],
        (queries, head_dim): (&[u32], usize),
        left: &mut Vec<u32>,
        out: &mut [f32],
    ) {
        let tokens = out.len() / head_dim;
        let count = self.queries.len();
        left.resize(HEIGHT * count, 0);
        for first in (self.keys.start..self.keys.end).step_by(HEIGHT) {
            let last = (first + HEIGHT).min(self.keys.end);
            let columns = first - self.keys.start..last - self.keys.start;
            pack(
                Matrix::new(weights, count, self.width, self.width).block(0..count, columns).transposed_if(true),
                left,
            );
            let mut panels = queries;
            for (column, width) in column_panels(head_dim) {
                let (panel, rest) = panels.split_at(tokens * width);
                panels = rest;
                let columns = column..(column + width).min(head_dim);
                let mut tile = Tile::default();
                let part = &panel[self.queries.start * width..][..count * width];
                tiles.multiply(left, part, width, 1.0, &mut tile);
                let rows = out[first * head_dim..last * head_dim].chunks_mut(head_dim);
                for (out, tile) in rows.zip(tile.0.chunks(WIDTH)) {
                    out[columns.clone()].iter_mut().zip(tile).for_each(|(out, x)| *out += x);
                }
            }
        }
    }
}
