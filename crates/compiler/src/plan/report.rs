//! The plan's table: for each part of the model what was decided, what that frees or costs, and why.

use std::collections::HashSet;

use graph::{Graph, Phase, ValueId};
use program::{EntryKind, Machine, PlanLine, Variant};

use super::Decision;
use super::head::Head;
use super::parts::{Part, classify};
use super::recompute::{pair, recompute};
use crate::memory::dtype_of;

/// Decisions to tell reasons from: what was asked for, and what was needed to fit.
pub(super) struct Reasons<'a> {
    pub start: &'a Decision,
    pub fitting: &'a Decision,
}

/// The table of one entry. `graph` is the graph before anything was decided.
pub(super) fn lines(
    (kind, variant): (EntryKind, Variant),
    graph: &Graph,
    decision: &Decision,
    reasons: &Reasons<'_>,
    machine: &Machine,
) -> Vec<PlanLine> {
    let line = |part: &str, layers: String, decision: String, bytes: usize, seconds: f64, reason: &str| PlanLine {
        kind,
        variant,
        part: part.to_owned(),
        layers,
        decision,
        bytes,
        seconds,
        reason: reason.to_owned(),
    };
    let mut result = Vec::new();
    if kind == EntryKind::FirstMicroStep {
        let saved = saved_bytes(graph);
        for part in Part::ALL.into_iter().filter(|part| saved.iter().any(|of| of[*part as usize] > 0)) {
            let chosen = |of: &Decision, layer: usize| of.recomputed[layer].has(part);
            let layers = 0..decision.recomputed.len();
            let (again, kept): (Vec<usize>, Vec<usize>) = layers.partition(|layer| chosen(decision, *layer));
            let bytes = |layers: &[usize]| layers.iter().map(|layer| saved[*layer][part as usize]).sum::<usize>();
            if let (Some(first), Some(last)) = (again.first(), again.last()) {
                let needed = again.iter().filter(|layer| chosen(reasons.fitting, **layer)).last();
                let reason = match needed {
                    _ if chosen(reasons.start, *first) => "asked for".to_owned(),
                    None => "costs next to nothing".to_owned(),
                    Some(needed) if needed == last => "needed to fit".to_owned(),
                    Some(needed) => format!("needed to fit up to layer {needed}; the rest costs next to nothing"),
                };
                let (freed, cost) = again_costs(graph, part, &again, decision, machine);
                result.push(line(part.name(), ranges(&again), "computed again".into(), freed, cost, &reason));
            }
            if !kept.is_empty() {
                result.push(line(part.name(), ranges(&kept), "kept".into(), bytes(&kept), 0.0, "fits, and is fastest"));
            }
        }
    }
    if let Some(bytes) = Some(carried_bytes(graph)).filter(|bytes| *bytes > 0 && kind == EntryKind::FirstMicroStep) {
        let layers = (0..decision.recomputed.len()).collect::<Vec<_>>();
        let (decided, reason) = match (decision.waiting, reasons.start.waiting) {
            (false, _) => ("kept", "everything else is computed from it"),
            (true, true) => ("on the host", "asked for"),
            (true, false) => ("on the host", "needed to fit: `offload_residual`"),
        };
        result.push(line("residual stream between layers", ranges(&layers), decided.into(), bytes, 0.0, reason));
    }
    let parts_reason = |of: fn(&Decision) -> usize, chosen: usize| match () {
        () if of(reasons.start) == chosen => "as asked, or at no cost",
        () if of(reasons.fitting) == chosen => "needed to fit",
        () => "costs next to nothing",
    };
    if decision.head_parts > 1 {
        let bytes = Head::find(graph).map_or(0, |head| head.bytes - head.bytes / decision.head_parts);
        let reason = parts_reason(|d| d.head_parts, decision.head_parts);
        result.push(line("output head", String::new(), format!("{} parts", decision.head_parts), bytes, 0.0, reason));
    }
    if decision.attention_parts > 1 && kind == EntryKind::FirstMicroStep {
        let reason = parts_reason(|d| d.attention_parts, decision.attention_parts);
        let text = format!("{} parts", decision.attention_parts);
        result.push(line("attention's backward pass", String::new(), text, 0, 0.0, reason));
    }
    result
}

