//! Parts of a model as models of their own: what leads from given values to wanted ones, inside of a layer or before the layers.
//!
//! Knows names and types of the graph; not weights, devices or batches.

use std::collections::{BTreeMap, BTreeSet};

use graph::{Axis, Bindings, Block, Dim, Each, Element, Input, Item, Model, NodeSpec, Output, Repeat, ValueType};
use tensor::{Attrs, DType};

use super::reads::GROUPED;

/// The input of a batch that is 1 for tokens of documents, 0 for padding.
const PRESENT: &str = "present";

/// The place of a layer in a model's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of the stack among the items of the body.
    pub item: usize,
    pub layer: usize,
}

impl Place {
    /// Returns the stack that the layer is in.
    pub fn stack(self, model: &Model) -> &Repeat {
        match &model.body[self.item] {
            Item::Repeat(repeat) => repeat,
            Item::Node(_) => unreachable!("a place is in a stack"),
        }
    }

    /// Returns the kind of the layer.
    pub fn block(self, model: &Model) -> &Block {
        self.stack(model).block(self.layer).expect("the compiler checked the pattern")
    }

    /// Returns the name of a parameter of the layer, whose number is `{i}` in the block.
    pub fn numbered(self, name: &str) -> String {
        name.replace("{i}", &self.layer.to_string())
    }
}

/// The types of all values by name; inside of blocks names are those of the blocks.
pub fn types(model: &Model) -> BTreeMap<String, ValueType> {
    let of_inputs = model.inputs.iter().map(|of| (of.name.clone(), ValueType::new(of.dtype, of.shape.clone())));
    let mut found: BTreeMap<String, ValueType> = of_inputs.collect();
    let of_node = |node: &NodeSpec| node.outputs.iter().cloned().zip(node.types.iter().cloned()).collect::<Vec<_>>();
    for item in &model.body {
        let repeat = match item {
            Item::Node(node) => {
                found.extend(of_node(node));
                continue;
            }
            Item::Repeat(repeat) => repeat,
        };
        found.extend(repeat.blocks.iter().flat_map(|block| &block.nodes).flat_map(of_node));
        for (index, of) in repeat.carry.iter().enumerate() {
            // Some layers only hand on what another kind of layer makes.
            let names = repeat.blocks.iter().map(|block| &block.carry[index].next);
            let Some(known) = of.initial.iter().chain(names).find_map(|name| found.get(name)).cloned() else {
                continue;
            };
            found.extend(repeat.blocks.iter().map(|block| (block.carry[index].inside.clone(), known.clone())));
            found.insert(of.result.clone(), known);
        }
    }
    found
}

/// The part of a model that computes `wanted` values of a layer from `given` ones and from what is before the layers. Its
/// results have the names of the values; parameters of the layer have the number 0.
pub fn of_layer(model: &Model, place: Place, given: &BTreeSet<String>, wanted: &[String]) -> Model {
    let (stack, block) = (place.stack(model), place.block(model));
    let mut needed = Needed::new(given, wanted);
    let mut nodes: Vec<NodeSpec> = block.nodes.iter().rev().filter(|node| needed.takes(node)).cloned().collect();
    nodes.reverse();
    for node in &mut nodes {
        node.attrs = of_one(&node.attrs, place.layer);
    }
    let parameters = block.parameters.iter().filter(|of| needed.names.contains(&of.name)).cloned().collect();
    let mut each = Vec::new();
    for of in &stack.each {
        if !needed.names.contains(&of.inside) {
            continue;
        }
        let value = of.values[place.layer].clone();
        needed.add(&value);
        each.push(Each { inside: of.inside.clone(), values: vec![value] });
    }
    let outputs = wanted.iter().map(|name| Output { name: name.clone(), value: name.clone() }).collect();
    let block = Block { carry: Vec::new(), parameters, nodes, outputs };
    let (repeat, stack) = (1, stack.stack.clone());
    let layer = Repeat { repeat, stack, pattern: Vec::new(), carry: Vec::new(), each, blocks: vec![block] };
    needed.rest(model, place.item, vec![Item::Repeat(layer)], Vec::new())
}

