//! Makes a model of whole rows one of their parts: each rank computes its tokens of the batch, but attention some heads
//! of all tokens (Ulysses: arXiv 2309.14509). Heads are partitioned and exchanged before attention and collected after
//! it, in the graph, so that gradients exchange by construction. Keys and values of fewer heads than ranks are repeated
//! first. The heads of the gated delta rule are partitioned
//! likewise, as are the channels of the convolution over tokens before it. What a token draws follows from its place in
//! the whole batch.
//!
//! Rank s of S has the tokens s·N/S to (s+1)·N/S of the N of all rows, one after another: a row of that many tokens.
//! Documents fall where they fall, since attention has the rows of the batch.

use graph::Axis::{Rows, Tokens};
use graph::{Dim, Element, Graph, Node, OpId, Origin, Phase, ValueId, ValueType};
use ops::{Append, Emit, id};
use program::Variant;
use tensor::Attrs;

use crate::CompileError;
use crate::options::Sharding;

/// The batch of which a rank computes its part, as a model of whole rows sees it.
pub fn part(variant: Variant, sharding: &Sharding) -> Result<Variant, CompileError> {
    if sharding.sequence == 1 {
        return Ok(variant);
    }
    let tokens = variant.batch * variant.seq_len;
    match tokens.is_multiple_of(sharding.sequence) {
        true => Ok(Variant { batch: 1, seq_len: tokens / sharding.sequence, ..variant }),
        false => Err(refused(
            sharding,
            &format!("{} rows of {} tokens cannot be cut into equal parts", variant.batch, variant.seq_len),
            "choose `sequence_len` and `per_device_train_batch_size` so that their product is a multiple of it",
        )),
    }
}

/// Rewrites the graph of the whole batch, whose shape is `variant`.
pub fn run(graph: &mut Graph, sharding: &Sharding, variant: Variant) -> Result<(), CompileError> {
    if sharding.sequence == 1 {
        return Ok(());
    }
    check(graph, sharding)?;
    see_whole_documents(graph, sharding, variant)?;
    see_all_positions(graph, sharding, variant)?;
    count_all_tokens(graph, sharding);
    let mut result = Vec::with_capacity(graph.nodes.len());
    for node in std::mem::take(&mut graph.nodes) {
        if node.op == id::ATTENTION {
            result.extend(by_heads(graph, node, sharding, variant)?);
        } else if node.op == id::GATED_DELTA {
            result.extend(states_by_heads(graph, node, sharding, variant)?);
        } else if node.op == id::CAUSAL_CONV {
            result.extend(by_channels(graph, node, sharding, variant)?);
        } else if [id::DROPOUT, id::EMBEDDING_NOISE].contains(&node.op) {
            result.push(of_part(graph, node));
        } else {
            result.push(node);
        }
    }
    graph.nodes = result;
    Ok(())
}

fn refused(sharding: &Sharding, why: &str, hint: &str) -> CompileError {
    CompileError::option(
        "sequence_parallel_size",
        format!("`sequence_parallel_size: {}`: {why}", sharding.sequence),
        hint,
    )
}

/// Refuses operations that need all tokens of the batch and whose heads or channels cannot be partitioned.
fn check(graph: &Graph, sharding: &Sharding) -> Result<(), CompileError> {
    const DEALT: [OpId; 3] = [id::ATTENTION, id::GATED_DELTA, id::CAUSAL_CONV];
    let others = |node: &&Node| !DEALT.contains(&node.op) && ops::get(node.op).mixes_tokens();
    if let Some(node) = graph.nodes.iter().find(others) {
        let why = format!("`{}` reads other tokens of its row, which ranks cannot share yet", ops::get(node.op).name());
        return Err(refused(sharding, &why, "choose `sequence_parallel_size: 1`"));
    }
    Ok(())
}

/// Whole rows, where a batch has them.
fn whole(variant: Variant) -> ValueType {
    ValueType::new(Element::I32, [Dim::Named(Rows, variant.batch), Dim::Named(Tokens, variant.seq_len)])
}

/// The operand of an operation that says where the documents of the whole batch start.
fn starts_of(node: &Node) -> Option<ValueId> {
    let places = [(id::ATTENTION, 3), (id::EMBEDDING_NOISE, 1), (id::GATED_DELTA, 5), (id::CAUSAL_CONV, 2)];
    let place = places.into_iter().find(|(op, _)| *op == node.op);
    place.map(|(_, input)| node.inputs[input])
}

