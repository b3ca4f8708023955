//! Attention backward: a task is a stretch of the query blocks of one head. Each has its own sums for the
//! gradients of keys and values, which are added in a fixed order at the end.

use std::cell::RefCell;
use std::ops::Range;

use ops::{Call, Loop, Real, sum_of, sum_of_three, vectorised};
use program::TensorRef;
use rayon::prelude::*;

use super::block::{Block, QUERIES};
use super::{Extents, Room, by_column, by_token, head};
use crate::simd::{MatrixMut, Tiles};

/// What a task keeps from block to block.
#[derive(Default)]
struct Work {
    weights: Vec<f32>,
    gradients: Vec<f32>,
    left: Vec<u32>,
    queries: Vec<u32>,
    d_o: Vec<u32>,
}

thread_local! {
    static WORK: RefCell<Work> = RefCell::default();
}

/// The query blocks of each task of a head: two stretches of about equal work, one where there is little.
fn stretches(blocks: usize) -> Vec<Range<usize>> {
    if blocks < 4 {
        return std::iter::once(0..blocks).collect();
    }
    let work = |blocks: usize| blocks * (blocks + 1) / 2;
    let cut = (0..blocks).find(|cut| 2 * work(*cut) >= work(blocks)).expect("all of the work is more than half");
    vec![0..cut, cut..blocks]
}

pub fn room(inputs: &[TensorRef]) -> Room {
    let e = Extents::of_shapes(&inputs[0].shape, &inputs[1].shape);
    let tasks = e.batch * e.heads * stretches(e.tokens.div_ceil(QUERIES)).len();
    let packed = e.batch * e.kv_heads * (2 * e.by_token() + e.by_column());
    Room { packed, partial: tasks * 2 * e.tokens * e.head_dim }
}

/// One key head, packed.
struct Keys<'a> {
    k: &'a [u32],
    v: &'a [u32],
    k_columns: &'a [u32],
}

pub fn run(call: &mut Call<'_, f32>, packed: &mut [u32], partial: &mut [f32]) {
    let e = Extents::of(call);
    let inputs = call.inputs;
    let [_, k, v, ..] = inputs else { unreachable!("the shape rule asks for seven inputs") };
    let key_head = 2 * e.by_token() + e.by_column();
    let packed = &mut packed[..e.batch * e.kv_heads * key_head];
    packed.par_chunks_mut(key_head).enumerate().for_each(|(task, out)| {
        let (k, v) = (head(k, task / e.kv_heads, task % e.kv_heads), head(v, task / e.kv_heads, task % e.kv_heads));
        let (keys, rest) = out.split_at_mut(e.by_token());
        let (values, columns) = rest.split_at_mut(e.by_token());
        by_token(k, keys);
        by_token(v, values);
        by_column(k, &e, columns);
    });
    let stretches = stretches(e.tokens.div_ceil(QUERIES));
    let sums = 2 * e.tokens * e.head_dim;
    let partial = &mut partial[..e.batch * e.heads * stretches.len() * sums];
    let [dq, dk, dv] = call.outputs_mut();
    let row = e.heads * e.head_dim;
    let mut parts = partial.chunks_mut(sums);
    let mut tasks = Vec::with_capacity(e.batch * e.heads * stretches.len());
    for (b, dq) in dq.real().chunks_mut(e.tokens * row).enumerate() {
        for (_, column, dq) in MatrixMut::new(dq, e.tokens, row, row).tiles(e.tokens, e.head_dim) {
            let h = column / e.head_dim;
            let mut cut = dq.tiles(QUERIES, e.head_dim).into_iter().map(|(_, _, tile)| tile);
            for blocks in &stretches {
                let dq: Vec<_> = cut.by_ref().take(blocks.len()).collect();
                tasks.push((b, h, blocks.clone(), dq, parts.next().expect("one part for each task")));
            }
        }
    }
    tasks.into_par_iter().for_each(|(b, h, blocks, dq, sums)| {
        let keys = &packed[(b * e.kv_heads + h / e.group()) * key_head..][..key_head];
        let (k, rest) = keys.split_at(e.by_token());
        let (v, k_columns) = rest.split_at(e.by_token());
        stretch(inputs, &e, (b, h), blocks, &Keys { k, v, k_columns }, dq, sums);
    });
    let total = |out: &mut [f32], which: usize| {
        out.par_chunks_mut(e.kv_heads * e.head_dim).enumerate().for_each(|(row, out)| {
            let (b, j) = (row / e.tokens, row % e.tokens);
            out.fill(0.0);
            let parts = &partial[b * e.heads * stretches.len() * sums..][..e.heads * stretches.len() * sums];
            for (task, part) in parts.chunks(sums).enumerate() {
                let out = &mut out[task / stretches.len() / e.group() * e.head_dim..][..e.head_dim];
                let part = &part[(which * e.tokens + j) * e.head_dim..][..e.head_dim];
                out.iter_mut().zip(part).for_each(|(out, x)| *out += x);
            }
        });
    };
    total(dk.real(), 0);
    total(dv.real(), 1);
}

