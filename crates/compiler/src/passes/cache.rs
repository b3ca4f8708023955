//! Makes a model that reads whole rows one that goes on where it was: attention reads keys and values of earlier tokens
//! from caches in pages, which are states, and adds those of the new tokens; only one token of each row reaches the head.
//!
//! Knows what attention, rotation and the head read; no model. Every kind of layer is right because its attention is.

use graph::{Axis, Dim, Element, Graph, Node, Origin, Phase, StateId, ValueId, ValueType};
use ops::{Append, Class, Emit, id};
use program::{Arch, EntryKind, Machine, Variant, generation};
use tensor::{Attrs, Shape};

use crate::options::KeyValueCache;
use crate::{CompileError, EntryOptions};

pub fn run(graph: &mut Graph, entry: &EntryOptions, variant: Variant, machine: &Machine) -> Result<(), CompileError> {
    let Some(cache) = &entry.cache else { return Ok(()) };
    if graph.nodes.iter().any(|node| node.op == id::GATED_DELTA) {
        let why = "states of its gated delta nets are not kept from token to token yet, so text cannot be generated";
        return Err(CompileError::Options(format!("{}: {why}", graph.name)));
    }
    if entry.kind != EntryKind::Forward {
        leave_room(graph, cache, machine);
        return Ok(());
    }
    let rows = Dim::Named(Axis::Rows, variant.batch);
    let tokens = Dim::Named(Axis::Tokens, variant.seq_len);
    let positions = input(graph, generation::POSITIONS, [rows.clone(), tokens]);
    let table = input(graph, generation::TABLE, [rows.clone(), Dim::Fixed(cache.pages_per_sequence)]);
    read_caches(graph, cache, [positions, table], machine)?;
    follow_the_sequence(graph);
    if variant.seq_len > 1 {
        let last = input(graph, generation::LAST_TOKEN, [rows]);
        pick_last(graph, last)?;
    }
    add_likeliest(graph)
}

/// Next to the logits the place of the largest of each row: they need not cross the link where nothing is drawn.
fn add_likeliest(graph: &mut Graph) -> Result<(), CompileError> {
    let logits = graph.output("logits").ok_or_else(|| CompileError::Model(no_logits(&graph.name)))?;
    let mut append = Append::new(graph, Phase::Forward);
    let likeliest = append.emit(id::LIKELIEST, &[logits], Attrs::new())[0];
    let made = append.nodes;
    graph.nodes.extend(made);
    graph.outputs.push((generation::LIKELIEST.to_owned(), likeliest));
    Ok(())
}

fn no_logits(name: &str) -> String {
    format!("{name}: no product gives the output `logits`")
}

fn input(graph: &mut Graph, name: &str, shape: impl Into<Vec<Dim>>) -> ValueId {
    let id = graph.add_typed(name, &ValueType::new(Element::I32, shape.into()), Origin::Input);
    graph.inputs.push(id);
    id
}

/// Attention of whole rows becomes a write of the new keys and values, and attention over the caches.
fn read_caches(
    graph: &mut Graph,
    cache: &KeyValueCache,
    [positions, table]: [ValueId; 2],
    machine: &Machine,
) -> Result<(), CompileError> {
    let name = graph.name.clone();
    let mut result = Vec::with_capacity(graph.nodes.len());
    for node in std::mem::take(&mut graph.nodes) {
        if node.op != id::ATTENTION {
            result.push(node);
            continue;
        }
        let sink = match node.inputs[4..] {
            [] => None,
            [id] if graph.value(id).shape.len() == 1 => Some(id),
            _ => return Err(sees_later_tokens(&name)),
        };
        if node.attrs.flag("bidirectional").expect("checked by the shape rule") {
            return Err(sees_later_tokens(&name));
        }
        let [q, k, v] = [node.inputs[0], node.inputs[1], node.inputs[2]];
        let mut append = Append::new(graph, node.phase);
        append.place_like(&node);
        let written = append.emit(id::CACHE_WRITE, &[k, v, positions, table], keeping(cache, machine));
        result.append(&mut append.nodes);
        for (written, what) in written.iter().zip(WHAT) {
            let (element, shape) = (graph.value(*written).element, graph.value(*written).shape.clone());
            let state = pages(graph, what, element, shape);
            graph.stored.push((*written, state));
        }
        let known = |name: &&str| ["scale", "window", "soft_cap"].contains(name);
        let names: Vec<&str> = node.attrs.0.keys().map(String::as_str).filter(known).collect();
        let attrs = names.into_iter().fold(Attrs::new(), |attrs, name| attrs.with(name, node.attrs.0[name].clone()));
        let inputs = [q, written[0], written[1], positions, table].into_iter().chain(sink).collect();
        let outputs = vec![node.outputs[0]];
        result.push(Node { op: id::CACHED_ATTENTION, inputs, outputs, attrs, ..node });
    }
    graph.nodes = result;
    Ok(())
}

