//! CPU references of attention. Scores and weighted sums of a block of queries are small matrix products over the keys
//! that any of them sees. A task is a block (forward) or a head (backward); sums over several tasks are added in a
//! fixed order.

use std::ops::Range;

use rayon::prelude::*;

use super::mask::Mask;
use super::operands::{Operands, Scoring};
use super::panels::{LANES, Left, Panels, add_product};
use crate::call::{Call, Input};
use crate::real::Real;
use crate::vector::add_scaled;

/// Number of queries in a block.
const QUERIES: usize = 32;

/// One head of a tensor [B, T, heads, D].
#[derive(Clone, Copy)]
struct Head<'a, T> {
    data: &'a [T],
    stride: usize,
    tokens: usize,
    head_dim: usize,
}

impl<'a, T: Real> Head<'a, T> {
    fn of(tensor: &Input<'a, T>, b: usize, head: usize) -> Self {
        let [_, tokens, heads, head_dim] = tensor.shape[..] else { unreachable!("the shape rule requires four axes") };
        let start = b * tokens * heads * head_dim + head * head_dim;
        Head { data: &tensor.real()[start..], stride: heads * head_dim, tokens, head_dim }
    }

    /// Returns the head as the left operand of a product, from one token on.
    fn from(&self, token: usize) -> Left<'a, T> {
        Left { data: &self.data[token * self.stride..], row: self.stride, step: 1 }
    }

    /// [T, D]: for weighted sums of its rows.
    fn panels(&self) -> Panels<T> {
        Panels::pack(self.tokens, self.head_dim, |token, column| self.data[token * self.stride + column])
    }

    /// [D, T]: for products with each of its rows.
    fn transposed(&self) -> Panels<T> {
        Panels::pack(self.head_dim, self.tokens, |column, token| self.data[token * self.stride + column])
    }
}

/// A block of queries and the keys that any of them sees, from a panel's edge on.
struct Block {
    queries: Range<usize>,
    keys: Range<usize>,
    panels: Range<usize>,
    /// Columns of a score matrix: whole panels.
    width: usize,
}

impl Block {
    fn of(index: usize, tokens: usize, mask: &Mask<'_>) -> Self {
        let queries = index * QUERIES..((index + 1) * QUERIES).min(tokens);
        let seen = mask.visible_to(&queries);
        let panels = seen.start / LANES..seen.end.div_ceil(LANES);
        let width = panels.len() * LANES;
        Block { keys: panels.start * LANES..seen.end, queries, panels, width }
    }

    fn head_panels(head_dim: usize) -> Range<usize> {
        0..head_dim.div_ceil(LANES)
    }

    /// The products of each query's row with each key's row.
    fn scores<T: Real>(&self, rows: Head<'_, T>, keys: &Panels<T>) -> Vec<T> {
        let mut scores = vec![T::default(); self.queries.len() * self.width];
        let left = rows.from(self.queries.start);
        add_product(&mut scores, self.width, left, keys, 0..rows.head_dim, self.panels.clone());
        scores
    }

    /// The columns of a row of scores that query `i` sees.
    fn columns(&self, i: usize, mask: &Mask<'_>) -> Range<usize> {
        let keys = mask.visible(i);
        keys.start - self.keys.start..keys.end - self.keys.start
    }
}