fn stretch(
    inputs: &[ops::Input<'_, f32>],
    e: &Extents,
    (b, h): (usize, usize),
    blocks: Range<usize>,
    keys: &Keys<'_>,
    dq: Vec<MatrixMut<'_, f32>>,
    sums: &mut [f32],
) {
    let [q, _, _, _, lse, d_o, starts] = inputs else { unreachable!("the shape rule asks for seven inputs") };
    let (q, d_o) = (head(q, b, h), head(d_o, b, h));
    let lse = &lse.real()[(b * e.heads + h) * e.tokens..][..e.tokens];
    let starts = &starts.int()[b * e.tokens..][..e.tokens];
    let tiles = Tiles::<f32>::here().expect("looked for when the program is loaded");
    sums.fill(0.0);
    let (dk, dv) = sums.split_at_mut(e.tokens * e.head_dim);
    WORK.with_borrow_mut(|work| {
        let Work { weights, gradients, left, queries, d_o: d_o_columns } = work;
        queries.resize(e.by_column(), 0);
        d_o_columns.resize(e.by_column(), 0);
        by_column(q, e, queries);
        by_column(d_o, e, d_o_columns);
        for (index, mut dq) in blocks.zip(dq) {
            let block = Block::of(index, e, starts);
            weights.resize(block.queries.len() * block.width, 0.0);
            gradients.resize(block.queries.len() * block.width, 0.0);
            block.scores(tiles, q, keys.k, e.scale, weights);
            block.scores(tiles, d_o, keys.v, 1.0, gradients);
            let rows = weights.chunks_mut(block.width).zip(gradients.chunks_mut(block.width));
            for (i, (p, ds)) in block.queries.clone().zip(rows) {
                let seen = block.seen(i, e, starts);
                for row in [&mut *p, &mut *ds] {
                    row[..seen.start].fill(0.0);
                    row[seen.end..].fill(0.0);
                }
                vectorised(ScoreGradients, (&mut p[seen.clone()], &mut ds[seen], lse[i], e.scale));
            }
            block.sums_by_query(tiles, e, gradients, keys.k_columns, left, &mut dq);
            block.add_sums_by_key(tiles, e, gradients, queries, left, dk);
            block.add_sums_by_key(tiles, e, weights, d_o_columns, left, dv);
        }
    });
}

/// One query: scores become weights p, their gradients (d_o·v) become ds. The mean gradient is taken of the
/// weights as they are here: lse is rounded, so that they do not sum to 1.
struct ScoreGradients;

impl<'a> Loop<(&'a mut [f32], &'a mut [f32], f32, f32)> for ScoreGradients {
    type Output = ();

    #[inline(always)]
    fn run((p, ds, lse, scale): (&'a mut [f32], &'a mut [f32], f32, f32)) {
        for p in &mut *p {
            *p = Real::exp(*p - lse);
        }
        let mean = sum_of_three(p, ds, p, |p, ds, _| p * ds) / sum_of(p, |p| p);
        for (p, ds) in p.iter().zip(ds) {
            *ds = *p * (*ds - mean) * scale;
        }
    }
}
