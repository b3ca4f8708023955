//! How long the nodes of a graph are expected to take, before anything is placed.

use graph::{Graph, Node, Phase};
use ops::Class;
use program::{ArenaId, Machine, TensorRef, Work, expected};
use tensor::DType;

use crate::memory::dtype_of;

/// Seconds of all nodes, one after the other.
pub(super) fn seconds(graph: &Graph, machine: &Machine) -> f64 {
    graph.nodes.iter().map(|node| node_seconds(graph, node, machine)).sum()
}

/// Seconds of one node.
pub(crate) fn node_seconds(graph: &Graph, node: &Node, machine: &Machine) -> f64 {
    let op = ops::find(&node.op).expect("the verifier knows every operation");
    let work = match (op.class(), node.phase) {
        (Class::View, _) => return 0.0,
        (Class::Matmul, _) => Work::Product { launches: 1, extra: 0.0 },
        (Class::Attention, phase) => Work::Attention { backward: phase == Phase::Backward, filled: 1.0 },
        _ => Work::Kernel { launches: 1 },
    };
    let dense =
        |id: &graph::ValueId| TensorRef::dense(ArenaId(0), 0, dtype_of(graph, *id), graph.value(*id).shape.clone());
    let inputs: Vec<TensorRef> = node.inputs.iter().map(dense).collect();
    let outputs: Vec<TensorRef> = node.outputs.iter().map(dense).collect();
    let cost = op.cost(&inputs, &outputs, &node.attrs);
    let halves = matches!(op.class(), Class::Matmul | Class::Attention) && inputs[0].dtype == DType::BF16;
    expected(work, cost, halves.then_some(DType::BF16), machine)
}