pub fn forward<T: Real>(call: &mut Call<'_, T>) {
    let operands = Operands::of(call);
    let ([q, k, v, ..], e) = (call.inputs, operands.e) else { unreachable!("the shape rule requires four inputs") };
    let masks: Vec<Mask<'_>> = (0..e.batch).map(|b| operands.mask(b)).collect();
    let key_head = |task: usize| (task / e.kv_heads, task % e.kv_heads);
    let packed: Vec<(Panels<T>, Panels<T>)> = (0..e.batch * e.kv_heads)
        .into_par_iter()
        .map(key_head)
        .map(|(b, h)| (Head::of(k, b, h).transposed(), Head::of(v, b, h).panels()))
        .collect();
    let blocks = e.tokens.div_ceil(QUERIES);
    let results: Vec<(Vec<T>, Vec<T>)> = (0..e.batch * e.heads * blocks)
        .into_par_iter()
        .map(|task| {
            let (b, h) = (task / blocks / e.heads, task / blocks % e.heads);
            let keys = &packed[b * e.kv_heads + h / e.group()];
            attend(task % blocks, Head::of(q, b, h), keys, e.value_dim, &masks[b], operands.scoring(h))
        })
        .collect();
    let [o, lse] = call.outputs_mut();
    let lse = lse.real().chunks_mut(e.tokens).flat_map(|row| row.chunks_mut(QUERIES));
    for (lse, (_, part)) in lse.zip(&results) {
        lse.copy_from_slice(part);
    }
    o.real().par_chunks_mut(e.heads * e.value_dim).enumerate().for_each(|(row, o)| {
        let (b, i) = (row / e.tokens, row % e.tokens);
        for (h, o) in o.chunks_mut(e.value_dim).enumerate() {
            let part = &results[(b * e.heads + h) * blocks + i / QUERIES].0;
            o.copy_from_slice(&part[i % QUERIES * e.value_dim..][..e.value_dim]);
        }
    });
}

/// One block of queries: its rows of o and lse.
fn attend<T: Real>(
    index: usize,
    q: Head<'_, T>,
    (k, v): &(Panels<T>, Panels<T>),
    value_dim: usize,
    mask: &Mask<'_>,
    scoring: Scoring<T>,
) -> (Vec<T>, Vec<T>) {
    let block = Block::of(index, q.tokens, mask);
    let mut weights = block.scores(q, k);
    let mut sums = Vec::with_capacity(block.queries.len());
    let mut lse = Vec::with_capacity(block.queries.len());
    for (i, row) in block.queries.clone().zip(weights.chunks_mut(block.width)) {
        let seen = block.columns(i, mask);
        row[..seen.start].fill(T::default());
        row[seen.end..].fill(T::default());
        let row = &mut row[seen];
        row.iter_mut().for_each(|x| *x = scoring.score(*x).0);
        mask.hide(i, row);
        let largest = row.iter().copied().fold(scoring.sink.unwrap_or(T::negative_infinity()), T::max);
        let mut sum = scoring.sink.map_or(T::default(), |sink| (sink - largest).exp());
        for weight in row {
            *weight = (*weight - largest).exp();
            sum += *weight;
        }
        sums.push(sum);
        lse.push(largest + sum.ln());
    }
    let mut o = vec![T::default(); block.queries.len() * value_dim];
    let left = Left { data: &weights, row: block.width, step: 1 };
    add_product(&mut o, value_dim, left, v, block.keys, Block::head_panels(value_dim));
    for (o, sum) in o.chunks_mut(value_dim).zip(sums) {
        o.iter_mut().for_each(|o| *o = *o / sum);
    }
    (o, lse)
}

/// Gradients of one query head: dq, and its share of dk and dv, each [T, D].
struct HeadGradients<T> {
    dq: Vec<T>,
    dk: Vec<T>,
    dv: Vec<T>,
}

pub fn backward<T: Real>(call: &mut Call<'_, T>) {
    let operands = Operands::of(call);
    let (inputs, e) = (call.inputs, operands.e);
    let results: Vec<HeadGradients<T>> = (0..e.batch * e.heads)
        .into_par_iter()
        .map(|task| head_gradients(inputs, &operands, task / e.heads, task % e.heads))
        .collect();
    let [dq, dk, dv] = call.outputs_mut();
    dq.real().par_chunks_mut(e.heads * e.head_dim).enumerate().for_each(|(row, dq)| {
        let (b, i) = (row / e.tokens, row % e.tokens);
        for (h, dq) in dq.chunks_mut(e.head_dim).enumerate() {
            dq.copy_from_slice(&results[b * e.heads + h].dq[i * e.head_dim..][..e.head_dim]);
        }
    });
    let sum = |out: &mut [T], columns: usize, part: fn(&HeadGradients<T>) -> &[T]| {
        out.par_chunks_mut(e.kv_heads * columns).enumerate().for_each(|(row, out)| {
            let (b, j) = (row / e.tokens, row % e.tokens);
            out.fill(T::default());
            for (h, result) in results[b * e.heads..(b + 1) * e.heads].iter().enumerate() {
                let out = &mut out[h / e.group() * columns..][..columns];
                add_scaled(out, T::from_f64(1.0), &part(result)[j * columns..][..columns]);
            }
        });
    };
    sum(dk.real(), e.head_dim, |r| &r.dk);
    sum(dv.real(), e.value_dim, |r| &r.dv);
}

