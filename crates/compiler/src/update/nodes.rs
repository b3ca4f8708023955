//! The sums of the gradients of several nodes, where each node has all shards: every rank has the sum of its node for its
//! share, and adds it up with the ranks of the other nodes that have the same share, the first node's first. Bucket by bucket,
//! twice: each gets a part of what all have and adds it up, then all get the parts. Where gradients are compressed, both are
//! sent in blocks, and what these leave is added the next time; of blocks of a few elements, every rank gets those of all nodes
//! and adds them up itself, as their sum has more elements than one. What is summed so may be the first moment: then each node
//! makes its part of it from its gradients, which the sum takes the place of. Knows buckets and places; not how gradients
//! became the sums of a node, or what the sums are for.

use ops::id;
use ops::optimizer::{Blocks, COMPRESSED_BLOCK, block_count, blocks_of};
use program::{
    Collective, Cost, EventId, Instruction, Movement, OptimizerState, ProcessGroup, Step, StreamId, TensorRef, scalar,
};
use tensor::{Attrs, DType};

use super::steps::{provenance, push_behind};
use crate::lowering::Lowering;
use crate::memory::{self, ALIGNMENT_BYTES, Errors, ParameterPlan, Run, align, arena, part, scalar_ref};
use crate::options::Sharding;
use crate::residency::Streams;
use crate::rule::{Per, Rule};

/// Buckets that have places at a time: one that is sent, one that is added up, one whose sums come back.
const AT_ONCE: usize = 3;

/// The tensors that are summed over the nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Summed {
    Gradients,
    /// First moments of AdamW, by what a step keeps of them.
    Momentum {
        beta1: f64,
    },
}

impl Summed {
    /// Returns the form of the blocks that it is sent in, if it is sent in blocks.
    fn blocks(self, sharding: &Sharding) -> Option<Blocks> {
        sharding.blocks().filter(|blocks| blocks.are_of_momentum() == matches!(self, Summed::Momentum { .. }))
    }
}

/// A bucket that is summed between nodes.
struct Bucket {
    /// f32 [n]: the sum of the node, and then that of all.
    gradient: TensorRef,
    /// Both moments of AdamW, where the first one is summed.
    moments: Option<[TensorRef; 2]>,
    /// [nodes · m]: the gradient in the form in which it is sent.
    sent: TensorRef,
    /// None where every rank adds up all parts.
    part: Option<Part>,
    /// [nodes · m]: the sums of all parts; [nodes, n], what all nodes sent, where every rank adds up all.
    whole: TensorRef,
    /// The errors of compression, where gradients are compressed.
    errors: Option<Errors>,
    /// Blocks of squares before its own; none where its squares are not part of the norm.
    squares: Option<usize>,
    /// Bytes that its places take.
    bytes: usize,
}

/// The part of a bucket that a rank adds up.
struct Part {
    /// [nodes, m]: the part, as all nodes have it.
    come: TensorRef,
    /// f32 \[m\]: its sum, and what is sent of that.
    sum: TensorRef,
    returned: TensorRef,
}

impl Bucket {
    /// Places its tensors from an offset of the activation arena on.
    fn new(of: &Sent, sharding: &Sharding, blocks: Option<Blocks>, offset: usize) -> Bucket {
        let Sent { gradient, moments, squares, errors } = of.clone();
        let (nodes, dtype) = (sharding.inter_node_group().size, sharding.sent());
        let part = part(gradient.len(), sharding);
        let mut end = offset;
        let mut take = |dtype: DType, shape: &[usize]| {
            let at = TensorRef::dense(arena::ACTIVATIONS, end, dtype, shape);
            end = align(end + at.bytes(), ALIGNMENT_BYTES);
            at
        };
        if let Some(blocks) = blocks.filter(|blocks| blocks.are_sparse()) {
            let bytes = blocks.bytes(gradient.len());
            let (sent, whole) = (take(DType::U8, &[bytes]), take(DType::U8, &[nodes, bytes]));
            return Bucket { gradient, moments, sent, part: None, whole, errors, squares, bytes: end - offset };
        }
        if let Some(blocks) = blocks {
            let bytes = blocks.bytes(part);
            let [sent, whole] = [(); 2].map(|()| take(DType::U8, &[nodes * bytes]));
            let (come, returned) = (take(DType::U8, &[nodes, bytes]), take(DType::U8, &[bytes]));
            let part = Some(Part { come, sum: take(DType::F32, &[part]), returned });
            return Bucket { gradient, moments, sent, part, whole, errors, squares, bytes: end - offset };
        }
        let is_whole = dtype == DType::F32 && part * nodes == gradient.len();
        let mut of_all = || if is_whole { gradient.clone() } else { take(dtype, &[nodes * part]) };
        let (sent, whole) = (of_all(), of_all());
        let come = take(dtype, &[nodes, part]);
        let sum = take(DType::F32, &[part]);
        let returned = if dtype == DType::F32 { sum.clone() } else { take(dtype, &[part]) };
        let part = Some(Part { come, sum, returned });
        Bucket { gradient, moments, sent, part, whole, errors, squares, bytes: end - offset }
    }

