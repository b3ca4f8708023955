//! The times at which gradients leave for the other ranks: a group of them as soon as the last of it is complete,
//! bucket by bucket, each staged until it is summed. A group has a live range on the device until then where a rank
//! keeps only the sums of its own pieces, or where gradients have their home on the host; there a sum has one, too.
//! Knows when nodes write what, and how long both take; not what is computed, or what the sums are for.

use std::ops::Range;

use graph::{Graph, ValueId};
use program::{Shard, TensorRef};
use tensor::DType;

use super::clock::{Clock, STAGED};
use super::live_ranges::{AHEAD, arrive, leave};
use super::{Follows, Homes, LiveRange, Move};
use crate::memory::{Group, ParameterPlan, Placement, arena, is_view};

/// More gaps than this between the tensors of a group are zeroed with everything else of it.
const MOST_GAPS: usize = 4;

/// A bucket that is sent. Positions are those of nodes, and further ones after the last node.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct GradientBucket {
    /// f32 [ranks · n]: what the entry has computed.
    pub from: TensorRef,
    /// The same, rounded to the type in which it is sent, if that is another.
    pub rounded: Option<TensorRef>,
    /// [ranks, n]: the pieces of all other ranks, as they are sent.
    pub staged: TensorRef,
    /// f32 [n]: where the rank keeps their sum.
    pub sum: TensorRef,
    /// Blocks of squares before its own; none where its squares do not count in the norm, or are summed in the update.
    pub blocks: Option<usize>,
    /// The position before which it is sent; `summed` is the one before which it is summed.
    pub sent: usize,
    pub summed: usize,
}

/// All gradient buckets of an entry.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct GradientBuckets {
    /// In the order in which they are sent, which is that in which they are summed.
    pub all: Vec<GradientBucket>,
    /// The tensors that are sent though no node writes them, each zeroed before a position.
    pub blanks: Vec<(usize, TensorRef)>,
    /// For each gradient bucket, the live range that it leaves from, and that of its sum.
    live_ranges: Vec<[Option<usize>; 2]>,
}

/// One touch of a group: by a node, of these bytes of the arena.
pub(super) struct Touched {
    pub node: usize,
    pub bytes: Range<usize>,
    pub writes: bool,
}

/// Returns, for each group of one arena in order, the touches of nodes. Results that lie there are read after the last
/// node.
pub(super) fn touches(graph: &Graph, placement: &Placement, groups: &[Group]) -> Vec<Vec<Touched>> {
    let mut all: Vec<Vec<Touched>> = groups.iter().map(|_| Vec::new()).collect();
    let mut touch = |tensor: &TensorRef, node: usize, writes: bool| {
        if groups.first().is_none_or(|group| group.arena != tensor.arena) {
            return;
        }
        let bytes = tensor.offset..tensor.offset + tensor.span();
        let number = groups.partition_point(|group| group.bytes.end <= bytes.start);
        let inside =
            groups.get(number).is_some_and(|group| group.bytes.start <= bytes.start && bytes.end <= group.bytes.end);
        assert!(inside, "{tensor} lies in one group");
        all[number].push(Touched { node, bytes, writes });
    };
    let place = |id: &ValueId| placement.get(*id).expect("every value was placed");
    for (index, node) in graph.nodes.iter().enumerate() {
        let computes = |_: &&ValueId| !is_view(node);
        node.inputs.iter().filter(computes).for_each(|id| touch(place(id), index, false));
        node.outputs.iter().filter(computes).for_each(|id| touch(place(id), index, true));
        for copied in placement.copies.get(&index).into_iter().flatten() {
            touch(&copied.from, index, false);
            touch(&copied.to, index, true);
        }
    }
    let results = graph.outputs.iter().map(|(_, id)| place(id)).filter(|tensor| tensor.arena != arena::GRADIENTS);
    results.for_each(|tensor| touch(tensor, graph.nodes.len(), false));
    all
}

/// A group of gradients that leaves.
struct Leaving<'a> {
    group: &'a Group,
    /// Blocks of squares before those of the group.
    blocks: usize,
    begin: usize,
    last: usize,
    written: Vec<Range<usize>>,
}

