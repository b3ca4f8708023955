//! The activation arena of one entry: how long every buffer lives, where it is, and what the
//! arena holds when it is fullest.

use std::cell::LazyCell;

use graph::{Graph, Phase, ValueId};
use ops::{Class, LowerCall};
use program::{ArenaKind, Documents, EntryKind, Machine, MemoryLine, TensorRef};

use super::addresses::Addresses;
use super::clock::Clock;
use super::{GradientBuckets, Homes, LiveRange, gathers, gradient_buckets, live_ranges};
use crate::memory::{
    ALIGNMENT_BYTES, Copied, Fixed, Interval, ParameterPlan, Placement, Shadow, align, arena, pack, peak, place,
    shadow_adapters,
};

/// The purpose of a buffer: the lines of the plan below `activations`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Kept,
    Passing,
    Adapters,
    Gradients,
    Exchange,
    Weights,
    Quants,
    Loaded,
    Workspace,
}

impl Purpose {
    const ALL: [Purpose; 9] = [
        Purpose::Kept,
        Purpose::Passing,
        Purpose::Adapters,
        Purpose::Gradients,
        Purpose::Exchange,
        Purpose::Weights,
        Purpose::Quants,
        Purpose::Loaded,
        Purpose::Workspace,
    ];

    const fn words(self) -> (&'static str, &'static str) {
        match self {
            Purpose::Kept => ("saved", "values saved for the backward pass"),
            Purpose::Passing => ("temporary", "values between neighboring operations"),
            Purpose::Adapters => ("adapters", "LoRA matrices in the type of the products"),
            Purpose::Gradients => ("gradients", "gradients before they reach their arena"),
            Purpose::Exchange => ("exchange", "gradients exchanged between ranks"),
            Purpose::Weights => ("weights", "weights gathered from all ranks"),
            Purpose::Quants => ("quants", "frozen weights in codes, fetched from the host"),
            Purpose::Loaded => ("loaded", "weights of which codes alone live_range, while they are loaded"),
            Purpose::Workspace => ("workspace", "workspaces of single operations"),
        }
    }
}

/// The arena of one entry.
pub(crate) struct Buffers {
    placement: Placement,
    /// The adapters' conversion, where there is one.
    pub shadow: Option<Shadow>,
    /// The offset of each buffer of the placement.
    offsets: Vec<usize>,
    /// The tensors with a home on the host, while they are on the device.
    pub live_ranges: Vec<LiveRange>,
    addresses: Addresses,
    /// The gradients that are sent to other ranks.
    pub gradient_buckets: GradientBuckets,
    /// The offset and the bytes of each node's workspace.
    pub scratch: Vec<Option<(usize, usize)>>,
    /// Bytes of the activation arena.
    pub bytes: usize,
    intervals: Vec<(Interval, Purpose)>,
}

/// The use of the activation arena by an entry.
pub(crate) struct Usage {
    /// The contents of the arena at its fullest; their sum is its size.
    pub fullest: Vec<MemoryLine<&'static str>>,
    /// Most bytes in use in each phase.
    pub phases: Vec<MemoryLine<&'static str>>,
}

/// The arena of one entry before anything in it has an offset.
pub(crate) struct Outline {
    placement: Placement,
    shadow: Option<Shadow>,
    live_ranges: Vec<LiveRange>,
    gradient_buckets: GradientBuckets,
    /// The lives of buffers, live ranges, workspaces and buckets, in this order.
    intervals: Vec<(Interval, Purpose)>,
    /// The bytes of each node's workspace.
    scratch: Vec<usize>,
    /// Bytes at the beginning that loaded weights occupy.
    loaded: usize,
    /// The position after the last.
    end: usize,
}

