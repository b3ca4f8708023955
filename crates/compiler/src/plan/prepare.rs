//! Values that follow from weights alone, made in the layers that read them: the numbers that codes of weights stand
//! for, and where weights are cut over the ranks their codes, too, which as states would be whole on every rank. Made
//! right before a layer's first product reads them, once for the forward pass and once for the backward pass, which
//! shares them with what it recomputes. Codes are made of the whole weights of a group, so they have the bits that
//! states have.

use std::collections::{HashMap, HashSet};

use graph::{Graph, Layer, Node, OpId, Origin, Phase, ValueId};
use ops::id;

/// A part of a step in which something is made once.
type Window = (Option<Layer>, bool);

fn window(node: &Node) -> Window {
    (node.layer, node.phase != Phase::Forward)
}

/// Rewrites the readers of codes of weights. `codes`: these are made in layers. Initial values of parameters remain
/// prepared.
pub fn prepare_in_layers(graph: &mut Graph, codes: bool) {
    let derived = graph.derived();
    if derived.is_empty() {
        return;
    }
    let mut made = Made { makers: HashMap::new(), moved: HashMap::new(), read: HashSet::new(), made: HashMap::new() };
    if codes {
        for node in keep_prepared(graph, &derived) {
            made.makers.extend(node.outputs.iter().map(|id| (*id, node.clone())));
        }
        made.moved.extend(derived.iter().map(|id| (*id, *id)));
        let reads = graph.nodes.iter().flat_map(|node| node.inputs.iter().map(move |id| (window(node), *id)));
        made.read.extend(reads);
    }
    let mut known: HashMap<(OpId, Vec<ValueId>, String), Vec<ValueId>> = HashMap::new();
    let nodes = std::mem::take(&mut graph.nodes);
    let mut result = Vec::with_capacity(nodes.len());
    for mut node in nodes {
        if node.inputs.iter().all(|id| derived.contains(id)) && !node.inputs.is_empty() {
            let key = (node.op, node.inputs.clone(), node.attrs.to_string());
            let first = known.entry(key).or_insert_with(|| node.outputs.clone());
            made.moved.extend(node.outputs.iter().copied().zip(first.iter().copied()));
            made.makers.extend(node.outputs.iter().map(|id| (*id, node.clone())));
            continue;
        }
        for index in 0..node.inputs.len() {
            if let Some(of) = made.moved.get(&node.inputs[index]).copied() {
                node.inputs[index] = made.value(graph, of, &node, &mut result);
            }
        }
        result.push(node);
    }
    graph.nodes = result;
}

/// Keeps the prepared nodes that no layer makes, and returns all that there were.
fn keep_prepared(graph: &mut Graph, derived: &HashSet<ValueId>) -> Vec<Node> {
    let prepared = std::mem::take(&mut graph.prepared);
    let mut needed: HashSet<ValueId> = graph.states.iter().copied().filter(|id| !derived.contains(id)).collect();
    for node in prepared.iter().rev() {
        if node.outputs.iter().any(|id| needed.contains(id)) {
            needed.extend(&node.inputs);
            graph.prepared.push(node.clone());
        }
    }
    graph.prepared.reverse();
    prepared
}

struct Made {
    /// The node that makes each value.
    makers: HashMap<ValueId, Node>,
    /// The values that are made in layers, each with the first of its equals.
    moved: HashMap<ValueId, ValueId>,
    read: HashSet<(Window, ValueId)>,
    made: HashMap<(Window, ValueId), ValueId>,
}

impl Made {
    /// Returns the value that a node reads instead of another; makes it where the node's window has none yet.
    fn value(&mut self, graph: &mut Graph, id: ValueId, reader: &Node, result: &mut Vec<Node>) -> ValueId {
        let window = window(reader);
        if let Some(known) = self.made.get(&(window, id)) {
            return *known;
        }
        let Some(maker) = self.makers.get(&id) else { return id };
        let mut node = self.without_unread_transpose(maker.clone(), window);
        node.inputs = node.inputs.iter().map(|input| self.value(graph, *input, reader, result)).collect();
        for output in &mut node.outputs {
            let mut value = graph.value(*output).clone();
            value.origin = Origin::Node;
            let fresh = graph.add(value);
            self.made.insert((window, *output), fresh);
            *output = fresh;
        }
        result.push(Node { phase: reader.phase, ..node });
        self.made[&(window, id)]
    }

    /// Drops the transposed codes of a node where the window's pass does not read them.
    fn without_unread_transpose(&self, mut node: Node, window: Window) -> Node {
        if node.op == id::QUANTISE
            && let Some(transposed) = node.outputs.get(2)
            && !self.read.contains(&(window, *transposed))
        {
            node.outputs.truncate(2);
            node.attrs.remove("transposed");
        }
        node
    }
}