/// Gives attention, and noise that depends on the lengths of documents, the document starts of the whole batch.
fn see_whole_documents(graph: &mut Graph, sharding: &Sharding, variant: Variant) -> Result<(), CompileError> {
    let starts: Vec<ValueId> = graph.nodes.iter().filter_map(starts_of).collect();
    let elsewhere = |node: &&Node| starts_of(node).is_none() && node.inputs.iter().any(|id| starts.contains(id));
    let given = starts.iter().all(|id| graph.value(*id).origin == Origin::Input);
    if !given || graph.nodes.iter().any(|node| elsewhere(&node)) {
        let why = "what this model computes of its documents needs the whole batch, which is not available yet";
        return Err(refused(sharding, why, "choose `sequence_parallel_size: 1`"));
    }
    for start in starts {
        graph.retype(start, &whole(variant));
    }
    Ok(())
}

/// Rotations that follow from the largest position read those of the whole batch; everything else has its own tokens'.
fn see_all_positions(graph: &mut Graph, sharding: &Sharding, variant: Variant) -> Result<(), CompileError> {
    let readers = graph.nodes.iter().filter(|node| node.op == id::ROPE_FREQUENCIES_OF_BATCH);
    let mut all: Vec<ValueId> = readers.map(|node| node.inputs[0]).collect();
    all.dedup();
    for positions in all {
        if graph.value(positions).origin != Origin::Input {
            let why = "what this model computes of its positions needs the whole batch, which is not available yet";
            return Err(refused(sharding, why, "choose another `rope_scaling`, or `sequence_parallel_size: 1`"));
        }
        graph.retype(positions, &whole(variant));
        let mut append = Append::new(graph, Phase::Forward);
        let own = append.emit(id::OWN_PART, &[positions], own_part(sharding, variant.batch * variant.seq_len))[0];
        let made = append.nodes;
        for node in graph.nodes.iter_mut().filter(|node| node.op != id::ROPE_FREQUENCIES_OF_BATCH) {
            node.inputs.iter_mut().filter(|id| **id == positions).for_each(|id| *id = own);
        }
        graph.nodes.splice(0..0, made);
    }
    Ok(())
}

/// The loads of experts are those of all tokens: the loss of uneven ones is that of the batch, and each rank reports its
/// share.
fn count_all_tokens(graph: &mut Graph, sharding: &Sharding) {
    let among = sharding.sequence;
    let reads_load = [(id::ROUTER_REPORT, 0), (id::BALANCED_LOSS, 1)];
    let mut sums: Vec<(ValueId, ValueId)> = Vec::new();
    let mut result = Vec::with_capacity(graph.nodes.len());
    for mut node in std::mem::take(&mut graph.nodes) {
        if let Some((_, input)) = reads_load.into_iter().find(|(op, _)| *op == node.op) {
            let load = node.inputs[input];
            let known = sums.iter().find(|(of, _)| *of == load).map(|(_, sum)| *sum);
            node.inputs[input] = known.unwrap_or_else(|| {
                let (sum, nodes) = sum_over_parts(graph, &node, load, among);
                result.extend(nodes);
                sums.push((load, sum));
                sum
            });
            if node.op == id::ROUTER_REPORT {
                node.attrs = node.attrs.with("parts", among);
            }
        }
        result.push(node);
    }
    graph.nodes = result;
}

/// The sum of a matrix over the ranks of a batch, in their order: each gives every one its own. The gradient is the same
/// sum of gradients.
fn sum_over_parts(graph: &mut Graph, near: &Node, matrix: ValueId, among: usize) -> (ValueId, Vec<Node>) {
    let [rows, columns] = graph.value(matrix).shape[..] else { panic!("loads are a matrix") };
    let mut append = Append::new(graph, near.phase);
    append.place_like(near);
    let mut next = |op, from, attrs| append.emit(op, &[from], attrs)[0];
    let flat = next(id::MERGE_HEADS, matrix, Attrs::new());
    let row = next(id::SPLIT_HEADS, flat, Attrs::new().with("head_dim", rows * columns));
    let copies = next(id::REPEAT_HEADS, row, Attrs::new().with("heads", among));
    let of_all = next(id::EXCHANGE, copies, Attrs::new().with("among", among));
    let sum = next(id::SUM_HEADS, of_all, Attrs::new());
    let flat = next(id::MERGE_HEADS, sum, Attrs::new());
    let matrix = next(id::SPLIT_HEADS, flat, Attrs::new().with("head_dim", columns));
    (matrix, append.nodes)
}

