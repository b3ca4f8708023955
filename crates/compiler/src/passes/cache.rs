//! Makes a model that reads whole rows one that continues its sequences: attention reads keys and values of earlier
//! tokens from caches in pages, which are states, and adds those of the new tokens; convolutions and delta rules
//! continue from the window and the states of their sequence's slot; only one token of each row reaches the head. The
//! tokens of an image may see each other both ways, as all of them are among the new ones.
//!
//! Knows what operations that mix tokens, rotation and the head read; no model. Every kind of layer is right because
//! these operations are.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use graph::{Axis, Dim, Element, Graph, Node, OpId, Origin, Phase, StateId, ValueId, ValueType};
use ops::elementwise::Expr;
use ops::rowwise::{Extent, Form};
use ops::sampling::Draw;
use ops::{Append, Class, Emit, id};
use program::{Arch, Machine, Variant, generation};
use tensor::Attrs;

use crate::options::KeyValueCache;
use crate::{CompileError, CompileOptions, EntryOptions};

pub fn run(
    graph: &mut Graph,
    options: &CompileOptions,
    entry: &EntryOptions,
    variant: Variant,
    machine: &Machine,
) -> Result<(), CompileError> {
    let Some(cache) = &entry.cache else { return Ok(()) };
    if !entry.generates() {
        leave_room(graph, cache, machine);
        return Ok(());
    }
    go_on(graph, cache, variant, machine)?;
    follow_the_sequence(graph);
    if variant.seq_len > 1 {
        let last = input(graph, generation::LAST_TOKEN, [Dim::Named(Axis::Rows, variant.batch)]);
        pick_last(graph, last)?;
    }
    add_next_token(graph, machine.arch == Arch::Cpu || options.batch_invariant)
}

/// Draws the token that follows each row from its logits, which need not cross the link. Where sampling is exact, its
/// log-probability has the bits of the loss.
fn add_next_token(graph: &mut Graph, is_exact: bool) -> Result<(), CompileError> {
    let logits = graph.output("logits").ok_or_else(|| CompileError::Model(no_logits(&graph.name)))?;
    let of_row = graph.value(logits).value_type().shape;
    let (_, rows) = of_row.split_last().expect("logits have an axis");
    let sampling = ValueType::new(Element::F32, [rows, &[Dim::Fixed(Draw::WIDTH)]].concat());
    let sampling = graph.add_typed(generation::SAMPLING, &sampling, Origin::Input);
    graph.inputs.push(sampling);
    let factors = is_exact.then(|| {
        let of_rows = ValueType::new(Element::F32, rows.to_vec());
        graph.add_typed(generation::LOGIT_FACTORS, &of_rows, Origin::Input)
    });
    graph.inputs.extend(factors);
    let element = graph.value(logits).element;
    let mut append = Append::new(graph, Phase::Forward);
    let mut next = append.emit(id::SAMPLE_TOKEN, &[logits, sampling], Attrs::new());
    if let Some(factors) = factors {
        let form = Form {
            operands: vec![Extent::Element, Extent::Row],
            results: vec![(Extent::Element, Expr::Input(0) * Expr::Input(1))],
        };
        let attrs =
            form.attrs().with("of", vec![id::SCALE.name().to_owned()]).with("dtypes", vec![element.to_string()]);
        let scaled = append.emit(id::ROWWISE, &[logits, factors], attrs)[0];
        let loss = append.emit(id::CROSS_ENTROPY, &[scaled, next[0]], Attrs::new())[0];
        next[1] = append.emit(id::SCALE, &[loss], Attrs::new().with("factor", -1.0))[0];
    }
    let made = append.nodes;
    graph.nodes.extend(made);
    let names = [generation::NEXT_TOKEN, generation::NEXT_LOGP].map(str::to_owned);
    graph.outputs.extend(names.into_iter().zip(next));
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

/// The memory in which a sequence has what is kept of it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In pages, enough for its tokens.
    Pages,
    /// In a slot of its own, whatever the sequence's length.
    Slot,
}

/// The earlier tokens' contribution to an operation over whole rows.
struct Kept {
    /// The operation over whole rows.
    of: OpId,
    /// The operation that keeps it.
    op: OpId,
    /// The operands that it takes of the operation over whole rows, before positions and place.
    operands: Range<usize>,
    place: Place,
    /// The names of its last results, in order.
    what: &'static [&'static str],
}

static KEPT: [Kept; 3] = [
    Kept { of: id::ATTENTION, op: id::CACHE_WRITE, operands: 1..3, place: Place::Pages, what: &["keys", "values"] },
    Kept { of: id::CAUSAL_CONV, op: id::CACHED_CONV, operands: 0..2, place: Place::Slot, what: &["window"] },
    Kept { of: id::GATED_DELTA, op: id::CACHED_DELTA, operands: 0..5, place: Place::Slot, what: &["states"] },
];

