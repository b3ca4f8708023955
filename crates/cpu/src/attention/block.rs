//! A block of queries against all keys that any of them sees: the matrix products shared by forward and backward. Does
//! not know softmax.

use std::ops::Range;

use ops::attention::{MAX_HEAD_DIM, Mask};

use super::packed::column_panels;
use crate::simd::{CHAIN, HEIGHT, Matrix, MatrixMut, Tile, Tiles, WIDTH, pack};

/// Number of queries of one block.
pub const QUERIES: usize = 64;

/// c += a·b, where a is a panel of [`HEIGHT`] lines and b one of `width`: a sum of its own from each of these units to the
/// next. Units before the first are zero in a.
pub fn add_chains(tiles: Tiles<f32>, beginnings: &[usize], (a, b, width): (&[u32], &[u32], usize), c: &mut Tile) {
    let ends = beginnings[1..].iter().copied().chain([b.len() / width]);
    for (begin, end) in beginnings.iter().zip(ends) {
        tiles.chain(&a[begin * HEIGHT..end * HEIGHT], &b[begin * width..end * width], width, 1.0, c);
    }
}

/// Queries whose sums over keys begin at the same columns.
struct Chains {
    queries: Range<usize>,
    beginnings: Vec<usize>,
}

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

    /// Returns the keys that query `i` sees, counted from the first, as ranges; `None` where they are one.
    pub fn parts(&self, i: usize) -> Option<Vec<Range<usize>>> {
        let first = self.mask.visible(i).start;
        let local = |part: Range<usize>| part.start - first..part.end - first;
        self.mask.has_branches().then(|| self.mask.parts(i).into_iter().map(local).collect())
    }

    /// Returns the chains of a group of queries over columns of a row of scores, up to `end`: a sum begins every [`CHAIN`]
    /// keys of a query's document, counted from its first and past branches that the query does not see. So the sums of a
    /// document have the same bits wherever it stands in a row.
    fn chains(&self, queries: Range<usize>, end: usize) -> Vec<Chains> {
        let mut all: Vec<Chains> = Vec::new();
        for i in queries {
            let (mut beginnings, mut counted) = (Vec::new(), 0);
            for part in self.mask.parts(i) {
                let keys = part.clone().skip((CHAIN - counted % CHAIN) % CHAIN).step_by(CHAIN);
                beginnings.extend(keys.map(|key| key.saturating_sub(self.keys.start)).filter(|column| *column < end));
                counted += part.len();
            }
            match all.last_mut() {
                // Where one document ends and the next begins, the weights of either are zero: sums of both begin there.
                Some(last) if !self.mask.has_branches() || beginnings.starts_with(&last.beginnings) => {
                    last.queries.end = i + 1;
                    last.beginnings.extend(beginnings);
                    last.beginnings.sort_unstable();
                    last.beginnings.dedup();
                }
                _ => {
                    beginnings.dedup();
                    all.push(Chains { queries: i..i + 1, beginnings });
                }
            }
        }
        all
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
            let (first, rows) = (self.queries.start + group * HEIGHT, weights.len() / self.width);
            let queries = first..first + rows;
            let units = self.columns_before(queries.end);
            let left = &mut left[..HEIGHT * units];
            pack(Matrix::new(weights, rows, units, self.width), left);
            let chains = self.chains(queries.clone(), units);
            let mut panels = keys;
            for (column, width) in column_panels(head_dim) {
                let (panel, rest) = panels.split_at(tokens * width);
                panels = rest;
                let part = &panel[self.keys.start * width..][..units * width];
                let columns = column..(column + width).min(head_dim);
                for Chains { queries: same, beginnings } in &chains {
                    let mut tile = Tile::default();
                    add_chains(tiles, beginnings, (left, part, width), &mut tile);
                    for i in same.clone() {
                        let sums = &tile.0[(i - queries.start) * WIDTH..][..columns.len()];
                        out.row(i - self.queries.start)[columns.clone()].copy_from_slice(sums);
                    }
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
