//! Codes of eight bits in the kernels that give their tensors: what is quantized after an operation on rows or elements
//! is written as a form next to it, so that both are joined like other neighbours. A pass of its own remains where
//! nothing of that kind gives the tensor: what attention gives, gradients of heads after their rotation, what a product
//! gives; and where tensors of several kernels share a power of two.
//!
//! Codes side by side come from tensors side by side. Transposed codes are made from the codes: a row has no part of 16
//! rows. Does not know recipes.

use std::collections::HashMap;

use graph::{Element, Graph, Node, ValueId};
use ops::id;
use ops::rowwise::{Extent, form_of, quantising};
use tensor::{Attrs, DType};

use crate::CompileError;

/// Rewrites every such call, and puts the form right after the node that gives the tensor.
pub fn run(graph: &mut Graph) -> Result<(), CompileError> {
    let (uses, producers) = (graph.use_counts(), graph.producers());
    let mut after: HashMap<usize, Vec<Node>> = HashMap::new();
    let mut instead: HashMap<usize, Option<Node>> = HashMap::new();
    for index in 0..graph.nodes.len() {
        let Some(found) = Found::at(graph, &uses, &producers, index) else { continue };
        let (place, nodes) = found.form(graph);
        after.entry(place).or_default().extend(nodes);
        instead.insert(found.amax, None);
        instead.insert(index, found.transposed(graph));
        if let Some(joint) = found.joint.filter(|joint| uses[graph.nodes[*joint].outputs[0].0 as usize] == 2) {
            // Only the two calls read the tensors side by side.
            instead.insert(joint, None);
        }
    }
    let nodes = std::mem::take(&mut graph.nodes);
    for (index, node) in nodes.into_iter().enumerate() {
        graph.nodes.extend(instead.remove(&index).unwrap_or(Some(node)));
        graph.nodes.extend(after.remove(&index).unwrap_or_default());
    }
    Ok(())
}

/// A call of `quantise` whose tensor a form gives.
struct Found {
    quantise: usize,
    /// The call that finds the tensor's own magnitude.
    amax: usize,
    producer: usize,
    /// The view that puts tensors side by side.
    joint: Option<usize>,
    /// The results of the producer that are quantised.
    tensors: Vec<ValueId>,
}

impl Found {
    fn at(graph: &Graph, uses: &[usize], producers: &[Option<usize>], quantise: usize) -> Option<Found> {
        let node = Some(&graph.nodes[quantise]).filter(|node| node.op == id::QUANTISE)?;
        let [x, parts, factor] = node.inputs[..] else { return None };
        let amax = producers[parts.0 as usize]?;
        if graph.nodes[amax].inputs != [factor, x] || uses[parts.0 as usize] != 1 {
            return None;
        }
        let of_x = producers[x.0 as usize]?;
        let joint = (graph.nodes[of_x].op == id::CONCAT).then_some(of_x);
        let tensors = joint.map_or_else(|| vec![x], |joint| graph.nodes[joint].inputs.clone());
        let producer = producers[tensors[0].0 as usize]?;
        let form = form_of(&graph.nodes[producer]).filter(|_| graph.nodes[producer].phase == node.phase)?;
        let results = &graph.nodes[producer].outputs;
        let given = |id: &ValueId| {
            let place = results.iter().position(|result| result == id);
            let alike = graph.value(*id).shape == graph.value(tensors[0]).shape;
            place.is_some_and(|place| alike && form.results[place].0 == Extent::Element)
        };
        tensors.iter().all(given).then_some(Found { quantise, amax, producer, joint, tensors })
    }

    /// Returns the form with a view of its codes side by side, and the node that they come after.
    fn form(&self, graph: &mut Graph) -> (usize, Vec<Node>) {
        let node = graph.nodes[self.quantise].clone();
        let format: DType = node.attrs.text("format").ok().and_then(|name| name.parse().ok()).expect("a checked call");
        let top = node.attrs.int("top").expect("a checked call") as i32;
        let record = node.attrs.flag("record").expect("a checked call");
        let mut codes = vec![node.outputs[0]];
        let mut views = Vec::new();
        if let Some(joint) = self.joint {
            codes = self.tensors.iter().map(|id| self.codes_like(graph, *id, format)).collect();
            views.push(Node { inputs: codes.clone(), outputs: vec![node.outputs[0]], ..graph.nodes[joint].clone() });
        }
        let count = node.attrs.flag("count").expect("a checked call");
        let transposed = node.attrs.flag("transposed").expect("a checked call");
        let kept = &node.outputs[2 + usize::from(transposed)..];
        let form = Node {
            op: id::ROWWISE,
            inputs: self.tensors.iter().copied().chain([node.inputs[2]]).collect(),
            outputs: codes.into_iter().chain([node.outputs[1]]).chain(kept.iter().copied()).collect(),
            attrs: quantising(self.tensors.len(), format, top, record, count),
            ..graph.nodes[self.producer].clone()
        };
        (self.producer, [form].into_iter().chain(views).collect())
    }

    fn codes_like(&self, graph: &mut Graph, id: ValueId, format: DType) -> ValueId {
        let mut value = graph.value(id).clone();
        value.element = Element::Fixed(format);
        graph.add(value)
    }

    /// Returns the node that replaces the call: a transposition of its codes, if one was requested.
    fn transposed(&self, graph: &Graph) -> Option<Node> {
        let node = &graph.nodes[self.quantise];
        let transposed = node.attrs.flag("transposed").expect("a checked call").then(|| node.outputs[2])?;
        Some(Node {
            op: id::TRANSPOSE_CODES,
            inputs: vec![node.outputs[0]],
            outputs: vec![transposed],
            attrs: Attrs::new(),
            ..node.clone()
        })
    }
}
