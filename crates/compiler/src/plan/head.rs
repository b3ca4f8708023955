//! The output head and its loss in parts, for logits that are too large as a whole. A part computes
//! what the whole computes for its rows, forward and backward, before the next part begins. Only sums
//! over rows change: the gradients of a trained head are added up part by part.

use std::collections::{HashMap, HashSet};

use graph::{Axis, Graph, Node, Value, ValueId};
use ops::{Append, Class, Emit, OpId, id};
use tensor::Attrs;

/// The widest tensor that a model computes for every token, and everything that reads or makes tensors of that width:
/// product, loss and their gradients.
pub struct Head {
    /// Node indices in order; the first computes the logits.
    nodes: Vec<usize>,
    rows: usize,
    /// Number of tokens in a batch.
    pub tokens: usize,
    /// Bytes of the batch's logits.
    pub bytes: usize,
    /// True if its nodes include a gradient of the head's weight.
    pub trained: bool,
}

impl Head {
    /// Finds the head. `None` where there is no loss over it, where the logits are requested, or where
    /// something is in between that cannot be done for a part of the rows.
    pub fn find(graph: &Graph) -> Option<Head> {
        let producers = graph.producers();
        let is_loss = |op: &OpId| [id::CROSS_ENTROPY, id::CROSS_ENTROPY_WITH_GRADIENT].contains(op);
        let loss = graph.nodes.iter().position(|node| is_loss(&node.op))?;
        let logits = graph.nodes[loss].inputs[0];
        // Logits may be more than the product: a soft cap is one element-wise node.
        let alone = |index: usize| match graph.nodes[index].inputs[..] {
            [only] if class(&graph.nodes[index]) == Class::Elementwise => Some(only),
            _ => None,
        };
        let mut wide = HashSet::from([logits]);
        let mut first = producers[logits.0 as usize]?;
        while let Some(before) = alone(first) {
            wide.insert(before);
            first = producers[before.0 as usize]?;
        }
        let [rows, tokens] = by_tokens(graph.value(logits))?.map(|axis| graph.value(logits).shape[axis]);
        // What is as wide as the logits and computed from them. A product has a width of its own.
        let mut nodes = vec![first];
        for (index, node) in graph.nodes.iter().enumerate().skip(first + 1) {
            if node.inputs.iter().any(|id| wide.contains(id)) {
                let like_logits = |id: &&ValueId| graph.value(**id).shape == graph.value(logits).shape;
                if class(node) != Class::Matmul {
                    wide.extend(node.outputs.iter().filter(like_logits));
                }
                nodes.push(index);
            }
        }
        let results = graph.outputs.iter().map(|(_, id)| id);
        let requested = results.chain(graph.gradients.iter().map(|(_, id)| id)).any(|id| wide.contains(id));
        let taken: HashSet<usize> = nodes.iter().copied().collect();
        let made: HashSet<ValueId> =
            nodes.iter().flat_map(|index| graph.nodes[*index].outputs.iter().copied()).collect();
        let behind = needed_before(&graph.nodes, &nodes, &taken)
            .into_iter()
            .any(|index| graph.nodes[index].inputs.iter().any(|id| made.contains(id)));
        let separable = nodes.iter().all(|index| separable(graph, &graph.nodes[*index]));
        if requested || behind || !separable || class(&graph.nodes[first]) != Class::Matmul {
            return None;
        }
        let value = graph.value(logits);
        let gradients: HashSet<ValueId> = graph.gradients.iter().map(|(_, id)| *id).collect();
        let trained = nodes.iter().any(|index| graph.nodes[*index].outputs.iter().any(|id| gradients.contains(id)));
        let bytes = value.shape.iter().product::<usize>() * crate::memory::dtype_of(graph, logits).size();
        Some(Head { nodes, rows, tokens: rows * tokens, bytes, trained })
    }
}

fn class(node: &Node) -> Class {
    ops::get(node.op).class()
}

/// Returns the axes of rows and tokens of a value that has an entry for every token. Names decide, not extents: a
/// matrix of an adapter may be as large as a batch.
fn by_tokens(value: &Value) -> Option<[usize; 2]> {
    Some([value.axis(Axis::Rows)?, value.axis(Axis::Tokens)?])
}

