//! Gives the biases that experts are chosen by a value that their update reads in the place of a gradient: the excess
//! of each expert's load over an even one. It is summed over micro-steps and ranks as gradients are.
//!
//! Knows the operations that route tokens and count choices; not how the biases are updated.

use graph::{Graph, ParameterId, Phase, ValueId};
use ops::{Append, Emit, id};
use tensor::Attrs;

use crate::CompileError;

pub fn run(graph: &mut Graph) -> Result<(), CompileError> {
    let trained = graph.parameters.iter().enumerate().filter(|(_, parameter)| parameter.buffer && parameter.trainable);
    let biases: Vec<(ParameterId, ValueId)> =
        trained.map(|(index, parameter)| (ParameterId(index as u32), parameter.value)).collect();
    for (parameter, bias) in biases {
        let load = load_of(graph, bias).ok_or_else(|| {
            let name = &graph.parameter(parameter).name;
            CompileError::Model(format!("`{name}` is to even out loads, but no router whose load is counted reads it"))
        })?;
        let mut append = Append::new(graph, Phase::Backward);
        append.place_like(&append.graph.nodes[load].clone());
        let counted = append.graph.nodes[load].outputs[0];
        let excess = append.emit(id::LOAD_EXCESS, &[counted], Attrs::new())[0];
        let made = append.nodes;
        graph.nodes.extend(made);
        graph.gradients.push((parameter, excess));
    }
    Ok(())
}

/// The node that counts the choices that are made with a bias.
fn load_of(graph: &Graph, bias: ValueId) -> Option<usize> {
    let router = graph.nodes.iter().find(|node| node.op == id::ROUTE && node.inputs.get(1) == Some(&bias))?;
    let index = router.outputs[1];
    graph.nodes.iter().position(|node| node.op == id::EXPERT_LOAD && node.inputs[1] == index)
}
