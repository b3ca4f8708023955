//! The adapters in the type that matrices are multiplied in. All casts of adapter matrices of one
//! entry become one conversion of their arena: the results are in a buffer laid out like it.

use std::collections::HashSet;

use graph::{Graph, ValueId};
use ops::id;
use program::TensorRef;

use super::arena;
use super::place::{Placement, dtype_of};

/// The conversion, and the nodes that it replaces.
#[derive(Debug)]
pub(crate) struct Shadow {
    pub from: TensorRef,
    pub to: TensorRef,
    pub nodes: HashSet<usize>,
}

/// Finds the casts of adapter matrices and moves their results into the shadow buffer.
pub(crate) fn shadow_adapters(graph: &Graph, placement: &mut Placement) -> Option<Shadow> {
    let mut casts: Vec<(usize, TensorRef, ValueId)> = Vec::new();
    for (index, node) in graph.nodes.iter().enumerate().filter(|(_, node)| node.op == id::CAST) {
        let from = placement.get(node.inputs[0]).expect("every value was placed").clone();
        let result = placement.get(node.outputs[0]).expect("every value was placed");
        if from.arena == arena::ADAPTERS && from.is_dense() && placement.owns(result) {
            casts.push((index, from, node.outputs[0]));
        }
    }
    let dtype = dtype_of(graph, casts.first()?.2);
    if casts.iter().any(|(_, from, id)| dtype_of(graph, *id) != dtype || from.dtype != casts[0].1.dtype) {
        return None;
    }
    let size = casts[0].1.dtype.size();
    let start = casts.iter().map(|(_, from, _)| from.offset).min()?;
    let end = casts.iter().map(|(_, from, _)| from.offset + from.bytes()).max()?;
    let elements = (end - start) / size;
    let from = TensorRef::dense(arena::ADAPTERS, start, casts[0].1.dtype, [elements]);
    let to = placement.own_buffer(dtype, &[elements]);
    for (_, from, id) in &casts {
        let offset = to.offset + (from.offset - start) / size * dtype.size();
        placement.set(*id, TensorRef::dense(to.arena, offset, dtype, graph.value(*id).shape.clone()));
    }
    Some(Shadow { from, to, nodes: casts.into_iter().map(|(index, _, _)| index).collect() })
}