impl Outline {
    /// Gives every value of a graph a buffer, except those that have a place. `leaves`: gradients go to the other ranks.
    pub fn new(
        graph: &Graph,
        fixed: &Fixed,
        documents: Documents,
        machine: &Machine,
        homes: &Homes,
        parameters: &ParameterPlan,
        leaves: bool,
    ) -> Outline {
        let mut placement = place(graph, fixed);
        let shadow = shadow_adapters(graph, &mut placement);
        // Most entries move nothing.
        let bucket = leaves.then(|| parameters.sharding.sent_bytes(parameters.sharding.bucket()));
        let clock = LazyCell::new(|| Clock::new(graph, documents, machine, parameters.shards, bucket));
        let mut live_ranges = live_ranges::plan(graph, &placement, homes, &clock, leaves);
        live_ranges.extend(gathers::plan(graph, &placement, parameters, &clock));
        let (gradient_buckets, of_gradients) = match leaves {
            true => gradient_buckets::plan(graph, &placement, parameters, homes, &clock, live_ranges.len()),
            false => Default::default(),
        };
        live_ranges.extend(of_gradients);
        let mut intervals = lives(graph, &placement, shadow.as_ref(), gradient_buckets.end(graph.nodes.len()));
        // A buffer that is on the device several times takes a place each time.
        live_ranges.iter().filter_map(|live_range| live_range.buffer).for_each(|buffer| intervals[buffer].0.bytes = 0);
        intervals.extend(live_ranges.iter().map(|live_range| {
            let purpose = match ArenaKind::at(live_range.moves[0].home.arena) {
                _ if live_range.buffer.is_some() => Purpose::Passing,
                ArenaKind::Quants => Purpose::Quants,
                ArenaKind::Weights => Purpose::Weights,
                ArenaKind::Adapters => Purpose::Adapters,
                ArenaKind::Gradients => Purpose::Gradients,
                kind @ (ArenaKind::Optimizer
                | ArenaKind::Batch
                | ArenaKind::Scalars
                | ArenaKind::Constants
                | ArenaKind::Activations
                | ArenaKind::Masters
                | ArenaKind::Waiting
                | ArenaKind::States
                | ArenaKind::Cache
                | ArenaKind::Errors) => unreachable!("entries fetch nothing of `{}`", kind.name()),
            };
            (Interval { bytes: live_range.bytes(), first: live_range.arrives, last: live_range.released }, purpose)
        }));
        let sizes = scratch_sizes(graph, &placement, machine, documents);
        let scratched: Vec<usize> = (0..sizes.len()).filter(|node| sizes[*node] > 0).collect();
        let of_node = |node: &usize| Interval { bytes: sizes[*node], first: *node, last: *node };
        intervals.extend(scratched.iter().map(|node| (of_node(node), Purpose::Workspace)));
        intervals.extend(gradient_buckets.all.iter().map(|of| {
            let staged = Interval { bytes: of.place_bytes(), first: of.sent, last: of.summed - 1 };
            (staged, Purpose::Exchange)
        }));
        let (loaded, end) = (loaded_bytes(graph, &placement), gradient_buckets.end(graph.nodes.len()));
        Outline { placement, shadow, live_ranges, gradient_buckets, intervals, scratch: sizes, loaded, end }
    }

    /// The most bytes that are live at one time: the arena has at least as many.
    pub fn peak(&self) -> usize {
        self.loaded + peak(&self.plain())
    }

    fn plain(&self) -> Vec<Interval> {
        self.intervals.iter().map(|(interval, _)| *interval).collect()
    }

    /// Packs the arena: gives everything in it an offset.
    pub fn pack(self) -> Buffers {
        let (mut offsets, packed) = pack(&self.plain());
        let Outline { placement, shadow, mut live_ranges, mut gradient_buckets, mut intervals, .. } = self;
        offsets.iter_mut().for_each(|offset| *offset += self.loaded);
        intervals.push((Interval { bytes: self.loaded, first: 0, last: self.end }, Purpose::Loaded));
        let staged_offsets = offsets.split_off(offsets.len() - gradient_buckets.all.len());
        let scratch_offsets = offsets.split_off(placement.buffers.len() + live_ranges.len());
        for (live_range, offset) in live_ranges.iter_mut().zip(offsets.split_off(placement.buffers.len())) {
            live_range.moves[0].device.offset = offset;
        }
        let addresses = Addresses::new(&live_ranges);
        gradient_buckets.settle(&live_ranges, &staged_offsets);
        let mut offsets_of_scratch = scratch_offsets.into_iter();
        let place = |bytes: usize| (bytes > 0).then(|| (offsets_of_scratch.next().expect("each has a place"), bytes));
        let scratch = self.scratch.into_iter().map(place).collect();
        let bytes = self.loaded + packed;
        Buffers { placement, shadow, offsets, live_ranges, addresses, gradient_buckets, scratch, bytes, intervals }
    }
}

impl Buffers {
    /// Returns the place of a tensor when a node runs.
    pub fn place(&self, tensor: &TensorRef, node: usize) -> TensorRef {
        let buffer = self.placement.buffer_of(tensor);
        let here = |live_range: &LiveRange| (live_range.begin..=live_range.last).contains(&node);
        match self.addresses.find(&self.live_ranges, tensor, buffer, here) {
            Some(live_range) => live_range.place(tensor),
            None => self.placement.resolve(tensor, arena::ACTIVATIONS, &self.offsets),
        }
    }

    /// Returns the place of a value when a node runs.
    pub fn value(&self, id: ValueId, node: usize) -> TensorRef {
        self.place(self.placement.get(id).expect("every value was placed"), node)
    }

    /// Returns the copies that views need when a node is reached.
    pub fn copies(&self, node: usize) -> &[Copied] {
        self.placement.copies.get(&node).map_or(&[], Vec::as_slice)
    }

