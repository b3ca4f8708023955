//! Neighbours that expressions give, of elements or of rows, become one operation. A value that no longer reaches memory
//! inside such a chain is still rounded as if it did.

use std::collections::HashMap;

use graph::{Graph, Node, ValueId};
use ops::rowwise::{Extent, form_of, join};

use crate::CompileError;

/// More operands than this in one kernel are not worth the address arithmetic.
const MOST_OPERANDS: usize = 8;

/// Joins nodes that have forms with the nearest node before them that has one and that they read.
pub fn run(graph: &mut Graph) -> Result<(), CompileError> {
    let uses = graph.use_counts();
    let mut nodes: Vec<Option<Node>> = std::mem::take(&mut graph.nodes).into_iter().map(Some).collect();
    let mut producer: HashMap<ValueId, usize> = HashMap::new();
    for index in 0..nodes.len() {
        while let Some((first, joint)) = form_candidate(graph, &nodes, &producer, &uses, index) {
            (nodes[first], nodes[index]) = (None, Some(joint));
        }
        for output in &nodes[index].as_ref().expect("only earlier nodes are taken").outputs {
            producer.insert(*output, index);
        }
    }
    graph.nodes = nodes.into_iter().flatten().collect();
    Ok(())
}

/// Operands and results but those that a tensor has one of.
fn tensors(node: &Node) -> usize {
    let form = form_of(node).expect("a joint node has a form");
    let results = form.results.iter().map(|(extent, _)| extent);
    form.operands.iter().chain(results).filter(|extent| **extent != Extent::Tensor).count()
}

/// The producer to join `nodes[index]` with, and the node that replaces both.
fn form_candidate(
    graph: &Graph,
    nodes: &[Option<Node>],
    producer: &HashMap<ValueId, usize>,
    uses: &[usize],
    index: usize,
) -> Option<(usize, Node)> {
    let second = nodes[index].as_ref().filter(|node| form_of(node).is_some())?;
    let mut producers: Vec<usize> = second.inputs.iter().filter_map(|id| producer.get(id)).copied().collect();
    producers.sort_unstable();
    producers.dedup();
    producers.into_iter().rev().find_map(|first_index| {
        let first = nodes[first_index].as_ref().filter(|n| n.phase == second.phase)?;
        let read_here = |id: &ValueId| second.inputs.iter().filter(|i| *i == id).count();
        let is_stored = |id: &ValueId| graph.stored.iter().any(|(stored, _)| stored == id);
        let is_kept = |id: &ValueId| uses[id.0 as usize] > read_here(id) || is_stored(id);
        let keep: Vec<ValueId> = first.outputs.iter().copied().filter(is_kept).collect();
        // The first node moves down to the second: no node in between may need what it computes.
        let mut between = nodes[first_index + 1..index].iter().flatten();
        if between.any(|n| n.inputs.iter().any(|id| first.outputs.contains(id))) {
            return None;
        }
        let joint = join(graph, first, second, &keep)?;
        (tensors(&joint) <= MOST_OPERANDS).then_some((first_index, joint))
    })
}