/// Bytes of each part, by layer, that the backward pass reads when everything is kept.
fn saved_bytes(graph: &Graph) -> Vec<[usize; Part::ALL.len()]> {
    let parts = classify(graph);
    let roots = roots(graph);
    let read: HashSet<ValueId> = graph
        .nodes
        .iter()
        .filter(|node| node.phase == Phase::Backward)
        .flat_map(|node| node.inputs.iter().map(|id| roots[id.0 as usize]))
        .collect();
    let layers = graph.nodes.iter().filter_map(|node| node.layer).max().map_or(0, |last| last as usize + 1);
    let mut saved = vec![[0; Part::ALL.len()]; layers];
    for (node, part) in graph.nodes.iter().zip(&parts) {
        let (Some(layer), Some(part)) = (node.layer, part) else { continue };
        for id in node.outputs.iter().filter(|id| read.contains(id)) {
            let bytes = graph.value(*id).shape.iter().product::<usize>() * dtype_of(graph, *id).size();
            // A sum that a norm was fused to belongs to the residual stream; what enters a layer stays.
            let sum = pair(node).is_some() && *id == node.outputs[0];
            let part = if sum { Part::Residual } else { *part };
            if !graph.carried.contains(id) {
                saved[layer as usize][part as usize] += bytes;
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
        let op = ops::find(&node.op).expect("the verifier knows every operation");
        if op.class() == ops::Class::View {
            let root = roots[node.inputs[0].0 as usize];
            node.outputs.iter().for_each(|id| roots[id.0 as usize] = root);
        }
    }
    roots
}

/// What computing a part again frees and costs beside the other parts that are: bytes, seconds.
fn again_costs(graph: &Graph, part: Part, layers: &[usize], decision: &Decision, machine: &Machine) -> (usize, f64) {
    let after = |parts: &[super::Parts]| {
        let mut graph = graph.clone();
        recompute(&mut graph, parts);
        (kept_bytes(&graph), super::time::seconds(&graph, machine))
    };
    let mut without = decision.recomputed.clone();
    layers.iter().for_each(|layer| without[*layer] = without[*layer].without(part));
    let ((bytes, seconds), (more_bytes, less_seconds)) = (after(&decision.recomputed), after(&without));
    (more_bytes.saturating_sub(bytes), seconds - less_seconds)
}

/// Bytes that the forward pass computes and something behind it reads.
fn kept_bytes(graph: &Graph) -> usize {
    let roots = roots(graph);
    let behind = graph.nodes.iter().filter(|node| node.phase != Phase::Forward);
    let read: HashSet<ValueId> = behind.flat_map(|node| node.inputs.iter().map(|id| roots[id.0 as usize])).collect();
    let forward = graph.nodes.iter().filter(|node| node.phase == Phase::Forward);
    let kept = forward.flat_map(|node| &node.outputs).filter(|id| read.contains(id));
    kept.map(|id| graph.value(*id).shape.iter().product::<usize>() * dtype_of(graph, *id).size()).sum()
}

/// `0–3, 7` for 0, 1, 2, 3 and 7.
fn ranges(layers: &[usize]) -> String {
    let mut result: Vec<(usize, usize)> = Vec::new();
    for layer in layers {
        match result.last_mut() {
            Some((_, last)) if *last + 1 == *layer => *last = *layer,
            _ => result.push((*layer, *layer)),
        }
    }
    let text = |(a, b): (usize, usize)| if a == b { a.to_string() } else { format!("{a}–{b}") };
    result.into_iter().map(text).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_told_as_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 3, 7, 9, 10]), "0–3, 7, 9–10");
        assert_eq!(ranges(&[]), "");
    }
}
