//! Model → flat graph: repeats become layers, the entry's task follows them, parameter names get their numbers, batch
//! symbols their extents. Types recorded in the model are bound here and checked by the verifier.

use std::collections::{HashMap, HashSet};

use graph::{
    Axis, Bindings, Block, Carried, Carry, Each, Graph, Item, Layer, Model, Node, NodeSpec, Origin, Output,
    ParameterId, ParameterSpec, Phase, Repeat, Task, ValueId, ValueType,
};
use ops::id;
use program::Variant;
use tensor::{Attrs, DType};

use crate::{CompileError, CompileOptions, EntryOptions};

/// Names in scope and what they stand for.
type Scope = HashMap<String, ValueId>;

/// Flattens the model with the task of an entry for one shape variant.
pub fn expand(
    model: &Model,
    options: &CompileOptions,
    entry: &EntryOptions,
    variant: Variant,
) -> Result<Graph, CompileError> {
    let bindings = Bindings::from([
        (Axis::Rows, variant.batch),
        (Axis::Tokens, variant.seq_len),
        (Axis::Patches, variant.patches),
    ]);
    let graph = Graph { name: model.architecture.clone(), entry: entry.name.clone(), ..Graph::default() };
    let mut expansion = Expansion { graph, names: HashSet::new(), bindings, options, apart: &model.adapters.apart };
    let mut scope = Scope::new();
    let task = entry.task.as_deref().map(|name| find(model, name)).transpose()?;
    for input in model.inputs.iter().chain(task.iter().flat_map(|task| &task.inputs)) {
        let bound = expansion.bind(&ValueType::new(input.dtype, input.shape.clone()), &input.name)?;
        let id = expansion.graph.add_typed(&input.name, &bound, Origin::Input);
        expansion.graph.inputs.push(id);
        scope.insert(input.name.clone(), id);
    }
    expansion.parameters(&model.parameters, None, &mut scope)?;
    for item in &model.body {
        match item {
            Item::Node(node) => expansion.node(node, None, &mut scope)?,
            Item::Repeat(repeat) => expansion.repeat(repeat, &mut scope)?,
        }
    }
    expansion.outputs(&model.outputs, None, &scope)?;
    mark_tables(&mut expansion.graph);
    // All entries have one parameter table: it holds those of every task that an entry has.
    let asked = |task: &&Task| options.entries.iter().any(|entry| entry.task.as_deref() == Some(&task.name));
    for task in model.tasks.iter().filter(asked) {
        expansion.parameters(&task.parameters, None, &mut scope)?;
    }
    if let Some(task) = task {
        for node in &task.nodes {
            expansion.node(node, None, &mut scope)?;
        }
        expansion.outputs(&task.outputs, None, &scope)?;
    }
    let mut graph = expansion.graph;
    keep_other_buffers(&mut graph);
    if options.bias_rate().is_some() && !graph.parameters.iter().any(|of| of.buffer && of.trainable) {
        let message = format!("`router_bias_update_rate`, but {} has no bias that experts are chosen by", graph.name);
        return Err(CompileError::option("router_bias_update_rate", message, "remove `router_bias_update_rate`"));
    }
    Ok(graph)
}

/// Freezes all buffers except those that experts are chosen by.
fn keep_other_buffers(graph: &mut Graph) {
    let routes = graph.nodes.iter().filter(|node| node.op == id::ROUTE);
    let read: HashSet<ValueId> = routes.filter_map(|node| node.inputs.get(1).copied()).collect();
    for parameter in graph.parameters.iter_mut().filter(|parameter| parameter.buffer) {
        parameter.trainable &= read.contains(&parameter.value);
    }
}

fn find<'m>(model: &'m Model, name: &str) -> Result<&'m Task, CompileError> {
    model.tasks.iter().find(|task| task.name == name).ok_or_else(|| {
        let known = model.tasks.iter().map(|task| task.name.as_str()).collect::<Vec<_>>().join(", ");
        CompileError::Options(format!("{} was recorded without the task `{name}`, with: {known}", model.architecture))
    })
}

/// Marks what is looked up by ids, and the weight of the product that gives the logits.
fn mark_tables(graph: &mut Graph) {
    let parameters = |graph: &Graph, node: &Node| -> Vec<ParameterId> {
        let of = |id: &ValueId| match graph.value(*id).origin {
            Origin::Parameter(id) => Some(id),
            _ => None,
        };
        node.inputs.iter().filter_map(of).collect()
    };
    let mut tables: Vec<ParameterId> = Vec::new();
    for node in graph.nodes.iter().filter(|node| node.op == id::EMBEDDING) {
        tables.extend(parameters(graph, node));
    }
    let producers = graph.producers();
    // What is between the product and the output has no weight.
    let producer = |id: &ValueId| producers[id.0 as usize].map(|index| &graph.nodes[index]);
    let mut node = graph.output("logits").and_then(|id| producer(&id));
    while let Some(found) = node {
        let weights = parameters(graph, found);
        node = found.inputs.first().filter(|_| weights.is_empty()).and_then(producer);
        tables.extend(weights);
    }
    for ParameterId(index) in tables {
        graph.parameters[index as usize].table = true;
    }
}