/// Returns the bytes of a value for this many rows of this many tokens. `dtype`: the type of values in the layers.
pub fn bytes_of(of: &ValueType, [rows, tokens]: [usize; 2], dtype: DType) -> usize {
    let bindings = Bindings::from([(Axis::Rows, rows), (Axis::Tokens, tokens)]);
    let extents = of.shape.iter().map(|dim| dim.bind(&bindings).and_then(|dim| dim.fixed()).unwrap_or(0));
    let own = if let Element::Fixed(own) = of.dtype { own } else { dtype };
    extents.product::<usize>() * own.size()
}

/// Returns the bytes of all values of a layer for a token, of the kind of layer that has the most.
pub fn bytes_of_token(model: &Model, dtype: DType) -> usize {
    let of_block = |block: &Block| {
        let types = block.nodes.iter().flat_map(|node| &node.types);
        types.map(|of| bytes_of(of, [1, 1], dtype)).sum::<usize>()
    };
    blocks(model).map(of_block).max().unwrap_or(0)
}

/// True if layers have matrices of experts.
pub fn has_experts(model: &Model) -> bool {
    blocks(model).flat_map(|block| &block.nodes).any(|node| node.op == GROUPED)
}

fn blocks(model: &Model) -> impl Iterator<Item = &Block> {
    let stacks = model.body.iter().filter_map(|item| if let Item::Repeat(stack) = item { Some(stack) } else { None });
    stacks.flat_map(|stack| &stack.blocks)
}

/// Returns the columns of a value of the tokens of rows, [B, T, K].
pub fn columns_of_tokens(of: &ValueType) -> Option<usize> {
    let is = |dim: &Dim, axis: Axis| matches!(dim, Dim::Symbol(symbol) if symbol == axis.symbol());
    match of.shape.as_slice() {
        [rows, tokens, columns] if is(rows, Axis::Rows) && is(tokens, Axis::Tokens) => columns.fixed(),
        _ => None,
    }
}

/// The part of a model that computes Σ xᵀx over the tokens of a batch for some `values` x [B, T, K] of a layer, f32 [K, K]; and the
/// names of these results.
pub fn of_moments(model: &Model, place: Place, given: &BTreeSet<String>, values: &[String]) -> (Model, Vec<String>) {
    let types = types(model);
    let mut model = model.clone();
    let Item::Repeat(stack) = &mut model.body[place.item] else { unreachable!("a place is in a stack") };
    let kind = stack.pattern.get(place.layer).copied().unwrap_or(0);
    let block = &mut stack.blocks[kind];
    let mut names = Vec::new();
    for value in values {
        let of = &types[value];
        let columns = of.shape.last().expect("a value has columns").clone();
        let node = |op: &str, inputs: [&str; 2], output: &str, of: ValueType, attrs: Attrs| NodeSpec {
            op: op.to_owned(),
            inputs: inputs.map(str::to_owned).to_vec(),
            outputs: vec![output.to_owned()],
            types: vec![of],
            attrs,
            region: None,
            at: None,
        };
        let (masked, name) = (format!("{value}.present"), format!("{value}.moments"));
        // Padding counts nothing.
        let product = Attrs::new()
            .with("of", Vec::<String>::new())
            .with("expressions", vec!["mul(in0, in1)"])
            .with("operands", vec!["element", "row"])
            .with("results", vec!["element"])
            .with("dtypes", vec!["float"]);
        block.nodes.push(node("rowwise", [value.as_str(), PRESENT], &masked, of.clone(), product));
        let squares = Attrs::new().with("transpose_a", true).with("f32", true);
        let of = ValueType::new(Element::F32, vec![columns.clone(), columns]);
        block.nodes.push(node("matmul", [masked.as_str(), value.as_str()], &name, of, squares));
        names.push(name);
    }
    if !model.inputs.iter().any(|of| of.name == PRESENT) {
        let shape = [Axis::Rows, Axis::Tokens].map(|axis| Dim::Symbol(axis.symbol().to_owned())).to_vec();
        model.inputs.push(Input { name: PRESENT.to_owned(), dtype: Element::F32, shape });
    }
    (of_layer(&model, place, given, &names), names)
}

/// The part of a model that computes `wanted` values before a stack, from `given` ones.
pub fn before_stack(model: &Model, item: usize, given: &BTreeSet<String>, wanted: &[String]) -> Model {
    let outputs = wanted.iter().map(|name| Output { name: name.clone(), value: name.clone() }).collect();
    Needed::new(given, wanted).rest(model, item, Vec::new(), outputs)
}

