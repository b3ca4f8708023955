//! Evaluates operations without inputs while compiling; their results become constants.

use graph::{Graph, Origin};
use ops::Class;
use ops::evaluate::{Array, apply};
use tensor::HostTensor;

use crate::CompileError;

pub fn run(graph: &mut Graph) -> Result<(), CompileError> {
    for node in std::mem::take(&mut graph.nodes) {
        let op = ops::get(node.op);
        if op.class() != Class::Constant {
            graph.nodes.push(node);
            continue;
        }
        let mut results: Vec<(Vec<usize>, Array<f32>)> = node
            .outputs
            .iter()
            .map(|id| {
                let shape = graph.value(*id).shape.clone();
                let len = shape.iter().product();
                (shape, Array::Real(vec![0.0; len]))
            })
            .collect();
        apply(op, &node.attrs, &[], &mut results);
        for (id, (shape, array)) in node.outputs.iter().zip(results) {
            graph.value_mut(*id).origin = Origin::Constant;
            graph.constants.push((*id, HostTensor::from_f32(shape, array.real())));
        }
    }
    Ok(())
}
