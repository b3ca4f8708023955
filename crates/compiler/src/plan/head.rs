//! The output head and its loss in parts, for logits that are too large as a whole. A part computes
//! what the whole computes for its rows, forward and backward, before the next part begins. Only sums
//! over rows change: the gradients of a trained head are added up part by part.
//!
//! Where the gradient of a token depends on the losses of others, as for preferences, the backward pass has parts of its
//! own, which compute their logits once more.

use std::collections::{HashMap, HashSet};

use graph::{Axis, Graph, Node, Value, ValueId};
use ops::{Append, Class, Emit, OpId, id};
use tensor::Attrs;

/// The operations that read the logits of each token by itself, as their first operand.
const LOSSES: [OpId; 5] =
    [id::CROSS_ENTROPY, id::CROSS_ENTROPY_WITH_GRADIENT, id::DISTILLATION, id::DISTILLATION_TOP, id::TOP_LOGPS];

/// The widest tensor that a model computes for every token, and everything that reads or makes tensors of that width:
/// product, loss and their gradients.
pub struct Head {
    /// Node indices in order; the first computes the logits.
    nodes: Vec<usize>,
    /// Node indices in order that wait for losses of all rows. They are not among `nodes`.
    late: Vec<usize>,
    /// Node indices in order that compute the logits, which the late nodes need again.
    logits: Vec<usize>,
    rows: usize,
    /// Number of tokens in a batch.
    pub tokens: usize,
    /// The logits of the batch.
    of_batch: ValueId,
    /// True if its nodes include a gradient of the head's weight.
    pub trained: bool,
}

impl Head {
    /// Node indices in order; the first computes the logits.
    pub(crate) fn nodes(&self) -> &[usize] {
        &self.nodes
    }

    /// True if some of its nodes wait for the losses of all rows.
    pub(crate) fn waits(&self) -> bool {
        !self.late.is_empty()
    }

    /// Finds the head. `None` where there is no loss over it, where the logits are requested, or where
    /// something is in between that cannot be done for a part of the rows.
    pub fn find(graph: &Graph) -> Option<Head> {
        let producers = graph.producers();
        let is_loss = |op: &OpId| LOSSES.contains(op);
        let loss = graph.nodes.iter().position(|node| is_loss(&node.op))?;
        let logits = graph.nodes[loss].inputs[0];
        // Logits may be more than the product: a soft cap is one element-wise node.
        let alone = |index: usize| match graph.nodes[index].inputs[..] {
            [only] if class(&graph.nodes[index]) == Class::Elementwise => Some(only),
            _ => None,
        };
        let mut wide = HashSet::from([logits]);
        let mut first = producers[logits.0 as usize]?;
        let mut of_logits = vec![first];
        while let Some(before) = alone(first) {
            wide.insert(before);
            first = producers[before.0 as usize]?;
            of_logits.insert(0, first);
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
        let separable = nodes.iter().all(|index| separable(graph, &graph.nodes[*index]));
        if requested || !separable || class(&graph.nodes[first]) != Class::Matmul {
            return None;
        }
        let mut waiting = depending(graph, &nodes);
        let (late, nodes): (Vec<usize>, Vec<usize>) = nodes.into_iter().partition(|index| {
            let node = &graph.nodes[*index];
            let waits = node.inputs.iter().any(|id| waiting.contains(id));
            if waits {
                waiting.extend(&node.outputs);
            }
            waits
        });
        // Of what is as wide as the logits, the late nodes compute the logits alone once more.
        let is_read_late = |id: &ValueId| late.iter().any(|index| graph.nodes[*index].inputs.contains(id));
        let others = nodes.iter().filter(|index| !of_logits.contains(index));
        if others.flat_map(|index| &graph.nodes[*index].outputs).any(|id| wide.contains(id) && is_read_late(id)) {
            return None;
        }
        let logits_again = if late.is_empty() { Vec::new() } else { of_logits };
        let gradients: HashSet<ValueId> = graph.gradients.iter().map(|(_, id)| *id).collect();
        let trained =
            nodes.iter().chain(&late).any(|index| graph.nodes[*index].outputs.iter().any(|id| gradients.contains(id)));
        Some(Head { nodes, late, logits: logits_again, of_batch: logits, rows, tokens: rows * tokens, trained })
    }
}

/// Values that nodes outside of the head compute from what it gives.
fn depending(graph: &Graph, head: &[usize]) -> HashSet<ValueId> {
    let taken: HashSet<usize> = head.iter().copied().collect();
    let mut made: HashSet<ValueId> = HashSet::new();
    let mut outside = HashSet::new();
    for (index, node) in graph.nodes.iter().enumerate().skip(head[0]) {
        let depends = node.inputs.iter().any(|id| made.contains(id) || outside.contains(id));
        if taken.contains(&index) {
            made.extend(&node.outputs);
        } else if depends {
            outside.extend(node.outputs.iter().copied());
        }
    }
    outside
}

impl Head {
    /// Returns the bytes of the batch's logits.
    pub fn bytes(&self, graph: &Graph) -> usize {
        graph.value(self.of_batch).shape.iter().product::<usize>()
            * crate::memory::dtype_of(graph, self.of_batch).size()
    }