fn head_gradients<T: Real>(
    inputs: &[Input<'_, T>],
    operands: &Operands<'_, T>,
    b: usize,
    h: usize,
) -> HeadGradients<T> {
    let [q, k, v, _, lse, d_o, ..] = inputs else { unreachable!("the shape rule requires seven inputs") };
    let (e, mask, scoring) = (operands.e, operands.mask(b), operands.scoring(h));
    let (k, v) = (Head::of(k, b, h / e.group()), Head::of(v, b, h / e.group()));
    let (q, d_o) = (Head::of(q, b, h), Head::of(d_o, b, h));
    let (k_transposed, v_transposed) = (k.transposed(), v.transposed());
    let (k, q_panels, do_panels) = (k.panels(), q.panels(), d_o.panels());
    let lse = &lse.real()[(b * e.heads + h) * e.tokens..][..e.tokens];
    let (d, dv) = (e.head_dim, e.value_dim);
    let zeros = |columns: usize| vec![T::default(); e.tokens * columns];
    let mut result = HeadGradients { dq: zeros(d), dk: zeros(d), dv: zeros(dv) };
    for index in 0..e.tokens.div_ceil(QUERIES) {
        let block = Block::of(index, e.tokens, &mask);
        let (mut p, mut ds) = (block.scores(q, &k_transposed), block.scores(d_o, &v_transposed));
        let rows = p.chunks_mut(block.width).zip(ds.chunks_mut(block.width));
        for (i, (p, ds)) in block.queries.clone().zip(rows) {
            score_gradients((p, ds), i, (block.columns(i, &mask), &mask), lse[i], &scoring);
        }
        let (queries, keys) = (block.queries, block.keys);
        let (panels, v_panels) = (Block::head_panels(d), Block::head_panels(dv));
        let by_query = Left { data: &ds, row: block.width, step: 1 };
        let by_key = |data| Left { data, row: 1, step: block.width };
        let rows = |of: &Range<usize>, columns: usize| of.start * columns..of.end * columns;
        add_product(&mut result.dq[rows(&queries, d)], d, by_query, &k, keys.clone(), panels.clone());
        add_product(&mut result.dk[rows(&keys, d)], d, by_key(&ds), &q_panels, queries.clone(), panels);
        add_product(&mut result.dv[rows(&keys, dv)], dv, by_key(&p), &do_panels, queries, v_panels);
    }
    result
}

/// Query `i`: products become weights p, their gradients (d_o·v) become those of the products; zero where nothing
/// is seen. The mean gradient is taken of the weights p as they are here, not as d_o·o: lse is rounded, so that
/// they do not sum to 1, and any other mean would leave a part of it in every ds. A sink has a weight and no value.
fn score_gradients<T: Real>(
    (p, ds): (&mut [T], &mut [T]),
    i: usize,
    (seen, mask): (Range<usize>, &Mask<'_>),
    lse: T,
    scoring: &Scoring<T>,
) {
    for row in [&mut *p, &mut *ds] {
        row[..seen.start].fill(T::default());
        row[seen.end..].fill(T::default());
    }
    let mut sum = scoring.sink.map_or(T::default(), |sink| (sink - lse).exp());
    let mut mean = T::default();
    let mut slopes = Vec::with_capacity(seen.len());
    for p in &mut p[seen.clone()] {
        let (score, slope) = scoring.score(*p);
        slopes.push(slope);
        *p = score;
    }
    mask.hide(i, &mut p[seen.clone()]);
    for (p, ds) in p[seen.clone()].iter_mut().zip(&ds[seen.clone()]) {
        *p = (*p - lse).exp();
        mean += *p * *ds;
        sum += *p;
    }
    mean = mean / sum;
    for ((p, ds), slope) in p[seen.clone()].iter().zip(&mut ds[seen]).zip(slopes) {
        *ds = *p * (*ds - mean) * slope;
    }
}
