//! The memory plan: what is kept for the backward pass, what is recomputed, and what is done in parts. One decision for
//! each shape of batches, from the available memory and the machine's ceilings.
//!
//! The choice has a few axes, ordered from cheap to dear, each with levels from nothing to all. If
//! everything is saved and it fits, nothing is to be done; else the search starts from the smallest plan and undoes
//! savings, the dearest first, as far as it fits. Savings that cost less than [`MARGIN`] of the step are then
//! added. Options that the user set are obeyed throughout. What was decided is carried out by rewrites
//! ([`Decision::rewrites`]); the graph is verified after the last.

mod attention;
mod axes;
mod decision;
mod dequantise;
pub(crate) mod head;
mod levels;
mod memory;
mod parts;
mod prepare;
mod recompute;
mod recompute_fusion;
mod report;
mod states;

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::Hash;

use axes::{Axis, MOST_PARTS, doubled, fewest_savings, save_while_cheap};
use decision::Decision;
use graph::Graph;
use head::Head;
use program::{Arch, EntryKind, LayerPart as Part, Machine, PlanDecision, Variant};

use crate::CompileError;
use crate::options::{CompileOptions, Sharding};
use crate::pass::{Pass, Passes};
use crate::time;
pub(crate) use levels::nearest_scope;
use memory::Bytes;
pub(crate) use memory::Memory;
use parts::Parts;
pub(crate) use states::{Candidate, Rivals, chooses_the_same, least_step};

/// Share of the fastest fitting plan's time that a smaller one may cost.
const MARGIN: f64 = 0.015;

/// The factor between the time of recomputation and its time at the ceilings: it evicts caches and takes power from the
/// products. Qwen3-0.6B on an H200, full, 8 × 2048: 7.5 ms measured for 3.8 ms.
const OVERHEAD: f64 = 2.0;

/// Logits up to this size are not worth parts of their own.
const SMALL_LOGITS: usize = 256 << 20;

/// Rows of a head's part that cost next to nothing. Qwen3-0.6B on an H200: parts of 4096 rows 0.5 % of a full
/// step, of 1024 rows 2.6 % of a step with adapters.
const FULL_ROWS: usize = 4096;

/// Fewer rows than this in a part waste the product's tiles.
const FEWEST_ROWS: usize = 64;

/// Work of an attention's part, in rows times key heads, that still fills a GPU.
const FULL_HEADS: usize = 8;

/// The parts that are recomputed together: what follows a norm is recomputed from the norm's output.
const STEPS: [&[Part]; 6] = [
    &[Part::Norms, Part::Activation],
    &[Part::Rotation],
    &[Part::FeedForward],
    &[Part::Projections],
    &[Part::Attention],
    &[Part::Residual],
];

impl Decision {
    fn after(&self, axes: &[Axis], levels: &[usize]) -> Decision {
        let mut decision = self.clone();
        for (axis, level) in axes.iter().zip(levels).filter(|(_, level)| **level > 0) {
            match axis {
                Axis::Layers(parts, _) => {
                    decision.recomputed[..*level].iter_mut().for_each(|layer| *layer = layer.and(*parts));
                }
                Axis::Waiting => decision.waiting = true,
                Axis::Head(parts) => decision.head_parts = decision.head_parts.max(parts[level - 1]),
                Axis::Attention(parts) => decision.attention_parts = decision.attention_parts.max(parts[level - 1]),
            }
        }
        decision
    }

    /// Returns the rewrites that carry it out, in their order; [`Pass::JoinRecompute`] comes after them and is kept
    /// only if it fits. The head first: its parts read whole gradients only. Attention after recomputation, which knows
    /// its backward pass as one node. What is made of weights last: its readers, and when they run, are known then;
    /// values of packed weights after codes, which may be made of them.
    fn rewrites<'a>(&'a self, head: Option<&'a Head>, sharding: &'a Sharding) -> [(Pass, Rewrite<'a>); 6] {
        [
            (
                Pass::SplitHead,
                Box::new(move |g| head.into_iter().for_each(|head| head::split_head(g, head, self.head_parts))),
            ),
            (
                Pass::OffloadResidual,
                Box::new(|g| {
                    if self.waiting {
                        g.waiting = recompute::residual_stream(g);
                    }
                }),
            ),
            (Pass::Recompute, Box::new(|g| recompute::recompute(g, &self.recomputed))),
            (Pass::SplitAttention, Box::new(|g| attention::split_attention(g, self.attention_parts))),
            (Pass::PrepareInLayers, Box::new(|g| prepare::prepare_in_layers(g, sharding.cuts_weights()))),
            (Pass::Dequantise, Box::new(dequantise::dequantise)),
        ]
    }

    /// Returns the rewritten graph for a comparison of costs: not verified.
    fn apply(&self, graph: &Graph, head: Option<&Head>, sharding: &Sharding) -> Graph {
        let mut graph = graph.clone();
        self.rewrites(head, sharding).iter().for_each(|(_, rewrite)| rewrite(&mut graph));
        graph
    }
}