/// The states of a layer, in order.
const WHAT: [&str; 2] = ["keys", "values"];

/// What is written of a layer's new tokens.
fn keeping(cache: &KeyValueCache, machine: &Machine) -> Attrs {
    let attrs = Attrs::new().with("pages", cache.pages).with("page", cache.page);
    // The reference computes in f32: what is kept so is read where it lies, and has the same numbers.
    if machine.arch == Arch::Cpu { attrs.with("dtype", "f32") } else { attrs }
}

/// The pages of the next layer's keys, or of its values.
fn pages(graph: &mut Graph, what: &str, element: Element, shape: Shape) -> StateId {
    let state = graph.add_state(&format!("cache.{}.{what}", graph.pages.len() / 2), element, shape);
    graph.pages.push(state);
    state
}

/// The pages that other entries read and write.
fn leave_room(graph: &mut Graph, cache: &KeyValueCache, machine: &Machine) {
    let attentions = graph.nodes.iter().filter(|node| node.op == id::ATTENTION);
    let read: Vec<[ValueId; 2]> = attentions.map(|node| [node.inputs[1], node.inputs[2]]).collect();
    for layer in read {
        let [k, v] = layer.map(|id| graph.value(id).value_type());
        let places = |of: Dim| ValueType::new(Element::I32, [k.shape[0].clone(), of]);
        let types = [places(k.shape[1].clone()), places(Dim::Fixed(cache.pages_per_sequence))];
        let types: Vec<ValueType> = [k.clone(), v].into_iter().chain(types).collect();
        let kept = ops::infer(id::CACHE_WRITE, &types, &keeping(cache, machine));
        for (of, what) in kept.expect("keys and values of an attention can be kept").iter().zip(WHAT) {
            pages(graph, what, of.dtype, of.extents().expect("the sizes of pages are known"));
        }
    }
}

fn sees_later_tokens(name: &str) -> CompileError {
    let why = "its tokens see later ones, so text cannot be generated token by token";
    CompileError::Options(format!("{name}: {why}"))
}

/// What follows from the largest position of a batch follows from the length of the sequence, however many of its tokens
/// are in this batch.
fn follow_the_sequence(graph: &mut Graph) {
    if graph.nodes.iter().any(|node| node.op == id::ROPE_FREQUENCIES_OF_BATCH) {
        let longest = input(graph, generation::LARGEST_POSITION, [Dim::Fixed(1)]);
        for node in graph.nodes.iter_mut().filter(|node| node.op == id::ROPE_FREQUENCIES_OF_BATCH) {
            node.inputs = vec![longest];
        }
    }
}

/// The product that gives the logits, and what is behind it, has one token of each row.
fn pick_last(graph: &mut Graph, last: ValueId) -> Result<(), CompileError> {
    let missing = || CompileError::Model(no_logits(&graph.name));
    let producers = graph.producers();
    let mut value = graph.output("logits").ok_or_else(missing)?;
    let (index, x) = loop {
        let index = producers[value.0 as usize].ok_or_else(missing)?;
        let node = &graph.nodes[index];
        value = *node.inputs.first().ok_or_else(missing)?;
        if ops::get(node.op).class() == Class::Matmul {
            break (index, value);
        }
    };
    let first = graph.nodes.iter().position(|node| node.inputs.contains(&x)).unwrap_or(index);
    let mut append = Append::new(graph, graph.nodes[first].phase);
    append.place_like(&append.graph.nodes[first].clone());
    let picked = append.emit(id::PICK_TOKEN, &[x, last], Attrs::new())[0];
    let made = append.nodes;
    for node in &mut graph.nodes[first..] {
        node.inputs.iter_mut().filter(|id| **id == x).for_each(|id| *id = picked);
    }
    graph.nodes.splice(first..first, made);
    retype(graph, first)
}

/// Shapes from a node on, which follow from those before it.
fn retype(graph: &mut Graph, first: usize) -> Result<(), CompileError> {
    let nodes = std::mem::take(&mut graph.nodes);
    for node in &nodes[first..] {
        let types: Vec<ValueType> = node.inputs.iter().map(|id| graph.value(*id).value_type()).collect();
        let results = ops::infer(node.op, &types, &node.attrs).map_err(CompileError::Model)?;
        for (id, of) in node.outputs.iter().zip(results) {
            let value = graph.value_mut(*id);
            value.shape = of.extents().expect("flat graphs have no symbols");
            value.axes = of.shape.iter().map(Dim::axis).collect();
        }
    }
    graph.nodes = nodes;
    Ok(())
}
