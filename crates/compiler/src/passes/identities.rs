//! Removes operations that give what they take: their readers read the input instead.

use std::collections::HashMap;

use graph::{Graph, ValueId};

use crate::CompileError;

pub fn run(graph: &mut Graph) -> Result<(), CompileError> {
    let mut same: HashMap<ValueId, ValueId> = HashMap::new();
    let nodes = std::mem::take(&mut graph.nodes);
    for mut node in nodes {
        for input in &mut node.inputs {
            *input = same.get(input).copied().unwrap_or(*input);
        }
        match ops::find(&node.op).is_some_and(|op| op.unchanged(&node.attrs)) {
            true => drop(same.insert(node.outputs[0], node.inputs[0])),
            false => graph.nodes.push(node),
        }
    }
    for (_, value) in &mut graph.outputs {
        *value = same.get(value).copied().unwrap_or(*value);
    }
    Ok(())
}
