//! The axes of a model's parameters that have the same channels, found in the model's graph: of the residual stream, of a
//! feed-forward layer, of the heads of an attention.
//!
//! Knows operations by their names; not values, nor which channels stay.

use std::collections::{BTreeMap, BTreeSet};

use graph::{Item, Model, NodeSpec, ParameterSpec, ValueType};

use crate::artifacts::compress::part::{self, Place};

/// An axis of a parameter, by its name with the number of its layer.
pub type Axis = (String, usize);

/// Values and axes of a layer of a decoder.
#[derive(Clone, Debug)]
pub struct LayerAxes {
    pub place: Place,
    /// The value that the attention's output projection reads, and the size of a head; none without attention.
    pub heads: Option<Heads>,
    /// The value that the feed-forward layer's last matrix reads, and the axes that have its channels.
    pub mlp: Option<(String, Vec<Axis>)>,
    /// Results of norms of the residual stream.
    pub norms: Vec<String>,
    pub experts: Option<Experts>,
}

/// The experts of a mixture.
#[derive(Clone, Debug)]
pub struct Experts {
    pub count: usize,
    /// The results of experts in the order of `order`, and where the rows of each begin.
    pub rows: String,
    pub order: String,
    pub offsets: String,
    /// The weight of each choice of a token.
    pub weights: String,
    /// Axes with a number for each expert.
    pub routers: Vec<Axis>,
    /// The parameters of each expert.
    pub parameters: Vec<Vec<String>>,
}

/// The heads of an attention.
#[derive(Clone, Debug)]
pub struct Heads {
    pub value: String,
    pub head_dim: usize,
    pub count: usize,
    pub key_count: usize,
    /// Axes with the channels of queries and of keys and values, heads in their order.
    pub queries: Vec<Axis>,
    pub keys: Vec<Axis>,
}

/// The axes of a model.
#[derive(Clone, Debug)]
pub struct Axes {
    pub layers: Vec<LayerAxes>,
    /// The name of the stack that the layers are in.
    pub stack: String,
    /// Axes with the channels of the residual stream.
    pub hidden: Vec<Axis>,
    pub hidden_size: usize,
    /// The result of the norm after the layers.
    pub last_norm: Option<String>,
    /// The reason for which channels of a kind cannot be removed: an operation that needs them all.
    pub fixed: BTreeMap<&'static str, String>,
}

/// Sets of axes that have the same channels.
#[derive(Default)]
struct Sets {
    numbers: BTreeMap<Axis, usize>,
    parents: Vec<usize>,
    sizes: Vec<usize>,
    /// Members that an operation needs whole, with its name.
    fixed: Vec<(usize, String)>,
}

impl Sets {
    fn of(&mut self, axis: &Axis, size: usize) -> usize {
        let next = self.parents.len();
        let number = *self.numbers.entry(axis.clone()).or_insert(next);
        if number == next {
            self.parents.push(next);
            self.sizes.push(size);
        }
        self.root(number)
    }

    fn root(&self, mut number: usize) -> usize {
        while self.parents[number] != number {
            number = self.parents[number];
        }
        number
    }

    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.root(a), self.root(b));
        if self.sizes[a] == self.sizes[b] {
            self.parents[b] = a;
        } else {
            self.fixed.push((a, "a join of other sizes".to_owned()));
            self.fixed.push((b, "a join of other sizes".to_owned()));
        }
    }

    fn members(&self, set: usize) -> Vec<Axis> {
        let root = self.root(set);
        self.numbers.iter().filter(|(_, number)| self.root(**number) == root).map(|(axis, _)| axis.clone()).collect()
    }

    fn is_fixed(&self, set: usize) -> Option<&str> {
        let root = self.root(set);
        self.fixed.iter().find(|(of, _)| self.root(*of) == root).map(|(_, why)| why.as_str())
    }
}

/// The channels of a value: their set, and whether its last axis is that of one head alone.
#[derive(Clone, Copy)]
struct Channels {
    set: usize,
    of_heads: bool,
}

/// A walk over the nodes of a model.
struct Walk<'m> {
    types: BTreeMap<String, ValueType>,
    sets: Sets,
    channels: BTreeMap<String, Channels>,
    parameters: BTreeMap<String, &'m ParameterSpec>,
    /// Matrices of experts in one value, by the name of the value.
    stacks: BTreeMap<String, Vec<String>>,
}