/// True when the node can be done for some rows: what it reads and gives belongs to tokens or to no row of the batch,
/// its results to tokens, or they are gradients of parameters, which add up.
fn separable(graph: &Graph, node: &Node) -> bool {
    let gradient = |id: &ValueId| {
        let uses = graph.nodes.iter().filter(|n| n.inputs.contains(id)).count();
        uses == 0 && graph.gradients.iter().any(|(_, g)| g == id)
    };
    let known = matches!(class(node), Class::Matmul | Class::Loss | Class::Elementwise | Class::Reduction);
    let whole = |id: &ValueId| by_tokens(graph.value(*id)).is_some();
    let readable = |id: &ValueId| whole(id) || graph.value(*id).axes.iter().all(Option::is_none);
    known && node.inputs.iter().all(readable) && node.outputs.iter().all(|id| whole(id) || gradient(id))
}

/// Does the head in `parts` parts, each with its gradients before the next one begins.
pub fn split_head(graph: &mut Graph, head: &Head, parts: usize) {
    if parts <= 1 {
        return;
    }
    let taken: HashSet<usize> = head.nodes.iter().copied().collect();
    let nodes = std::mem::take(&mut graph.nodes);
    // What the parts read from nodes between them must be there before the first part.
    let (mut before, mut after) = (Vec::new(), Vec::new());
    let needed = needed_before(&nodes, &head.nodes, &taken);
    for (index, node) in nodes.iter().enumerate().filter(|(index, _)| !taken.contains(index)) {
        if index < head.nodes[0] || needed.contains(&index) { &mut before } else { &mut after }.push(node.clone());
    }
    let mine: Vec<&Node> = head.nodes.iter().map(|index| &nodes[*index]).collect();
    let outside: HashSet<ValueId> = after.iter().flat_map(|node: &Node| node.inputs.iter().copied()).collect();
    let results: HashSet<ValueId> = graph.outputs.iter().map(|(_, id)| *id).collect();
    let mut split = Split::new(graph, head, parts, mine[0]);
    for part in 0..split.ranges.len() {
        mine.iter().for_each(|node| split.node(node, part));
    }
    for node in &mine {
        for id in node.outputs.iter().filter(|id| outside.contains(id) || results.contains(id)) {
            split.join(*id, node);
        }
    }
    let Split { append, gradients, .. } = split;
    let made = append.nodes;
    graph.gradients = graph
        .gradients
        .iter()
        .flat_map(|(parameter, id)| {
            let parts = gradients.get(id).cloned().unwrap_or_else(|| vec![*id]);
            parts.into_iter().map(|part| (*parameter, part)).collect::<Vec<_>>()
        })
        .collect();
    graph.nodes = before.into_iter().chain(made).chain(after).collect();
}

/// Returns the nodes after the head's first that other nodes of the head read from, without those in `taken`.
fn needed_before(nodes: &[Node], head: &[usize], taken: &HashSet<usize>) -> HashSet<usize> {
    let mut wanted: HashSet<ValueId> = head.iter().flat_map(|i| nodes[*i].inputs.iter().copied()).collect();
    let mut needed = HashSet::new();
    for index in (head[0]..nodes.len()).rev().filter(|index| !taken.contains(index)) {
        if nodes[index].outputs.iter().any(|id| wanted.contains(id)) {
            wanted.extend(nodes[index].inputs.iter().copied());
            needed.insert(index);
        }
    }
    needed
}

/// The range of a part: rows of the batch, or tokens of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    row: usize,
    rows: usize,
    token: usize,
    tokens: usize,
}

/// At least `parts` ranges of nearly equal size: whole rows where there are enough of them.
fn ranges(rows: usize, tokens: usize, parts: usize) -> Vec<Range> {
    let cut = |n: usize, parts: usize| -> Vec<(usize, usize)> {
        (0..parts).map(|i| (i * n / parts, (i + 1) * n / parts)).filter(|(a, b)| b > a).collect()
    };
    if parts <= rows {
        let whole = |(row, end): (usize, usize)| Range { row, rows: end - row, token: 0, tokens };
        return cut(rows, parts).into_iter().map(whole).collect();
    }
    let inside = cut(tokens, parts.div_ceil(rows).min(tokens));
    (0..rows)
        .flat_map(|row| inside.iter().map(move |(a, b)| Range { row, rows: 1, token: *a, tokens: b - a }))
        .collect()
}

struct Split<'g> {
    append: Append<'g>,
    ranges: Vec<Range>,
    /// Parts of the values that come from outside, cut once.
    cut: HashMap<ValueId, Vec<ValueId>>,
    /// The value that stands for another in each part.
    made: Vec<HashMap<ValueId, ValueId>>,
    /// Contributions to a gradient, part by part.
    gradients: HashMap<ValueId, Vec<ValueId>>,
}

