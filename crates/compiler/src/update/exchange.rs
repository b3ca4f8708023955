//! The collectives of an update: the ranks agree on loss and norm, and each gets the weights that the others have
//! updated, where it keeps them. The sums of the gradients have come with the micro-steps. Bytes travel on a stream of
//! their own, sums are launches in the order of the ranks. Does not know how weights are updated.

use ops::id;
use ops::optimizer::blocks_of;
use program::{Collective, Cost, EventId, Instruction, Step, StreamId, TensorRef, scalar};
use tensor::{Attrs, DType};

use super::steps::{provenance, push_behind};
use crate::lowering::Lowering;
use crate::memory::{ParameterPlan, SCALARS, SUM_SQUARES, arena, scalar_ref};
use crate::residency::{Homes, Streams};
use crate::rule::Per;

/// The sums over micro-steps that a step needs of all ranks.
const COUNTED: [&str; 2] = [scalar::LOSS_SUM, scalar::WEIGHT_SUM];

/// Gives all ranks the sums of loss and weights, and the largest magnitudes where some are recorded. The first `taken` bytes of the activation arena are occupied. Gives the
/// sums of all squares, f32 [ranks · blocks]: those of gradients on the host have been summed up on their way there.
pub(super) fn agree(
    streams: &mut Streams,
    lowering: &mut Lowering<'_>,
    taken: usize,
    parameters: &ParameterPlan,
    homes: &Homes,
) -> TensorRef {
    let from = provenance("exchange");
    streams.follow(StreamId::Exchange, &from);
    let counted = count(streams, parameters);
    let magnitudes = parameters.states.histories.as_ref().zip(parameters.gathered_magnitudes());
    let magnitudes = magnitudes.map(|(histories, to)| {
        let own = histories.amax.clone();
        streams.collective(Collective::gather(own.clone(), to.clone()), &from);
        (to, own, streams.record(StreamId::Exchange, &from))
    });
    let [all, own] = parameters.gathered_squares();
    if parameters.sharding.gradients && homes.on_device(arena::GRADIENTS) {
        // Pieces are contiguous in the order of their blocks.
        let size = DType::F32.size();
        let squared = parameters.buckets().filter(|(run, _)| run.rule.descends());
        let pieces = squared.map(|(run, bucket)| {
            (bucket.kept(&run.gradient, Per::Element, parameters.shards).offset / size, bucket.piece)
        });
        let table = lowering.constant(&blocks_of(pieces));
        let kept = TensorRef::dense(arena::GRADIENTS, 0, DType::F32, [parameters.gradients_bytes / size]);
        push_behind(
            &mut streams.steps,
            lowering,
            taken,
            id::BLOCK_SQUARES,
            Attrs::new(),
            vec![kept, table],
            vec![own.clone()],
        );
    }
    streams.wait(StreamId::Compute, counted, &from);
    let [scalars, sums] = counted_places(parameters);
    push_behind(&mut streams.steps, lowering, taken, id::SUM_PIECES, Attrs::new(), vec![scalars], vec![sums]);
    if let Some((magnitudes, largest, gathered)) = magnitudes {
        streams.wait(StreamId::Compute, gathered, &from);
        let steps = &mut streams.steps;
        push_behind(steps, lowering, taken, id::MAX_PIECES, Attrs::new(), vec![magnitudes], vec![largest]);
    }
    // With one shard, each rank has the sums itself.
    if parameters.shards > 1 {
        streams.follow(StreamId::Exchange, &from);
        streams.collective(Collective::gather(own, all.clone()), &from);
        let gathered = streams.record(StreamId::Exchange, &from);
        streams.wait(StreamId::Compute, gathered, &from);
    }
    all
}

/// Gives all stages of a pipeline the sum of the squares of all, and the weight of the step, which the last one has counted.
pub(super) fn agree_stages(
    streams: &mut Streams,
    lowering: &mut Lowering<'_>,
    taken: usize,
    parameters: &ParameterPlan,
) {
    let from = provenance("exchange");
    let [numbers, squares] = parameters.of_stages();
    let (stages, count) = (numbers.shape[0], numbers.shape[1]);
    let own = TensorRef::dense(arena::SCALARS, 0, DType::F32, [count]);
    streams.follow(StreamId::Exchange, &from);
    streams.collective(Collective::gather(own, numbers.clone()), &from);
    let gathered = streams.record(StreamId::Exchange, &from);
    streams.wait(StreamId::Compute, gathered, &from);
    let of = |stage: usize, name: &str, stages: usize| TensorRef {
        offset: numbers.offset + stage * count * DType::F32.size() + scalar_ref(name).offset,
        shape: vec![stages],
        strides: vec![count],
        ..numbers.clone()
    };
    let weight = scalar_ref(scalar::WEIGHT_SUM);
    for (from_all, to) in
        [(of(0, SUM_SQUARES, stages), squares.clone()), (of(stages - 1, scalar::WEIGHT_SUM, 1), weight)]
    {
        let cost = Cost { flops: 0.0, bytes: 2.0 * to.bytes() as f64 };
        let instruction = Instruction::Copy { from: from_all, to };
        streams.push(Step { instruction, provenance: from.clone(), cost });
    }
    let total = scalar_ref(SUM_SQUARES);
    push_behind(&mut streams.steps, lowering, taken, id::TOTAL_SQUARES, Attrs::new(), vec![squares], vec![total]);
}

/// Begins to gather the sums of loss and weights.
fn count(streams: &mut Streams, parameters: &ParameterPlan) -> EventId {
    let from = provenance("exchange");
    let [to, sums] = counted_places(parameters);
    streams.collective(Collective::gather(sums, to), &from);
    streams.record(StreamId::Exchange, &from)
}

/// The sums of all ranks, f32 [ranks, n], and those of one: the scalars from the first to the last, with what is between
/// them.
fn counted_places(parameters: &ParameterPlan) -> [TensorRef; 2] {
    let number = |name: &str| SCALARS.iter().position(|(known, _)| *known == name).expect("a step has its sums");
    assert_eq!(number(COUNTED[0]) + 1, number(COUNTED[1]), "the sums of a step are neighbours");
    let [first, last] = COUNTED.map(scalar_ref);
    let bytes = 2 * (last.offset - first.offset);
    // The reports follow.
    let count = bytes / first.dtype.size() + parameters.reported();
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
    let gather = Collective::gather(of.own.clone(), of.whole.clone());
    streams.collective(gather, &from);
    streams.record(StreamId::Exchange, &from)
}
