//! Nodes that recipes add to a graph.

use graph::{Element, Graph, Node, OpId, ValueId};
use ops::{Append, Emit};
use tensor::{Attrs, DType};

/// Appends an operation to `nodes`, in the place of `like`; its real numbers have the compute type.
pub(super) fn emit(
    graph: &mut Graph,
    compute: DType,
    nodes: &mut Vec<Node>,
    like: &Node,
    op: OpId,
    inputs: &[ValueId],
    attrs: Attrs,
) -> Vec<ValueId> {
    let mut append = Append::new(graph, like.phase);
    append.place_like(like);
    let results = append.emit(op, inputs, attrs);
    nodes.append(&mut append.nodes);
    for id in &results {
        let value = graph.value_mut(*id);
        if value.element == Element::Float {
            value.element = Element::Fixed(compute);
        }
    }
    results
}