    /// Returns the use of the arena over time, for the lines of the plan.
    pub fn usage(&self, graph: &Graph, kind: EntryKind) -> Usage {
        let nodes = graph.nodes.len();
        let moments = self.gradient_buckets.end(nodes) + 1;
        let mut live = vec![[0usize; Purpose::ALL.len()]; moments];
        for (interval, purpose) in &self.intervals {
            let moments = live.iter_mut().take(interval.last + 1).skip(interval.first);
            moments.for_each(|moment| moment[*purpose as usize] += interval.bytes);
        }
        let total = |moment: &[usize; Purpose::ALL.len()]| moment.iter().sum::<usize>();
        let fullest = live.iter().max_by_key(|moment| total(moment)).expect("there is at least one moment");
        let purpose = |purpose: Purpose| {
            let (class, note) = purpose.words();
            MemoryLine { class, bytes: fullest[purpose as usize], note }
        };
        let mut lines: Vec<_> = Purpose::ALL.into_iter().map(purpose).filter(|line| line.bytes > 0).collect();
        let (bytes, note) = (self.bytes - total(fullest), "alignment, and unused space between buffers");
        lines.push(MemoryLine { class: "gaps", bytes, note });
        let trains = kind == EntryKind::FirstMicroStep || kind == EntryKind::NextMicroStep;
        let phases = graph.nodes.iter().zip(&live).map(|(node, moment)| {
            let class = match node.phase {
                _ if !trains => kind.name(),
                Phase::Forward => Phase::Forward.name(),
                Phase::Recompute | Phase::Backward => Phase::Backward.name(),
            };
            MemoryLine { class, bytes: total(moment), note: "" }
        });
        Usage { fullest: lines, phases: MemoryLine::greatest(phases) }
    }
}

/// Bytes at the beginning of the arena that weights occupy, where they are in it to be prepared.
fn loaded_bytes(graph: &Graph, placement: &Placement) -> usize {
    let read = graph.nodes.iter().flat_map(|node| &node.inputs).filter_map(|id| placement.get(*id));
    let ends = read.filter(|at| at.arena == arena::ACTIVATIONS).map(|at| at.offset + at.span());
    align(ends.max().unwrap_or(0), ALIGNMENT_BYTES)
}

/// Life and purpose of every buffer of the placement. Results live until `end`.
fn lives(graph: &Graph, placement: &Placement, shadow: Option<&Shadow>, end: usize) -> Vec<(Interval, Purpose)> {
    let mut lives: Vec<Option<(usize, usize)>> = vec![None; placement.buffers.len()];
    let mut touch = |id: ValueId, index: usize| {
        let tensor = placement.get(id).expect("every value was placed");
        if let Some(buffer) = placement.buffer_of(tensor) {
            let life = lives[buffer].get_or_insert((index, index));
            *life = (life.0.min(index), life.1.max(index));
        }
    };
    for (index, node) in graph.nodes.iter().enumerate() {
        node.inputs.iter().chain(&node.outputs).for_each(|id| touch(*id, index));
    }
    for (_, id) in &graph.outputs {
        touch(*id, end);
    }
    let shadow = shadow.and_then(|shadow| placement.buffer_of(&shadow.to));
    if let Some(buffer) = shadow {
        // Filled before the first node.
        lives[buffer].as_mut().expect("a shadow is read").0 = 0;
    }
    let forward = |index: usize| graph.nodes.get(index).is_none_or(|node| node.phase == Phase::Forward);
    let of_buffer = |(index, (bytes, life)): (usize, (&usize, &Option<(usize, usize)>))| {
        // What a shadow replaces leaves its buffer without a use.
        let bytes = if life.is_some() { *bytes } else { 0 };
        let (first, last) = life.unwrap_or_default();
        let purpose = match () {
            () if shadow == Some(index) => Purpose::Adapters,
            () if forward(first) && !forward(last) => Purpose::Kept,
            () => Purpose::Passing,
        };
        (Interval { bytes, first, last }, purpose)
    };
    placement.buffers.iter().zip(&lives).enumerate().map(of_buffer).collect()
}

fn scratch_sizes(graph: &Graph, placement: &Placement, machine: &Machine, documents: Documents) -> Vec<usize> {
    let at = |id: &ValueId| placement.get(*id).expect("every value was placed").clone();
    let size = |node: &graph::Node| {
        let op = ops::get(node.op);
        if op.class() == Class::View || machine.arch == program::Arch::Cpu {
            return 0;
        }
        let inputs: Vec<TensorRef> = node.inputs.iter().map(at).collect();
        let outputs: Vec<TensorRef> = node.outputs.iter().map(at).collect();
        op.scratch(&LowerCall { inputs: &inputs, outputs: &outputs, attrs: &node.attrs, machine, documents })
    };
    graph.nodes.iter().map(size).collect()
}
