//! The backward pass of an attention in parts, for workspaces that are too large as a whole: rows of
//! the batch and key heads do not know of each other.

use graph::{Graph, Node, ValueId};
use ops::{Append, Emit, id};
use program::Arch;
use tensor::Attrs;

/// Splits every backward pass of an attention into at least `parts` parts where it has enough rows and key heads: rows
/// of the batch first, then key heads.
pub fn split_attention(graph: &mut Graph, parts: usize) {
    if parts <= 1 {
        return;
    }
    let nodes = std::mem::take(&mut graph.nodes);
    let mut result = Vec::with_capacity(nodes.len());
    for node in nodes {
        match node.op == id::ATTENTION_BACKWARD {
            true => result.extend(attention_parts(graph, &node, parts)),
            false => result.push(node),
        }
    }
    graph.nodes = result;
}

/// Most parts that the attentions of a graph can be done in: rows and key heads. A GPU's kernels lay out
/// the statistics of the heads together, so their parts are rows.
pub fn most_attention_parts(graph: &Graph, arch: &Arch) -> usize {
    let node = graph.nodes.iter().find(|node| node.op == id::ATTENTION_BACKWARD);
    node.map_or(1, |node| {
        let keys = &graph.value(node.inputs[1]).shape;
        if *arch == Arch::Cpu { keys[0] * keys[2] } else { keys[0] }
    })
}

/// The smallest divisor of `n` that is at least `least`, or `n`.
fn divisor_from(n: usize, least: usize) -> usize {
    (least.max(1)..=n).find(|d| n.is_multiple_of(*d)).unwrap_or(n)
}

/// The axes at which an operand of the attention is cut.
#[derive(Clone, Copy)]
struct Axes {
    /// True if the rows of the batch are its first axis.
    rows: bool,
    /// Axis of the heads, and heads for each key head.
    heads: Option<(usize, usize)>,
}

/// The cut of [`attention_parts`]: the batch into `rows` equal parts, the key heads into `heads`.
struct AttentionCut {
    rows: usize,
    heads: usize,
    row_size: usize,
    head_size: usize,
}

impl AttentionCut {
    /// The operand of every part: heads inside rows.
    fn of(&self, append: &mut Append<'_>, id: ValueId, axes: Axes) -> Vec<ValueId> {
        let mut cut = |ids: Vec<ValueId>, axis: usize, size: usize, n: usize| -> Vec<ValueId> {
            let attrs = Attrs::new().with("sizes", vec![size; n]).with("axis", axis as u64);
            let parts =
                ids.into_iter().map(|id| if n > 1 { append.emit(id::UNSTACK, &[id], attrs.clone()) } else { vec![id] });
            parts.flatten().collect()
        };
        let rows = if axes.rows { cut(vec![id], 0, self.row_size, self.rows) } else { vec![id] };
        let parts = match axes.heads {
            Some((axis, per_key)) => cut(rows, axis, self.head_size * per_key, self.heads),
            None => rows.into_iter().flat_map(|row| vec![row; self.heads]).collect(),
        };
        if axes.rows { parts } else { parts.repeat(self.rows) }
    }

    fn joined(&self, append: &mut Append<'_>, mut parts: Vec<ValueId>, id: ValueId) {
        for (axis, n) in [(2u64, self.heads), (0, self.rows)].into_iter().filter(|(_, n)| *n > 1) {
            let stacked = |parts: &[ValueId]| append.emit(id::STACK, parts, Attrs::new().with("axis", axis))[0];
            parts = parts.chunks(n).map(stacked).collect();
        }
        append.nodes.last_mut().expect("there are at least two parts").outputs = vec![id];
    }
}

fn attention_parts(graph: &mut Graph, node: &Node, parts: usize) -> Vec<Node> {
    let (q, k) = (graph.value(node.inputs[0]).shape.clone(), graph.value(node.inputs[1]).shape.clone());
    let (rows, key_heads, group) = (q[0], k[2], q[2] / k[2]);
    let row_parts = divisor_from(rows, parts.min(rows));
    let head_parts = divisor_from(key_heads, parts.div_ceil(row_parts));
    if row_parts * head_parts == 1 {
        return vec![node.clone()];
    }
    let cut = AttentionCut {
        rows: row_parts,
        heads: head_parts,
        row_size: rows / row_parts,
        head_size: key_heads / head_parts,
    };
    let mut append = Append::new(graph, node.phase);
    append.place_like(node);
    // q, k, v, o, lse, d_o, document_start, last_key or a sink [heads], a sink
    let of = |heads: Option<(usize, usize)>| Axes { rows: true, heads };
    let mut axes = vec![of(Some((2, group))); 6];
    (axes[1], axes[2], axes[4]) = (of(Some((2, 1))), of(Some((2, 1))), of(Some((1, group))));
    let by_row = node.inputs[6..].iter().map(|id| append.value(*id).shape.len() > 1);
    axes.extend(by_row.map(|rows| if rows { of(None) } else { Axes { rows, heads: Some((0, group)) } }));
    let inputs: Vec<Vec<ValueId>> =
        node.inputs.iter().zip(axes).map(|(id, axes)| cut.of(&mut append, *id, axes)).collect();
    let mut results = vec![Vec::new(); node.outputs.len()];
    for part in 0..row_parts * head_parts {
        let of_part: Vec<ValueId> = inputs.iter().map(|parts| parts[part]).collect();
        let made = append.emit(id::ATTENTION_BACKWARD, &of_part, node.attrs.clone());
        made.into_iter().zip(&mut results).for_each(|(id, result)| result.push(id));
    }
    for (id, parts) in node.outputs.iter().zip(results) {
        cut.joined(&mut append, parts, *id);
    }
    append.nodes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_cut_evenly() {
        assert_eq!([divisor_from(8, 3), divisor_from(8, 8), divisor_from(8, 99), divisor_from(5, 2)], [4, 8, 8, 5]);
    }
}