impl Kept {
    /// The row for an operation over tokens; none for others, and for those over patches of images, which nothing is kept of.
    fn by(graph: &Graph, node: &Node) -> Option<&'static Kept> {
        let kept = KEPT.iter().find(|kept| kept.of == node.op)?;
        is_of_tokens(graph, node).then_some(kept)
    }

    /// Returns the values that nodes share pages by: nodes that read the same keys and values share theirs. None
    /// outside of pages.
    fn shared(&self, node: &Node) -> Option<Vec<ValueId>> {
        (self.place == Place::Pages).then(|| node.inputs[self.operands.clone()].to_vec())
    }

    fn attrs(&self, node: &Node, cache: &KeyValueCache, machine: &Machine) -> Attrs {
        let attrs = match self.place {
            Place::Pages => Attrs::new().with("pages", cache.pages).with("page", cache.page),
            Place::Slot => some_of(&node.attrs, &["scale", "additive"]).with("slots", cache.sequences),
        };
        // The reference computes in f32: a cache of f32 is read where it lies, and has the same numbers.
        let has_choice = ops::get(self.op).attributes().iter().any(|of| of.name == "dtype");
        if has_choice && machine.arch == Arch::Cpu { attrs.with("dtype", "f32") } else { attrs }
    }

    /// The types of what is kept for a node.
    fn types(&self, graph: &Graph, node: &Node, cache: &KeyValueCache, machine: &Machine) -> Vec<ValueType> {
        let operands = &node.inputs[self.operands.clone()];
        let mut types: Vec<ValueType> = operands.iter().map(|id| graph.value(*id).value_type()).collect();
        let rows = types[0].shape[..2].to_vec();
        let place = match self.place {
            Place::Pages => vec![rows[0].clone(), Dim::Fixed(cache.pages_per_sequence)],
            Place::Slot => vec![rows[0].clone()],
        };
        types.extend([rows, place].map(|shape| ValueType::new(Element::I32, shape)));
        let made = ops::infer(self.op, &types, &self.attrs(node, cache, machine));
        let mut made = made.expect("what an operation of a model reads of earlier tokens can be kept");
        made.split_off(made.len() - self.what.len())
    }
}

/// Returns true if the rows of an operation are tokens, not patches of images.
fn is_of_tokens(graph: &Graph, node: &Node) -> bool {
    graph.value(node.inputs[0]).axes.get(1) != Some(&Some(Axis::Patches))
}

/// The attributes of these names, where they are given.
fn some_of(attrs: &Attrs, names: &[&str]) -> Attrs {
    let given = names.iter().filter_map(|name| Some((*name, attrs.get(name)?.clone())));
    given.fold(Attrs::new(), |attrs, (name, value)| attrs.with(name, value))
}

/// Replaces operations over whole rows by those that continue their sequences.
fn go_on(graph: &mut Graph, cache: &KeyValueCache, variant: Variant, machine: &Machine) -> Result<(), CompileError> {
    let rows = Dim::Named(Axis::Rows, variant.batch);
    let tokens = [rows.clone(), Dim::Named(Axis::Tokens, variant.seq_len)];
    let positions = input(graph, generation::POSITIONS, tokens.clone());
    let in_images = sees_images(graph, variant)?;
    let last_keys = in_images.then(|| input(graph, generation::LAST_KEYS, tokens));
    let needed =
        |place: Place| graph.nodes.iter().filter_map(|node| Kept::by(graph, node)).any(|kept| kept.place == place);
    let [in_pages, in_slots] = [Place::Pages, Place::Slot].map(needed);
    let pages = Dim::Fixed(cache.pages_per_sequence);
    let table = in_pages.then(|| input(graph, generation::TABLE, [rows.clone(), pages]));
    let slots = in_slots.then(|| input(graph, generation::SLOTS, [rows]));
    let mut result = Vec::with_capacity(graph.nodes.len());
    let mut layers = 0;
    let mut pages_of: HashMap<Vec<ValueId>, Vec<ValueId>> = HashMap::new();
    for node in std::mem::take(&mut graph.nodes) {
        let Some(kept) = Kept::by(graph, &node) else {
            result.push(node);
            continue;
        };
        let shared = kept.shared(&node);
        if let Some(written) = shared.as_ref().and_then(|operands| pages_of.get(operands)) {
            let table = table.expect("an input, since it is needed");
            result.push(over_pages(graph, node, written, [positions, table], last_keys)?);
            continue;
        }
        let types = kept.types(graph, &node, cache, machine);
        let written: Vec<ValueId> = types.iter().map(|of| graph.add_typed(kept.op.name(), of, Origin::Node)).collect();
        let states = add_states(graph, layers, kept, &types);
        graph.stored.extend(written.iter().copied().zip(states));
        layers += 1;
        pages_of.extend(shared.map(|operands| (operands, written.clone())));
        let place = if kept.place == Place::Pages { table } else { slots }.expect("an input, since it is needed");
        let operands = node.inputs[kept.operands.clone()].iter().copied();
        let inputs = operands.chain([positions, place]).collect();
        let attrs = kept.attrs(&node, cache, machine);
        match kept.place {
            Place::Pages => {
                let write = Node { op: kept.op, inputs, outputs: written.clone(), attrs, ..node.clone() };
                let read = over_pages(graph, node, &written, [positions, place], last_keys)?;
                result.extend([write, read]);
            }
            Place::Slot => {
                let outputs = [node.outputs[0]].into_iter().chain(written).collect();
                result.push(Node { op: kept.op, inputs, outputs, attrs, ..node });
            }
        }
    }
    graph.nodes = result;
    Ok(())
}

