//! Attention forward: a task is a block of queries of one head.

use std::cell::RefCell;

use ops::attention::{Extents, Operands};
use ops::{Call, vectorised};
use program::TensorRef;
use rayon::prelude::*;

use super::block::{Block, QUERIES};
use super::packed::{Room, by_column, by_column_units, by_token, by_token_units, head};
use super::softmax::{Capped, WeightsOf};
use crate::simd::{Matrix, MatrixMut, Tiles};

/// The buffers that a task keeps from block to block.
#[derive(Default)]
struct Work {
    scores: Vec<f32>,
    slopes: Vec<f32>,
    left: Vec<u32>,
    /// The weights of a query that sees parts of the keys.
    seen_alone: Vec<f32>,
}

thread_local! {
    static WORK: RefCell<Work> = RefCell::default();
}

pub fn room(inputs: &[TensorRef]) -> Room {
    let e = Extents::of_call(inputs);
    let units = by_token_units(e.tokens, e.head_dim) + by_column_units(e.tokens, e.value_dim);
    Room { packed: e.batch * e.kv_heads * units, partial: 0 }
}

pub fn run(call: &mut Call<'_, f32>, packed: &mut [u32], _partial: &mut [f32]) {
    let operands = Operands::of(call);
    let ([q, k, v, ..], e) = (call.inputs, operands.e) else { unreachable!("the shape rule requires four inputs") };
    let (key_units, value_units) = (by_token_units(e.tokens, e.head_dim), by_column_units(e.tokens, e.value_dim));
    let (by_tokens, by_columns) = packed.split_at_mut(e.batch * e.kv_heads * key_units);
    let by_columns = &mut by_columns[..e.batch * e.kv_heads * value_units];
    let heads = by_tokens.par_chunks_mut(key_units).zip(by_columns.par_chunks_mut(value_units));
    heads.enumerate().for_each(|(task, (keys, values))| {
        let (b, h) = (task / e.kv_heads, task % e.kv_heads);
        by_token(head(k, b, h), keys);
        by_column(head(v, b, h), values);
    });
    let (keys, values) = (&*by_tokens, &*by_columns);
    let [o, lse] = call.outputs_mut();
    let row = e.heads * e.value_dim;
    let batches = o.real().par_chunks_mut(e.tokens * row).zip(lse.real().par_chunks_mut(e.heads * e.tokens));
    batches.enumerate().for_each(|(b, (o, lse))| {
        let mask = operands.mask(b);
        // Tiles come block by block, heads inside; statistics head by head, blocks inside.
        let mut parts: Vec<_> = lse.chunks_mut(e.tokens).map(|lse| lse.chunks_mut(QUERIES)).collect();
        let tiles = MatrixMut::new(o, e.tokens, row, row).tiles(QUERIES, e.value_dim);
        let tasks: Vec<_> = tiles
            .into_iter()
            .enumerate()
            .map(|(task, (_, _, o))| (o, parts[task % e.heads].next().expect("one part for each block")))
            .collect();
        tasks.into_par_iter().enumerate().for_each(|(task, (o, lse))| {
            let h = task % e.heads;
            let key_head = b * e.kv_heads + h / e.group();
            let keys = &keys[key_head * key_units..][..key_units];
            let values = &values[key_head * value_units..][..value_units];
            let block = Block::of(task / e.heads, e.tokens, &mask);
            attend(&operands, &block, h, (head(q, b, h), keys, values), o, lse);
        });
    });
}

/// One block of queries of head `h`.
fn attend(
    operands: &Operands<'_, f32>,
    block: &Block<'_>,
    h: usize,
    (q, keys, values): (Matrix<'_>, &[u32], &[u32]),
    mut o: MatrixMut<'_, f32>,
    lse: &mut [f32],
) {
    let scoring = operands.scoring(h);
    let tiles = Tiles::<f32>::here().expect("looked for when the program is loaded");
    WORK.with_borrow_mut(|Work { scores, slopes, left, seen_alone }| {
        scores.resize(block.queries.len() * block.width, 0.0);
        slopes.resize(block.width, 0.0);
        block.scores(tiles, q, keys, scoring.scale, scores);
        let rows = block.queries.clone().zip(scores.chunks_mut(block.width)).zip(lse);
        let sums: Vec<f32> = rows
            .map(|((i, row), lse)| {
                let seen = block.seen(i);
                row[..seen.start].fill(0.0);
                row[seen.end..].fill(0.0);
                let row = &mut row[seen];
                if let Some(cap) = scoring.soft_cap {
                    vectorised(Capped, (&mut *row, cap, &mut slopes[..]));
                }
                let (sum, top) = match block.parts(i) {
                    None => vectorised(WeightsOf, (row, scoring.sink)),
                    Some(parts) => {
                        // As if nothing stood between the parts, so that the sum has the same order.
                        seen_alone.clear();
                        parts.iter().for_each(|part| seen_alone.extend_from_slice(&row[part.clone()]));
                        let found = vectorised(WeightsOf, (&mut *seen_alone, scoring.sink));
                        row.fill(0.0);
                        let mut weights = &seen_alone[..];
                        for part in parts {
                            let (these, rest) = weights.split_at(part.len());
                            row[part].copy_from_slice(these);
                            weights = rest;
                        }
                        found
                    }
                };
                *lse = top + sum.ln();
                sum
            })
            .collect();
        block.sums_by_query(tiles, scores, (values, operands.e.value_dim), left, &mut o);
        for (i, sum) in sums.iter().enumerate() {
            o.row(i).iter_mut().for_each(|o| *o /= sum);
        }
    });
}