impl Walk<'_> {
    /// The axis of a parameter, as a set.
    fn axis(&mut self, place: Option<Place>, name: &str, axis: usize) -> Option<usize> {
        let size = *self.parameters.get(name)?.shape.get(axis)?;
        let numbered = place.map_or_else(|| name.to_owned(), |place| place.numbered(name));
        Some(self.sets.of(&(numbered, axis), size))
    }

    fn joined(&mut self, x: Option<Channels>, axis: Option<usize>) {
        if let (Some(x), Some(axis)) = (x, axis) {
            self.sets.join(x.set, axis);
        }
    }

    /// Passes channels on from what a node reads to what it makes.
    fn node(&mut self, place: Option<Place>, node: &NodeSpec) {
        let x = node.inputs.first().and_then(|name| self.channels.get(name)).copied();
        let whole = |set| Some(Channels { set, of_heads: false });
        let made = match node.op.as_str() {
            "embedding" => self.axis(place, &node.inputs[1], 1).and_then(whole),
            "linear" => {
                let transposed = node.attrs.flag("transposed").unwrap_or(false);
                let (inputs, outputs) = if transposed { (0, 1) } else { (1, 0) };
                let axis = self.axis(place, &node.inputs[1], inputs);
                self.joined(x, axis);
                let made = self.axis(place, &node.inputs[1], outputs).and_then(whole);
                let bias = node.inputs.get(2).and_then(|bias| self.axis(place, bias, 0));
                self.joined(made, bias);
                made
            }
            "rmsnorm" | "layernorm" => {
                if x.is_some_and(|x| !x.of_heads) {
                    for weight in node.inputs.iter().skip(1) {
                        let axis = self.axis(place, weight, 0);
                        self.joined(x, axis);
                    }
                }
                x
            }
            "split_heads" => x.map(|x| Channels { of_heads: true, ..x }),
            "merge_heads" => x.map(|x| Channels { of_heads: false, ..x }),
            "attention" => {
                let of = |index: usize| node.inputs.get(index).and_then(|name| self.channels.get(name)).copied();
                if let (Some(k), Some(v)) = (of(1), of(2)) {
                    self.sets.join(k.set, v.set);
                }
                if let Some(sinks) = node.inputs.iter().find(|name| self.parameters.contains_key(*name)) {
                    x.iter().for_each(|x| self.sets.fixed.push((x.set, format!("`{sinks}`"))));
                }
                x
            }
            "rope" | "activation" | "scale" | "scale_by" | "unit_norm" | "soft_cap" | "dropout" | "to_groups"
            | "from_groups" => x,
            "add" | "sub" | "mul" | "swiglu" => {
                let of = |name: &String| self.channels.get(name).copied().or_else(|| self.axis_of_vector(place, name));
                let all: Vec<Channels> = node.inputs.iter().filter_map(of).collect();
                let all: Vec<Channels> =
                    all.into_iter().map(|of| Channels { set: self.sets.root(of.set), ..of }).collect();
                all.windows(2).for_each(|pair| self.sets.join(pair[0].set, pair[1].set));
                all.first().copied()
            }
            "stack" => {
                self.stacks.insert(node.outputs[0].clone(), node.inputs.clone());
                None
            }
            "grouped_linear" if self.stacks.contains_key(&node.inputs[1]) => {
                let parts = self.stacks[&node.inputs[1]].clone();
                for part in &parts {
                    let axis = self.axis(place, part, 1);
                    self.joined(x, axis);
                }
                // Gate and up of an expert make two values.
                let is_one_each = node.attrs.size("groups").is_ok_and(|count| count == parts.len());
                let mut made = None;
                for part in parts.iter().filter(|_| is_one_each) {
                    let axis = self.axis(place, part, 0);
                    self.joined(made, axis);
                    made = made.or(axis.and_then(whole));
                }
                made
            }
            other => {
                for name in &node.inputs {
                    if let Some(of) = self.channels.get(name) {
                        self.sets.fixed.push((of.set, format!("`{other}`")));
                    }
                }
                None
            }
        };
        if let Some(made) = made {
            self.channels.insert(node.outputs[0].clone(), made);
        }
    }

    /// The channels of a parameter that is a vector, if it is known already.
    fn axis_of_vector(&self, place: Option<Place>, name: &str) -> Option<Channels> {
        let numbered = place.map_or_else(|| name.to_owned(), |place| place.numbered(name));
        let set = *self.sets.numbers.get(&(numbered, 0))?;
        Some(Channels { set, of_heads: false })
    }
}

