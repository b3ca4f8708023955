//! Computes parts of the forward pass again in the backward pass instead of keeping them. A clone
//! copies the fused node with its attributes, so its bits are those of the first computation.

use std::collections::{HashMap, HashSet};

use graph::{Axis, Graph, Layer, Node, Phase, ValueId};
use ops::Class;
use ops::rowwise::{around, intermediate, without_codes};

use program::LayerPart as Part;

use super::parts::{Parts, classify};

/// Rewrites the backward pass: what a chosen part of a layer computed is recomputed, each node
/// just before it is first needed. `layers` are the parts of each of [`Graph::layers`].
pub fn recompute(graph: &mut Graph, layers: &[Parts]) {
    let layers: HashMap<Layer, Parts> = graph.layers().into_iter().zip(layers.iter().copied()).collect();
    let again = |node: &Node, part: Part| node.layer.and_then(|of| layers.get(&of)).is_some_and(|of| of.has(part));
    let parts = classify(graph).into_iter().zip(&graph.nodes);
    let chosen: Vec<bool> = parts.map(|(part, node)| part.is_some_and(|part| again(node, part))).collect();
    if !chosen.contains(&true) {
        return;
    }
    let kept = kept_sums(graph, |node| !again(node, Part::Residual));
    let forward = std::mem::take(&mut graph.nodes);
    let mut producers = vec![None; graph.values.len()];
    for (index, node) in forward.iter().enumerate().filter(|(_, node)| node.phase == Phase::Forward) {
        node.outputs.iter().for_each(|id| producers[id.0 as usize] = Some(index));
    }
    let mut clones =
        Clones { graph, nodes: &forward, chosen: &chosen, producers, kept, made: HashMap::new(), result: Vec::new() };
    for node in &forward {
        let mut node = node.clone();
        if node.phase == Phase::Backward {
            node.inputs.iter_mut().for_each(|id| *id = clones.again(*id));
        }
        clones.result.push(node);
    }
    graph.nodes = clones.result;
    without_unread_codes(graph);
}

/// Drops from recomputed nodes the codes of a tensor that only forward products read.
fn without_unread_codes(graph: &mut Graph) {
    let uses = graph.use_counts();
    for index in 0..graph.nodes.len() {
        let node = &graph.nodes[index];
        if node.phase == Phase::Recompute
            && let Some(less) = without_codes(graph, node, |id| uses[id.0 as usize] > 0)
        {
            graph.nodes[index] = less;
        }
    }
}

/// Returns the sums of the residual stream that are kept: those that enter a layer, and those inside a layer whose
/// residual stream is not recomputed.
fn kept_sums(graph: &Graph, stays: impl Fn(&Node) -> bool) -> HashSet<ValueId> {
    let mut kept: HashSet<ValueId> = graph.carried.iter().copied().collect();
    for node in &graph.nodes {
        if stays(node)
            && let Some(sum) = sum_inside(graph, node)
        {
            kept.insert(sum);
        }
    }
    kept
}

/// The residual stream of the forward pass: what enters the layers of each token, and the sums inside of them. Loads of
/// experts, which layers hand on too, are none of it: they may be fused into one sum.
pub fn residual_stream(graph: &Graph) -> Vec<ValueId> {
    let axis = |id: &ValueId, axis| graph.value(*id).axis(axis);
    let of_tokens = |id: &ValueId| axis(id, Axis::Rows).or(axis(id, Axis::Patches)).is_some();
    let sums = graph.nodes.iter().filter(|node| node.phase == Phase::Forward && node.layer.is_some());
    let sums = sums.filter_map(|node| sum_inside(graph, node));
    let mut stream: Vec<ValueId> = graph.carried.iter().copied().filter(of_tokens).chain(sums).collect();
    stream.sort_unstable();
    stream.dedup();
    stream
}

/// The sum that a node over rows writes before it goes on with it.
pub(super) fn sum_inside(graph: &Graph, node: &Node) -> Option<ValueId> {
    intermediate(graph, node).map(|index| node.outputs[index])
}

struct Clones<'a> {
    graph: &'a mut Graph,
    nodes: &'a [Node],
    chosen: &'a [bool],
    /// Forward nodes by the values that they compute.
    producers: Vec<Option<usize>>,
    kept: HashSet<ValueId>,
    /// The value that stands for another in the backward pass.
    made: HashMap<ValueId, ValueId>,
    result: Vec<Node>,
}

impl Clones<'_> {
    /// The value to read in the backward pass; recomputes it if it is not kept.
    fn again(&mut self, id: ValueId) -> ValueId {
        if let Some(known) = self.made.get(&id) {
            return *known;
        }
        let producer = self.producers.get(id.0 as usize).copied().flatten().filter(|_| !self.kept.contains(&id));
        let Some(index) = producer else { return id };
        let node = &self.nodes[index];
        if ops::get(node.op).class() == Class::View {
            let inputs: Vec<ValueId> = node.inputs.iter().map(|input| self.again(*input)).collect();
            if inputs == node.inputs {
                return id;
            }
            self.emit(node.clone(), inputs);
        } else if self.chosen[index] {
            self.compute(node, id);
        } else {
            return id;
        }
        self.made[&id]
    }

    fn compute(&mut self, node: &Node, wanted: ValueId) {
        // Where the sum is kept, what was fused after it and what was fused before it are recomputed separately: the
        // one needs nothing of the layer before, whose backward pass needs the other.
        let kept = intermediate(self.graph, node).filter(|index| self.kept.contains(&node.outputs[*index]));
        let part = kept.map(|index| match around(self.graph, node, index) {
            (_, Some(front)) if front.outputs.contains(&wanted) => front,
            (after, _) => after,
        });
        let node = part.as_ref().unwrap_or(node);
        let inputs = node.inputs.iter().map(|id| self.again(*id)).collect();
        self.emit(node.clone(), inputs);
    }

    /// Adds the clone; its results stand for those of `node`.
    fn emit(&mut self, mut node: Node, inputs: Vec<ValueId>) {
        let outputs = std::mem::take(&mut node.outputs);
        node.outputs = outputs.iter().map(|id| self.fresh(*id)).collect();
        self.made.extend(outputs.iter().copied().zip(node.outputs.iter().copied()));
        (node.inputs, node.phase) = (inputs, Phase::Recompute);
        self.result.push(node);
    }

    fn fresh(&mut self, id: ValueId) -> ValueId {
        let value = self.graph.value(id).clone();
        self.graph.add(value)
    }
}