/// The values that are still to be computed, from the last node to the first.
struct Needed<'a> {
    given: &'a BTreeSet<String>,
    names: BTreeSet<String>,
    /// The given values that are read.
    read: BTreeSet<String>,
}

impl<'a> Needed<'a> {
    fn new(given: &'a BTreeSet<String>, wanted: &[String]) -> Needed<'a> {
        let mut needed = Needed { given, names: BTreeSet::new(), read: BTreeSet::new() };
        wanted.iter().for_each(|name| needed.add(name));
        needed
    }

    fn add(&mut self, name: &str) {
        let set = if self.given.contains(name) { &mut self.read } else { &mut self.names };
        set.insert(name.to_owned());
    }

    /// True for a node that is needed; what it reads is needed then.
    fn takes(&mut self, node: &NodeSpec) -> bool {
        let is_needed = node.outputs.iter().any(|name| self.names.contains(name));
        if is_needed {
            node.inputs.iter().for_each(|name| self.add(name));
        }
        is_needed
    }

    /// True for a stack whose results are needed.
    fn takes_whole(&mut self, repeat: &Repeat) -> bool {
        let is_needed = repeat.carry.iter().any(|of| self.names.contains(&of.result));
        if is_needed {
            // Names of the stack's own values are harmless: nothing outside has them.
            let nodes = repeat.blocks.iter().flat_map(|block| &block.nodes);
            let inputs = nodes.flat_map(|node| &node.inputs).chain(repeat.each.iter().flat_map(|of| &of.values));
            inputs.chain(repeat.carry.iter().filter_map(|of| of.initial.as_ref())).for_each(|name| self.add(name));
        }
        is_needed
    }

    /// The model of what is needed before an item of the body, with further items after it.
    fn rest(mut self, model: &Model, item: usize, after: Vec<Item>, outputs: Vec<Output>) -> Model {
        let mut body: Vec<Item> = Vec::new();
        for item in model.body[..item].iter().rev() {
            let is_needed = match item {
                Item::Node(node) => self.takes(node),
                Item::Repeat(repeat) => self.takes_whole(repeat),
            };
            body.extend(is_needed.then(|| item.clone()));
        }
        body.reverse();
        body.extend(after);
        let types = types(model);
        let mut inputs: Vec<Input> = model.inputs.iter().filter(|of| self.names.contains(&of.name)).cloned().collect();
        inputs.extend(self.read.into_iter().map(|name| {
            let of = &types[&name];
            Input { dtype: of.dtype, shape: of.shape.clone(), name }
        }));
        let parameters = model.parameters.iter().filter(|of| self.names.contains(&of.name)).cloned().collect();
        Model { inputs, parameters, body, outputs, tasks: Vec::new(), ..model.clone() }
    }
}

/// True if layers of two models have the same nodes, with the same attributes but for sizes of parts.
pub fn same_layer(a: &Model, place_a: Place, b: &Model, place_b: Place) -> bool {
    let nodes = |model: &Model, place: Place| -> Vec<(String, Vec<String>, Attrs)> {
        let of = |node: &NodeSpec| {
            let mut attrs = of_one(&node.attrs, place.layer);
            attrs.retain(|name, _| name != "sizes" && name != "groups");
            (node.op.clone(), if node.op == "stack" { Vec::new() } else { node.inputs.clone() }, attrs)
        };
        place.block(model).nodes.iter().map(of).collect()
    };
    nodes(a, place_a)
        .iter()
        .zip(nodes(b, place_b))
        .all(|((op, inputs, attrs), other)| *op == other.0 && inputs.len() == other.1.len() && *attrs == other.2)
        && place_a.block(a).nodes.len() == place_b.block(b).nodes.len()
}

/// Attributes with a layer's value of each that differs from layer to layer.
fn of_one(attrs: &Attrs, layer: usize) -> Attrs {
    let of = |value: &serde_json::Value| {
        let each = value.get("each").and_then(|each| each.as_array());
        each.and_then(|each| each.get(layer)).unwrap_or(value).clone()
    };
    attrs.iter().map(|(name, value)| (name.clone(), of(value))).collect()
}
