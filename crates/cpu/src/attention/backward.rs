//! Attention backward: a task is a range of query blocks of one head. Each task has its own partial sums of the
//! gradients of keys and values, which are added in a fixed order at the end.

use std::cell::RefCell;
use std::ops::Range;

use ops::attention::{Extents, Mask, Operands};
use ops::{Call, Loop, Real, sum_of, sum_of_three, vectorised};
use program::TensorRef;
use rayon::prelude::*;

use super::block::{Block, QUERIES};
use super::packed::{Room, by_column, by_column_units, by_token, by_token_units, head};
use super::softmax::Capped;
use crate::simd::{MatrixMut, Tiles};

/// The buffers that a task keeps from block to block.
#[derive(Default)]
struct Work {
    weights: Vec<f32>,
    gradients: Vec<f32>,
    slopes: Vec<f32>,
    left: Vec<u32>,
    queries: Vec<u32>,
    d_o: Vec<u32>,
}

thread_local! {
    static WORK: RefCell<Work> = RefCell::default();
}

/// Returns the query blocks of each task of a head: two ranges of about equal work, one where there is little.
fn stretches(blocks: usize) -> Vec<Range<usize>> {
    if blocks < 4 {
        return std::iter::once(0..blocks).collect();
    }
    let work = |blocks: usize| blocks * (blocks + 1) / 2;
    let cut = (0..blocks).find(|cut| 2 * work(*cut) >= work(blocks)).expect("all of the work is more than half");
    vec![0..cut, cut..blocks]
}

/// Units of a key head by token, a value head by token, a key head by column.
fn key_units(e: &Extents) -> [usize; 3] {
    [by_token_units(e.tokens, e.head_dim), by_token_units(e.tokens, e.value_dim), by_column_units(e.tokens, e.head_dim)]
}

pub fn room(inputs: &[TensorRef]) -> Room {
    let e = Extents::of_call(inputs);
    let tasks = e.batch * e.heads * stretches(e.tokens.div_ceil(QUERIES)).len();
    let packed = e.batch * e.kv_heads * key_units(&e).iter().sum::<usize>();
    Room { packed, partial: tasks * e.tokens * (e.head_dim + e.value_dim) }
}

/// The packed panels of one key head.
struct Keys<'a> {
    k: &'a [u32],
    v: &'a [u32],
    k_columns: &'a [u32],
}

impl<'a> Keys<'a> {
    fn of(e: &Extents, packed: &'a [u32]) -> Self {
        let [k, v, _] = key_units(e);
        let (keys, rest) = packed.split_at(k);
        let (values, k_columns) = rest.split_at(v);
        Keys { k: keys, v: values, k_columns }
    }
}

pub fn run(call: &mut Call<'_, f32>, packed: &mut [u32], partial: &mut [f32]) {
    let operands = Operands::of(call);
    let (inputs, e) = (call.inputs, operands.e);
    let masks: Vec<Mask<'_>> = (0..e.batch).map(|b| operands.mask(b)).collect();
    let [_, k, v, ..] = inputs else { unreachable!("the shape rule requires seven inputs") };
    let [k_units, v_units, column_units] = key_units(&e);
    let key_head = k_units + v_units + column_units;
    let packed = &mut packed[..e.batch * e.kv_heads * key_head];
    packed.par_chunks_mut(key_head).enumerate().for_each(|(task, out)| {
        let (k, v) = (head(k, task / e.kv_heads, task % e.kv_heads), head(v, task / e.kv_heads, task % e.kv_heads));
        let (keys, rest) = out.split_at_mut(k_units);
        let (values, columns) = rest.split_at_mut(v_units);
        by_token(k, keys);
        by_token(v, values);
        by_column(k, columns);
    });
    let stretches = stretches(e.tokens.div_ceil(QUERIES));
    let sums = e.tokens * (e.head_dim + e.value_dim);
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
        let keys = Keys::of(&e, &packed[(b * e.kv_heads + h / e.group()) * key_head..][..key_head]);
        stretch(inputs, &operands, (b, h), blocks, (&keys, &masks[b]), dq, sums);
    });
    let total = |out: &mut [f32], columns: usize, at: usize| {
        out.par_chunks_mut(e.kv_heads * columns).enumerate().for_each(|(row, out)| {
            let (b, j) = (row / e.tokens, row % e.tokens);
            out.fill(0.0);
            let parts = &partial[b * e.heads * stretches.len() * sums..][..e.heads * stretches.len() * sums];
            for (task, part) in parts.chunks(sums).enumerate() {
                let out = &mut out[task / stretches.len() / e.group() * columns..][..columns];
                let part = &part[at + j * columns..][..columns];
                out.iter_mut().zip(part).for_each(|(out, x)| *out += x);
            }
        });
    };
    total(dk.real(), e.head_dim, 0);
    total(dv.real(), e.value_dim, e.tokens * e.head_dim);
}

