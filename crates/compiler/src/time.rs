//! The expected times of the nodes of a graph, before anything is placed: each on dense tensors.

use graph::{Graph, Node};
use ops::{Class, LowerCall};
use program::{ArenaId, Cost, Documents, Extents, Machine, Seen, TensorRef, Work, expected_times};

use crate::memory::dtype_of;

/// Seconds of all nodes, one after the other.
pub(crate) fn seconds(graph: &Graph, documents: Documents, machine: &Machine) -> f64 {
    graph.nodes.iter().map(|node| node_seconds(graph, node, documents, machine)).sum()
}

/// Returns the expected seconds of one node.
pub(crate) fn node_seconds(graph: &Graph, node: &Node, documents: Documents, machine: &Machine) -> f64 {
    let op = ops::get(node.op);
    if op.class() == Class::View {
        return 0.0;
    }
    let dense =
        |id: &graph::ValueId| TensorRef::dense(ArenaId(0), 0, dtype_of(graph, *id), graph.value(*id).shape.clone());
    let inputs: Vec<TensorRef> = node.inputs.iter().map(dense).collect();
    let outputs: Vec<TensorRef> = node.outputs.iter().map(dense).collect();
    let cost = op.cost(&inputs, &outputs, &node.attrs);
    let work = match op.class() {
        Class::Matmul => {
            let dtype = inputs.first().map(|of| of.dtype);
            Work::Product { cost, dtype, extents: extents(cost, &outputs[0]), launches: 1, extra: 0.0 }
        }
        _ => {
            let call = LowerCall { inputs: &inputs, outputs: &outputs, attrs: &node.attrs, machine, documents };
            Work::of_operation(cost, op.arithmetic(&call), [&inputs, &outputs], Seen::default())
        }
    };
    expected_times(&work, machine).seconds()
}

/// Returns the extents of the product that gives a result of this size at this cost.
fn extents(cost: Cost, output: &TensorRef) -> Extents {
    let n = output.shape.last().copied().unwrap_or(1).max(1);
    let m = (output.len() / n).max(1);
    let k = (cost.flops / (2.0 * (m * n) as f64)).round().max(1.0) as usize;
    Extents { batch: 1, m, n, k }
}
