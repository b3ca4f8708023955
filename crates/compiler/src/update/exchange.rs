//! What the ranks of an update do together: they sum the gradients of a step, bucket by bucket, so that each has the sum
//! of its pieces; they agree on loss and norm; and each gets the weights that the others have updated. Bytes travel on a
//! stream of their own, sums are launches in the order of the ranks. Does not know how weights are updated.

use ops::id;
use ops::optimizer::{block_count, blocks_of};
use program::{Collective, EventId, Movement, StreamId, TensorRef, scalar};
use tensor::{Attrs, DType};

use super::{provenance, push_behind};
use crate::lowering::Lowering;
use crate::memory::{ALIGNMENT_BYTES, ParameterPlan, SCALARS, align, arena, scalar_ref};
use crate::residency::Streams;

/// Buckets on their way at a time: one that is exchanged, one that is summed.
const SLOTS: usize = 2;

/// The sums over micro-steps that a step needs of all ranks.
const COUNTED: [&str; 2] = [scalar::LOSS_SUM, scalar::WEIGHT_SUM];

/// Gives every rank the sums of its pieces of the gradients, and all the sums of loss and weights. The first `taken` bytes
/// of the activation arena are occupied. Gives the sums of all squares, f32 [ranks · blocks].
pub(super) fn sum_gradients(
    streams: &mut Streams,
    lowering: &mut Lowering<'_>,
    taken: usize,
    parameters: &ParameterPlan,
) -> TensorRef {
    let ranks = parameters.ranks;
    let from = provenance("exchange");
    streams.follow(StreamId::Exchange, &from);
    let counted = count(streams, parameters);
    let buckets: Vec<_> = parameters.buckets().collect();
    let largest = buckets.iter().map(|(_, of)| of.elements(ranks) * DType::F32.size()).max().unwrap_or(0);
    let slot = align(largest, ALIGNMENT_BYTES);
    let start = align(taken, ALIGNMENT_BYTES);
    let behind = start + slot * buckets.len().min(SLOTS);
    lowering.update_workspace(behind);
    let staged = |number: usize| {
        let pieces = [ranks, buckets[number].1.piece];
        TensorRef::dense(arena::ACTIVATIONS, start + number % SLOTS * slot, DType::F32, pieces)
    };
    let mut summed: Vec<EventId> = Vec::new();
    let exchange = |number: usize, summed: &[EventId], streams: &mut Streams| {
        if let Some(before) = number.checked_sub(SLOTS) {
            streams.wait(StreamId::Exchange, summed[before], &from);
        }
        let (run, bucket) = buckets[number];
        let (whole, to) = (bucket.whole(&run.gradient, ranks), staged(number));
        streams.collective(Collective { movement: Movement::Exchange, from: whole, to }, &from);
        streams.record(StreamId::Exchange, &from)
    };
    let [all, own] = parameters.gathered_squares();
    let mut arrived = vec![];
    let mut begun = 0;
    if !buckets.is_empty() {
        arrived.push(exchange(0, &summed, streams));
    }
    for (number, (run, bucket)) in buckets.iter().enumerate() {
        if number + 1 < buckets.len() {
            arrived.push(exchange(number + 1, &summed, streams));
        }
        streams.wait(StreamId::Compute, arrived[number], &from);
        let (steps, sum) = (&mut streams.steps, bucket.own(&run.gradient));
        push_behind(steps, lowering, behind, id::SUM_PIECES, Attrs::new(), vec![staged(number)], vec![sum.clone()]);
        let blocks = block_count(bucket.piece);
        let table = lowering.constant(&blocks_of(std::iter::once((0, bucket.piece))));
        let offset = own.offset + begun * DType::F32.size();
        let sums = TensorRef { offset, shape: vec![blocks], ..own.clone() };
        push_behind(steps, lowering, behind, id::BLOCK_SQUARES, Attrs::new(), vec![sum, table], vec![sums]);
        begun += blocks;
        summed.push(streams.record(StreamId::Compute, &from));
    }
    streams.wait(StreamId::Compute, counted, &from);
    let [scalars, sums] = counted_places(parameters);
    push_behind(&mut streams.steps, lowering, behind, id::SUM_PIECES, Attrs::new(), vec![scalars], vec![sums]);
    streams.follow(StreamId::Exchange, &from);
    streams.collective(Collective { movement: Movement::Gather, from: own, to: all.clone() }, &from);
    let gathered = streams.record(StreamId::Exchange, &from);
    streams.wait(StreamId::Compute, gathered, &from);
    all
}

/// Begins to gather the sums of loss and weights.
fn count(streams: &mut Streams, parameters: &ParameterPlan) -> EventId {
    let from = provenance("exchange");
    let [to, sums] = counted_places(parameters);
    streams.collective(Collective { movement: Movement::Gather, from: sums, to }, &from);
    streams.record(StreamId::Exchange, &from)
}

/// The sums of all ranks, f32 [ranks, n], and those of one: the scalars from the first to the last, with what is between
/// them.
fn counted_places(parameters: &ParameterPlan) -> [TensorRef; 2] {
    let number = |name: &str| SCALARS.iter().position(|(known, _)| *known == name).expect("a step has its sums");
    assert_eq!(number(COUNTED[0]) + 1, number(COUNTED[1]), "the sums of a step are neighbours");
    let [first, last] = COUNTED.map(scalar_ref);
    let bytes = 2 * (last.offset - first.offset);
    let count = bytes / first.dtype.size();
    [parameters.gathered_scalars(count), TensorRef::dense(first.arena, first.offset, first.dtype, [count])]
}

/// Weights of a bucket of which every rank has updated its own.
#[derive(Clone, Debug)]
pub(super) struct Updated {
    pub own: TensorRef,
    pub whole: TensorRef,
}

/// Begins to give all ranks what each has updated so far.
pub(super) fn gather_weights(of: &Updated, streams: &mut Streams) -> EventId {
    let from = provenance("exchange");
    streams.follow(StreamId::Exchange, &from);
    let gather = Collective { movement: Movement::Gather, from: of.own.clone(), to: of.whole.clone() };
    streams.collective(gather, &from);
    streams.record(StreamId::Exchange, &from)
}
