//! CPU references of attention. Only visible keys are touched; a task is one head of one row, and
//! what several tasks add to is summed in a fixed order.

use std::ops::RangeInclusive;

use rayon::prelude::*;

use super::{Extents, Reading};
use crate::call::{Call, Input};
use crate::real::Real;
use crate::vector::{add_scaled, dot};

/// Queries of one task of the forward pass.
const QUERIES: usize = 64;

/// One head of a tensor [B, T, heads, D].
#[derive(Clone, Copy)]
struct Head<'a, T> {
    data: &'a [T],
    stride: usize,
    head_dim: usize,
}

impl<'a, T: Real> Head<'a, T> {
    fn of(tensor: &Input<'a, T>, b: usize, head: usize) -> Self {
        let [_, tokens, heads, head_dim] = tensor.shape[..] else { unreachable!("the shape rule asks for four axes") };
        let start = b * tokens * heads * head_dim + head * head_dim;
        Head { data: &tensor.real()[start..], stride: heads * head_dim, head_dim }
    }

    fn at(&self, token: usize) -> &'a [T] {
        &self.data[token * self.stride..token * self.stride + self.head_dim]
    }
}

/// The keys that query `i` sees.
fn visible(i: usize, document_start: i32, window: Option<usize>) -> RangeInclusive<usize> {
    let first = document_start as usize;
    first.max(window.map_or(0, |window| (i + 1).saturating_sub(window)))..=i
}

pub fn forward<T: Real>(call: &mut Call<'_, T>) {
    let reading = Reading::checked(call.attrs);
    let [q, k, v, starts] = call.inputs else { unreachable!("the shape rule asks for four inputs") };
    let e = Extents::of(q.shape, k.shape);
    let starts = starts.int();
    let blocks = e.tokens.div_ceil(QUERIES);
    let results: Vec<(Vec<T>, Vec<T>)> = (0..e.batch * e.heads * blocks)
        .into_par_iter()
        .map(|task| {
            let (head, block) = (task / blocks, task % blocks);
            let (b, h) = (head / e.heads, head % e.heads);
            let queries = block * QUERIES..((block + 1) * QUERIES).min(e.tokens);
            let (q, k, v) = (Head::of(q, b, h), Head::of(k, b, h / e.group()), Head::of(v, b, h / e.group()));
            let mut o = vec![T::default(); queries.len() * e.head_dim];
            let mut scores = Vec::with_capacity(queries.end);
            let rows = queries.zip(o.chunks_mut(e.head_dim));
            let lse = rows
                .map(|(i, o)| {
                    let keys = visible(i, starts[b * e.tokens + i], reading.window);
                    attend(q.at(i), k, v, keys, T::from_f64(reading.scale), &mut scores, o)
                })
                .collect();
            (o, lse)
        })
        .collect();
    let [o, lse] = call.outputs_mut();
    for (lse, (_, part)) in blocks_of(lse.real(), e.tokens).zip(&results) {
        lse.copy_from_slice(part);
    }
    o.real().par_chunks_mut(e.heads * e.head_dim).enumerate().for_each(|(row, o)| {
        let (b, i) = (row / e.tokens, row % e.tokens);
        for (h, o) in o.chunks_mut(e.head_dim).enumerate() {
            let part = &results[(b * e.heads + h) * blocks + i / QUERIES].0;
            o.copy_from_slice(&part[i % QUERIES * e.head_dim..][..e.head_dim]);
        }
    });
}

/// The pieces of [heads, tokens] that the tasks of the forward pass computed, in order.
fn blocks_of<T>(rows: &mut [T], tokens: usize) -> impl Iterator<Item = &mut [T]> {
    rows.chunks_mut(tokens).flat_map(|row| row.chunks_mut(QUERIES))
}

