//! Makes a model of whole rows one of their parts: each rank computes its tokens of the batch, but attention some heads of
//! all tokens (Ulysses: arXiv 2309.14509). Heads are dealt out and exchanged before attention and collected behind it, in
//! the graph, so that gradients exchange by construction. What a token draws follows from its place in the whole batch.
//!
//! Rank s of S has the tokens s·N/S to (s+1)·N/S of the N of all rows, one behind another: a row of that many tokens.
//! Documents fall where they fall, since attention has the rows of the batch.

use graph::Axis::{Rows, Tokens};
use graph::{Dim, Element, Graph, Node, Origin, ValueId, ValueType};
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

/// `variant`: of the whole batch.
pub fn run(graph: &mut Graph, sharding: &Sharding, variant: Variant) -> Result<(), CompileError> {
    if sharding.sequence == 1 {
        return Ok(());
    }
    check(graph, sharding)?;
    see_whole_documents(graph, sharding, variant)?;
    let mut result = Vec::with_capacity(graph.nodes.len());
    for node in std::mem::take(&mut graph.nodes) {
        if node.op == id::ATTENTION {
            result.extend(by_heads(graph, node, sharding, variant)?);
        } else if node.op == id::DROPOUT {
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

/// Operations that need all tokens of the batch, besides attention.
fn check(graph: &Graph, sharding: &Sharding) -> Result<(), CompileError> {
    let has = |op| graph.nodes.iter().any(|node| node.op == op);
    if has(id::ROPE_FREQUENCIES_OF_BATCH) {
        let why = "rotations of this model depend on the longest row of the batch, which is not available yet";
        return Err(refused(sharding, why, "choose another `rope_scaling`, or `sequence_parallel_size: 1`"));
    }
    if has(id::EMBEDDING_NOISE) {
        let why = "noise on embeddings needs the documents of the whole batch, which is not available yet";
        return Err(refused(sharding, why, "leave out `neftune_noise_alpha`, or set `sequence_parallel_size: 1`"));
    }
    if let Some(node) = graph.nodes.iter().find(|node| node.op != id::ATTENTION && ops::get(node.op).mixes_tokens()) {
        let why = format!("`{}` reads other tokens of its row, which ranks cannot share yet", ops::get(node.op).name());
        return Err(refused(sharding, &why, "choose `sequence_parallel_size: 1`"));
    }
    if has(id::BALANCED_LOSS) {
        let why = "the loss of uneven expert loads needs all tokens of the batch, which is not available yet";
        return Err(refused(sharding, why, "set `router_aux_loss_coef: 0`, or `sequence_parallel_size: 1`"));
    }
    Ok(())
}

/// Where documents start is known of the whole batch: attention alone reads it.
fn see_whole_documents(graph: &mut Graph, sharding: &Sharding, variant: Variant) -> Result<(), CompileError> {
    let starts: Vec<ValueId> =
        graph.nodes.iter().filter(|node| node.op == id::ATTENTION).map(|node| node.inputs[3]).collect();
    let elsewhere = |node: &&Node| node.op != id::ATTENTION && node.inputs.iter().any(|id| starts.contains(id));
    let given = starts.iter().all(|id| graph.value(*id).origin == Origin::Input);
    if !given || graph.nodes.iter().any(|node| elsewhere(&node)) {
        let why = "what this model computes of its documents needs the whole batch, which is not available yet";
        return Err(refused(sharding, why, "choose `sequence_parallel_size: 1`"));
    }
    let whole = ValueType::new(Element::I32, [Dim::Named(Rows, variant.batch), Dim::Named(Tokens, variant.seq_len)]);
    for start in starts {
        graph.retype(start, &whole);
    }
    Ok(())
}

/// Attention over all tokens of some heads, between exchanges.
fn by_heads(graph: &mut Graph, node: Node, sharding: &Sharding, variant: Variant) -> Result<Vec<Node>, CompileError> {
    let among = sharding.sequence;
    if node.inputs.len() > 4 {
        let why = "attention with sinks, or over spans that see each other, is not available yet";
        return Err(refused(sharding, why, "choose `sequence_parallel_size: 1`"));
    }
    let heads = [0, 1].map(|input| graph.value(node.inputs[input]).shape[2]);
    if let Some(heads) = heads.into_iter().find(|heads| !heads.is_multiple_of(among)) {
        let what = if heads == node_heads(graph, &node) { "heads" } else { "key and value heads" };
        let why = format!("{heads} {what} of attention cannot be shared evenly");
        return Err(refused(sharding, &why, "choose a divisor of the numbers of heads"));
    }
    let types: Vec<ValueType> = node.outputs.iter().map(|id| graph.value(*id).value_type()).collect();
    let mut append = Append::new(graph, node.phase);
    append.place_like(&node);
    let mut turned = |id: ValueId| {
        let dealt = append.emit(id::DEAL_HEADS, &[id], Attrs::new().with("parts", among))[0];
        append.emit(id::EXCHANGE, &[dealt], Attrs::new().with("among", among).with("rows", variant.batch))[0]
    };
    let [q, k, v] = [0, 1, 2].map(|input| turned(node.inputs[input]));
    let attended = append.emit(id::ATTENTION, &[q, k, v, node.inputs[3]], node.attrs.clone());
    let back = append.emit(id::EXCHANGE, &[attended[0]], Attrs::new().with("among", among))[0];
    append.emit(id::COLLECT_HEADS, &[back], Attrs::new());
    let mut nodes = append.nodes;
    let last = nodes.last_mut().expect("heads are collected");
    assert_eq!(graph.value(last.outputs[0]).value_type(), types[0], "attention gives what it gave");
    last.outputs = vec![node.outputs[0]];
    Ok(nodes)
}

fn node_heads(graph: &Graph, node: &Node) -> usize {
    graph.value(node.inputs[0]).shape[2]
}

/// A dropout whose numbers are those of its elements in the whole batch.
fn of_part(graph: &Graph, node: Node) -> Node {
    let elements: usize = graph.value(node.inputs[0]).shape.iter().product();
    Node { attrs: node.attrs.with("first_per_part", elements), ..node }
}
