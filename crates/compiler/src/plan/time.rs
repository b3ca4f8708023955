//! How long the nodes of a graph take at the machine's ceilings, before anything is placed.

use graph::{Graph, Node};
use ops::Class;
use program::{ArenaId, Cost, Machine, TensorRef};
use tensor::DType;

use crate::memory::dtype_of;

/// Seconds of all nodes, one after the other.
pub(super) fn seconds(graph: &Graph, machine: &Machine) -> f64 {
    graph.nodes.iter().map(|node| node_seconds(graph, node, machine)).sum()
}

/// Seconds of one node: the longer of its arithmetic and its traffic.
pub(super) fn node_seconds(graph: &Graph, node: &Node, machine: &Machine) -> f64 {
    let op = ops::find(&node.op).expect("the verifier knows every operation");
    if op.class() == Class::View {
        return 0.0;
    }
    let dense =
        |id: &graph::ValueId| TensorRef::dense(ArenaId(0), 0, dtype_of(graph, *id), graph.value(*id).shape.clone());
    let inputs: Vec<TensorRef> = node.inputs.iter().map(dense).collect();
    let outputs: Vec<TensorRef> = node.outputs.iter().map(dense).collect();
    let Cost { flops, bytes } = op.cost(&inputs, &outputs, &node.attrs);
    let halves = matches!(op.class(), Class::Matmul | Class::Attention) && inputs[0].dtype == DType::BF16;
    let rate = if halves { machine.bf16_flops } else { machine.f32_flops };
    (flops / rate).max(bytes / machine.bandwidth)
}
