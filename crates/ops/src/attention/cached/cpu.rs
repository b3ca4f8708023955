//! CPU references. A task of the attention is one head of one token.

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

pub fn read<T: Real>(call: &mut Call<'_, T>) {
    let [q, keys, values, positions, table, ..] = call.inputs else { unreachable!("five inputs at least") };
    let optional = Optional::of(call.inputs, PLACED_INPUTS).expect("checked by the shape rule");
    let last = optional.limit.map_or(positions, |at| &call.inputs[at]).int();
    let sink = optional.sink.map(|at| &call.inputs[at]);
    let [_, tokens, heads, head_dim] = q.shape[..] else { unreachable!("the shape rule requires four axes") };
    let (kv_heads, value_dim) = (keys.shape[2], values.shape[3]);
    let reading = Reading::checked(call.attrs, head_dim);
    let pages = Pages::of(table, keys.shape);
    let (q, positions) = (q.real(), positions.int());
    let [o] = call.outputs_mut();
    o.real().par_chunks_mut(value_dim).enumerate().for_each(|(task, o)| {
        let (token, head) = (task / heads, task % heads);
        o.fill(T::default());
        let Ok(position) = usize::try_from(positions[token]) else { return };
        let first = reading.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let lines: Vec<usize> = (first..=last[token] as usize).map(|j| pages.line(token / tokens, j)).collect();
        let scoring = Scoring::of_head(&reading, sink, head);
        let kv = head / (heads / kv_heads);
        let sides = [Cached::of(keys, kv), Cached::of(values, kv)];
        vectorised(Attend, (&q[task * head_dim..][..head_dim], sides, &lines[..], scoring, o));
    });
}

/// One head of a cache.
#[derive(Clone, Copy)]
struct Cached<'a, T> {
    data: &'a [T],
    kv: usize,
    heads: usize,
    columns: usize,
}

impl<'a, T: Real> Cached<'a, T> {
    fn of(cache: &Input<'a, T>, kv: usize) -> Self {
        Cached { data: cache.real(), kv, heads: cache.shape[2], columns: cache.shape[3] }
    }

    #[inline(always)]
    fn line(&self, line: usize) -> &'a [T] {
        &self.data[(line * self.heads + self.kv) * self.columns..][..self.columns]
    }
}

struct Attend;

impl<'a, T: Real> Loop<(&'a [T], [Cached<'a, T>; 2], &'a [usize], Scoring<T>, &'a mut [T])> for Attend {
    type Output = ();

    #[inline(always)]
    fn run((q, [keys, values], lines, scoring, o): (&[T], [Cached<'_, T>; 2], &[usize], Scoring<T>, &mut [T])) {
        let mut weights = Vec::with_capacity(lines.len());
        for line in lines {
            weights.push(scoring.score(dot(q, keys.line(*line))).0);
        }
        let top = T::max(largest(&weights), scoring.sink.unwrap_or(T::negative_infinity()));
        for weight in &mut weights {
            *weight = (*weight - top).exp();
        }
        let sum = sum_of(&weights, |x| x) + scoring.sink.map_or(T::default(), |sink| (sink - top).exp());
        for (weight, line) in weights.iter().zip(lines) {
            add_scaled(o, *weight / sum, values.line(*line));
        }
    }
}