/// The gradient buckets of an entry, and the live ranges of the gradients where a rank does not keep them on the
/// device, followed by those of their sums: numbered from `first` on.
pub(super) fn plan(
    graph: &Graph,
    placement: &Placement,
    parameters: &ParameterPlan,
    homes: &Homes,
    clock: &Clock,
    first: usize,
) -> (GradientBuckets, Vec<LiveRange>) {
    let (groups, sharding) = (parameters.gradient_groups(), &parameters.sharding);
    let on_host = !homes.on_device(arena::GRADIENTS);
    // With several nodes, these are not the sums of all yet; what micro-steps add to on the device is squared in the
    // update.
    let squared = sharding.inter_node_group().size == 1 && (on_host || !sharding.gradients);
    let mut leaving = leaving(graph, placement, &groups);
    leaving.sort_by_key(|of| of.last);
    let (mut gradient_buckets, mut live_ranges) = (GradientBuckets::default(), Vec::new());
    let mut queue = Queue { clock, free: 0.0, summed: Vec::new() };
    for (index, of) in leaving.iter().enumerate() {
        let latest = latest(&leaving, index);
        let live_range = (on_host || sharding.gradients).then_some(first + live_ranges.len());
        let mut blocks = of.blocks;
        for shard in &of.group.shards {
            let bytes = sharding.sent_bytes(shard.piece * parameters.shards);
            let (sent, summed) = queue.send(of.last + 1, bytes, latest);
            let blocks_before = (squared && of.group.squared).then_some(blocks);
            gradient_buckets.all.push(gradient_bucket(shard, parameters, blocks_before, sent, summed));
            gradient_buckets.live_ranges.push([live_range, None]);
            blocks += of.group.blocks(shard);
        }
        if live_range.is_some() {
            gradient_buckets.blanks.extend(blanks(of).into_iter().map(|at| (of.begin, at)));
            let last = gradient_buckets.all.last().expect("a group has buckets");
            let released = if last.rounded.is_some() { last.sent } else { last.summed - 1 };
            // What other micro-steps have added up comes from the host.
            live_ranges.push(LiveRange { fetched: !sharding.gradients, released, ..live_range_of(of) });
        }
    }
    if on_host {
        arrive_in_order(&mut live_ranges, clock);
        let sums = sums(&gradient_buckets, sharding.gradients, clock);
        let numbers = first + live_ranges.len()..;
        gradient_buckets.live_ranges.iter_mut().zip(numbers).for_each(|([_, sum], number)| *sum = Some(number));
        live_ranges.extend(sums);
    }
    (gradient_buckets, live_ranges)
}

/// Gives live ranges time to be fetched in the order in which they are touched.
fn arrive_in_order(live_ranges: &mut [LiveRange], clock: &Clock) {
    let mut order: Vec<usize> = (0..live_ranges.len()).collect();
    order.sort_by_key(|index| live_ranges[*index].begin);
    let mut ordered: Vec<LiveRange> = order.iter().map(|index| live_ranges[*index].clone()).collect();
    arrive(&mut ordered, clock);
    order.into_iter().zip(ordered).for_each(|(index, of)| live_ranges[index].arrives = of.arrives);
}

/// Returns, for each gradient bucket, the live range of its sum, whose home is on the host. `accumulate`: those of the
/// micro-steps before are added.
fn sums(gradient_buckets: &GradientBuckets, accumulate: bool, clock: &Clock) -> Vec<LiveRange> {
    let live_range = |of: &GradientBucket| {
        let device = TensorRef::dense(arena::ACTIVATIONS, 0, DType::F32, of.sum.shape.clone());
        LiveRange {
            moves: vec![Move { home: of.sum.clone(), device, written: true }],
            buffer: None,
            shards: Vec::new(),
            arrives: of.summed - 1,
            fetched: accumulate,
            opens: true,
            closes: true,
            begin: of.summed - 1,
            last: of.summed - 1,
            stored: Some(of.summed - 1),
            released: of.summed - 1,
            follows: Follows::Computation,
        }
    };
    let mut sums: Vec<LiveRange> = gradient_buckets.all.iter().map(live_range).collect();
    arrive(&mut sums, clock);
    leave(&mut sums, clock, gradient_buckets.all.last().map_or(0, |of| of.summed));
    sums
}

fn leaving<'a>(graph: &Graph, placement: &Placement, groups: &'a [Group]) -> Vec<Leaving<'a>> {
    let mut blocks = 0;
    let mut all = Vec::new();
    for (group, touches) in groups.iter().zip(touches(graph, placement, groups)) {
        let written: Vec<Range<usize>> =
            touches.iter().filter(|touch| touch.writes).map(|touch| touch.bytes.clone()).collect();
        if let (Some(first), Some(last)) = (touches.first(), touches.last()) {
            all.push(Leaving { group, blocks, begin: first.node, last: last.node, written });
        }
        blocks += group.shards.iter().map(|shard| group.blocks(shard)).sum::<usize>();
    }
    all
}

/// Returns the position by which a group has left, so that few groups wait while others are computed.
fn latest(leaving: &[Leaving<'_>], index: usize) -> usize {
    let largest = leaving.iter().map(|of| of.group.bytes.len()).max().unwrap_or(0);
    let mut waiting = 0;
    let mut others = leaving[index + 1..].iter();
    let full = others.find(|of| {
        waiting += of.group.bytes.len();
        waiting > largest.max(AHEAD)
    });
    full.map_or(usize::MAX, |of| of.last)
}

/// The queue of buckets that are sent one after the other.
struct Queue<'a> {
    clock: &'a Clock,
    /// The time at which it has sent everything so far.
    free: f64,
    /// The positions before which buckets are summed.
    summed: Vec<usize>,
}

