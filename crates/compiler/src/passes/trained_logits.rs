//! Computes the logits, and the losses of tokens that follow from them, for the tokens that have a target: their hidden
//! states are put together before the output head, and their losses at their places after it. Other tokens get 0, as their
//! weight is.

use std::collections::{HashMap, HashSet};

use graph::Axis::{Rows, Tokens};
use graph::{Dim, Element, Graph, Node, Origin, ValueId, ValueType};
use ops::{Append, Emit, id};
use program::Variant;
use tensor::Attrs;

use crate::CompileError;
use crate::plan::head::{Head, by_tokens};

/// The input that has the tokens with a target.
const TOKENS_OF: &str = "logit_tokens";
/// The input that has the place of each token among them.
const PLACES: &str = "logit_places";
/// The input that has their targets.
const TARGETS_OF: &str = "logit_targets";
/// The input that has the targets of all tokens.
const TARGETS: &str = "targets";

pub fn run(graph: &mut Graph, variant: Variant) -> Result<(), CompileError> {
    if variant.logits == 0 {
        return Ok(());
    }
    // Readers of logits that nothing wants are no part of the head.
    super::dead_code::run(graph)?;
    if let Some(head) = Head::find(graph).filter(|head| takes(graph, head)) {
        take(graph, &head, variant);
    }
    Ok(())
}

/// True if the head can be computed for some tokens.
pub fn applies(graph: &mut Graph) -> Result<bool, CompileError> {
    super::dead_code::run(graph)?;
    Ok(Head::find(graph).is_some_and(|head| takes(graph, &head)))
}

/// Returns the hidden states of the tokens with a target, which the head reads.
pub fn states(graph: &Graph) -> HashSet<ValueId> {
    let index = graph.input(TOKENS_OF);
    let takes = |node: &&Node| node.op == id::TAKE_ROWS && index.is_some() && node.inputs.get(1).copied() == index;
    graph.nodes.iter().filter(takes).map(|node| node.outputs[0]).collect()
}

/// True if the head reads hidden states and targets alone of the tokens, and gives numbers of tokens that are floating point.
fn takes(graph: &Graph, head: &Head) -> bool {
    let nodes: Vec<_> = head.nodes().iter().map(|index| &graph.nodes[*index]).collect();
    let inside: HashSet<ValueId> = nodes.iter().flat_map(|node| node.outputs.iter().copied()).collect();
    let outside = |id: &ValueId| !inside.contains(id) && by_tokens(graph.value(*id)).is_some();
    let readable = |id: &ValueId| {
        let value = graph.value(*id);
        (value.origin == Origin::Input && value.name == TARGETS) || (value.shape.len() == 3 && value.element.is_float())
    };
    let read_later: HashSet<ValueId> = read_outside(graph, head);
    let made = |id: &ValueId| graph.value(*id).shape.len() == 2 && graph.value(*id).element.is_float();
    !head.waits()
        && nodes.iter().flat_map(|node| &node.inputs).filter(|id| outside(id)).all(readable)
        && inside.iter().filter(|id| read_later.contains(id)).all(made)
}

/// The values that something else than the head reads.
fn read_outside(graph: &Graph, head: &Head) -> HashSet<ValueId> {
    let taken: HashSet<usize> = head.nodes().iter().copied().collect();
    let others = graph.nodes.iter().enumerate().filter(|(index, _)| !taken.contains(index));
    others.flat_map(|(_, node)| node.inputs.iter().copied()).chain(graph.outputs.iter().map(|(_, id)| *id)).collect()
}

/// Rewrites the head, which `takes` accepts: its nodes have one row of `variant.logits` tokens.
fn take(graph: &mut Graph, head: &Head, variant: Variant) {
    let shape =
        |rows: usize, tokens: usize| ValueType::new(Element::I32, [Dim::Named(Rows, rows), Dim::Named(Tokens, tokens)]);
    let mut input = |name: &str, of: &ValueType| {
        let id = graph.add_typed(name, of, Origin::Input);
        graph.inputs.push(id);
        id
    };
    let index = input(TOKENS_OF, &shape(1, variant.logits));
    let places = input(PLACES, &shape(variant.batch, variant.seq_len));
    let targets = input(TARGETS_OF, &shape(1, variant.logits));
    let read_later = read_outside(graph, head);
    let nodes = std::mem::take(&mut graph.nodes);
    // The value of some tokens for each of all.
    let mut of: HashMap<ValueId, ValueId> = HashMap::new();
    let mut made = Vec::with_capacity(nodes.len() + 8);
    let mut later: HashMap<ValueId, ValueId> = HashMap::new();
    for (place, mut node) in nodes.into_iter().enumerate() {
        if !head.nodes().contains(&place) {
            node.inputs.iter_mut().for_each(|id| *id = later.get(id).copied().unwrap_or(*id));
            made.push(node);
            continue;
        }
        let mut append = Append::new(graph, node.phase);
        append.place_like(&node);
        let inputs: Vec<ValueId> = node
            .inputs
            .iter()
            .map(|id| match (of.get(id), by_tokens(append.value(*id)), append.value(*id).name.as_str()) {
                (Some(some), _, _) => *some,
                (None, None, _) => *id,
                (None, Some(_), TARGETS) => targets,
                (None, Some(_), _) => {
                    let some = append.emit(id::TAKE_ROWS, &[*id, index, places], Attrs::new())[0];
                    of.insert(*id, some);
                    some
                }
            })
            .collect();
        let outputs = append.emit(node.op, &inputs, node.attrs.clone());
        for (all, some) in node.outputs.iter().zip(outputs) {
            of.insert(*all, some);
            if read_later.contains(all) {
                let spread = append.emit(id::TAKE_ROWS, &[some, places, index], Attrs::new())[0];
                later.insert(*all, spread);
            }
        }
        made.append(&mut append.nodes);
    }
    graph.nodes = made;
    for (_, value) in &mut graph.outputs {
        *value = later.get(value).copied().unwrap_or(*value);
    }
}
