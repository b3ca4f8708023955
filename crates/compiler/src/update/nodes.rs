//! The sums of the gradients of several nodes, where each node has all shards: every rank has the sum of its node for its
//! share, and adds it up with the ranks of the other nodes that have the same share, the first node's first. Bucket by bucket,
//! twice: each gets a part of what all have and adds it up, then all get the parts. Knows buckets and places; not how
//! gradients became the sums of a node, or what the sums are for.

use ops::id;
use ops::optimizer::{block_count, blocks_of};
use program::{Among, Collective, Cost, EventId, Instruction, Movement, Step, StreamId, TensorRef};
use tensor::{Attrs, DType};

use super::{provenance, push_behind};
use crate::lowering::Lowering;
use crate::memory::{ALIGNMENT_BYTES, ParameterPlan, align, arena};
use crate::residency::Streams;
use crate::rule::Per;

/// Buckets that have places at a time: one that is sent, one that is added up, one whose sums come back.
const AT_ONCE: usize = 3;

/// Parts of a bucket are multiples of this many elements.
const GRANULE: usize = 64;

/// A bucket on its way between nodes.
struct Bucket {
    /// f32 [n]: the sum of the node, and then that of all.
    gradient: TensorRef,
    /// [nodes · m]: the same as it is sent, and [nodes, m]: the parts that come.
    sent: TensorRef,
    come: TensorRef,
    /// f32 \[m\]: the sum of the part, and what is sent of it.
    part: TensorRef,
    returned: TensorRef,
    /// [nodes · m]: the sums of all parts.
    whole: TensorRef,
    /// Blocks of squares before its own; none where its squares are not part of the norm.
    blocks: Option<usize>,
    /// Bytes of its places.
    bytes: usize,
}

impl Bucket {
    /// Its places begin at an offset of the activation arena.
    fn new(gradient: TensorRef, blocks: Option<usize>, nodes: usize, dtype: DType, offset: usize) -> Bucket {
        let part = gradient.len().div_ceil(nodes).next_multiple_of(GRANULE);
        let mut end = offset;
        let mut take = |dtype: DType, shape: &[usize]| {
            let at = TensorRef::dense(arena::ACTIVATIONS, end, dtype, shape);
            end = align(end + at.bytes(), ALIGNMENT_BYTES);
            at
        };
        let is_whole = dtype == DType::F32 && part * nodes == gradient.len();
        let mut of_all = || if is_whole { gradient.clone() } else { take(dtype, &[nodes * part]) };
        let (sent, whole) = (of_all(), of_all());
        let come = take(dtype, &[nodes, part]);
        let sum = take(DType::F32, &[part]);
        let returned = if dtype == DType::F32 { sum.clone() } else { take(dtype, &[part]) };
        Bucket { gradient, sent, come, part: sum, returned, whole, blocks, bytes: end - offset }
    }

    /// What is sent for the elements of the gradient, without what fills the parts up.
    fn of_gradient(&self, of: &TensorRef) -> TensorRef {
        TensorRef { shape: vec![self.gradient.len()], ..of.clone() }
    }
}

/// Queues the sums over all nodes. The first `taken` bytes of the activation arena are occupied.
pub(super) fn sum(streams: &mut Streams, lowering: &mut Lowering<'_>, taken: usize, parameters: &ParameterPlan) {
    let among = parameters.sharding.rail();
    let mut blocks = 0;
    let gradients = parameters.buckets().map(|(run, bucket)| {
        let before = run.rule.descends().then_some(blocks);
        blocks += before.map_or(0, |_| block_count(bucket.piece));
        match parameters.sharding.gradients {
            true => (bucket.kept(&run.gradient, Per::Element, parameters.shards), before),
            false => (bucket.own(&run.gradient), before),
        }
    });
    let gradients: Vec<(TensorRef, Option<usize>)> = gradients.collect();
    let dtype = parameters.sharding.sent();
    let bucket = |(gradient, blocks): &(TensorRef, Option<usize>), at| {
        Bucket::new(gradient.clone(), *blocks, among.count, dtype, at)
    };
    let start = align(taken, ALIGNMENT_BYTES);
    let each = gradients.iter().map(|of| bucket(of, 0).bytes).max().unwrap_or(0);
    let end = start + each * AT_ONCE.min(gradients.len());
    lowering.update_workspace(end);
    let buckets = gradients.iter().enumerate().map(|(number, of)| bucket(of, start + number % AT_ONCE * each));
    let buckets: Vec<Bucket> = buckets.collect();
    let mut rail = Rail { among, taken: end, streams, lowering, events: vec![[None; 2]; buckets.len()] };
    for round in 0..buckets.len() + AT_ONCE - 1 {
        let of = |behind: usize| round.checked_sub(behind).filter(|number| *number < buckets.len());
        if let Some(number) = of(0) {
            rail.send(number, &buckets[number]);
        }
        if let Some(number) = of(1) {
            rail.add(number, &buckets[number]);
        }
        if let Some(number) = of(2) {
            rail.end(number, &buckets[number], parameters);
        }
    }
}

