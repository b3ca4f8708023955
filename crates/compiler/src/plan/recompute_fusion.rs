//! What is recomputed together with a gradient that reads the same operands becomes one node with it, which reads them
//! once. Everything in between that needs what was recomputed then comes behind.

use graph::{Graph, Node, ValueId};
use ops::{RECOMPUTE_FUSIONS, RecomputeFusion};

/// Joins wherever the gradient does not depend on what is recomputed.
pub fn join(graph: &mut Graph) {
    let mut nodes = std::mem::take(&mut graph.nodes);
    let mut index = 0;
    while index < nodes.len() {
        let found = RECOMPUTE_FUSIONS.iter().find_map(|fusion| Some((fusion, moved(&nodes, index, fusion)?)));
        if let Some((fusion, (gradient, behind))) = found {
            put_together(&mut nodes, index, gradient, &behind, fusion);
        } else {
            index += 1;
        }
    }
    graph.nodes = nodes;
}

/// The gradient next to `nodes[again]`, and the nodes in between that must come behind it.
fn moved(nodes: &[Node], again: usize, fusion: &RecomputeFusion) -> Option<(usize, Vec<usize>)> {
    let first = &nodes[again];
    if first.op != fusion.again || first.phase != graph::Phase::Recompute {
        return None;
    }
    let reads_the_same = |node: &Node| fusion.shared.iter().zip(&first.inputs).all(|(i, id)| node.inputs[*i] == *id);
    let later = nodes[again + 1..].iter().position(|node| node.op == fusion.gradient && reads_the_same(node))?;
    let gradient = again + 1 + later;
    let mut depends: Vec<ValueId> = first.outputs.clone();
    let mut behind = Vec::new();
    for (index, node) in nodes.iter().enumerate().take(gradient).skip(again + 1) {
        if node.inputs.iter().any(|id| depends.contains(id)) {
            depends.extend(&node.outputs);
            behind.push(index);
        }
    }
    let second = &nodes[gradient];
    let made = fusion.made.map(|(input, result)| (input, first.outputs[result]));
    let mut read = second.inputs.iter().enumerate();
    let free = read.all(|(i, id)| made == Some((i, *id)) || !depends.contains(id));
    let agree = second.attrs.0.iter().all(|(name, value)| first.attrs.get(name).is_none_or(|other| other == value));
    (free && agree).then_some((gradient, behind))
}

fn put_together(nodes: &mut Vec<Node>, again: usize, gradient: usize, behind: &[usize], fusion: &RecomputeFusion) {
    let second = nodes[gradient].clone();
    let first = &nodes[again];
    let given = |input: usize| fusion.made.is_some_and(|(made, _)| made == input);
    let inputs = second.inputs.iter().enumerate().filter(|(i, _)| !given(*i)).map(|(_, id)| *id).collect();
    let outputs = first.outputs.iter().chain(&second.outputs).copied().collect();
    let mut attrs = first.attrs.clone();
    attrs.0.extend(second.attrs.0.clone());
    let joint = Node { op: fusion.joint.to_owned(), inputs, outputs, attrs, ..second };
    let later: Vec<Node> = behind.iter().map(|index| nodes[*index].clone()).collect();
    let between = (again + 1..gradient).filter(|index| !behind.contains(index)).map(|index| nodes[index].clone());
    let order: Vec<Node> = between.chain([joint]).chain(later).collect();
    nodes.splice(again..=gradient, order);
}