/// Returns the attributes of a rank's part of a tensor of `elements` elements.
fn own_part(sharding: &Sharding, elements: usize) -> Attrs {
    let parts = sharding.sequence;
    Attrs::new().with("parts", parts).with("first_per_part", elements / parts)
}

/// Attention over all tokens of some heads, between exchanges.
fn by_heads(graph: &mut Graph, node: Node, sharding: &Sharding, variant: Variant) -> Result<Vec<Node>, CompileError> {
    let among = sharding.sequence;
    // After the starts of documents: the last keys of tokens, then a sink for each head.
    let (spans, sinks): (Vec<ValueId>, Vec<ValueId>) =
        node.inputs[4..].iter().partition(|id| graph.value(**id).shape.len() > 1);
    if !spans.is_empty() {
        let why = "attention over spans that see each other is not available yet";
        return Err(refused(sharding, why, "choose `sequence_parallel_size: 1`"));
    }
    let heads = graph.value(node.inputs[0]).shape[2];
    if !heads.is_multiple_of(among) {
        let why = format!("{heads} heads of attention cannot be shared evenly");
        return Err(refused(sharding, &why, "choose a divisor of the number of heads"));
    }
    let mut between = Between::at(graph, &node, sharding, variant);
    let [q, k, v] = [0, 1, 2].map(|input| between.all_tokens(node.inputs[input]));
    let append = &mut between.append;
    let sinks = sinks.iter().map(|sink| append.emit(id::OWN_PART, &[*sink], own_part(sharding, heads))[0]);
    let operands: Vec<ValueId> = [q, k, v, node.inputs[3]].into_iter().chain(sinks.collect::<Vec<_>>()).collect();
    let attended = append.emit(id::ATTENTION, &operands, node.attrs.clone());
    between.own_tokens(attended[0]);
    Ok(between.nodes_giving(node.outputs[0]))
}

/// The gated delta rule over all tokens of some heads, between exchanges.
fn states_by_heads(
    graph: &mut Graph,
    node: Node,
    sharding: &Sharding,
    variant: Variant,
) -> Result<Vec<Node>, CompileError> {
    let heads = graph.value(node.inputs[2]).shape[2];
    if !heads.is_multiple_of(sharding.sequence) {
        let what = if node.attrs.flag("additive") == Ok(true) { "state-space models" } else { "gated delta nets" };
        let why = format!("{heads} heads of {what} cannot be shared evenly");
        return Err(refused(sharding, &why, "choose a divisor of the number of heads"));
    }
    let mut between = Between::at(graph, &node, sharding, variant);
    let [q, k, v] = [0, 1, 2].map(|input| between.all_tokens(node.inputs[input]));
    let [decay, share] = [3, 4].map(|input| {
        let columns = between.emit(id::SPLIT_HEADS, node.inputs[input], Attrs::new().with("head_dim", 1));
        let all = between.all_tokens(columns);
        between.emit(id::MERGE_HEADS, all, Attrs::new())
    });
    let operands = [q, k, v, decay, share, node.inputs[5]];
    let result = between.append.emit(id::GATED_DELTA, &operands, node.attrs.clone())[0];
    between.own_tokens(result);
    Ok(between.nodes_giving(node.outputs[0]))
}