/// A function that rewrites a graph.
type Rewrite<'a> = Box<dyn Fn(&mut Graph) + 'a>;

/// Rewrites the graphs so that the plan fits, and says what was decided. What cannot be made to fit
/// is left at its smallest; lowering refuses it.
pub(crate) fn decide(
    graphs: &mut [(EntryKind, Variant, Graph)],
    memory: &Memory<'_>,
    options: &CompileOptions,
    machine: &Machine,
    known: &Known,
    passes: &mut Passes<'_>,
) -> Result<Vec<PlanDecision>, CompileError> {
    let available = memory.available(options);
    let mut lines = Vec::new();
    // The training step first: the other entries may use the arena that it needs.
    let mut shared = None;
    let (training, others): (Vec<_>, Vec<_>) =
        graphs.iter_mut().enumerate().partition(|(_, (kind, _, _))| *kind == EntryKind::FirstMicroStep);
    for (number, (kind, variant, graph)) in training.into_iter().chain(others) {
        let trains = *kind == EntryKind::FirstMicroStep;
        let available = if trains { available } else { shared.unwrap_or(available) };
        let margin = if trains { MARGIN } else { 0.0 };
        let (kind, variant) = (*kind, *variant);
        let search = Search { number, kind, variant, graph, memory, machine, available, margin, known };
        let (decided, of_entry) = search.run(options, passes)?;
        if trains {
            shared = shared.max(Some(memory.activation_bytes(&decided, variant, usize::MAX).least()));
        }
        *graph = decided;
        lines.extend(of_entry);
    }
    Ok(lines)
}

/// The first micro-step as [`decide`] would leave it, without the graph.
#[derive(Clone)]
pub(crate) struct Outlook {
    /// The bytes of activations that it needs, and those that there are for them.
    needed: usize,
    available: usize,
    /// The levels of savings that the search chose.
    savings: Vec<usize>,
    /// Seconds of its nodes, one after the other; none where something of it waits for the link.
    seconds: Option<f64>,
}

impl Outlook {
    fn new((needed, available): (usize, usize), savings: Vec<usize>, seconds: Option<f64>) -> Outlook {
        Outlook { needed, available, savings, seconds }
    }

    /// Returns the bytes that it needs where these are too many, by more than fused nodes may save.
    pub fn excess(&self) -> Option<usize> {
        (self.needed > self.available + self.available / 64).then_some(self.needed)
    }
}

/// Searches for what [`decide`] would decide about the first micro-step. None where there is none.
pub(crate) fn outlook(
    graphs: &[(EntryKind, Variant, Graph)],
    memory: &Memory<'_>,
    options: &CompileOptions,
    machine: &Machine,
    known: &Known,
) -> Result<Option<Outlook>, CompileError> {
    let available = memory.available(options);
    let first = graphs.iter().enumerate().find(|(_, (kind, ..))| *kind == EntryKind::FirstMicroStep);
    let Some((number, (kind, variant, graph))) = first else { return Ok(None) };
    let (kind, variant, margin) = (*kind, *variant, MARGIN);
    let search = Search { number, kind, variant, graph, memory, machine, available, margin, known };
    let found = search.find(options)?;
    let waits = found.start.after(&found.axes, &found.chosen).waiting;
    let seconds = (!waits).then(|| search.seconds(&found, &found.chosen));
    let needed = search.size(&found, &found.chosen, usize::MAX);
    Ok(Some(Outlook::new((needed, available), found.chosen, seconds)))
}

/// The sizes and times that searches have found, for searches that differ in nothing but the states that lie on the host.
/// Keys begin with the number of the entry.
#[derive(Default)]
pub(crate) struct Known {
    /// Sizes of activation arenas by the arenas that the plan moves of the micro-step, and the levels of savings.
    sizes: RefCell<HashMap<(usize, [bool; 2], Vec<usize>), Bytes>>,
    /// Seconds by levels of savings.
    seconds: RefCell<HashMap<(usize, Vec<usize>), f64>>,
    /// Bytes that are kept and seconds of all nodes by the recomputed parts of each layer.
    recomputed: RefCell<HashMap<(usize, Vec<Parts>), (usize, f64)>>,
}