/// The axes of a model's decoder.
pub fn axes(model: &Model) -> Axes {
    let mut parameters: BTreeMap<String, &ParameterSpec> = BTreeMap::new();
    parameters.extend(model.weights().map(|of| (of.name.clone(), of)));
    let types = part::types(model);
    let mut walk =
        Walk { types, sets: Sets::default(), channels: BTreeMap::new(), parameters, stacks: BTreeMap::new() };
    let mut layers = Vec::new();
    let mut stream = None;
    let (mut last_norm, mut stack) = (None, String::new());
    for (item, of) in model.body.iter().enumerate() {
        let repeat = match of {
            Item::Node(node) => {
                walk.node(None, node);
                let is_norm = matches!(node.op.as_str(), "rmsnorm" | "layernorm");
                if is_norm && !layers.is_empty() {
                    last_norm = Some(node.outputs[0].clone());
                }
                continue;
            }
            Item::Repeat(repeat) => repeat,
        };
        let mut carried: Vec<Option<Channels>> = repeat
            .carry
            .iter()
            .map(|of| of.initial.as_ref().and_then(|name| walk.channels.get(name)).copied())
            .collect();
        stream = carried.first().copied().flatten().or(stream);
        stack.clone_from(&repeat.stack);
        for layer in 0..repeat.repeat {
            let place = Place { item, layer };
            let block = place.block(model);
            for (of, channels) in block.carry.iter().zip(&carried) {
                walk.channels.extend(channels.map(|channels| (of.inside.clone(), channels)));
            }
            block.nodes.iter().for_each(|node| walk.node(Some(place), node));
            layers.push(of_layer(&walk, place, model));
            carried = block.carry.iter().map(|of| walk.channels.get(&of.next).copied()).collect();
        }
        for (of, channels) in repeat.carry.iter().zip(carried) {
            walk.channels.extend(channels.map(|channels| (of.result.clone(), channels)));
        }
    }
    // Sets were still joined while layers were found: their members are known only now.
    let hidden_set = stream.map(|of| walk.sets.root(of.set));
    let mut found = Axes {
        layers: Vec::new(),
        hidden: hidden_set.map(|set| walk.sets.members(set)).unwrap_or_default(),
        hidden_size: hidden_set.map_or(0, |set| walk.sets.sizes[set]),
        last_norm,
        stack,
        fixed: BTreeMap::new(),
    };
    if let Some(why) = hidden_set.and_then(|set| walk.sets.is_fixed(set)) {
        found.fixed.insert("hidden", why.to_owned());
    }
    for (place, heads, mlp, norms, experts) in layers {
        let experts = experts.map(|(mut of, set)| {
            of.routers.extend(walk.sets.members(set));
            of
        });
        let mut fix = |kind, set| {
            if let Some(why) = walk.sets.is_fixed(set) {
                found.fixed.insert(kind, why.to_owned());
            }
            walk.sets.members(set)
        };
        let heads = heads.map(|(value, head_dim, queries, keys)| Heads {
            value,
            head_dim,
            count: walk.sets.sizes[walk.sets.root(queries)] / head_dim,
            key_count: walk.sets.sizes[walk.sets.root(keys)] / head_dim,
            queries: fix("heads", queries),
            keys: fix("heads", keys),
        });
        let mlp = mlp.map(|(value, set)| (value, fix("mlp", set)));
        let is_of_stream = |(_, set): &(String, usize)| Some(walk.sets.root(*set)) == hidden_set;
        let norms = norms.into_iter().filter(is_of_stream).map(|(name, _)| name).collect();
        found.layers.push(LayerAxes { place, heads, mlp, norms, experts });
    }
    found
}