    /// Returns the part of a tensor to send that holds the gradient's elements, without what fills the parts up.
    fn of_gradient(&self, of: &TensorRef) -> TensorRef {
        TensorRef { shape: vec![self.gradient.len()], ..of.clone() }
    }
}

/// The tensors of a bucket that are sent.
#[derive(Clone)]
struct Sent {
    gradient: TensorRef,
    /// Both moments of AdamW, where the first one is summed.
    moments: Option<[TensorRef; 2]>,
    /// Blocks of squares before its own; none where its squares are not part of the norm.
    squares: Option<usize>,
    errors: Option<Errors>,
}

fn sent(parameters: &ParameterPlan, summed: Summed) -> Vec<Sent> {
    let compressed = summed.blocks(&parameters.sharding).is_some();
    let (mut end, mut errors) = (0, parameters.errors().into_iter().filter(|_| compressed));
    let of = |(run, bucket): (&Run, &memory::Bucket)| {
        let squares = run.rule.descends().then_some(end);
        end += squares.map_or(0, |_| block_count(bucket.piece));
        let gradient = match parameters.sharding.gradients {
            true => bucket.kept(&run.gradient, Per::Element, parameters.shards),
            false => bucket.own(&run.gradient),
        };
        let kept = |state: &OptimizerState| bucket.kept(&state.at, Per::Element, parameters.shards);
        let moments = matches!(summed, Summed::Momentum { .. }).then(|| {
            assert_eq!(run.rule, Rule::AdamW, "1-bit Adam sums the first moments of AdamW");
            [kept(&run.states[0]), kept(&run.states[1])]
        });
        Sent { gradient, moments, squares, errors: errors.next() }
    };
    parameters.buckets().map(of).collect()
}

/// Queues the sums over all nodes. The first `taken` bytes of the activation arena are occupied. Sums of first moments take
/// the gradients' places.
pub(super) fn sum(
    streams: &mut Streams,
    lowering: &mut Lowering<'_>,
    taken: usize,
    parameters: &ParameterPlan,
    summed: Summed,
) {
    let (sharding, sent) = (&parameters.sharding, sent(parameters, summed));
    let blocks = summed.blocks(sharding);
    let start = align(taken, ALIGNMENT_BYTES);
    let each = sent.iter().map(|of| Bucket::new(of, sharding, blocks, 0).bytes).max().unwrap_or(0);
    let end = start + each * AT_ONCE.min(sent.len());
    lowering.update_workspace(end);
    let bucket = |(number, of)| Bucket::new(of, sharding, blocks, start + number % AT_ONCE * each);
    let buckets: Vec<Bucket> = sent.iter().enumerate().map(bucket).collect();
    let events = vec![[None; 2]; buckets.len()];
    let mut sums =
        NodeSums { group: sharding.inter_node_group(), summed, blocks, taken: end, streams, lowering, events };
    for round in 0..buckets.len() + AT_ONCE - 1 {
        let of = |after: usize| round.checked_sub(after).filter(|number| *number < buckets.len());
        if let Some(number) = of(0) {
            sums.send(number, &buckets[number]);
        }
        if let Some(number) = of(1) {
            sums.add(number, &buckets[number]);
        }
        if let Some(number) = of(2) {
            sums.end(number, &buckets[number], parameters);
        }
    }
}

/// Queues the squares of the gradients of this node, where each rank has whole ones and has not summed any over nodes.
pub(super) fn own_squares(
    steps: &mut Vec<Step>,
    lowering: &mut Lowering<'_>,
    taken: usize,
    parameters: &ParameterPlan,
) {
    if parameters.sharding.gradients {
        return;
    }
    for Sent { gradient, squares, .. } in sent(parameters, Summed::Gradients) {
        if let Some(before) = squares {
            push_squares(steps, lowering, taken, parameters, &gradient, before);
        }
    }
}