struct Search<'a> {
    /// The number of the entry.
    number: usize,
    kind: EntryKind,
    variant: Variant,
    graph: &'a Graph,
    memory: &'a Memory<'a>,
    machine: &'a Machine,
    /// Bytes that the activation arena may have.
    available: usize,
    /// Share of the fastest fitting plan's time that a smaller one may cost.
    margin: f64,
    known: &'a Known,
}

/// The savings that a search may choose from, and those that it found.
struct Found<'a> {
    head: Option<Head>,
    /// The parts of layers that may be recomputed.
    open: Parts,
    start: Decision,
    axes: Vec<Axis>,
    sharding: &'a Sharding,
    /// The levels that fit, and those that are taken.
    fitting: Vec<usize>,
    chosen: Vec<usize>,
}

impl Search<'_> {
    /// The size of the activation arena with some levels, as far as it decides whether it is within `limit`.
    fn size(&self, found: &Found<'_>, levels: &[usize], limit: usize) -> usize {
        let key = (self.number, self.memory.moved(), levels.to_vec());
        let known = self.known.sizes.borrow().get(&key).copied();
        match known {
            Some(Bytes::Exact(bytes)) => return bytes,
            Some(Bytes::AtLeast(bytes)) if bytes > limit => return bytes,
            _ => {}
        }
        let size = self.memory.activation_bytes(&self.graph_with(found, levels), self.variant, limit);
        self.known.sizes.borrow_mut().insert(key, size);
        size.least()
    }

    /// Returns the seconds of all nodes with some levels.
    fn seconds(&self, found: &Found<'_>, levels: &[usize]) -> f64 {
        let find = || time::seconds(&self.graph_with(found, levels), self.variant.documents, self.machine);
        once(&self.known.seconds, (self.number, levels.to_vec()), find)
    }

    /// Returns the bytes that the backward pass finds kept and the seconds of all nodes, where nothing is decided but the parts
    /// that are recomputed.
    fn recomputed(&self, parts: &[Parts]) -> (usize, f64) {
        let find = || {
            let mut graph = self.graph.clone();
            recompute::recompute(&mut graph, parts);
            (report::kept_bytes(&graph), time::seconds(&graph, self.variant.documents, self.machine))
        };
        once(&self.known.recomputed, (self.number, parts.to_vec()), find)
    }

    fn graph_with(&self, found: &Found<'_>, levels: &[usize]) -> Graph {
        found.start.after(&found.axes, levels).apply(self.graph, found.head.as_ref(), found.sharding)
    }

    /// Finds the levels of savings.
    fn find<'o>(&self, options: &'o CompileOptions) -> Result<Found<'o>, CompileError> {
        let head = Head::find(self.graph);
        let (requested, open) = self.layers(options);
        let start = Decision {
            recomputed: vec![requested; self.graph.layers().len()],
            head_parts: self.head_parts(options, head.as_ref())?,
            attention_parts: self.attention_parts(options)?,
            waiting: self.kind == EntryKind::FirstMicroStep && options.plan.offload.residual == Some(true),
        };
        let axes = self.axes(options, head.as_ref(), open, &start);
        let none = Vec::new();
        let sharding = &options.sharding;
        let mut found = Found { head, open, start, axes, sharding, fitting: none.clone(), chosen: none };
        found.fitting = match self.available {
            // Parameters leave no room: nothing fits, and the smallest plan says by how much.
            0 => found.axes.iter().map(Axis::levels).collect(),
            available => fewest_savings(&found.axes, available, |levels| self.size(&found, levels, available)),
        };
        found.chosen = found.fitting.clone();
        if self.margin > 0.0 {
            let most = self.seconds(&found, &found.fitting) * (1.0 + self.margin / OVERHEAD);
            let bytes = self.size(&found, &found.fitting, usize::MAX);
            let mut chosen = found.fitting.clone();
            save_while_cheap(&found.axes, &mut chosen, |levels| self.seconds(&found, levels) <= most);
            if self.size(&found, &chosen, usize::MAX) < bytes {
                found.chosen = chosen;
            }
        }
        Ok(found)
    }

    fn run(
        &self,
        options: &CompileOptions,
        passes: &mut Passes<'_>,
    ) -> Result<(Graph, Vec<PlanDecision>), CompileError> {
        let found = self.find(options)?;
        let Found { head, open, start, axes, sharding, fitting, chosen } = &found;
        let fitting = start.after(axes, fitting);
        let reasons = report::Reasons { plan: &options.plan, open: *open, start, fitting: &fitting };
        let decision = start.after(axes, chosen);
        let costs = |parts: &[Parts]| self.recomputed(parts);
        let lines = report::lines((self.kind, self.variant), self.graph, &decision, &reasons, self.machine, &costs);
        let mut graph = self.graph.clone();
        for (name, rewrite) in decision.rewrites(head.as_ref(), sharding) {
            passes.run(self.kind, name, &mut graph, |graph| {
                rewrite(graph);
                Ok(())
            })?;
        }
        passes.run(self.kind, Pass::JoinRecompute, &mut graph, |graph| {
            let mut joined = graph.clone();
            recompute_fusion::join(&mut joined);
            // Tensors that are read once are kept a little longer.
            if self.memory.activation_bytes(&joined, self.variant, self.available).least() <= self.available {
                *graph = joined;
            }
            Ok(())
        })?;
        Ok((graph, lines))
    }

    /// Returns the parts that are recomputed on request, and those that may be recomputed.
    fn layers(&self, options: &CompileOptions) -> (Parts, Parts) {
        match self.kind {
            EntryKind::FirstMicroStep => Parts::requested(&options.plan.recompute, options.adapter.is_some()),
            _ => Default::default(),
        }
    }

    fn attention_parts(&self, options: &CompileOptions) -> Result<usize, CompileError> {
        let requested = options.plan.attention_chunks.filter(|_| self.kind == EntryKind::FirstMicroStep).unwrap_or(1);
        let most = attention::most_attention_parts(self.graph, &self.machine.arch);
        if requested <= most {
            return Ok(requested);
        }
        let of = if self.machine.arch == Arch::Cpu { "rows times key heads" } else { "rows" };
        let text = format!(
            "`attn_bwd_chunks: {requested}`, but a micro-batch has {most} {of}, and no attention is done in more parts"
        );
        Err(CompileError::option("attn_bwd_chunks", text, &format!("set `attn_bwd_chunks` to at most {most}")))
    }

    fn head_parts(&self, options: &CompileOptions, head: Option<&Head>) -> Result<usize, CompileError> {
        match (options.plan.head_chunks, head) {
            (Some(parts), Some(_)) => Ok(parts),
            (Some(parts), None) if parts > 1 && self.kind == EntryKind::FirstMicroStep => {
                let text = format!(
                    "`lmhead_chunks: {parts}`, but the output head of {} cannot be done in parts: its logits are wanted \
                     whole, or something other than the loss reads them",
                    self.graph.name
                );
                Err(CompileError::option("lmhead_chunks", text, "remove `lmhead_chunks`"))
            }
            (None, Some(head)) if head.is_cheap_in_parts() && head.bytes(self.graph) > SMALL_LOGITS => {
                Ok(head.tokens.div_ceil(FULL_ROWS).min(MOST_PARTS))
            }
            _ => Ok(1),
        }
    }

    /// The savings there are, cheap ones first.
    fn axes(&self, options: &CompileOptions, head: Option<&Head>, open: Parts, start: &Decision) -> Vec<Axis> {
        let trains = self.kind == EntryKind::FirstMicroStep;
        let head = head.filter(|_| options.plan.head_chunks.is_none());
        let (tokens, bytes) = head.map_or((0, 0), |head| (head.tokens, head.bytes(self.graph)));
        let few = doubled(start.head_parts, |parts| tokens / parts >= FULL_ROWS && bytes > SMALL_LOGITS);
        let many = doubled(start.head_parts, |parts| tokens / parts >= FEWEST_ROWS);
        let heads = match options.plan.attention_chunks {
            None if trains => attention::most_attention_parts(self.graph, &self.machine.arch),
            _ => 1,
        };
        let mut axes = vec![Axis::Head(few), Axis::Attention(doubled(1, |parts| heads / parts >= FULL_HEADS))];
        for step in STEPS {
            let parts = step.iter().filter(|part| open.has(**part)).fold(Parts::default(), |sum, part| sum.with(*part));
            axes.push(Axis::Layers(parts, start.recomputed.len()));
        }
        axes.push(Axis::Attention(doubled(1, |parts| parts <= heads)));
        axes.push(Axis::Head(many));
        // Last: the computation may have to wait for the link.
        if trains && self.machine.arch != Arch::Cpu && options.plan.offload.residual.is_none() {
            axes.push(Axis::Waiting);
        }
        axes.retain(|axis| axis.levels() > 0 && !matches!(axis, Axis::Layers(parts, _) if *parts == Parts::default()));
        axes
    }
}

/// Returns the known value of a key; finds and keeps it where there is none.
fn once<K: Eq + Hash, T: Copy>(known: &RefCell<HashMap<K, T>>, key: K, find: impl Fn() -> T) -> T {
    let found = known.borrow().get(&key).copied();
    found.unwrap_or_else(|| {
        let value = find();
        known.borrow_mut().insert(key, value);
        value
    })
}