/// A layer's place, the heads of its attention (value, size, queries, keys), the channels of its feed-forward layer, its norms, its
/// experts with the set of what chooses them.
type Found = (
    Place,
    Option<(String, usize, usize, usize)>,
    Option<(String, usize)>,
    Vec<(String, usize)>,
    Option<(Experts, usize)>,
);

fn of_layer(walk: &Walk<'_>, place: Place, model: &Model) -> Found {
    let block = place.block(model);
    let set = |name: &String| walk.channels.get(name).map(|of| of.set);
    let (mut heads, mut mlp, mut norms) = (None, None, Vec::new());
    for node in &block.nodes {
        match node.op.as_str() {
            "rmsnorm" | "layernorm" => norms.extend(set(&node.outputs[0]).map(|set| (node.outputs[0].clone(), set))),
            "merge_heads" => {
                let attention = block.nodes.iter().find(|of| of.op == "attention" && of.outputs[0] == node.inputs[0]);
                let Some(attention) = attention else { continue };
                let head_dim = walk.types.get(&node.inputs[0]).and_then(ValueType::last);
                if let (Some(size), Some(q), Some(k)) = (head_dim, set(&attention.inputs[0]), set(&attention.inputs[1]))
                {
                    heads = Some((node.outputs[0].clone(), size, q, k));
                }
            }
            "linear" => {
                let by = block.nodes.iter().find(|of| of.outputs[0] == node.inputs[0]);
                // Experts and what they share have sizes of their own.
                if block.nodes.iter().any(|of| of.op == "grouped_linear") {
                    continue;
                }
                if by.is_some_and(|of| matches!(of.op.as_str(), "swiglu" | "mul" | "activation")) {
                    let found = set(&node.inputs[0]).map(|set| (node.inputs[0].clone(), set));
                    // Gates of other parts look alike, and come after it or have other regions.
                    mlp = if node.region.as_deref() == Some("mlp") { mlp.or(found) } else { mlp };
                }
            }
            _ => {}
        }
    }
    (place, heads, mlp, norms, experts_of(walk, place, model))
}

/// The experts of a layer, where weights are applied to what they make.
fn experts_of(walk: &Walk<'_>, place: Place, model: &Model) -> Option<(Experts, usize)> {
    let block = place.block(model);
    let maker = |name: &String| block.nodes.iter().find(|node| node.outputs.contains(name));
    let gather = block.nodes.iter().find(|node| node.op == "from_groups" && node.inputs.len() == 4)?;
    let (rows, order, weights) = (&gather.inputs[0], &gather.inputs[1], &gather.inputs[3]);
    let groups = maker(order).filter(|node| node.op == "group_rows")?;
    let count = groups.attrs.size("groups").ok()?;
    let route = maker(weights).filter(|node| node.op == "route")?;
    let set = walk.channels.get(&route.inputs[0])?.set;
    let routers = route.inputs.iter().skip(1).map(|name| (place.numbered(name), 0)).collect();
    let mut parameters: Vec<Vec<String>> = vec![Vec::new(); count];
    for node in block.nodes.iter().filter(|node| node.op == "grouped_linear") {
        let parts = &walk.stacks.get(&node.inputs[1])?;
        let each = parts.len() / count;
        for (expert, of) in parts.chunks(each.max(1)).zip(&mut parameters) {
            of.extend(expert.iter().map(|name| place.numbered(name)));
        }
    }
    let (rows, order, weights) = (rows.clone(), order.clone(), weights.clone());
    let offsets = groups.outputs[2].clone();
    Some((Experts { count, rows, order, offsets, weights, routers, parameters }, set))
}

/// The names of parameters with an axis among these.
pub fn names(axes: &[Axis]) -> BTreeSet<&str> {
    axes.iter().map(|(name, _)| name.as_str()).collect()
}

/// The channels of the feed-forward layers; the largest, where they differ.
pub fn mlp_size(axes: &Axes, model: &Model) -> usize {
    let of = |of: &LayerAxes| {
        let (name, axis) = of.mlp.as_ref()?.1.first()?;
        model.weights().find(|spec| spec.is_named(name)).map(|spec| spec.shape[*axis])
    };
    axes.layers.iter().filter_map(of).max().unwrap_or(0)
}