impl Queue<'_> {
    /// Sends a bucket that is complete before a position. Returns the positions before which it is sent and summed.
    fn send(&mut self, complete: usize, bytes: usize, latest: usize) -> (usize, usize) {
        let number = self.summed.len();
        let sent = complete.max(number.checked_sub(STAGED).map_or(0, |before| self.summed[before]));
        let begin =
            self.clock.begins.get(sent).copied().unwrap_or(f64::INFINITY).min(self.clock.end(self.clock.last_node()));
        self.free = self.free.max(begin) + self.clock.collective(bytes);
        let summed = self.clock.begins_at(self.free).min(latest).max(sent + 1);
        let summed = summed.max(self.summed.last().copied().unwrap_or(0));
        self.summed.push(summed);
        (sent, summed)
    }
}

fn gradient_bucket(
    shard: &Shard,
    parameters: &ParameterPlan,
    blocks: Option<usize>,
    sent: usize,
    summed: usize,
) -> GradientBucket {
    let (ranks, elements) = (parameters.shards, shard.piece / DType::F32.size());
    let from = TensorRef::dense(arena::GRADIENTS, shard.start, DType::F32, [ranks * elements]);
    let sum = match parameters.sharding.gradients {
        true => TensorRef::dense(arena::GRADIENTS, shard.at, DType::F32, [elements]),
        false => TensorRef { shape: vec![elements], per_rank: shard.piece, ..from.clone() },
    };
    let dtype = parameters.sharding.sent();
    let staged = TensorRef::dense(arena::ACTIVATIONS, 0, dtype, [ranks, elements]);
    let rounded = (dtype != from.dtype).then(|| TensorRef::dense(arena::ACTIVATIONS, 0, dtype, [ranks * elements]));
    GradientBucket { from, rounded, staged, sum, blocks, sent, summed }
}

/// Returns the parts of a group that no node writes.
fn blanks(of: &Leaving<'_>) -> Vec<TensorRef> {
    let mut written = of.written.clone();
    written.sort_by_key(|range| range.start);
    let (mut gaps, mut end) = (Vec::new(), of.group.bytes.start);
    for range in written.into_iter().chain(std::iter::once(of.group.bytes.end..of.group.bytes.end)) {
        if range.start > end {
            gaps.push(end..range.start);
        }
        end = end.max(range.end);
    }
    if gaps.len() > MOST_GAPS {
        gaps = vec![of.group.bytes.clone()];
    }
    let at = |gap: Range<usize>| TensorRef::dense(of.group.arena, gap.start, DType::U8, [gap.len()]);
    gaps.into_iter().map(at).collect()
}

/// Returns the live range of a group, from the first touch to the last.
fn live_range_of(of: &Leaving<'_>) -> LiveRange {
    let bytes = |arena, offset: usize| TensorRef::dense(arena, offset, DType::U8, [of.group.bytes.len()]);
    let (home, device) = (bytes(of.group.arena, of.group.bytes.start), bytes(arena::ACTIVATIONS, 0));
    LiveRange {
        moves: vec![Move { home, device, written: false }],
        buffer: None,
        shards: Vec::new(),
        arrives: of.begin,
        fetched: false,
        opens: true,
        closes: true,
        begin: of.begin,
        last: of.last,
        stored: None,
        released: of.last,
        follows: Follows::Computation,
    }
}

impl GradientBucket {
    /// Returns the rank's own piece, which is not sent.
    pub fn own(&self) -> TensorRef {
        let from = self.rounded.as_ref().unwrap_or(&self.from);
        let elements = self.staged.shape[1];
        TensorRef {
            per_rank: elements * from.dtype.size(),
            ..TensorRef::dense(from.arena, from.offset, from.dtype, [elements])
        }
    }

    /// Bytes of its place: the pieces of all ranks, and before them what the rank sends, if that is rounded.
    pub fn place_bytes(&self) -> usize {
        self.staged.bytes() + self.rounded.as_ref().map_or(0, TensorRef::bytes)
    }
}

impl GradientBuckets {
    /// Sets the places of the live ranges and of what is sent.
    pub fn settle(&mut self, live_ranges: &[LiveRange], places: &[usize]) {
        for ((gradient_bucket, [live_range, sum]), offset) in self.all.iter_mut().zip(&self.live_ranges).zip(places) {
            gradient_bucket.staged.offset = offset + gradient_bucket.place_bytes() - gradient_bucket.staged.bytes();
            if let Some(rounded) = &mut gradient_bucket.rounded {
                rounded.offset = *offset;
            }
            if let Some(live_range) = live_range {
                gradient_bucket.from = live_ranges[*live_range].place(&gradient_bucket.from);
            }
            if let Some(sum) = sum {
                gradient_bucket.sum = live_ranges[*sum].moves[0].device.clone();
            }
        }
        for (_, blank) in &mut self.blanks {
            let live_range = self
                .live_ranges
                .iter()
                .filter_map(|[live_range, _]| *live_range)
                .map(|live_range| &live_ranges[live_range])
                .find(|live_range| live_range.holds(blank, None));
            *blank = live_range.expect("only what live_ranges is blank").place(blank);
        }
    }

    /// Returns the position after everything: the one after the last node, or after the last sum.
    pub fn end(&self, nodes: usize) -> usize {
        self.all.iter().map(|of| of.summed + 1).max().unwrap_or(0).max(nodes)
    }
}
