//! Joins a recomputed node with a gradient that reads the same operands, so that both read them once. Nodes in between
//! that need what was recomputed then come after the joined node.

use graph::{Graph, Node, Phase, ValueId};
use ops::rowwise::{Extent, form_of, join as joined};

/// Joins a recomputed node with a gradient that depends on it only through the values that the joined node has inside.
pub fn join(graph: &mut Graph) {
    let mut nodes = std::mem::take(&mut graph.nodes);
    let mut index = 0;
    while index < nodes.len() {
        match fusion(graph, &nodes, index) {
            Some((gradient, node, after)) => put_together(&mut nodes, index, gradient, &after, node),
            None => index += 1,
        }
    }
    graph.nodes = nodes;
}

/// The operands that a node reads element by element.
fn elements(node: &Node) -> Option<Vec<ValueId>> {
    // Threads share sums over rows differently: what is recomputed would have other bits.
    let form = form_of(node).filter(|form| !form.sums_rows())?;
    let read = node.inputs.iter().zip(&form.operands).filter(|(_, extent)| **extent == Extent::Element);
    Some(read.map(|(id, _)| *id).collect())
}

/// Returns the gradient that `nodes[again]` joins, both as one node, and the nodes in between that must come after it.
fn fusion(graph: &Graph, nodes: &[Node], again: usize) -> Option<(usize, Node, Vec<usize>)> {
    let first = &nodes[again];
    let shared = elements(first).filter(|_| first.phase == Phase::Recompute)?;
    let reads_the_same = |node: &Node| {
        node.phase == Phase::Backward && elements(node).is_some_and(|read| shared.iter().all(|id| read.contains(id)))
    };
    let gradient = again + 1 + nodes[again + 1..].iter().position(reads_the_same)?;
    let second = &nodes[gradient];
    let mut depends: Vec<ValueId> = first.outputs.clone();
    let mut after = Vec::new();
    for (index, node) in nodes.iter().enumerate().take(gradient).skip(again + 1) {
        if node.inputs.iter().any(|id| depends.contains(id)) {
            depends.extend(&node.outputs);
            after.push(index);
        }
    }
    let free = second.inputs.iter().all(|id| first.outputs.contains(id) || !depends.contains(id));
    let node = joined(graph, first, second, &first.outputs).filter(|_| free)?;
    Some((gradient, node, after))
}

fn put_together(nodes: &mut Vec<Node>, again: usize, gradient: usize, after: &[usize], joint: Node) {
    let later: Vec<Node> = after.iter().map(|index| nodes[*index].clone()).collect();
    let between = (again + 1..gradient).filter(|index| !after.contains(index)).map(|index| nodes[index].clone());
    let order: Vec<Node> = between.chain([joint]).chain(later).collect();
    nodes.splice(again..=gradient, order);
}
