//! Computes equal things once: a node with the same operation, inputs and attributes as an earlier
//! one is replaced by it.

use std::collections::HashMap;

use graph::{Graph, OpId, ValueId};

use crate::CompileError;

pub fn run(graph: &mut Graph) -> Result<(), CompileError> {
    let mut seen: HashMap<(OpId, Vec<ValueId>, String), Vec<ValueId>> = HashMap::new();
    let mut replacement: HashMap<ValueId, ValueId> = HashMap::new();
    let mut kept = Vec::with_capacity(graph.nodes.len());
    for mut node in std::mem::take(&mut graph.nodes) {
        replace(&mut node.inputs, &replacement);
        let key = (node.op, node.inputs.clone(), node.attrs.to_string());
        match seen.get(&key) {
            Some(earlier) => replacement.extend(node.outputs.iter().copied().zip(earlier.iter().copied())),
            None => {
                seen.insert(key, node.outputs.clone());
                kept.push(node);
            }
        }
    }
    graph.nodes = kept;
    for (_, id) in graph.outputs.iter_mut() {
        *id = *replacement.get(id).unwrap_or(id);
    }
    for (_, id) in graph.gradients.iter_mut() {
        *id = *replacement.get(id).unwrap_or(id);
    }
    replace(&mut graph.carried, &replacement);
    Ok(())
}

fn replace(ids: &mut [ValueId], replacement: &HashMap<ValueId, ValueId>) {
    for id in ids {
        *id = *replacement.get(id).unwrap_or(id);
    }
}
