//! Attention over cached keys and values: a task is a block of new tokens of a row, with the query heads that share a key
//! head. Scores and sums have the bits that [`super::forward`] gives the same tokens in a row of training: products of the
//! same tiles, sums that begin at the same places of the sequence.

use std::cell::RefCell;
use std::ops::Range;

use ops::attention::Sequences;
use ops::{Call, vectorised};
use program::TensorRef;
use rayon::prelude::*;

use super::block::{QUERIES, add_chains};
use super::packed::{Room, column_panels};
use super::softmax::{Capped, WeightsOf};
use crate::simd::{CHAIN, HEIGHT, Matrix, MatrixMut, Tile, Tiles, WIDTH, pack};

/// The buffers that a task keeps.
#[derive(Default)]
struct Work {
    /// Lines of a panel before they are packed.
    lines: Vec<f32>,
    keys: Vec<u32>,
    values: Vec<u32>,
    left: Vec<u32>,
    scores: Vec<f32>,
    slopes: Vec<f32>,
}

thread_local! {
    static WORK: RefCell<Work> = RefCell::default();
}

/// Returns no room: how many keys there are is data.
pub fn room(_inputs: &[TensorRef]) -> Room {
    Room::default()
}

pub fn run(call: &mut Call<'_, f32>, _packed: &mut [u32], _partial: &mut [f32]) {
    let of = Sequences::of(call);
    let q = call.inputs[0].real();
    let [o] = call.outputs_mut();
    let (group, row) = (of.heads / of.kv_heads, of.heads * of.value_dim);
    let rows = o.real().par_chunks_mut(of.tokens * row).enumerate();
    rows.for_each(|(b, o)| {
        let tiles = MatrixMut::new(o, of.tokens, row, row).tiles(QUERIES, group * of.value_dim);
        tiles.into_par_iter().for_each(|(token, column, mut o)| {
            let task = Task { of: &of, row: b, first: token, kv: column / (group * of.value_dim), group };
            WORK.with_borrow_mut(|work| task.attend(q, work, &mut o));
        });
    });
}

/// New tokens from `first` on of a row, and the query heads of one key head.
struct Task<'a> {
    of: &'a Sequences<'a, f32>,
    row: usize,
    first: usize,
    kv: usize,
    group: usize,
}

