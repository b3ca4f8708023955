//! Gives every value of a graph a place: views inside what they look at, parts inside what they
//! are joined to, gradients inside the gradient arena, everything else in a buffer of its own.
//!
//! A reverse walk hands places down from consumers (joins, gradients), a forward walk derives the
//! views. Where both claim a value, a copy is recorded.

use std::collections::HashMap;

use graph::{Graph, Node, Origin, ValueId};
use ops::{Class, id};
use program::{ArenaId, TensorRef};
use tensor::DType;

/// Places that are decided before: batch, constants, parameters, gradients, scalars.
pub(crate) type Fixed = HashMap<ValueId, TensorRef>;

/// A copy that a view needs, made when its node is reached.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Copied {
    pub from: TensorRef,
    pub to: TensorRef,
}

/// The arena number that stands for "a buffer of its own"; see [`Placement::buffers`].
const OWN: u32 = u32::MAX / 2;

/// Places of all values. Buffers are still without offsets: a tensor in buffer `i` has the arena
/// id `OWN + i` until [`Placement::resolve`].
#[derive(Debug)]
pub(crate) struct Placement {
    places: Vec<Option<TensorRef>>,
    /// The bytes of each buffer.
    pub buffers: Vec<usize>,
    /// The copies that views need, by node index.
    pub copies: HashMap<usize, Vec<Copied>>,
}

/// Places every value that the graph computes.
pub(crate) fn place(graph: &Graph, fixed: &Fixed) -> Placement {
    let mut placement =
        Placement { places: vec![None; graph.values.len()], buffers: Vec::new(), copies: HashMap::new() };
    for (id, tensor) in fixed {
        placement.places[id.0 as usize] = Some(tensor.clone());
    }
    let replaceable = replaceable(graph);
    for index in (0..graph.nodes.len()).rev() {
        placement.hand_down(graph, index);
        placement.hand_down_in_place(graph, &graph.nodes[index], &replaceable);
    }
    for (index, node) in graph.nodes.iter().enumerate() {
        placement.derive(graph, index, node);
    }
    placement
}

/// True for a node whose results are views of its inputs' memory.
pub(crate) fn is_view(node: &Node) -> bool {
    ops::get(node.op).class() == Class::View
}

/// Returns, for every value, if one node alone reads it and its memory.
fn replaceable(graph: &Graph) -> Vec<bool> {
    let mut replaceable: Vec<bool> = graph.use_counts().into_iter().map(|uses| uses == 1).collect();
    for id in graph.nodes.iter().filter(|node| is_view(node)).flat_map(|node| node.inputs.iter().chain(&node.outputs)) {
        replaceable[id.0 as usize] = false;
    }
    replaceable
}

/// True for views whose inputs are parts of the output.
fn joins(node: &Node) -> bool {
    [id::CONCAT, id::STACK].contains(&node.op)
}

impl Placement {
    /// The place of a value, if it has one.
    pub fn get(&self, id: ValueId) -> Option<&TensorRef> {
        self.places[id.0 as usize].as_ref()
    }

    /// The buffer that a value lies in, if it is one of its own.
    pub fn buffer_of(&self, tensor: &TensorRef) -> Option<usize> {
        (tensor.arena.0 >= OWN).then(|| (tensor.arena.0 - OWN) as usize)
    }

    /// The tensor with its final arena and offset.
    pub fn resolve(&self, tensor: &TensorRef, arena: ArenaId, offsets: &[usize]) -> TensorRef {
        match self.buffer_of(tensor) {
            None => tensor.clone(),
            Some(buffer) => TensorRef { arena, offset: tensor.offset + offsets[buffer], ..tensor.clone() },
        }
    }

    /// True for a value that fills a buffer of its own.
    pub fn owns(&self, tensor: &TensorRef) -> bool {
        self.buffer_of(tensor).is_some_and(|buffer| self.buffers[buffer] == tensor.bytes() && tensor.offset == 0)
    }

    pub fn own_buffer(&mut self, dtype: DType, shape: &[usize]) -> TensorRef {
        let tensor = TensorRef::dense(ArenaId(OWN + self.buffers.len() as u32), 0, dtype, shape);
        self.buffers.push(tensor.bytes());
        tensor
    }

    pub fn set(&mut self, id: ValueId, tensor: TensorRef) {
        self.places[id.0 as usize] = Some(tensor);
    }

    fn lies_at(&self, id: ValueId, place: &TensorRef) -> bool {
        self.get(id).is_some_and(|found| found.is_same_place(place))
    }

    fn hand_down(&mut self, graph: &Graph, index: usize) {
        let node = &graph.nodes[index];
        if ops::get(node.op).class() != Class::View {
            for id in &node.outputs {
                if self.get(*id).is_none() {
                    let value = graph.value(*id);
                    let tensor = self.own_buffer(dtype_of(graph, *id), &value.shape);
                    self.set(*id, tensor);
                }
            }
        } else if joins(node) {
            self.hand_down_join(graph, index);
        } else {
            self.hand_down_view(graph, node);
        }
    }