    /// True if parts cost no time: a trained head adds its gradient up again for each, and late nodes compute the logits
    /// once more.
    pub fn is_cheap_in_parts(&self) -> bool {
        !self.trained && self.late.is_empty()
    }
}

fn class(node: &Node) -> Class {
    ops::get(node.op).class()
}

/// Returns the axes of rows and tokens of a value that has an entry for every token. Names decide, not extents: a
/// matrix of an adapter may be as large as a batch.
pub(crate) fn by_tokens(value: &Value) -> Option<[usize; 2]> {
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

/// Does the head in `parts` parts, each with its gradients before the next one begins, or with the gradients of all parts
/// after the losses of all.
pub fn split_head(graph: &mut Graph, head: &Head, parts: usize) {
    if parts <= 1 {
        return;
    }
    let taken: HashSet<usize> = head.nodes.iter().chain(&head.late).copied().collect();
    let nodes = std::mem::take(&mut graph.nodes);
    // What the parts read from nodes between them must be there before the first part.
    let first = head.nodes[0];
    let needed = needed_after(first, &nodes, &head.nodes, &taken);
    let needed_late = needed_after(first, &nodes, &head.late, &taken);
    let (mut before, mut between, mut after) = (Vec::new(), Vec::new(), Vec::new());
    for (index, node) in nodes.iter().enumerate().filter(|(index, _)| !taken.contains(index)) {
        let place = match index {
            _ if index < first || needed.contains(&index) => &mut before,
            _ if needed_late.contains(&index) => &mut between,
            _ => &mut after,
        };
        place.push(node.clone());
    }
    let of = |indices: &[usize]| indices.iter().map(|index| nodes[*index].clone()).collect::<Vec<Node>>();
    let (mine, late) = (of(&head.nodes), of(&head.late));
    let results: HashSet<ValueId> = graph.outputs.iter().map(|(_, id)| *id).collect();
    let reading = |nodes: &[Node]| nodes.iter().flat_map(|node| node.inputs.iter().copied()).collect::<HashSet<_>>();
    let outside = &reading(&after) | &results;
    let mut again = of(&head.logits);
    // The late parts compute the logits by themselves.
    let of_logits: HashSet<ValueId> = again.iter().flat_map(|node| node.outputs.iter().copied()).collect();
    let wanted_early = &(&outside | &reading(&between)) | &(&reading(&late) - &of_logits);
    let made = split_nodes(graph, head, parts, &mine, &wanted_early);
    let made_late = match late.first() {
        None => Vec::new(),
        Some(first) => {
            again.iter_mut().for_each(|node| node.phase = first.phase);
            again.extend(late);
            split_nodes(graph, head, parts, &again, &outside)
        }
    };
    graph.nodes = before.into_iter().chain(made).chain(between).chain(made_late).chain(after).collect();
}

/// Nodes in `parts` parts, one part after another. Results that are read `outside` are put together.
fn split_nodes(graph: &mut Graph, head: &Head, parts: usize, nodes: &[Node], outside: &HashSet<ValueId>) -> Vec<Node> {
    let mut split = Split::new(graph, head, parts, &nodes[0]);
    for part in 0..split.ranges.len() {
        nodes.iter().for_each(|node| split.node(node, part));
    }
    for node in nodes {
        for id in node.outputs.iter().filter(|id| outside.contains(id)) {
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
    made
}

/// Returns the nodes from `first` on that nodes of the head read from, without those in `taken`.
fn needed_after(first: usize, nodes: &[Node], head: &[usize], taken: &HashSet<usize>) -> HashSet<usize> {
    let mut wanted: HashSet<ValueId> = head.iter().flat_map(|i| nodes[*i].inputs.iter().copied()).collect();
    let mut needed = HashSet::new();
    for index in (first..nodes.len()).rev().filter(|index| !taken.contains(index)) {
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