/// The convolution over all tokens of some channels, between exchanges.
fn by_channels(
    graph: &mut Graph,
    node: Node,
    sharding: &Sharding,
    variant: Variant,
) -> Result<Vec<Node>, CompileError> {
    let [channels, _, window] = graph.value(node.inputs[1]).shape[..] else { panic!("weights are [channels, 1, K]") };
    if !channels.is_multiple_of(sharding.sequence) {
        let why = format!("{channels} channels of a convolution cannot be shared evenly");
        return Err(refused(sharding, &why, "choose a divisor of the number of channels"));
    }
    let own = Attrs::new().with("head_dim", channels / sharding.sequence);
    let by_window = || Attrs::new().with("head_dim", window);
    let mut between = Between::at(graph, &node, sharding, variant);
    let dealt = between.emit(id::SPLIT_HEADS, node.inputs[0], own.clone());
    let all = between.all_tokens(dealt);
    let x = between.emit(id::MERGE_HEADS, all, Attrs::new());
    let matrix = between.emit(id::MERGE_HEADS, node.inputs[1], Attrs::new());
    let flat = between.emit(id::MERGE_HEADS, matrix, Attrs::new());
    let part = between.emit(id::OWN_PART, flat, own_part(sharding, channels * window));
    let matrix = between.emit(id::SPLIT_HEADS, part, by_window());
    let weights = between.emit(id::SPLIT_HEADS, matrix, by_window());
    let y = between.append.emit(id::CAUSAL_CONV, &[x, weights, node.inputs[2]], node.attrs.clone())[0];
    let heads = between.emit(id::SPLIT_HEADS, y, own);
    let collected = between.own_tokens(heads);
    between.emit(id::MERGE_HEADS, collected, Attrs::new());
    Ok(between.nodes_giving(node.outputs[0]))
}

/// Nodes in the place of one, which exchange tokens and heads.
struct Between<'a> {
    append: Append<'a>,
    among: usize,
    rows: usize,
}

impl<'a> Between<'a> {
    fn at(graph: &'a mut Graph, node: &Node, sharding: &Sharding, variant: Variant) -> Self {
        let mut append = Append::new(graph, node.phase);
        append.place_like(node);
        Between { append, among: sharding.sequence, rows: variant.batch }
    }

    fn emit(&mut self, op: OpId, input: ValueId, attrs: Attrs) -> ValueId {
        self.append.emit(op, &[input], attrs)[0]
    }

    /// Returns all tokens with the own heads, from the own tokens with all heads.
    fn all_tokens(&mut self, id: ValueId) -> ValueId {
        let even = self.repeated(id);
        let dealt = self.emit(id::DEAL_HEADS, even, Attrs::new().with("parts", self.among));
        self.emit(id::EXCHANGE, dealt, Attrs::new().with("among", self.among).with("rows", self.rows))
    }

    /// Returns each head as many times as the ranks need to share them evenly: once, but for the keys and values of few
    /// heads. Those that read a head read its copies.
    fn repeated(&mut self, id: ValueId) -> ValueId {
        let [.., heads, columns] = self.append.graph.value(id).shape[..] else { panic!("heads have columns") };
        let copies = (1..=self.among).find(|copies| (heads * copies).is_multiple_of(self.among));
        match copies.expect("as many copies as ranks are enough") {
            1 => id,
            copies => {
                let of_columns = || Attrs::new().with("head_dim", columns);
                let alone = self.emit(id::SPLIT_HEADS, id, of_columns());
                let copies = self.emit(id::REPEAT_HEADS, alone, Attrs::new().with("heads", copies));
                let of_head = self.emit(id::MERGE_HEADS, copies, Attrs::new());
                let flat = self.emit(id::MERGE_HEADS, of_head, Attrs::new());
                self.emit(id::SPLIT_HEADS, flat, of_columns())
            }
        }
    }

    /// Returns the own tokens with all heads, from all tokens with the own heads.
    fn own_tokens(&mut self, id: ValueId) -> ValueId {
        let back = self.emit(id::EXCHANGE, id, Attrs::new().with("among", self.among));
        self.emit(id::COLLECT_HEADS, back, Attrs::new())
    }

    /// Returns the nodes, the last of which gives `output`.
    fn nodes_giving(self, output: ValueId) -> Vec<Node> {
        let Append { graph, mut nodes, .. } = self.append;
        let last = nodes.last_mut().expect("something is exchanged");
        let types = [last.outputs[0], output].map(|id| graph.value(id).value_type());
        assert_eq!(types[0], types[1], "the parts give what the whole gave");
        last.outputs = vec![output];
        nodes
    }
}

/// A node whose random numbers are those of its elements in the whole batch.
fn of_part(graph: &Graph, node: Node) -> Node {
    let elements: usize = graph.value(node.inputs[0]).shape.iter().product();
    Node { attrs: node.attrs.with("first_per_part", elements), ..node }
}
