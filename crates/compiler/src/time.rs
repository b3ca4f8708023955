//! How long the nodes of a graph are expected to take, before anything is placed.

use graph::{Graph, Node, Phase};
use ops::Class;
use program::{
    Arch, ArenaId, Cost, Extents, Machine, Realisation, Seen, TensorRef, Work, arithmetic_of, expected_times,
};
use tensor::DType;

use crate::memory::dtype_of;

/// Seconds of all nodes, one after the other.
pub(crate) fn seconds(graph: &Graph, machine: &Machine) -> f64 {
    graph.nodes.iter().map(|node| node_seconds(graph, node, machine)).sum()
}

/// Seconds of one node.
pub(crate) fn node_seconds(graph: &Graph, node: &Node, machine: &Machine) -> f64 {
    let op = ops::get(node.op);
    if op.class() == Class::View {
        return 0.0;
    }
    let dense =
        |id: &graph::ValueId| TensorRef::dense(ArenaId(0), 0, dtype_of(graph, *id), graph.value(*id).shape.clone());
    let inputs: Vec<TensorRef> = node.inputs.iter().map(dense).collect();
    let outputs: Vec<TensorRef> = node.outputs.iter().map(dense).collect();
    let cost = op.cost(&inputs, &outputs, &node.attrs);
    // As of the instructions that it becomes: in the type of the first factor.
    let dtype = inputs.first().map(|of| of.dtype);
    let work = match op.class() {
        Class::Matmul => Work::Product { cost, dtype, extents: extents(cost, &outputs[0]), launches: 1, extra: 0.0 },
        Class::Attention if inputs[0].shape.len() == 4 => {
            let halves = matches!(inputs[0].dtype, DType::BF16 | DType::F16);
            let by = if halves { on_matrix_units(machine) } else { Realisation::Scalar };
            Work::attention(cost, [&inputs[0], &inputs[1]], node.phase == Phase::Backward, by, Seen::default())
        }
        _ => {
            let dtype = arithmetic_of(op.name(), dtype);
            Work::Kernel { cost, dtype, launches: 1, blocks: None, left: 0.0 }
        }
    };
    expected_times(&work, machine).seconds()
}

/// The product that makes so many results at this cost.
fn extents(cost: Cost, output: &TensorRef) -> Extents {
    let n = output.shape.last().copied().unwrap_or(1).max(1);
    let m = (output.len() / n).max(1);
    let k = (cost.flops / (2.0 * (m * n) as f64)).round().max(1.0) as usize;
    Extents { batch: 1, m, n, k }
}

/// Who computes attention in bf16 there, before it is chosen: the order of magnitude.
fn on_matrix_units(machine: &Machine) -> Realisation {
    match machine.arch {
        Arch::Cpu => Realisation::Scalar,
        arch if arch.is_hopper() => Realisation::Hopper,
        Arch::Cuda(_) => Realisation::Portable,
    }
}