impl<'g> Split<'g> {
    fn new(graph: &'g mut Graph, head: &Head, parts: usize, like: &Node) -> Split<'g> {
        let ranges = ranges(head.rows, head.tokens / head.rows, parts);
        let mut append = Append::new(graph, like.phase);
        append.place_like(like);
        let made = vec![HashMap::new(); ranges.len()];
        Split { append, ranges, cut: HashMap::new(), made, gradients: HashMap::new() }
    }

    fn node(&mut self, node: &Node, part: usize) {
        let inputs: Vec<ValueId> = node.inputs.iter().map(|id| self.input(*id, part)).collect();
        let range = self.ranges[part];
        let mut outputs = Vec::with_capacity(node.outputs.len());
        for id in &node.outputs {
            let mut value = self.append.graph.value(*id).clone();
            let axes = by_tokens(&value);
            if let Some([rows, tokens]) = axes {
                (value.shape[rows], value.shape[tokens]) = (range.rows, range.tokens);
            }
            let made = self.append.graph.add(value);
            self.made[part].insert(*id, made);
            if axes.is_none() {
                self.gradients.entry(*id).or_default().push(made);
            }
            outputs.push(made);
        }
        self.append.nodes.push(Node { inputs, outputs, ..node.clone() });
    }

    /// The part of an input: made by the part's own nodes, or cut from the whole.
    fn input(&mut self, id: ValueId, part: usize) -> ValueId {
        if let Some(made) = self.made[part].get(&id) {
            return *made;
        }
        let Some(axes) = by_tokens(self.append.graph.value(id)) else { return id };
        if !self.cut.contains_key(&id) {
            let parts = self.cut(id, axes);
            self.cut.insert(id, parts);
        }
        self.cut[&id][part]
    }

    /// Sizes along an axis, of the ranges that share the position on the other.
    fn sizes(&self) -> (Vec<usize>, Vec<usize>) {
        let of_row = |row: usize| self.ranges.iter().filter(move |r| r.row == row);
        let rows = self.ranges.iter().filter(|r| r.token == 0).map(|r| r.rows).collect();
        (rows, of_row(0).map(|r| r.tokens).collect())
    }

    fn cut(&mut self, id: ValueId, [rows_axis, tokens_axis]: [usize; 2]) -> Vec<ValueId> {
        let (rows, tokens) = self.sizes();
        let mut parts = vec![id];
        for (axis, sizes) in [(rows_axis, rows), (tokens_axis, tokens)].into_iter().filter(|(_, sizes)| sizes.len() > 1)
        {
            let attrs = Attrs::new().with("sizes", sizes).with("axis", axis as u64);
            let cut = |id: ValueId| self.append.emit(id::UNSTACK, &[id], attrs.clone());
            parts = parts.into_iter().flat_map(cut).collect();
        }
        parts
    }

    /// Puts the parts of a result together under its own id.
    fn join(&mut self, id: ValueId, node: &Node) {
        self.append.phase = node.phase;
        let (rows, tokens) = self.sizes();
        let mut parts: Vec<ValueId> = self.made.iter().map(|made| made[&id]).collect();
        let [rows_axis, tokens_axis] = by_tokens(self.append.graph.value(id)).expect("parts were cut by tokens");
        for (axis, n) in [(tokens_axis, tokens.len()), (rows_axis, rows.len())].into_iter().filter(|(_, n)| *n > 1) {
            let attrs = Attrs::new().with("axis", axis as u64);
            let mut stack = |parts: &[ValueId]| self.append.emit(id::STACK, parts, attrs.clone())[0];
            parts = parts.chunks(n).map(&mut stack).collect();
        }
        let last = self.append.nodes.last_mut().expect("there are at least two parts");
        last.outputs = vec![id];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_rows_once() {
        for (rows, tokens, parts) in [(4, 8, 2), (4, 8, 3), (2, 8, 5), (1, 7, 3), (3, 2, 100)] {
            let ranges = ranges(rows, tokens, parts);
            assert!(ranges.len() >= parts.min(rows * tokens), "{rows} × {tokens} in {parts}: {ranges:?}");
            let mut seen = vec![0; rows * tokens];
            for r in &ranges {
                for row in r.row..r.row + r.rows {
                    (r.token..r.token + r.tokens).for_each(|t| seen[row * tokens + t] += 1);
                }
            }
            assert!(seen.iter().all(|n| *n == 1), "{rows} × {tokens} in {parts}: {ranges:?}");
        }
    }
}
