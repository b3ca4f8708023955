//! Removes nodes whose results no one reads.

use graph::Graph;

use crate::CompileError;

pub fn run(graph: &mut Graph) -> Result<(), CompileError> {
    let mut live = vec![false; graph.values.len()];
    let results = graph.outputs.iter().map(|(_, id)| *id).chain(graph.gradients.iter().map(|(_, id)| *id));
    for id in results.chain(graph.stored.iter().map(|(id, _)| *id)) {
        live[id.0 as usize] = true;
    }
    let mut kept = Vec::with_capacity(graph.nodes.len());
    for node in std::mem::take(&mut graph.nodes).into_iter().rev() {
        if node.outputs.iter().any(|id| live[id.0 as usize]) {
            for id in &node.inputs {
                live[id.0 as usize] = true;
            }
            kept.push(node);
        }
    }
    kept.reverse();
    graph.nodes = kept;
    Ok(())
}
