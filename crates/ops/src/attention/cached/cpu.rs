//! CPU references. A task of the attention is one head of one token.

use std::ops::Range;

use rayon::prelude::*;

use super::PLACED_INPUTS;
use crate::attention::operands::Optional;
use crate::attention::{Reading, Scoring};
use crate::call::{Call, Input};
use crate::real::Real;
use crate::vector::{Loop, add_scaled, dot, largest, sum_of, vectorised};

/// The pages of the sequences of a call.
struct Pages<'a> {
    table: &'a [i32],
    /// Pages of the longest sequence.
    width: usize,
    /// Number of tokens in a page.
    page: usize,
    /// Number of lines in a cache.
    lines: usize,
}

impl<'a> Pages<'a> {
    fn of<T>(table: &Input<'a, T>, cache: &[usize]) -> Pages<'a> {
        Pages { table: table.int(), width: table.shape[1], page: cache[1], lines: cache[0] * cache[1] }
    }

    /// The line of a token, counted over all pages.
    fn line(&self, row: usize, position: usize) -> usize {
        let line = self.table[row * self.width + position / self.page] as usize * self.page + position % self.page;
        assert!(position < self.width * self.page && line < self.lines, "row {row} has no page for token {position}");
        line
    }
}

pub fn write<T: Real>(call: &mut Call<'_, T>) {
    let [k, v, positions, table] = call.inputs else { unreachable!("the shape rule requires four inputs") };
    let tokens = k.shape[1];
    let pages = Pages::of(table, call.outputs[0].shape());
    for (new, cache) in [k, v].into_iter().zip(&mut *call.outputs) {
        let columns = new.shape[2] * new.shape[3];
        let cache = cache.real();
        for (index, (new, position)) in new.real().chunks(columns).zip(positions.int()).enumerate() {
            if let Ok(position) = usize::try_from(*position) {
                let line = pages.line(index / tokens, position);
                cache[line * columns..][..columns].copy_from_slice(new);
            }
        }
    }
}

/// The operands of a call of cached attention, seen as sequences of keys and values in order.
pub struct Sequences<'a, T> {
    /// Rows of the batch, new tokens of a row, query heads, heads of the caches.
    pub batch: usize,
    pub tokens: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// Columns of keys, and of values.
    pub head_dim: usize,
    pub value_dim: usize,
    keys: &'a Input<'a, T>,
    values: &'a Input<'a, T>,
    positions: &'a [i32],
    last: &'a [i32],
    sink: Option<&'a Input<'a, T>>,
    reading: Reading,
    pages: Pages<'a>,
}

impl<'a, T: Real> Sequences<'a, T> {
    pub fn of(call: &Call<'a, T>) -> Self {
        let [q, keys, values, positions, table, ..] = call.inputs else { unreachable!("five inputs at least") };
        let optional = Optional::of(call.inputs, PLACED_INPUTS).expect("checked by the shape rule");
        let [batch, tokens, heads, head_dim] = q.shape[..] else { unreachable!("the shape rule requires four axes") };
        Sequences {
            batch,
            tokens,
            heads,
            kv_heads: keys.shape[2],
            head_dim,
            value_dim: values.shape[3],
            keys,
            values,
            positions: positions.int(),
            last: optional.limit.map_or(positions, |at| &call.inputs[at]).int(),
            sink: optional.sink.map(|at| &call.inputs[at]),
            reading: Reading::checked(call.attrs, head_dim),
            pages: Pages::of(table, keys.shape),
        }
    }

    /// Returns the positions of the keys that a token of a row sees: none where it is padding.
    pub fn visible(&self, row: usize, token: usize) -> Range<usize> {
        let at = row * self.tokens + token;
        let Ok(position) = usize::try_from(self.positions[at]) else { return 0..0 };
        let first = self.reading.window.map_or(0, |window| (position + 1).saturating_sub(window));
        first..self.last[at] as usize + 1
    }

    /// Returns the function from products to scores of a query head.
    pub fn scoring(&self, head: usize) -> Scoring<T> {
        Scoring::of_head(&self.reading, self.sink, head)
    }

    /// Returns the key at a position of a row's sequence.
    #[inline(always)]
    pub fn key(&self, row: usize, position: usize, kv: usize) -> &'a [T] {
        self.line(self.keys, row, position, kv)
    }

    /// Returns the value at a position of a row's sequence.
    #[inline(always)]
    pub fn value(&self, row: usize, position: usize, kv: usize) -> &'a [T] {
        self.line(self.values, row, position, kv)
    }

    #[inline(always)]
    fn line(&self, cache: &'a Input<'a, T>, row: usize, position: usize, kv: usize) -> &'a [T] {
        let columns = cache.shape[3];
        &cache.real()[(self.pages.line(row, position) * self.kv_heads + kv) * columns..][..columns]
    }
}

pub fn read<T: Real>(call: &mut Call<'_, T>) {
    let of = Sequences::of(call);
    let q = call.inputs[0].real();
    let [o] = call.outputs_mut();
    o.real().par_chunks_mut(of.value_dim).enumerate().for_each(|(task, o)| {
        let (token, head) = (task / of.heads, task % of.heads);
        let seen = of.visible(token / of.tokens, token % of.tokens);
        o.fill(T::default());
        if !seen.is_empty() {
            vectorised(Attend, (&q[task * of.head_dim..][..of.head_dim], &of, (token / of.tokens, head), seen, o));
        }
    });
}

struct Attend;

impl<'a, T: Real> Loop<(&'a [T], &'a Sequences<'a, T>, (usize, usize), Range<usize>, &'a mut [T])> for Attend {
    type Output = ();

    #[inline(always)]
    fn run((q, of, (row, head), seen, o): (&[T], &Sequences<'_, T>, (usize, usize), Range<usize>, &mut [T])) {
        let (scoring, kv) = (of.scoring(head), head / (of.heads / of.kv_heads));
        let mut weights = Vec::with_capacity(seen.len());
        for position in seen.clone() {
            weights.push(scoring.score(dot(q, of.key(row, position, kv))).0);
        }
        let top = T::max(largest(&weights), scoring.sink.unwrap_or(T::negative_infinity()));
        for weight in &mut weights {
            *weight = (*weight - top).exp();
        }
        let sum = sum_of(&weights, |x| x) + scoring.sink.map_or(T::default(), |sink| (sink - top).exp());
        for (weight, position) in weights.iter().zip(seen) {
            add_scaled(o, *weight / sum, of.value(row, position, kv));
        }
    }
}