struct Rail<'r, 'l> {
    among: Among,
    taken: usize,
    streams: &'r mut Streams,
    lowering: &'r mut Lowering<'l>,
    /// By bucket: its parts have come, its sums have come.
    events: Vec<[Option<EventId>; 2]>,
}

impl Rail<'_, '_> {
    fn launch(&mut self, op: ops::OpId, attrs: Attrs, inputs: Vec<TensorRef>, output: TensorRef) {
        push_behind(&mut self.streams.steps, self.lowering, self.taken, op, attrs, inputs, vec![output]);
    }

    /// Rounds, or copies, from one place to another, unless they are one.
    fn convert(&mut self, from: &TensorRef, to: &TensorRef) {
        if from.dtype != to.dtype {
            self.launch(id::CAST, Attrs::new().with("dtype", to.dtype.name()), vec![from.clone()], to.clone());
        } else if from != to {
            let cost = Cost { flops: 0.0, bytes: (from.bytes() + to.bytes()) as f64 };
            let instruction = Instruction::Copy { from: from.clone(), to: to.clone() };
            self.streams.push(Step { instruction, provenance: provenance("exchange"), cost });
        }
    }

    fn collective(&mut self, movement: Movement, from: &TensorRef, to: &TensorRef) -> Option<EventId> {
        let origin = provenance("exchange");
        self.streams.follow(StreamId::Exchange, &origin);
        let of = Collective { movement, among: self.among, from: from.clone(), to: to.clone() };
        self.streams.collective(of, &origin);
        Some(self.streams.record(StreamId::Exchange, &origin))
    }

    fn wait(&mut self, event: Option<EventId>) {
        let event = event.expect("a bucket is sent, added up and comes back");
        self.streams.wait(StreamId::Compute, event, &provenance("exchange"));
    }

    fn send(&mut self, number: usize, of: &Bucket) {
        self.convert(&of.gradient, &of.of_gradient(&of.sent));
        let filled = of.sent.len() - of.gradient.len();
        if filled > 0 {
            let offset = of.sent.offset + of.gradient.len() * of.sent.dtype.size();
            let at = TensorRef { offset, shape: vec![filled], ..of.sent.clone() };
            let cost = Cost { flops: 0.0, bytes: at.bytes() as f64 };
            self.streams.push(Step { instruction: Instruction::Zero { at }, provenance: provenance("zero"), cost });
        }
        self.events[number][0] = self.collective(Movement::Exchange, &of.sent, &of.come);
    }

    fn add(&mut self, number: usize, of: &Bucket) {
        self.wait(self.events[number][0]);
        self.launch(id::SUM_PIECES, Attrs::new(), vec![of.come.clone()], of.part.clone());
        self.convert(&of.part, &of.returned);
        self.events[number][1] = self.collective(Movement::Gather, &of.returned, &of.whole);
    }

    /// The sum of all is where that of the node was; of whole gradients the squares are summed, too.
    fn end(&mut self, number: usize, of: &Bucket, parameters: &ParameterPlan) {
        self.wait(self.events[number][1]);
        self.convert(&of.of_gradient(&of.whole), &of.gradient);
        let Some(blocks) = of.blocks.filter(|_| !parameters.sharding.gradients) else { return };
        let [_, own] = parameters.gathered_squares();
        let table = self.lowering.constant(&blocks_of(std::iter::once((0, of.gradient.len()))));
        let offset = own.offset + blocks * DType::F32.size();
        let sums = TensorRef { offset, shape: vec![block_count(of.gradient.len())], ..own };
        self.launch(id::BLOCK_SQUARES, Attrs::new(), vec![of.gradient.clone(), table], sums);
    }
}
