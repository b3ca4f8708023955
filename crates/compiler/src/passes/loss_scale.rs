//! Multiplies the loss by the scale of the step, where gradients are stored in f16: small ones would vanish. The loss
//! that is reported stays as it is; only what the backward pass begins with is multiplied.
//!
//! Knows that a loss is a weighted sum; not who decides the scale.

use graph::{Element, Graph, Phase};
use ops::{Append, Emit, id};
use program::scalar;
use tensor::Attrs;

use crate::{CompileError, CompileOptions};

pub fn run(graph: &mut Graph, options: &CompileOptions) -> Result<(), CompileError> {
    if !options.scales_loss() {
        return Ok(());
    }
    let root = graph.output(scalar::LOSS_SUM).expect("the results pass checks for the loss");
    let producer = graph.producers()[root.0 as usize].expect("the loss is computed");
    let node = &graph.nodes[producer];
    assert!(node.op == id::WEIGHTED_SUM, "differentiation starts at a weighted sum");
    let weights = node.inputs[1];
    let scale = graph.add_input(scalar::LOSS_SCALE, Element::F32, vec![1]);
    // In the forward pass: a loss that is computed together with its gradient needs it there.
    let mut append = Append::new(graph, Phase::Forward);
    let scaled = append.emit(id::SCALED_WEIGHTS, &[weights, scale], Attrs::new())[0];
    let made = append.nodes;
    for node in graph.nodes.iter_mut().filter(|node| node.phase == Phase::Backward) {
        node.inputs.iter_mut().filter(|id| **id == weights).for_each(|id| *id = scaled);
    }
    let place = graph.producers()[weights.0 as usize].map_or(0, |index| index + 1);
    graph.nodes.splice(place..place, made);
    Ok(())
}
