//! The plan's table: for each part of the model what was decided, what that frees or costs, and why, all of it values.

use std::collections::HashSet;

use graph::{Graph, Phase, ValueId};
use program::{Choice, EntryKind, Layer, LayerPart as Part, Machine, Obstacle, PlanDecision, Reason, Subject, Variant};

use super::attention::most_attention_parts;
use super::decision::Decision;
use super::head::Head;
use super::parts::{Parts, classify};
use super::recompute::sum_inside;
use crate::lowering::program_layer;
use crate::memory::dtype_of;
use crate::options::PlanOptions;

/// The decisions that reasons follow from.
pub(super) struct Reasons<'a> {
    pub plan: &'a PlanOptions,
    /// Parts of layers that the options leave to the plan, or ask for.
    pub open: Parts,
    /// The decision before the search.
    pub start: &'a Decision,
    /// The decision that was found to fit.
    pub fitting: &'a Decision,
}

/// A function from the parts that are recomputed of each layer to the bytes that are kept for the backward pass and the seconds of
/// all nodes.
type Costs<'a> = dyn Fn(&[Parts]) -> (usize, f64) + 'a;

/// The table of one entry. `graph` is the graph before anything was decided.
pub(super) fn lines(
    (entry, variant): (EntryKind, Variant),
    graph: &Graph,
    decision: &Decision,
    reasons: &Reasons<'_>,
    machine: &Machine,
    costs: &Costs<'_>,
) -> Vec<PlanDecision> {
    let table = Table { entry, variant, graph, decision, reasons, machine, costs };
    let mut lines = Vec::new();
    let trains = entry == EntryKind::FirstMicroStep;
    if trains {
        lines.extend(table.parts());
        lines.extend(table.residual_stream());
    }
    lines.extend(Some(table.head()).filter(|head| trains || head.choice.saves()));
    if trains {
        lines.push(table.attention());
    }
    lines
}

/// One entry with what was decided for it.
struct Table<'a> {
    entry: EntryKind,
    variant: Variant,
    graph: &'a Graph,
    decision: &'a Decision,
    reasons: &'a Reasons<'a>,
    machine: &'a Machine,
    costs: &'a Costs<'a>,
}

impl Table<'_> {
    /// A decision that frees nothing and costs nothing.
    fn line(&self, subject: Subject, choice: Choice, reason: Reason) -> PlanDecision {
        let (entry, variant) = (self.entry, self.variant);
        PlanDecision { entry, variant, subject, layers: Vec::new(), choice, reason, bytes: 0, seconds: 0.0 }
    }

    /// The layers that are decided about, in their order.
    fn layers(&self) -> Vec<Layer> {
        self.graph.layers().into_iter().map(|layer| program_layer(self.graph, layer)).collect()
    }

    /// Parts of layers: what is recomputed, and what is kept.
    fn parts(&self) -> Vec<PlanDecision> {
        let mut lines = Vec::new();
        let saved = saved_bytes(self.graph);
        let named = self.layers();
        let names = |layers: &[usize]| layers.iter().map(|layer| named[*layer].clone()).collect();
        for part in Part::ALL.into_iter().filter(|part| saved.iter().any(|of| of[*part as usize] > 0)) {
            let layers = 0..self.decision.recomputed.len();
            let (again, kept): (Vec<usize>, Vec<usize>) =
                layers.partition(|layer| self.decision.recomputed[*layer].has(part));
            if !again.is_empty() {
                let (bytes, seconds) = self.again_costs(part, &again);
                let line = self.line(Subject::Layer(part), Choice::Recompute(true), self.why_again(part, &again));
                lines.push(PlanDecision { layers: names(&again), bytes, seconds, ..line });
            }
            if !kept.is_empty() {
                let reason = if self.reasons.open.has(part) { Reason::Fastest } else { Reason::Requested };
                let bytes = kept.iter().map(|layer| saved[*layer][part as usize]).sum();
                let line = self.line(Subject::Layer(part), Choice::Recompute(false), reason);
                lines.push(PlanDecision { layers: names(&kept), bytes, ..line });
            }
        }
        lines
    }

    /// Returns the bytes and the seconds that recomputing a part frees and costs, next to the other recomputed parts.
    fn again_costs(&self, part: Part, layers: &[usize]) -> (usize, f64) {
        let mut without = self.decision.recomputed.clone();
        layers.iter().for_each(|layer| without[*layer] = without[*layer].without(part));
        let (bytes, seconds) = (self.costs)(&self.decision.recomputed);
        let (more_bytes, less_seconds) = (self.costs)(&without);
        (more_bytes.saturating_sub(bytes), seconds - less_seconds)
    }

    /// Returns the reason why a part of some layers, one of them at least, is recomputed.
    fn why_again(&self, part: Part, layers: &[usize]) -> Reason {
        let chosen = |of: &Decision, layer: usize| of.recomputed[layer].has(part);
        let needed = layers.iter().rfind(|layer| chosen(self.reasons.fitting, **layer));
        match needed {
            _ if chosen(self.reasons.start, layers[0]) => Reason::Requested,
            None => Reason::Negligible,
            Some(needed) if layers.last() == Some(needed) => Reason::NeededToFit,
            Some(needed) => Reason::NeededUpTo(self.layers()[*needed].clone()),
        }
    }

    fn residual_stream(&self) -> Option<PlanDecision> {
        let bytes = carried_bytes(self.graph);
        let reason = match (self.reasons.plan.offload.residual, self.decision.waiting) {
            (Some(_), _) => Reason::Requested,
            (None, true) => Reason::NeededToFit,
            (None, false) => Reason::RecomputeSource,
        };
        let line = self.line(Subject::ResidualStream, Choice::Offload(self.decision.waiting), reason);
        (bytes > 0).then_some(PlanDecision { layers: self.layers(), bytes, ..line })
    }

    fn head(&self) -> PlanDecision {
        let parts = self.decision.head_parts;
        let head = Head::find(self.graph);
        let obstacle = head.is_none().then_some(Obstacle::LogitsAreRead);
        let reason = self.why_parts(self.reasons.plan.head_chunks, obstacle, |of| of.head_parts);
        let bytes = head.map_or(0, |head| head.bytes(self.graph));
        let bytes = bytes - bytes / parts;
        PlanDecision { bytes, ..self.line(Subject::OutputHead, Choice::Chunks(parts), reason) }
    }

    fn attention(&self) -> PlanDecision {
        let most = most_attention_parts(self.graph, &self.machine.arch);
        let obstacle = (most == 1).then_some(Obstacle::Indivisible);
        let reason = self.why_parts(self.reasons.plan.attention_chunks, obstacle, |of| of.attention_parts);
        self.line(Subject::AttentionBackward, Choice::Chunks(self.decision.attention_parts), reason)
    }

    fn why_parts(&self, requested: Option<usize>, obstacle: Option<Obstacle>, parts: fn(&Decision) -> usize) -> Reason {
        let chosen = parts(self.decision);
        match obstacle {
            _ if requested.is_some() => Reason::Requested,
            Some(obstacle) => Reason::Impossible(obstacle),
            None if chosen == 1 => Reason::Fastest,
            None if parts(self.reasons.start) == chosen => Reason::Free,
            None if parts(self.reasons.fitting) == chosen => Reason::NeededToFit,
            None => Reason::Negligible,
        }
    }
}

