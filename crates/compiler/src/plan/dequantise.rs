//! Values of packed weights: a layer's are made right before its first product reads them, once for the forward pass
//! and once for the backward pass, which shares them with what it recomputes. Where they lie is the memory of
//! values between operations, so those of one layer take the place of those of the one before. A recipe that makes codes
//! of its own from them reads them once, where these are made.

use std::collections::HashMap;

use graph::{Element, Graph, Layer, Node, Origin, ParameterId, Phase, ValueId};
use ops::dequantise::attributes;
use ops::{Append, Emit, id};
use tensor::storage::Packing;
use tensor::{DType, Storage};

use crate::memory::is_view;

/// A part of a step in which values are made once.
type Window = (Option<Layer>, bool);

/// Makes the values of packed weights that nodes read.
pub fn dequantise(graph: &mut Graph) {
    let mut packed = HashMap::new();
    for index in 0..graph.parameters.len() {
        let Storage::Packed(packing) = graph.parameters[index].storage else { continue };
        let parameter = &graph.parameters[index];
        let (name, bytes, values) = (parameter.name.clone(), packing.bytes(&parameter.shape), parameter.value);
        let id = ParameterId(index as u32);
        let codes = graph.add_value(&name, Element::Fixed(DType::U8), vec![bytes], Origin::Parameter(id));
        graph.parameters[index].value = codes;
        graph.value_mut(values).origin = Origin::Node;
        packed.insert(values, (codes, packing));
    }
    if packed.is_empty() {
        return;
    }
    let (nodes, prepared) = (std::mem::take(&mut graph.nodes), std::mem::take(&mut graph.prepared));
    graph.nodes = rewritten(graph, &packed, nodes);
    graph.prepared = rewritten(graph, &packed, prepared);
}

/// A list of nodes that stands by itself, with what makes the values that it reads.
fn rewritten(graph: &mut Graph, packed: &HashMap<ValueId, (ValueId, Packing)>, nodes: Vec<Node>) -> Vec<Node> {
    let mut made = Made { graph, packed, views: HashMap::new(), made: HashMap::new() };
    let mut result = Vec::with_capacity(nodes.len());
    for mut node in nodes {
        if is_view(&node) && node.inputs.iter().any(|id| made.is_weight(*id)) {
            made.views.extend(node.outputs.iter().map(|id| (*id, node.clone())));
            continue;
        }
        for input in node.inputs.clone() {
            let value = made.value(input, &node, &mut result);
            node.inputs.iter_mut().filter(|id| **id == input).for_each(|id| *id = value);
        }
        result.push(node);
    }
    result
}

struct Made<'a> {
    graph: &'a mut Graph,
    /// What stood for a packed weight, its codes and form.
    packed: &'a HashMap<ValueId, (ValueId, Packing)>,
    /// Views of such weights, by their results.
    views: HashMap<ValueId, Node>,
    made: HashMap<(Window, ValueId), ValueId>,
}

impl Made<'_> {
    fn is_weight(&self, id: ValueId) -> bool {
        self.packed.contains_key(&id) || self.views.contains_key(&id)
    }

    /// What a node reads instead of a packed weight or a view of some; makes it where the node's window has none yet.
    fn value(&mut self, id: ValueId, reader: &Node, result: &mut Vec<Node>) -> ValueId {
        if !self.is_weight(id) {
            return id;
        }
        let window = (reader.layer, reader.phase != Phase::Forward);
        if let Some(known) = self.made.get(&(window, id)) {
            return *known;
        }
        if let Some(view) = self.views.get(&id).cloned() {
            let inputs = view.inputs.iter().map(|input| self.value(*input, reader, result)).collect();
            let outputs: Vec<ValueId> =
                view.outputs.iter().map(|id| self.graph.add(self.graph.value(*id).clone())).collect();
            self.made.extend(view.outputs.iter().map(|id| (window, *id)).zip(outputs.iter().copied()));
            result.push(Node { inputs, outputs, phase: reader.phase, ..view });
        } else {
            let (codes, packing) = self.packed[&id];
            let value = self.graph.value(id).clone();
            let mut append = Append::new(self.graph, reader.phase);
            append.place_like(reader);
            let values = append.emit(id::DEQUANTISE, &[codes], attributes(packing, &value.shape))[0];
            result.append(&mut append.nodes);
            *self.graph.value_mut(values) = value;
            self.made.insert((window, id), values);
        }
        self.made[&(window, id)]
    }
}
