//! Values of packed weights: a layer's are made right before its first product reads them, once for the forward pass
//! and once for the backward pass, which shares them with what it recomputes. Where they lie is the memory of values
//! between operations, so those of one layer take the place of those of the one before. A recipe that makes codes of
//! its own from them reads them once, where these are made. Contiguous matrices of the same form, such as those of
//! experts, are made at once.

use std::collections::HashMap;

use graph::{Element, Graph, Layer, Node, Origin, ParameterId, Phase, Value, ValueId};
use ops::dequantise::{attributes, of_members};
use ops::{Append, Emit, id};
use tensor::storage::Packing;
use tensor::{Attrs, DType, Storage};

use crate::memory::{ALIGNMENT_ELEMENTS, is_view};

/// A part of a step in which values are made once.
type Window = (Option<Layer>, bool);

/// A weight that is in codes.
#[derive(Clone)]
struct Codes {
    value: ValueId,
    packing: Packing,
    /// Its place in a group of contiguous weights, if it is in one: `graph::Parameter::merge_group`.
    place: Option<(u32, u32)>,
}

/// Makes the values of packed weights that nodes read.
pub fn dequantise(graph: &mut Graph) {
    let mut packed = HashMap::new();
    for index in 0..graph.parameters.len() {
        let Storage::Packed(packing) = graph.parameters[index].storage else { continue };
        let parameter = &graph.parameters[index];
        let (name, bytes, values) = (parameter.name.clone(), packing.bytes(&parameter.shape), parameter.value);
        let (id, place) = (ParameterId(index as u32), parameter.merge_group);
        let value = graph.add_value(&name, Element::Fixed(DType::U8), vec![bytes], Origin::Parameter(id));
        graph.parameters[index].value = value;
        graph.value_mut(values).origin = Origin::Node;
        packed.insert(values, Codes { value, packing, place });
    }
    if packed.is_empty() {
        return;
    }
    let (nodes, prepared) = (std::mem::take(&mut graph.nodes), std::mem::take(&mut graph.prepared));
    graph.nodes = rewritten(graph, &packed, nodes);
    graph.prepared = rewritten(graph, &packed, prepared);
}

/// Returns a self-contained list of nodes, together with those that make the values it reads.
fn rewritten(graph: &mut Graph, packed: &HashMap<ValueId, Codes>, nodes: Vec<Node>) -> Vec<Node> {
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
            if made.is_transposed(input) {
                read_transposed(&mut node);
            }
        }
        result.push(node);
    }
    result
}

/// Makes a product read the transposes of its matrices.
fn read_transposed(node: &mut Node) {
    assert_eq!(node.op, id::GROUPED_LINEAR, "nothing else reads matrices whose codes are those of the transposes");
    let transposed = node.attrs.flag("transposed").expect("checked by the shape rule");
    node.attrs = node.attrs.clone().with("transposed", !transposed);
}

struct Made<'a> {
    graph: &'a mut Graph,
    /// The packed weights, by the values that stood for them.
    packed: &'a HashMap<ValueId, Codes>,
    /// Views of packed weights, by their results.
    views: HashMap<ValueId, Node>,
    made: HashMap<(Window, ValueId), ValueId>,
}

impl Made<'_> {
    fn is_weight(&self, id: ValueId) -> bool {
        self.packed.contains_key(&id) || self.views.contains_key(&id)
    }

    /// True if the values that are made of a weight are those of its matrices' transposes.
    fn is_transposed(&self, id: ValueId) -> bool {
        self.packed.get(&id).is_some_and(|of| of.packing.transposed)
    }

    /// Returns the value that a node reads instead of a packed weight or a view of some; makes it where the node's
    /// window has none yet.
    fn value(&mut self, id: ValueId, reader: &Node, result: &mut Vec<Node>) -> ValueId {
        if !self.is_weight(id) {
            return id;
        }
        let window = (reader.layer, reader.phase != Phase::Forward);
        if let Some(known) = self.made.get(&(window, id)) {
            return *known;
        }
        match self.views.get(&id).cloned() {
            Some(view) => match self.members(&view) {
                Some(members) => self.make_members(&view, &members, reader, result),
                None => {
                    let inputs = view.inputs.iter().map(|input| self.value(*input, reader, result)).collect();
                    let outputs: Vec<ValueId> =
                        view.outputs.iter().map(|id| self.graph.add(self.graph.value(*id).clone())).collect();
                    self.made.extend(view.outputs.iter().map(|id| (window, *id)).zip(outputs.iter().copied()));
                    result.push(Node { inputs, outputs, phase: reader.phase, ..view });
                }
            },
            None => {
                let Codes { value, packing, .. } = self.packed[&id].clone();
                let shape = packing.in_memory(&self.graph.value(id).shape);
                let attrs = attributes(packing.plain(), &shape);
                self.make(id, value, attrs, reader, result);
            }
        }
        self.made[&(window, id)]
    }

    /// Makes the values of `id` from its codes.
    fn make(&mut self, id: ValueId, codes: ValueId, attrs: Attrs, reader: &Node, result: &mut Vec<Node>) {
        let value = self.graph.value(id).clone();
        let mut append = Append::new(self.graph, reader.phase);
        append.place_like(reader);
        let values = append.emit(id::DEQUANTISE, &[codes], attrs)[0];
        result.append(&mut append.nodes);
        let shape = self.graph.value(values).shape.clone();
        *self.graph.value_mut(values) = Value { shape, ..value };
        self.made.insert(((reader.layer, reader.phase != Phase::Forward), id), values);
    }

    /// The weights of a stack, if they are contiguous in its order, alike in form and shape.
    fn members(&self, view: &Node) -> Option<Vec<Codes>> {
        let is_stack = view.op == id::STACK && view.attrs.optional_int("axis").ok()?.unwrap_or(0) == 0;
        let members: Vec<Codes> = view.inputs.iter().map(|id| self.packed.get(id).cloned()).collect::<Option<_>>()?;
        let shape = |id: &ValueId| &self.graph.value(*id).shape;
        let (first, first_shape) = (members.first()?, shape(view.inputs.first()?));
        let (group, start) = first.place?;
        let follows = |(number, of): (usize, &Codes)| {
            of.place == Some((group, start + number as u32)) && of.packing == first.packing
        };
        let alike = members.iter().enumerate().all(follows) && view.inputs.iter().all(|id| shape(id) == first_shape);
        let whole = first_shape.iter().product::<usize>().is_multiple_of(ALIGNMENT_ELEMENTS);
        (is_stack && alike && whole && members.len() > 1 && !first.packing.transposed).then_some(members)
    }

    /// Makes the values of a stack of packed weights.
    fn make_members(&mut self, view: &Node, members: &[Codes], reader: &Node, result: &mut Vec<Node>) {
        let shape = self.graph.value(view.inputs[0]).shape.clone();
        let mut append = Append::new(self.graph, reader.phase);
        append.place_like(reader);
        let codes: Vec<ValueId> = members.iter().map(|of| of.value).collect();
        let codes = append.emit(id::STACK, &codes, Attrs::new())[0];
        result.append(&mut append.nodes);
        let attrs = of_members(members[0].packing, &shape, members.len());
        self.make(view.outputs[0], codes, attrs, reader, result);
    }
}