/// Bytes of each part, for each of the graph's layers, that the backward pass reads when everything is kept.
fn saved_bytes(graph: &Graph) -> Vec<[usize; Part::ALL.len()]> {
    let parts = classify(graph);
    let roots = roots(graph);
    let read: HashSet<ValueId> = graph
        .nodes
        .iter()
        .filter(|node| node.phase == Phase::Backward)
        .flat_map(|node| node.inputs.iter().map(|id| roots[id.0 as usize]))
        .collect();
    let layers = graph.layers();
    let mut saved = vec![[0; Part::ALL.len()]; layers.len()];
    for (node, part) in graph.nodes.iter().zip(&parts) {
        let (Some(layer), Some(part)) = (node.layer, part) else { continue };
        let layer = layers.binary_search(&layer).expect("the graph lists its layers in order");
        let sum = sum_inside(graph, node);
        for id in node.outputs.iter().filter(|id| read.contains(id)) {
            let bytes = graph.value(*id).shape.iter().product::<usize>() * dtype_of(graph, *id).size();
            // A sum that a norm was fused to belongs to the residual stream; what enters a layer is kept.
            let part = if sum == Some(*id) { Part::Residual } else { *part };
            if !graph.carried.contains(id) {
                saved[layer][part as usize] += bytes;
            }
        }
    }
    saved
}

/// Bytes of what enters the layers.
fn carried_bytes(graph: &Graph) -> usize {
    let bytes = |id: &ValueId| graph.value(*id).shape.iter().product::<usize>() * dtype_of(graph, *id).size();
    graph.carried.iter().map(bytes).sum()
}

/// For every value the one that it is a view of.
fn roots(graph: &Graph) -> Vec<ValueId> {
    let mut roots: Vec<ValueId> = (0..graph.values.len() as u32).map(ValueId).collect();
    for node in &graph.nodes {
        let op = ops::get(node.op);
        if op.class() == ops::Class::View {
            let root = roots[node.inputs[0].0 as usize];
            node.outputs.iter().for_each(|id| roots[id.0 as usize] = root);
        }
    }
    roots
}

/// Returns the bytes that the forward pass computes and later phases read.
pub(super) fn kept_bytes(graph: &Graph) -> usize {
    let roots = roots(graph);
    let later = graph.nodes.iter().filter(|node| node.phase != Phase::Forward);
    let read: HashSet<ValueId> = later.flat_map(|node| node.inputs.iter().map(|id| roots[id.0 as usize])).collect();
    let forward = graph.nodes.iter().filter(|node| node.phase == Phase::Forward);
    let kept = forward.flat_map(|node| &node.outputs).filter(|id| read.contains(id));
    kept.map(|id| graph.value(*id).shape.iter().product::<usize>() * dtype_of(graph, *id).size()).sum()
}