fn stretch(
    inputs: &[ops::Input<'_, f32>],
    operands: &Operands<'_, f32>,
    (b, h): (usize, usize),
    blocks: Range<usize>,
    (keys, mask): (&Keys<'_>, &Mask<'_>),
    dq: Vec<MatrixMut<'_, f32>>,
    sums: &mut [f32],
) {
    let [q, _, _, _, lse, d_o, ..] = inputs else { unreachable!("the shape rule requires seven inputs") };
    let (e, scoring) = (&operands.e, operands.scoring(h));
    let (q, d_o) = (head(q, b, h), head(d_o, b, h));
    let lse = &lse.real()[(b * e.heads + h) * e.tokens..][..e.tokens];
    let tiles = Tiles::<f32>::here().expect("looked for when the program is loaded");
    sums.fill(0.0);
    let (dk, dv) = sums.split_at_mut(e.tokens * e.head_dim);
    WORK.with_borrow_mut(|work| {
        let Work { weights, gradients, slopes, left, queries, d_o: d_o_columns } = work;
        queries.resize(by_column_units(e.tokens, e.head_dim), 0);
        d_o_columns.resize(by_column_units(e.tokens, e.value_dim), 0);
        by_column(q, queries);
        by_column(d_o, d_o_columns);
        for (index, mut dq) in blocks.zip(dq) {
            let block = Block::of(index, e.tokens, mask);
            weights.resize(block.queries.len() * block.width, 0.0);
            gradients.resize(block.queries.len() * block.width, 0.0);
            slopes.resize(block.width, 0.0);
            block.scores(tiles, q, keys.k, scoring.scale, weights);
            block.scores(tiles, d_o, keys.v, 1.0, gradients);
            let rows = weights.chunks_mut(block.width).zip(gradients.chunks_mut(block.width));
            for (i, (p, ds)) in block.queries.clone().zip(rows) {
                let seen = block.seen(i);
                for row in [&mut *p, &mut *ds] {
                    row[..seen.start].fill(0.0);
                    row[seen.end..].fill(0.0);
                }
                let (p, ds) = (&mut p[seen.clone()], &mut ds[seen]);
                let slopes = &mut slopes[..p.len()];
                if let Some(cap) = scoring.soft_cap {
                    vectorised(Capped, (&mut *p, cap, &mut *slopes));
                }
                block.hide(i, p);
                let sink = scoring.sink.map_or(0.0, |sink| Real::exp(sink - lse[i]));
                vectorised(ScoreGradients, (p, &mut *ds, lse[i], sink, scoring.scale));
                if scoring.soft_cap.is_some() {
                    ds.iter_mut().zip(slopes).for_each(|(ds, slope)| *ds *= *slope);
                }
            }
            block.sums_by_query(tiles, gradients, (keys.k_columns, e.head_dim), left, &mut dq);
            block.add_sums_by_key(tiles, gradients, (queries, e.head_dim), left, dk);
            block.add_sums_by_key(tiles, weights, (d_o_columns, e.value_dim), left, dv);
        }
    });
}

/// The step of one query from scores to weights p, and from their gradients (d_o·v) to ds. The mean gradient is taken
/// over the weights as they are here, including the sink's: lse is rounded, so that they do not sum to 1.
struct ScoreGradients;

/// Scores, gradients, log-sum-exp, the sink's weight, scale.
type Gradients<'a> = (&'a mut [f32], &'a mut [f32], f32, f32, f32);

impl<'a> Loop<Gradients<'a>> for ScoreGradients {
    type Output = ();

    #[inline(always)]
    fn run((p, ds, lse, sink, scale): Gradients<'a>) {
        for p in &mut *p {
            *p = Real::exp(*p - lse);
        }
        let mean = sum_of_three(p, ds, p, |p, ds, _| p * ds) / (sum_of(p, |p| p) + sink);
        for (p, ds) in p.iter().zip(ds) {
            *ds = *p * (*ds - mean) * scale;
        }
    }
}