impl Task<'_> {
    fn attend(&self, q: &[f32], work: &mut Work, o: &mut MatrixMut<'_, f32>) {
        let (of, group) = (self.of, self.group);
        let seen: Vec<Range<usize>> = (0..o.rows()).map(|token| of.visible(self.row, self.first + token)).collect();
        let present = seen.iter().filter(|seen| !seen.is_empty());
        let first = present.clone().map(|seen| seen.start).min().unwrap_or(0);
        let keys = first..present.map(|seen| seen.end).max().unwrap_or(0);
        if keys.is_empty() {
            (0..o.rows()).for_each(|token| o.row(token).fill(0.0));
            return;
        }
        self.pack_keys(&keys, work);
        let tiles = Tiles::<f32>::here().expect("looked for when the program is loaded");
        let Work { lines, keys: by_token, values, left, scores, slopes } = work;
        let (width, columns) = (keys.len().next_multiple_of(WIDTH), of.head_dim);
        scores.resize(HEIGHT * width, 0.0);
        slopes.resize(width, 0.0);
        // Sums begin where those of a document do.
        let mut beginnings = vec![0];
        beginnings.extend((keys.start / CHAIN * CHAIN + CHAIN..keys.end).step_by(CHAIN).map(|key| key - keys.start));
        for first in (0..o.rows() * group).step_by(HEIGHT) {
            let queries = first..(first + HEIGHT).min(o.rows() * group);
            lines.clear();
            for index in queries.clone() {
                let token = self.row * of.tokens + self.first + index / group;
                lines
                    .extend_from_slice(&q[(token * of.heads + self.kv * group + index % group) * columns..][..columns]);
            }
            left.resize(HEIGHT * columns, 0);
            pack(Matrix::new(lines, queries.len(), columns, columns), left);
            let scale = of.scoring(self.kv * group).scale;
            for (panel, keys) in by_token.chunks(WIDTH * columns).enumerate() {
                let mut tile = Tile::default();
                tiles.multiply(left, keys, WIDTH, scale, &mut tile);
                for (scores, tile) in scores.chunks_mut(width).zip(tile.0.chunks(WIDTH)) {
                    scores[panel * WIDTH..(panel + 1) * WIDTH].copy_from_slice(tile);
                }
            }
            let sums: Vec<f32> = queries
                .clone()
                .zip(scores.chunks_mut(width))
                .map(|(index, row)| {
                    let scoring = of.scoring(self.kv * group + index % group);
                    let seen = &seen[index / group];
                    if seen.is_empty() {
                        row.fill(0.0);
                        return 1.0;
                    }
                    let seen = seen.start - keys.start..seen.end - keys.start;
                    row[..seen.start].fill(0.0);
                    row[seen.end..].fill(0.0);
                    let row = &mut row[seen];
                    if let Some(cap) = scoring.soft_cap {
                        vectorised(Capped, (&mut *row, cap, &mut slopes[..]));
                    }
                    vectorised(WeightsOf, (row, scoring.sink)).0
                })
                .collect();
            left.resize(HEIGHT * keys.len(), 0);
            pack(Matrix::new(scores, queries.len(), keys.len(), width), left);
            let mut panels = &values[..];
            for (column, panel_width) in column_panels(of.value_dim) {
                let (panel, rest) = panels.split_at(keys.len() * panel_width);
                panels = rest;
                let mut tile = Tile::default();
                add_chains(tiles, &beginnings, (left, panel, panel_width), &mut tile);
                let columns = column..(column + panel_width).min(of.value_dim);
                for ((index, tile), sum) in queries.clone().zip(tile.0.chunks(WIDTH)).zip(&sums) {
                    let o = &mut o.row(index / group)[index % group * of.value_dim..][columns.clone()];
                    o.iter_mut().zip(tile).for_each(|(o, x)| *o = x / sum);
                }
            }
        }
    }

    /// Packs keys as panels whose lines are tokens, and values as panels whose lines are columns.
    fn pack_keys(&self, keys: &Range<usize>, work: &mut Work) {
        let (of, columns) = (self.of, self.of.head_dim);
        work.keys.resize(keys.len().div_ceil(WIDTH) * WIDTH * columns, 0);
        for (panel, out) in work.keys.chunks_mut(WIDTH * columns).enumerate() {
            let begin = keys.start + panel * WIDTH;
            work.lines.clear();
            for position in begin..(begin + WIDTH).min(keys.end) {
                work.lines.extend_from_slice(of.key(self.row, position, self.kv));
            }
            pack(Matrix::new(&work.lines, work.lines.len() / columns, columns, columns), out);
        }
        work.values.resize(keys.len() * column_panels(of.value_dim).map(|(_, width)| width).sum::<usize>(), 0);
        for (token, position) in keys.clone().enumerate() {
            let value = of.value(self.row, position, self.kv);
            let mut start = 0;
            for (column, width) in column_panels(of.value_dim) {
                let line = &mut work.values[start + token * width..][..width];
                let part = &value[column..(column + width).min(of.value_dim)];
                line.iter_mut().zip(part).for_each(|(unit, x)| *unit = x.to_bits());
                line[part.len()..].fill(0);
                start += keys.len() * width;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ops::{Data, Input, Output};
    use tensor::{Attrs, DType};

    use super::super::forward;
    use super::*;

    const HEADS: usize = 4;
    const KV_HEADS: usize = 2;
    const COLUMNS: usize = 24;
    const PAGE: usize = 32;

    fn noise(count: usize, seed: u32) -> Vec<f32> {
        let number = |i: u32| ((i ^ seed).wrapping_mul(2654435761) >> 8) as f32 / 4e6 - 2.0;
        (0..count as u32).map(number).collect()
    }

    fn real<'a>(shape: &'a [usize], data: &'a [f32]) -> Input<'a, f32> {
        Input { shape, data: Data::Real(data) }
    }

    fn ints<'a>(shape: &'a [usize], data: &'a [i32]) -> Input<'a, f32> {
        Input { shape, data: Data::Int(data) }
    }

    /// Tensors of one row, and for each of its tokens the first token of its document and what the mask reads.
    struct Row {
        q: Vec<f32>,
        k: Vec<f32>,
        v: Vec<f32>,
        sink: Vec<f32>,
        starts: Vec<i32>,
        last_query: Option<Vec<i32>>,
        attrs: Attrs,
    }

    impl Row {
        fn new(lengths: &[usize], attrs: Attrs) -> Row {
            let tokens = lengths.iter().sum::<usize>();
            let begins = lengths.iter().scan(0, |at, length| Some(std::mem::replace(at, *at + length)));
            let starts = begins.zip(lengths).flat_map(|(begin, length)| vec![begin as i32; *length]).collect();
            let [q, k, v] = [(HEADS, 1), (KV_HEADS, 2), (KV_HEADS, 3)]
                .map(|(heads, seed)| noise(tokens * heads * COLUMNS, seed * 77_777));
            Row { q, k, v, sink: noise(HEADS, 5), starts, last_query: None, attrs }
        }

        /// The results of training, [tokens, heads · columns].
        fn trained(&self) -> Vec<f32> {
            let tokens = self.starts.len();
            let (many, few, lse_shape) =
                ([1, tokens, HEADS, COLUMNS], [1, tokens, KV_HEADS, COLUMNS], [1, HEADS, tokens]);
            let row = [1, tokens];
            let mut inputs =
                vec![real(&many, &self.q), real(&few, &self.k), real(&few, &self.v), ints(&row, &self.starts)];
            inputs.extend(self.last_query.as_ref().map(|last| ints(&row, last)));
            inputs.push(real(&[HEADS], &self.sink));
            let attrs = match self.last_query {
                Some(_) => self.attrs.clone().with("branches", true),
                None => self.attrs.clone(),
            };
            let (mut o, mut lse) = (vec![0.0; self.q.len()], vec![0.0; HEADS * tokens]);
            let mut outputs = [
                Output::Real { shape: &many, data: &mut o, storage: DType::F32 },
                Output::Real { shape: &lse_shape, data: &mut lse, storage: DType::F32 },
            ];
            let units = KV_HEADS
                * (super::super::packed::by_token_units(tokens, COLUMNS)
                    + super::super::packed::by_column_units(tokens, COLUMNS));
            let mut packed = vec![0; units];
            forward::run(&mut Call { attrs: &attrs, inputs: &inputs, outputs: &mut outputs }, &mut packed, &mut []);
            o
        }

        /// The results of the last `count` of these tokens, the others being in pages.
        fn continued(&self, tokens: &[usize], count: usize) -> Vec<f32> {
            let line =
                |of: &[f32], heads: usize, token: usize| of[token * heads * COLUMNS..][..heads * COLUMNS].to_vec();
            let pages = tokens.len().div_ceil(PAGE);
            // Pages from the last to the first, with noise around them.
            let table: Vec<i32> = (0..pages as i32).map(|page| pages as i32 - page).collect();
            let shape = [pages + 2, PAGE, KV_HEADS, COLUMNS];
            let mut caches = [noise(shape.iter().product(), 8), noise(shape.iter().product(), 9)];
            for (position, token) in tokens.iter().enumerate() {
                let at = (table[position / PAGE] as usize * PAGE + position % PAGE) * KV_HEADS * COLUMNS;
                for (cache, of) in caches.iter_mut().zip([&self.k, &self.v]) {
                    cache[at..at + KV_HEADS * COLUMNS].copy_from_slice(&line(of, KV_HEADS, *token));
                }
            }
            let q: Vec<f32> =
                tokens[tokens.len() - count..].iter().flat_map(|token| line(&self.q, HEADS, *token)).collect();
            let positions: Vec<i32> = (tokens.len() as i32 - count as i32..tokens.len() as i32).collect();
            let q_shape = [1, count, HEADS, COLUMNS];
            let inputs = [
                real(&q_shape, &q),
                real(&shape, &caches[0]),
                real(&shape, &caches[1]),
                ints(&[1, 0], &positions),
                Input { shape: &[1, pages], data: Data::Int(&table) },
                real(&[HEADS], &self.sink),
            ];
            let mut o = vec![f32::NAN; q.len()];
            let mut outputs = [Output::Real { shape: &q_shape, data: &mut o, storage: DType::F32 }];
            run(&mut Call { attrs: &self.attrs, inputs: &inputs, outputs: &mut outputs }, &mut [], &mut []);
            o
        }

        fn check(&self, tokens: &[usize], what: &str) {
            let trained = self.trained();
            let expected = |token: usize| &trained[token * HEADS * COLUMNS..][..HEADS * COLUMNS];
            let lengths = (1..=tokens.len()).filter(|length| length % 67 == 0 || (495..600).contains(length));
            for (length, count) in lengths.map(|length| (length, 1)).chain([(tokens.len(), 70), (tokens.len() - 3, 2)])
            {
                let found = self.continued(&tokens[..length], count);
                for (found, token) in found.chunks(HEADS * COLUMNS).zip(&tokens[length - count..length]) {
                    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(found), bits(expected(*token)), "{what}: {count} of {length}, token {token}");
                }
            }
        }
    }

    #[test]
    fn continued_sequences_have_the_bits_of_training() {
        if Tiles::<f32>::here().is_none() {
            return;
        }
        for (attrs, what) in [
            (Attrs::new(), "plain"),
            (Attrs::new().with("window", 100i64), "a window"),
            (Attrs::new().with("soft_cap", 3.0).with("scale", 0.3), "a soft cap"),
        ] {
            let row = Row::new(&[70, 1100, 90], attrs);
            row.check(&(70..1170).collect::<Vec<_>>(), what);
            row.check(&(1170..1260).collect::<Vec<_>>(), what);
        }
    }

    #[test]
    fn branches_have_the_bits_of_sequences_alone() {
        if Tiles::<f32>::here().is_none() {
            return;
        }
        // A document of 40 tokens, then a beginning of 500 with branches of 30 and 600.
        let mut row = Row::new(&[40, 1130], Attrs::new());
        let last = |token: i32| match token {
            0..40 => 39,
            540..570 => 569,
            _ => 1169,
        };
        row.last_query = Some((0..1170).map(last).collect());
        row.check(&(40..570).collect::<Vec<_>>(), "the first branch");
        row.check(&(40..540).chain(570..1170).collect::<Vec<_>>(), "the second branch");
    }
}