/// Takes sums out of the gradients' places that came in blocks. These write what lies between tensors, too, which micro-steps do
/// not: a sign with a magnitude, or what is not finite, would be part of the next norm.
pub(super) fn clear(steps: &mut Vec<Step>, parameters: &ParameterPlan, summed: Summed) {
    if summed.blocks(&parameters.sharding).is_some() {
        steps.extend(sent(parameters, summed).into_iter().map(|of| zero(of.gradient)));
    }
}

fn zero(at: TensorRef) -> Step {
    let cost = Cost { flops: 0.0, bytes: at.bytes() as f64 };
    Step { instruction: Instruction::Zero { at }, provenance: provenance("zero"), cost }
}

/// Queues the sum of what each node has for one number; for parts of a node all ranks of it have the same.
pub(super) fn total(
    streams: &mut Streams,
    lowering: &mut Lowering<'_>,
    taken: usize,
    parameters: &ParameterPlan,
    total: &TensorRef,
) {
    let origin = provenance("exchange");
    let all = parameters.gathered_totals();
    streams.follow(StreamId::Exchange, &origin);
    let group = parameters.sharding.inter_node_group();
    let of = Collective { movement: Movement::AllGather, group, from: total.clone(), to: all.clone() };
    streams.collective(of, &origin);
    let gathered = streams.record(StreamId::Exchange, &origin);
    streams.wait(StreamId::Compute, gathered, &origin);
    let steps = &mut streams.steps;
    push_behind(steps, lowering, taken, id::TOTAL_SQUARES, Attrs::new(), vec![all], vec![total.clone()]);
}

/// Queues the squares of a bucket's gradient, after `before` blocks of others.
fn push_squares(
    steps: &mut Vec<Step>,
    lowering: &mut Lowering<'_>,
    taken: usize,
    parameters: &ParameterPlan,
    gradient: &TensorRef,
    before: usize,
) {
    let [_, own] = parameters.gathered_squares();
    let table = lowering.constant(&blocks_of(std::iter::once((0, gradient.len()))));
    let offset = own.offset + before * DType::F32.size();
    let sums = TensorRef { offset, shape: vec![block_count(gradient.len())], ..own };
    push_behind(steps, lowering, taken, id::BLOCK_SQUARES, Attrs::new(), vec![gradient.clone(), table], vec![sums]);
}

struct NodeSums<'r, 'l> {
    group: ProcessGroup,
    summed: Summed,
    blocks: Option<Blocks>,
    taken: usize,
    streams: &'r mut Streams,
    lowering: &'r mut Lowering<'l>,
    /// The events of each bucket: its parts have arrived, its sums have arrived.
    events: Vec<[Option<EventId>; 2]>,
}

impl NodeSums<'_, '_> {
    fn launch(&mut self, op: ops::OpId, attrs: Attrs, input: &TensorRef, outputs: Vec<TensorRef>) {
        push_behind(&mut self.streams.steps, self.lowering, self.taken, op, attrs, vec![input.clone()], outputs);
    }

    /// Rounds, or copies, from one place to another, unless they are one.
    fn convert(&mut self, from: &TensorRef, to: &TensorRef) {
        if from.dtype != to.dtype {
            self.launch(id::CAST, Attrs::new().with("dtype", to.dtype.name()), from, vec![to.clone()]);
        } else if from != to {
            let cost = Cost { flops: 0.0, bytes: (from.bytes() + to.bytes()) as f64 };
            let instruction = Instruction::Copy { from: from.clone(), to: to.clone() };
            self.streams.push(Step { instruction, provenance: provenance("exchange"), cost });
        }
    }

    /// Makes blocks of a tensor and of what was left of it, with zeros after its own elements.
    fn compress(&mut self, blocks: Blocks, from: &TensorRef, to: &TensorRef, error: &TensorRef) {
        let elements = to.bytes() / blocks.bytes(COMPRESSED_BLOCK) * COMPRESSED_BLOCK;
        let attrs = Attrs::new().with("form", blocks.name()).with("elements", elements as u64);
        self.launch(id::COMPRESS, attrs, from, vec![to.clone(), error.clone()]);
    }

