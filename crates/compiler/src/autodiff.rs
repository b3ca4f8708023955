//! Reverse-mode differentiation of the graph, ahead of time. The node that gives `loss_sum` is the
//! root; every trained parameter gets the contributions of all its uses.
//! In a stage of a pipeline the gradients of what it hands on begin it, and those of what it was handed are results.
//!
//! What a gradient rule reads is what the forward pass keeps: nothing is declared to be saved.

use std::collections::{HashMap, HashSet};

use graph::{Graph, Node, Origin, ParameterId, Phase, ValueId};
use ops::{Append, Emit, GradientCall, Gradients, id};
use program::scalar;
use tensor::Attrs;

use crate::CompileError;
use crate::passes::stage::{GRADIENT, RECEIVED, RETURNED, SENT, named};

/// Appends the backward pass and its part of [`Graph::gradients`].
pub fn differentiate(graph: &mut Graph) -> Result<(), CompileError> {
    let root = graph.output(scalar::LOSS_SUM);
    let crossing = Crossing::of(graph);
    assert_eq!(root.is_none(), !crossing.sent.is_empty(), "the loss, or what is handed on, begins the backward pass");
    let needed = depends_on_trained(graph);
    let forward = graph.nodes.clone();
    let contributions = crossing.sent.iter().map(|(value, gradient)| (*value, vec![*gradient])).collect();
    let mut backward = Backward { contributions, gradients: Vec::new() };
    let mut append = Append::new(graph, Phase::Backward);
    for node in forward.iter().rev() {
        let is_root = root.is_some_and(|root| node.outputs.contains(&root));
        let wanted: Vec<bool> = node.inputs.iter().map(|id| needed[id.0 as usize]).collect();
        if !wanted.contains(&true) {
            continue;
        }
        append.place_like(node);
        let mut output_gradients: Vec<Option<ValueId>> =
            node.outputs.iter().map(|id| backward.total(*id, &mut append)).collect();
        if is_root {
            // The rule of the root takes its incoming gradient as 1 and reads no value for it.
            output_gradients[0] = root;
        }
        if output_gradients.iter().all(Option::is_none) {
            continue;
        }
        backward.step(node, &wanted, &output_gradients, &mut append)?;
    }
    let mut returned = Vec::new();
    for (number, value) in crossing.received.iter().enumerate() {
        let gradient = backward.total(*value, &mut append).ok_or_else(|| {
            let name = &append.graph.value(*value).name;
            CompileError::Model(format!("`{name}` has no gradient: nothing after it in this stage is differentiable"))
        })?;
        returned.push((named(RETURNED, number), gradient));
    }
    let nodes = std::mem::take(&mut append.nodes);
    graph.nodes.extend(nodes);
    graph.outputs.extend(returned);
    graph.gradients.extend(backward.gradients);
    untrained(graph)
}

/// The floating-point values that stages of a pipeline hand on. Their gradients go the other way.
struct Crossing {
    received: Vec<ValueId>,
    /// The values that are sent on, each with the input that is its gradient.
    sent: Vec<(ValueId, ValueId)>,
}

impl Crossing {
    /// Makes the gradients inputs. What is handed on is no result of a backward pass.
    fn of(graph: &mut Graph) -> Crossing {
        let float = |graph: &Graph, id: &ValueId| graph.value(*id).element.is_float();
        let received = graph.inputs.iter().copied().filter(|id| graph.value(*id).name.starts_with(RECEIVED));
        let received = received.filter(|id| float(graph, id)).collect();
        let sent = graph.outputs.iter().filter(|(name, id)| name.starts_with(SENT) && float(graph, id));
        let sent: Vec<ValueId> = sent.map(|(_, id)| *id).collect();
        graph.outputs.retain(|(name, _)| !name.starts_with(SENT));
        let gradient = |(number, id): (usize, ValueId)| {
            let of = graph.value(id).value_type();
            let gradient = graph.add_typed(&named(GRADIENT, number), &of, Origin::Input);
            graph.inputs.push(gradient);
            (id, gradient)
        };
        Crossing { received, sent: sent.into_iter().enumerate().map(gradient).collect() }
    }
}

struct Backward {
    /// Gradients that have arrived at a value so far.
    contributions: HashMap<ValueId, Vec<ValueId>>,
    gradients: Vec<(ParameterId, ValueId)>,
}

impl Backward {
    /// The sum of everything that has arrived. The latest comes first: fusion finds the addition right after the
    /// operation that made it.
    fn total(&mut self, id: ValueId, append: &mut Append<'_>) -> Option<ValueId> {
        let arrived = self.contributions.remove(&id)?;
        arrived.into_iter().reduce(|sum, next| append.emit(id::ADD, &[next, sum], Attrs::new())[0])
    }

    fn step(
        &mut self,
        node: &Node,
        wanted: &[bool],
        output_gradients: &[Option<ValueId>],
        append: &mut Append<'_>,
    ) -> Result<(), CompileError> {
        let op = ops::get(node.op);
        let gradients = op.gradient(&mut GradientCall { emit: append, node, output_gradients, wanted });
        let gradients = match gradients {
            Gradients::Inputs(gradients) => gradients,
            Gradients::NoGradient(reason) => {
                let place = node.at.as_deref().unwrap_or("the model");
                return Err(CompileError::Model(format!("{place}: `{}` has no gradient: {reason}", node.op)));
            }
        };
        assert_eq!(gradients.len(), node.inputs.len(), "`{}` must answer for each of its inputs", node.op);
        for ((input, gradient), wanted) in node.inputs.iter().zip(gradients).zip(wanted) {
            let (Some(gradient), true) = (gradient, wanted) else { continue };
            match append.graph.value(*input).origin {
                Origin::Parameter(id) => self.gradients.push((id, gradient)),
                Origin::Input | Origin::Node | Origin::Constant | Origin::State(_) => {
                    self.contributions.entry(*input).or_default().push(gradient)
                }
            }
        }
        Ok(())
    }
}

/// Returns for every value if a trained parameter flows into it.
pub(crate) fn depends_on_trained(graph: &Graph) -> Vec<bool> {
    let mut needed = vec![false; graph.values.len()];
    for parameter in graph.parameters.iter().filter(|p| p.trainable) {
        needed[parameter.value.0 as usize] = true;
    }
    // Layers of earlier stages are trained, too.
    for id in graph.inputs.iter().filter(|id| graph.value(**id).name.starts_with(RECEIVED)) {
        needed[id.0 as usize] = graph.value(*id).element.is_float();
    }
    for node in &graph.nodes {
        if node.inputs.iter().any(|id| needed[id.0 as usize]) {
            for id in &node.outputs {
                needed[id.0 as usize] = graph.value(*id).element.is_float();
            }
        }
    }
    needed
}

/// Refuses a graph with a trained parameter that the loss does not depend on: it would silently keep its value.
fn untrained(graph: &Graph) -> Result<(), CompileError> {
    let reached: HashSet<ParameterId> = graph.gradients.iter().map(|(parameter, _)| *parameter).collect();
    for (index, parameter) in graph.parameters.iter().enumerate() {
        if parameter.trainable && !reached.contains(&ParameterId(index as u32)) {
            return Err(CompileError::Model(format!("the loss does not depend on the parameter `{}`", parameter.name)));
        }
    }
    Ok(())
}
