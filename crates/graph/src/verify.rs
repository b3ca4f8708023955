//! The structure verifier: what must hold of any graph, whatever its operations mean.

use crate::flat::{Graph, Origin, ValueId};

/// Checks ids, single assignment, definition before use, and the tables' cross references. The
/// error says which node breaks which rule.
pub fn verify(graph: &Graph) -> Result<(), String> {
    let mut defined = vec![false; graph.values.len()];
    for (index, value) in graph.values.iter().enumerate() {
        match value.origin {
            Origin::Input => {
                if !graph.inputs.contains(&ValueId(index as u32)) {
                    return Err(format!("value `{}` is an input that the input list does not name", value.name));
                }
                defined[index] = true;
            }
            Origin::Parameter(id) => {
                let parameter = graph.parameters.get(id.0 as usize);
                if parameter.is_none_or(|p| p.value != ValueId(index as u32)) {
                    return Err(format!("value `{}` names a parameter row that is not its own", value.name));
                }
                defined[index] = true;
            }
            Origin::Constant => {
                let contents = graph.constants.iter().find(|(id, _)| id.0 as usize == index);
                if contents.is_none_or(|(_, tensor)| tensor.shape != value.shape) {
                    return Err(format!("constant `{}` has no contents of its shape", value.name));
                }
                defined[index] = true;
            }
            Origin::State(id) => {
                if graph.states.get(id.0 as usize) != Some(&ValueId(index as u32)) {
                    return Err(format!("value `{}` is a state that the list of states does not name", value.name));
                }
                defined[index] = true;
            }
            Origin::Node => {}
        }
    }
    for (index, node) in graph.nodes.iter().enumerate() {
        for input in &node.inputs {
            match defined.get(input.0 as usize) {
                Some(true) => {}
                Some(false) => {
                    let name = &graph.value(*input).name;
                    return Err(format!("node {index} ({}) reads `{name}` before it is computed", node.op));
                }
                None => return Err(format!("node {index} ({}) reads value {} of {}", node.op, input.0, defined.len())),
            }
        }
        for output in &node.outputs {
            let slot = defined.get_mut(output.0 as usize);
            let slot = slot.ok_or_else(|| format!("node {index} ({}) writes an unknown value", node.op))?;
            if std::mem::replace(slot, true) {
                let name = &graph.value(*output).name;
                return Err(format!("node {index} ({}) writes `{name}`, which is already written", node.op));
            }
        }
    }
    let results = graph.outputs.iter().map(|(name, id)| (name.as_str(), *id));
    let gradients = graph.gradients.iter().map(|(p, id)| (graph.parameter(*p).name.as_str(), *id));
    for (name, id) in results.chain(gradients) {
        if defined.get(id.0 as usize) != Some(&true) {
            return Err(format!("result `{name}` is never computed"));
        }
    }
    for (id, state) in &graph.stored {
        let (value, state) = (graph.value(*id), graph.state(*state));
        if defined.get(id.0 as usize) != Some(&true) || value.shape != state.shape {
            return Err(format!(
                "`{}` is not computed, or has not the shape of the state `{}`",
                value.name, state.name
            ));
        }
    }
    for (parameter, id) in &graph.gradients {
        let (wanted, found) = (&graph.parameter(*parameter).shape, &graph.value(*id).shape);
        if wanted.iter().product::<usize>() != found.iter().product::<usize>() {
            let name = &graph.parameter(*parameter).name;
            return Err(format!("the gradient of `{name}` has shape {found:?}, the parameter {wanted:?}"));
        }
    }
    Ok(())
}