/// The operand that says how far the tokens of an attention see.
fn last_key(graph: &Graph, node: &Node) -> Option<ValueId> {
    let optional = node.inputs.get(4..).filter(|_| node.op == id::ATTENTION && is_of_tokens(graph, node))?;
    optional.iter().copied().find(|id| graph.value(*id).shape.len() == 2)
}

/// Returns true if tokens of images in the batch see later ones of the same image. Errors: tokens that see others.
fn sees_images(graph: &Graph, variant: Variant) -> Result<bool, CompileError> {
    let seen: Vec<ValueId> = graph.nodes.iter().filter_map(|node| last_key(graph, node)).collect();
    if seen.iter().any(|id| graph.value(*id).name != generation::IMAGE_LAST) {
        return Err(sees_later_tokens(&graph.name));
    }
    Ok(!seen.is_empty() && variant.patches > 0)
}

/// Attention over the pages that were written, in place of `node`.
fn over_pages(
    graph: &Graph,
    node: Node,
    written: &[ValueId],
    [positions, table]: [ValueId; 2],
    last_keys: Option<ValueId>,
) -> Result<Node, CompileError> {
    let last_keys = last_keys.filter(|_| last_key(graph, &node).is_some());
    let sink = node.inputs[4..].iter().copied().find(|id| graph.value(*id).shape.len() == 1);
    if node.attrs.flag("bidirectional").expect("checked by the shape rule") {
        return Err(sees_later_tokens(&graph.name));
    }
    let attrs = some_of(&node.attrs, &["scale", "window", "soft_cap"]);
    let placed = [node.inputs[0], written[0], written[1], positions, table];
    let inputs = placed.into_iter().chain(last_keys).chain(sink).collect();
    let outputs = vec![node.outputs[0]];
    Ok(Node { op: id::CACHED_ATTENTION, inputs, outputs, attrs, ..node })
}

/// States for what is kept for a layer.
fn add_states(graph: &mut Graph, layer: usize, kept: &Kept, types: &[ValueType]) -> Vec<StateId> {
    let mut add = |(of, what): (&ValueType, &&str)| {
        let shape = of.extents().expect("the sizes of what is kept are known");
        graph.add_state(&format!("cache.{layer}.{what}"), of.dtype, shape)
    };
    let states: Vec<StateId> = types.iter().zip(kept.what).map(&mut add).collect();
    graph.cached.extend(&states);
    states
}

/// Adds the states of the cache, which other entries read and write.
fn leave_room(graph: &mut Graph, cache: &KeyValueCache, machine: &Machine) {
    let mut known: HashSet<Vec<ValueId>> = HashSet::new();
    let mut is_new = |operands: Option<Vec<ValueId>>| operands.is_none_or(|operands| known.insert(operands));
    let mut kept_for = |node: &Node| {
        let kept = Kept::by(graph, node).filter(|kept| is_new(kept.shared(node)))?;
        Some((kept.types(graph, node, cache, machine), kept))
    };
    let found: Vec<(Vec<ValueType>, &Kept)> = graph.nodes.iter().filter_map(&mut kept_for).collect();
    for (layer, (types, kept)) in found.iter().enumerate() {
        add_states(graph, layer, kept, types);
    }
}

fn sees_later_tokens(name: &str) -> CompileError {
    let why = "its tokens see later ones, so text cannot be generated token by token";
    CompileError::Options(format!("{name}: {why}"))
}

/// Makes what follows from the largest position of a batch follow from the length of the sequence, whatever the number
/// of its tokens in this batch.
fn follow_the_sequence(graph: &mut Graph) {
    if graph.nodes.iter().any(|node| node.op == id::ROPE_FREQUENCIES_OF_BATCH) {
        let longest = input(graph, generation::LARGEST_POSITION, [Dim::Fixed(1)]);
        for node in graph.nodes.iter_mut().filter(|node| node.op == id::ROPE_FREQUENCIES_OF_BATCH) {
            node.inputs = vec![longest];
        }
    }
}

/// Restricts the product that gives the logits, and everything after it, to one token of each row.
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

/// Infers the shapes from a node on, which follow from those before it.
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