struct Expansion<'a> {
    graph: Graph,
    /// Names of the parameters; mixtures of experts have tens of thousands.
    names: HashSet<String>,
    bindings: Bindings,
    options: &'a CompileOptions,
    /// Beginnings of the names of parts other than the text.
    apart: &'a [String],
}

impl Expansion<'_> {
    fn bind(&self, value: &ValueType, name: &str) -> Result<ValueType, CompileError> {
        let bound = |d: &graph::Dim| {
            d.bind(&self.bindings)
                .ok_or_else(|| CompileError::Model(format!("`{name}` has the unknown dimension `{d}`")))
        };
        Ok(ValueType::new(value.dtype, value.shape.iter().map(bound).collect::<Result<Vec<_>, _>>()?))
    }

    fn parameters(
        &mut self,
        specs: &[ParameterSpec],
        layer: Option<Layer>,
        scope: &mut Scope,
    ) -> Result<(), CompileError> {
        for spec in specs {
            let name = numbered(&spec.name, layer);
            if !self.names.insert(name.clone()) {
                return Err(CompileError::Model(format!("parameter `{name}` is declared twice")));
            }
            let storage = if spec.buffer { DType::F32 } else { self.options.weights };
            let id = self.graph.add_parameter(&name, spec.shape.clone(), spec.init, storage);
            let parameter = &mut self.graph.parameters[id.0 as usize];
            parameter.residual_projection = spec.residual_projection;
            parameter.transposed = spec.transposed;
            parameter.bias = spec.bias;
            let adapter = self.options.adapter.as_ref();
            parameter.saved = !spec.buffer && adapter.is_some_and(|adapter| adapter.saves(&name).is_some());
            let is_trained = adapter.is_none() || parameter.saved;
            parameter.buffer = spec.buffer;
            let is_moved = if spec.buffer { self.options.bias_rate().is_some() } else { is_trained };
            parameter.trainable = is_moved && self.options.training.is_some();
            // Nodes refer to the name as it is written in the model.
            scope.insert(spec.name.clone(), parameter.value);
        }
        Ok(())
    }

    fn node(&mut self, spec: &NodeSpec, layer: Option<Layer>, scope: &mut Scope) -> Result<(), CompileError> {
        let inputs = spec.inputs.iter().map(|name| lookup(scope, name, spec)).collect::<Result<Vec<_>, _>>()?;
        if spec.outputs.len() != spec.types.len() {
            let message = format!("{} outputs, {} types", spec.outputs.len(), spec.types.len());
            return Err(CompileError::Model(format!("{}: {message}", place(spec))));
        }
        let mut outputs = Vec::new();
        for (name, value_type) in spec.outputs.iter().zip(&spec.types) {
            let bound = self.bind(value_type, name)?;
            let id = self.graph.add_typed(name, &bound, Origin::Node);
            scope.insert(name.clone(), id);
            outputs.push(id);
        }
        let op = ops::find(&spec.op).map_err(|m| CompileError::Model(format!("{}: {m}", place(spec))))?;
        self.graph.nodes.push(Node {
            op: op.id(),
            inputs,
            outputs,
            attrs: attributes(&spec.attrs, layer).map_err(|m| CompileError::Model(format!("{}: {m}", place(spec))))?,
            phase: Phase::Forward,
            layer,
            region: spec.region.clone(),
            at: spec.at.clone(),
        });
        Ok(())
    }

    fn repeat(&mut self, repeat: &Repeat, outer: &mut Scope) -> Result<(), CompileError> {
        check_pattern(repeat)?;
        let missing = |name: &str| CompileError::Model(format!("a repeat carries `{name}`, which is not defined"));
        let carried = |names: &Scope, name: &str| names.get(name).copied().ok_or_else(|| missing(name));
        let stack = self.graph.stacks.len() as u32;
        self.graph.stacks.push(repeat.stack.clone());
        if self.apart.iter().any(|part| repeat.stack.starts_with(part.as_str())) {
            self.graph.apart.push(stack);
        }
        let initial = |c: &Carry| c.initial.as_deref().map(|name| carried(outer, name)).transpose();
        let mut state: Vec<Option<ValueId>> = repeat.carry.iter().map(initial).collect::<Result<_, _>>()?;
        for index in 0..repeat.repeat {
            let layer = Some(Layer { stack, index: index as u32 });
            let block = repeat.block(index).expect("the pattern was checked");
            check_given(block, &state, index)?;
            let mut scope = outer.clone();
            for (Carried { inside, .. }, value) in block.carry.iter().zip(&state) {
                scope.extend(value.map(|value| (inside.clone(), value)));
            }
            for Each { inside, values } in &repeat.each {
                scope.insert(inside.clone(), carried(outer, &values[index])?);
            }
            let known: HashSet<ValueId> = self.graph.carried.iter().copied().collect();
            self.graph.carried.extend(state.iter().flatten().filter(|value| !known.contains(value)));
            self.parameters(&block.parameters, layer, &mut scope)?;
            for node in &block.nodes {
                self.node(node, layer, &mut scope)?;
            }
            self.outputs(&block.outputs, layer, &scope)?;
            let next = |(c, before): (&Carried, &Option<ValueId>)| match before {
                None if c.next == c.inside => Ok(None),
                _ => carried(&scope, &c.next).map(Some),
            };
            state = block.carry.iter().zip(&state).map(next).collect::<Result<_, _>>()?;
        }
        for (carry, value) in repeat.carry.iter().zip(state) {
            outer.extend(value.map(|value| (carry.result.clone(), value)));
        }
        Ok(())
    }

    fn outputs(&mut self, outputs: &[Output], layer: Option<Layer>, scope: &Scope) -> Result<(), CompileError> {
        for output in outputs {
            let id = scope.get(&output.value).ok_or_else(|| {
                CompileError::Model(format!("output `{}` names `{}`, which is not defined", output.name, output.value))
            })?;
            let name = numbered(&output.name, layer);
            if self.graph.output(&name).is_some() {
                return Err(CompileError::Model(format!("output `{name}` is given twice")));
            }
            self.graph.outputs.push((name, *id));
        }
        Ok(())
    }
}

