//! Gradients on their way to the sums over all ranks, as instructions of a micro-step: what no node writes is zeroed,
//! buckets are sent when they are complete, rounded where that is requested, and summed in the order of the ranks when
//! they have arrived. Knows gradient buckets as they were planned; not the reasons for their times.

use ops::id;
use ops::optimizer::{block_count, blocks_of};
use program::{
    Collective, Documents, EntryKind, EventId, Instruction, Movement, ProcessGroup, Provenance, Step, StreamId,
    TensorRef,
};
use tensor::{Attrs, DType};

use crate::lowering::Lowering;
use crate::memory::ParameterPlan;
use crate::residency::{GradientBuckets, Streams};

pub(crate) struct Reduction<'a> {
    gradient_buckets: &'a GradientBuckets,
    parameters: &'a ParameterPlan,
    kind: EntryKind,
    /// The event of each gradient bucket that was sent.
    sent: Vec<EventId>,
    summed: usize,
}

impl<'a> Reduction<'a> {
    pub fn new(gradient_buckets: &'a GradientBuckets, parameters: &'a ParameterPlan, kind: EntryKind) -> Reduction<'a> {
        Reduction { gradient_buckets, parameters, kind, sent: Vec::new(), summed: 0 }
    }

    /// Sums what has come by a position, which frees its places.
    pub fn sum_before(&mut self, position: usize, streams: &mut Streams, lowering: &mut Lowering<'_>) {
        while self.gradient_buckets.all.get(self.summed).is_some_and(|of| of.summed <= position) {
            self.sum(streams, lowering);
        }
    }

    /// Zeroes places that are taken at a position, unless they hold what other micro-steps have added up.
    pub fn blank(&mut self, position: usize, streams: &mut Streams) {
        if !self.parameters.sharding.gradients && self.kind == EntryKind::NextMicroStep {
            return;
        }
        for (_, at) in self.gradient_buckets.blanks.iter().filter(|(begin, _)| *begin == position) {
            let cost = program::Cost { flops: 0.0, bytes: at.bytes() as f64 };
            streams.push(Step { instruction: Instruction::Zero { at: at.clone() }, provenance: from("zero"), cost });
        }
    }

    /// Sends what is complete by a position.
    pub fn send(&mut self, position: usize, streams: &mut Streams, lowering: &mut Lowering<'_>) {
        while let Some(of) = self.gradient_buckets.all.get(self.sent.len()).filter(|of| of.sent <= position) {
            let from = from("exchange");
            if let Some(rounded) = &of.rounded {
                let attrs = Attrs::new().with("dtype", rounded.dtype.name());
                push(streams, lowering, id::CAST, attrs, vec![of.from.clone()], rounded.clone());
            }
            streams.follow(StreamId::Exchange, &from);
            let (from_all, to) = (of.rounded.as_ref().unwrap_or(&of.from).clone(), of.staged.clone());
            let group = ProcessGroup::row(self.parameters.shards);
            streams.collective(Collective { movement: Movement::AllToAllOthers, group, from: from_all, to }, &from);
            self.sent.push(streams.record(StreamId::Exchange, &from));
        }
    }

    /// Sums the next bucket into what the rank keeps, and its squares where they are not summed later.
    fn sum(&mut self, streams: &mut Streams, lowering: &mut Lowering<'_>) {
        let of = &self.gradient_buckets.all[self.summed];
        streams.wait(StreamId::Compute, self.sent[self.summed], &from("exchange"));
        self.summed += 1;
        let accumulate = self.parameters.sharding.gradients && self.kind == EntryKind::NextMicroStep;
        let mut attrs = Attrs::new().with("own_per_rank", 1u64);
        if accumulate {
            attrs = attrs.with("accumulate", true);
        }
        // The own piece is where it was sent from, unless the sum takes its place.
        let mut inputs = vec![of.staged.clone()];
        inputs.extend(Some(of.own()).filter(|own| *own != of.sum));
        push(streams, lowering, id::SUM_PIECES, attrs, inputs, of.sum.clone());
        let Some(blocks) = of.blocks else { return };
        let [_, own] = self.parameters.gathered_squares();
        let table = lowering.constant(&blocks_of(std::iter::once((0, of.sum.len()))));
        let offset = own.offset + blocks * DType::F32.size();
        let sums = TensorRef { offset, shape: vec![block_count(of.sum.len())], ..own };
        push(streams, lowering, id::BLOCK_SQUARES, Attrs::new(), vec![of.sum.clone(), table], sums);
    }
}

fn from(op: &str) -> Provenance {
    Provenance { op: op.to_owned(), phase: program::Phase::Backward, layer: None, at: None }
}

fn push(
    streams: &mut Streams,
    lowering: &mut Lowering<'_>,
    op: ops::OpId,
    attrs: Attrs,
    inputs: Vec<TensorRef>,
    output: TensorRef,
) {
    let op = ops::get(op);
    let (instruction, cost) = lowering.instruction(op, &attrs, inputs, vec![output], None, Documents::Rows);
    streams.push(Step { instruction, provenance: from(op.name()), cost });
}