/// One query: writes its row of o and gives its lse.
fn attend<T: Real>(
    q: &[T],
    k: Head<'_, T>,
    v: Head<'_, T>,
    keys: RangeInclusive<usize>,
    scale: T,
    scores: &mut Vec<T>,
    o: &mut [T],
) -> T {
    scores.clear();
    scores.extend(keys.clone().map(|j| scale * dot(q, k.at(j))));
    let largest = scores.iter().copied().fold(T::negative_infinity(), T::max);
    let mut sum = T::default();
    for (score, j) in scores.iter().zip(keys) {
        let p = (*score - largest).exp();
        sum += p;
        add_scaled(o, p, v.at(j));
    }
    o.iter_mut().for_each(|o| *o = *o / sum);
    largest + sum.ln()
}

/// Gradients of one query head: dq, and its share of dk and dv, each [T, D].
struct HeadGradients<T> {
    dq: Vec<T>,
    dk: Vec<T>,
    dv: Vec<T>,
}

pub fn backward<T: Real>(call: &mut Call<'_, T>) {
    let reading = Reading::checked(call.attrs);
    let inputs = call.inputs;
    let e = Extents::of(inputs[0].shape, inputs[1].shape);
    let results: Vec<HeadGradients<T>> = (0..e.batch * e.heads)
        .into_par_iter()
        .map(|task| head_gradients(inputs, e, reading, task / e.heads, task % e.heads))
        .collect();
    let [dq, dk, dv] = call.outputs_mut();
    dq.real().par_chunks_mut(e.heads * e.head_dim).enumerate().for_each(|(row, dq)| {
        let (b, i) = (row / e.tokens, row % e.tokens);
        for (h, dq) in dq.chunks_mut(e.head_dim).enumerate() {
            dq.copy_from_slice(&results[b * e.heads + h].dq[i * e.head_dim..][..e.head_dim]);
        }
    });
    let sum = |out: &mut [T], part: fn(&HeadGradients<T>) -> &[T]| {
        out.par_chunks_mut(e.kv_heads * e.head_dim).enumerate().for_each(|(row, out)| {
            let (b, j) = (row / e.tokens, row % e.tokens);
            out.fill(T::default());
            for (h, result) in results[b * e.heads..(b + 1) * e.heads].iter().enumerate() {
                let out = &mut out[h / e.group() * e.head_dim..][..e.head_dim];
                add_scaled(out, T::from_f64(1.0), &part(result)[j * e.head_dim..][..e.head_dim]);
            }
        });
    };
    sum(dk.real(), |r| &r.dk);
    sum(dv.real(), |r| &r.dv);
}

fn head_gradients<T: Real>(inputs: &[Input<'_, T>], e: Extents, reading: Reading, b: usize, h: usize) -> HeadGradients<T> {
    let [q, k, v, o, lse, d_o, starts] = inputs else { unreachable!("the shape rule asks for seven inputs") };
    let (k, v) = (Head::of(k, b, h / e.group()), Head::of(v, b, h / e.group()));
    let (q, o, d_o) = (Head::of(q, b, h), Head::of(o, b, h), Head::of(d_o, b, h));
    let lse = &lse.real()[(b * e.heads + h) * e.tokens..][..e.tokens];
    let starts = &starts.int()[b * e.tokens..][..e.tokens];
    let (scale, n) = (T::from_f64(reading.scale), e.tokens * e.head_dim);
    let mut result = HeadGradients { dq: vec![T::default(); n], dk: vec![T::default(); n], dv: vec![T::default(); n] };
    for i in 0..e.tokens {
        let (q, d_o) = (q.at(i), d_o.at(i));
        let delta = dot(d_o, o.at(i));
        let dq = &mut result.dq[i * e.head_dim..][..e.head_dim];
        for j in visible(i, starts[i], reading.window) {
            let p = (scale * dot(q, k.at(j)) - lse[i]).exp();
            let ds = p * (dot(d_o, v.at(j)) - delta) * scale;
            add_scaled(dq, ds, k.at(j));
            add_scaled(&mut result.dk[j * e.head_dim..][..e.head_dim], ds, q);
            add_scaled(&mut result.dv[j * e.head_dim..][..e.head_dim], p, d_o);
        }
    }
    result
}
