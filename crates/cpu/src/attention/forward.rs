//! Attention forward: a task is a block of queries of one head.

use std::cell::RefCell;

use ops::{Call, Loop, Real, largest, sum_of, vectorised};
use program::TensorRef;
use rayon::prelude::*;

use super::block::{Block, QUERIES};
use super::{Extents, Room, by_column, by_token, head};
use crate::simd::{MatrixMut, Tiles};

thread_local! {
    /// Scores of one block, and packed weights.
    static WORK: RefCell<(Vec<f32>, Vec<u32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

pub fn room(inputs: &[TensorRef]) -> Room {
    let e = Extents::of_shapes(&inputs[0].shape, &inputs[1].shape);
    Room { packed: e.batch * e.kv_heads * (e.by_token() + e.by_column()), partial: 0 }
}

pub fn run(call: &mut Call<'_, f32>, packed: &mut [u32], _partial: &mut [f32]) {
    let e = Extents::of(call);
    let [q, k, v, starts] = call.inputs else { unreachable!("the shape rule asks for four inputs") };
    let starts = starts.int();
    let (by_tokens, by_columns) = packed.split_at_mut(e.batch * e.kv_heads * e.by_token());
    let by_columns = &mut by_columns[..e.batch * e.kv_heads * e.by_column()];
    let heads = by_tokens.par_chunks_mut(e.by_token()).zip(by_columns.par_chunks_mut(e.by_column()));
    heads.enumerate().for_each(|(task, (keys, values))| {
        let (b, h) = (task / e.kv_heads, task % e.kv_heads);
        by_token(head(k, b, h), keys);
        by_column(head(v, b, h), &e, values);
    });
    let (keys, values) = (&*by_tokens, &*by_columns);
    let [o, lse] = call.outputs_mut();
    let row = e.heads * e.head_dim;
    let batches = o.real().par_chunks_mut(e.tokens * row).zip(lse.real().par_chunks_mut(e.heads * e.tokens));
    batches.enumerate().for_each(|(b, (o, lse))| {
        let starts = &starts[b * e.tokens..][..e.tokens];
        // Tiles come block by block, heads inside; statistics head by head, blocks inside.
        let mut parts: Vec<_> = lse.chunks_mut(e.tokens).map(|lse| lse.chunks_mut(QUERIES)).collect();
        let tiles = MatrixMut::new(o, e.tokens, row, row).tiles(QUERIES, e.head_dim);
        let tasks: Vec<_> = tiles
            .into_iter()
            .enumerate()
            .map(|(task, (_, _, o))| (o, parts[task % e.heads].next().expect("one part for each block")))
            .collect();
        tasks.into_par_iter().enumerate().for_each(|(task, (mut o, lse))| {
            let h = b * e.kv_heads + task % e.heads / e.group();
            let (keys, values) = (&keys[h * e.by_token()..], &values[h * e.by_column()..]);
            let block = Block::of(task / e.heads, &e, starts);
            let q = head(q, b, task % e.heads);
            WORK.with_borrow_mut(|(scores, left)| {
                let tiles = Tiles::<f32>::here().expect("looked for when the program is loaded");
                scores.resize(block.queries.len() * block.width, 0.0);
                block.scores(tiles, q, &keys[..e.by_token()], e.scale, scores);
                let sums: Vec<f32> = block
                    .queries
                    .clone()
                    .zip(scores.chunks_mut(block.width))
                    .zip(lse)
                    .map(|((i, row), lse)| {
                        let seen = block.seen(i, &e, starts);
                        row[..seen.start].fill(0.0);
                        row[seen.end..].fill(0.0);
                        let (sum, top) = vectorised(WeightsOf, &mut row[seen]);
                        *lse = top + sum.ln();
                        sum
                    })
                    .collect();
                block.sums_by_query(tiles, &e, scores, &values[..e.by_column()], left, &mut o);
                for (i, sum) in sums.iter().enumerate() {
                    o.row(i).iter_mut().for_each(|o| *o /= sum);
                }
            });
        });
    });
}

/// Scores become exponentials of their distance to the largest; gives their sum and the largest.
struct WeightsOf;

impl<'a> Loop<&'a mut [f32]> for WeightsOf {
    type Output = (f32, f32);

    #[inline(always)]
    fn run(row: &'a mut [f32]) -> (f32, f32) {
        let top = largest(row);
        for x in &mut *row {
            *x = Real::exp(*x - top);
        }
        (sum_of(row, |x| x), top)
    }
}