/// Checks that no layer reads a carried value before a layer has given one.
fn check_given(block: &Block, state: &[Option<ValueId>], layer: usize) -> Result<(), CompileError> {
    let carried = block.carry.iter().zip(state);
    let absent: HashSet<&str> = carried.filter(|(_, value)| value.is_none()).map(|(c, _)| c.inside.as_str()).collect();
    let reads = |node: &NodeSpec| node.inputs.iter().find(|name| absent.contains(name.as_str())).cloned();
    match block.nodes.iter().find_map(|node| Some((node, reads(node)?))) {
        Some((node, name)) => {
            let what = format!("{} of layer {layer} reads `{name}`, which no layer before it gives", node.op);
            Err(CompileError::Model(format!("{}: {what}", place(node))))
        }
        None => Ok(()),
    }
}

/// Checks that every layer has a block and every block a layer, that each passes on what the repeat does, and that
/// there are values for each layer.
fn check_pattern(repeat: &Repeat) -> Result<(), CompileError> {
    let wrong = |what: String| Err(CompileError::Model(format!("the layers of `{}`: {what}", repeat.stack)));
    if !repeat.pattern.is_empty() && repeat.pattern.len() != repeat.repeat {
        return wrong(format!("the pattern has {} entries for {} layers", repeat.pattern.len(), repeat.repeat));
    }
    if let Some(layer) = (0..repeat.repeat).find(|layer| repeat.block(*layer).is_none()) {
        return wrong(format!("layer {layer} is of a kind that is not among the {} blocks", repeat.blocks.len()));
    }
    if let Some(each) = repeat.each.iter().find(|each| each.values.len() != repeat.repeat) {
        return wrong(format!("`{}` has {} values for {} layers", each.inside, each.values.len(), repeat.repeat));
    }
    let counts = |block: &Block| block.carry.len();
    match repeat.blocks.iter().map(counts).find(|count| *count != repeat.carry.len()) {
        Some(count) => wrong(format!("a block hands on {count} values, the repeat {}", repeat.carry.len())),
        None => Ok(()),
    }
}

fn place(spec: &NodeSpec) -> String {
    spec.at.clone().unwrap_or_else(|| spec.op.clone())
}

fn lookup(scope: &Scope, name: &str, spec: &NodeSpec) -> Result<ValueId, CompileError> {
    let missing = || CompileError::Model(format!("{}: {} reads `{name}`, which is not defined", place(spec), spec.op));
    scope.get(name).copied().ok_or_else(missing)
}

fn numbered(name: &str, layer: Option<Layer>) -> String {
    match layer {
        Some(layer) => name.replace("{i}", &layer.index.to_string()),
        None => name.to_owned(),
    }
}

/// Takes this layer's value of every `{"each": [...]}`.
fn attributes(attrs: &Attrs, layer: Option<Layer>) -> Result<Attrs, String> {
    let mut result = Attrs::new();
    for (name, value) in attrs.iter() {
        let chosen = match (value.get("each").and_then(|v| v.as_array()), layer) {
            (Some(each), Some(layer)) => each.get(layer.index as usize).cloned().ok_or_else(|| {
                format!("attribute `{name}` has {} values, layer {} has none", each.len(), layer.index)
            })?,
            _ => value.clone(),
        };
        result.insert(name.clone(), chosen);
    }
    Ok(result)
}