    /// Adds up pieces: [count, n], or the blocks of `count` pieces.
    fn add_pieces(&mut self, pieces: &TensorRef, sum: &TensorRef) {
        match self.blocks {
            Some(blocks) => {
                let attrs = Attrs::new().with("form", blocks.name());
                self.launch(id::SUM_COMPRESSED, attrs, pieces, vec![sum.clone()]);
            }
            None => self.launch(id::SUM_PIECES, Attrs::new(), pieces, vec![sum.clone()]),
        }
    }

    fn collective(&mut self, movement: Movement, from: &TensorRef, to: &TensorRef) -> Option<EventId> {
        let origin = provenance("exchange");
        self.streams.follow(StreamId::Exchange, &origin);
        let of = Collective { movement, group: self.group, from: from.clone(), to: to.clone() };
        self.streams.collective(of, &origin);
        Some(self.streams.record(StreamId::Exchange, &origin))
    }

    fn wait(&mut self, event: Option<EventId>) {
        let event = event.expect("a bucket is sent, added up and comes back");
        self.streams.wait(StreamId::Compute, event, &provenance("exchange"));
    }

    /// Makes a node's part of the first moment where its gradient is.
    fn add_momentum(&mut self, beta1: f64, [first, second]: &[TensorRef; 2], gradient: &TensorRef) {
        let attrs = Attrs::new().with("beta1", beta1).with("nodes", self.group.size as u64);
        let scalars = [scalar::GRADIENT_SCALE, scalar::UPDATE_APPLIED].map(scalar_ref);
        let inputs = [first.clone(), second.clone()].into_iter().chain(scalars).collect();
        let steps = &mut self.streams.steps;
        push_behind(steps, self.lowering, self.taken, id::MOMENTUM_PART, attrs, inputs, vec![gradient.clone()]);
    }

    fn send(&mut self, number: usize, of: &Bucket) {
        if let (Summed::Momentum { beta1 }, Some(moments)) = (self.summed, &of.moments) {
            self.add_momentum(beta1, moments, &of.gradient);
        }
        if let (Some(blocks), Some(errors)) = (self.blocks, &of.errors) {
            self.compress(blocks, &of.gradient, &of.sent, &errors.gradient);
        } else {
            self.convert(&of.gradient, &of.of_gradient(&of.sent));
            let filled = of.sent.len() - of.gradient.len();
            if filled > 0 {
                let offset = of.sent.offset + of.gradient.len() * of.sent.dtype.size();
                self.streams.push(zero(TensorRef { offset, shape: vec![filled], ..of.sent.clone() }));
            }
        }
        match &of.part {
            Some(part) => self.events[number][0] = self.collective(Movement::AllToAll, &of.sent, &part.come),
            None => self.events[number][1] = self.collective(Movement::AllGather, &of.sent, &of.whole),
        }
    }

    fn add(&mut self, number: usize, of: &Bucket) {
        let Some(part) = &of.part else { return };
        self.wait(self.events[number][0]);
        self.add_pieces(&part.come, &part.sum);
        match (self.blocks, of.errors.as_ref().and_then(|errors| errors.sum.as_ref())) {
            (Some(blocks), Some(error)) => self.compress(blocks, &part.sum, &part.returned, error),
            _ => self.convert(&part.sum, &part.returned),
        }
        self.events[number][1] = self.collective(Movement::AllGather, &part.returned, &of.whole);
    }

    /// The sum of all is where that of the node was; of whole gradients the squares are summed, too.
    fn end(&mut self, number: usize, of: &Bucket, parameters: &ParameterPlan) {
        self.wait(self.events[number][1]);
        match self.blocks {
            Some(_) if of.part.is_none() => self.add_pieces(&of.whole, &of.gradient),
            Some(blocks) => {
                let (whole, bytes) = (&of.whole, blocks.bytes(of.gradient.len()));
                let own = TensorRef::dense(whole.arena, whole.offset, whole.dtype, [1, bytes]);
                self.add_pieces(&own, &of.gradient);
            }
            None => self.convert(&of.of_gradient(&of.whole), &of.gradient),
        }
        let of_gradients = self.summed == Summed::Gradients && !parameters.sharding.gradients;
        if let Some(before) = of.squares.filter(|_| of_gradients) {
            push_squares(&mut self.streams.steps, self.lowering, self.taken, parameters, &of.gradient, before);
        }
    }
}