    /// An input that only this operation reads lies where the result that may replace it will lie.
    fn hand_down_in_place(&mut self, graph: &Graph, node: &Node, replaceable: &[bool]) {
        let Some((input, output)) = ops::get(node.op).in_place() else { return };
        let (id, place) = (node.inputs[input], self.get(node.outputs[output]).expect("results have places").clone());
        let alike = graph.value(id).shape == place.shape && dtype_of(graph, id) == place.dtype;
        let free = self.get(id).is_none() && graph.is_computed(id) && replaceable[id.0 as usize];
        if alike && free && self.owns(&place) {
            self.set(id, place);
        }
    }

    fn hand_down_join(&mut self, graph: &Graph, index: usize) {
        let node = &graph.nodes[index];
        let whole = match self.get(node.outputs[0]) {
            Some(place) => place.clone(),
            None => {
                let shape = &graph.value(node.outputs[0]).shape;
                let dtype = dtype_of(graph, node.outputs[0]);
                let stored = self.stored_whole(graph, node, shape, dtype);
                stored.unwrap_or_else(|| self.own_buffer(dtype, shape))
            }
        };
        self.set(node.outputs[0], whole.clone());
        for (input, part) in node.inputs.iter().zip(parts(graph, node, &whole)) {
            if self.get(*input).is_none() && graph.is_computed(*input) {
                self.set(*input, part);
            }
        }
    }

    /// The place of joined parameters that are already contiguous.
    fn stored_whole(&self, graph: &Graph, node: &Node, shape: &[usize], dtype: DType) -> Option<TensorRef> {
        let first = self.get(node.inputs[0])?;
        let whole = TensorRef::dense(first.arena, first.offset, dtype, shape);
        let fits = node.inputs.iter().zip(parts(graph, node, &whole)).all(|(id, part)| self.lies_at(*id, &part));
        fits.then_some(whole)
    }

    /// Gives the input of a view a place from the places of its results, if one layout of the input has all of them
    /// there.
    fn hand_down_view(&mut self, graph: &Graph, node: &Node) {
        let input = node.inputs[0];
        if self.get(input).is_some() || !graph.is_computed(input) {
            return;
        }
        let Some(first) = self.get(node.outputs[0]).cloned() else { return };
        let shape = &graph.value(input).shape;
        let candidate = match node.outputs.len() {
            1 => first.reshape(shape),
            _ => Some(TensorRef::dense(first.arena, first.offset, first.dtype, shape.clone())),
        };
        let Some(candidate) = candidate else { return };
        let derived = ops::get(node.op).alias(std::slice::from_ref(&candidate), &node.attrs);
        if node.outputs.iter().zip(&derived).all(|(id, t)| self.lies_at(*id, t)) {
            self.set(input, candidate);
        }
    }

    fn derive(&mut self, graph: &Graph, index: usize, node: &Node) {
        if ops::get(node.op).class() != Class::View {
            return;
        }
        let mut copies = Vec::new();
        if joins(node) {
            let whole = self.get(node.outputs[0]).expect("joins were placed on the way down").clone();
            for (input, part) in node.inputs.iter().zip(parts(graph, node, &whole)) {
                let place = self.get(*input).expect("inputs are placed before their use");
                if !place.is_same_place(&part) {
                    copies.push(Copied { from: place.clone(), to: part });
                }
            }
        } else {
            let input = self.get(node.inputs[0]).expect("inputs are placed before their use").clone();
            let derived = ops::get(node.op).alias(std::slice::from_ref(&input), &node.attrs);
            if derived.is_empty() {
                copies.push(self.gathered(graph, node, input));
            }
            for (id, tensor) in node.outputs.iter().zip(derived) {
                match self.get(*id) {
                    None => self.set(*id, tensor),
                    Some(place) if place.is_same_place(&tensor) => {}
                    Some(place) => copies.push(Copied { from: tensor, to: place.clone() }),
                }
            }
        }
        if !copies.is_empty() {
            self.copies.insert(index, copies);
        }
    }

    /// Returns the copy for a view that cannot view its input where that lies: into a place whose view is the result.
    fn gathered(&mut self, graph: &Graph, node: &Node, from: TensorRef) -> Copied {
        let id = node.outputs[0];
        let place = match self.get(id) {
            Some(place) => place.clone(),
            None => self.own_buffer(dtype_of(graph, id), &graph.value(id).shape),
        };
        self.set(id, place.clone());
        let to = parts(graph, node, &place).pop().expect("a view of a dense result has a look at its input");
        Copied { from, to }
    }
}

fn parts(graph: &Graph, node: &Node, whole: &TensorRef) -> Vec<TensorRef> {
    let shapes: Vec<Vec<usize>> = node.inputs.iter().map(|id| graph.value(*id).shape.clone()).collect();
    ops::get(node.op).parts(whole, &shapes, &node.attrs)
}

/// The concrete element type; the recipe has decided all of them.
pub(crate) fn dtype_of(graph: &Graph, id: ValueId) -> DType {
    match graph.value(id).element {
        graph::Element::Fixed(dtype) => dtype,
        graph::Element::Float => match graph.value(id).origin {
            Origin::Parameter(p) => match graph.parameter(p).storage {
                tensor::Storage::Plain(dtype) => dtype,
                tensor::Storage::Packed(_) => DType::U8,
            },
            _ => panic!("the recipe left the type of `{}` open", graph.value(id).name),
        },
    }
}
