//! Training for a number format that the weights will have: the products of the layers read the values of their weights' codes,
//! and where engines quantize activations, those of what they multiply with. Gradients are those of these products, and go
//! straight through to the weights, which the optimizer changes as ever.
//!
//! The graph and names tell these matrices, and those that share the scale of scales of NVFP4; the format is given. Values
//! of weights are made when weights were written, not in an entry, unless weights are cut over ranks: `plan/prepare.rs`.

use std::collections::{HashMap, HashSet};

use graph::{Graph, Node, Parameter, ParameterId, Phase, ValueId};
use ops::quantise::fake::{attributes, needs_parts};
use ops::{OpId, id};
use tensor::compressed::{Codes, Form};
use tensor::{Attrs, DType};

use super::emit::emit;
use super::groups;
use super::recipe::QuantizeAware;
use crate::CompileError;
use crate::options::CompileOptions;
use crate::passes::packed_linears;

/// The matrices that the format has codes for.
pub(super) fn taken(graph: &Graph, recipe: &QuantizeAware) -> HashSet<ParameterId> {
    let routers = groups::routers(graph);
    let fits = |id: &ParameterId| {
        let of = graph.parameter(*id);
        let is_matrix = of.shape.len() == 2 && of.shape.iter().all(|extent| *extent > 1) && !of.table && !of.adapter;
        is_matrix && !routers.contains(id) && recipe.fits(of)
    };
    let weights = packed_linears::weights(graph).into_iter().filter(|(_, is_apart)| !is_apart);
    weights.map(|(id, _)| id).filter(fits).collect()
}

/// A weight as a product reads it: a matrix, or several one after another.
struct Weight {
    value: ValueId,
    parameters: Vec<ParameterId>,
    /// Matrices that are scaled each by itself.
    matrices: usize,
    transposed: bool,
    /// A node that reads it.
    like: Node,
}

pub fn run(graph: &mut Graph, recipe: &QuantizeAware, options: &CompileOptions) -> Result<(), CompileError> {
    let taken = taken(graph, recipe);
    if taken.is_empty() {
        let text = "`quantize_aware`: the format has codes for no matrix of the layers";
        return Err(CompileError::option("quantize_aware", text, "take a format with smaller groups"));
    }
    let weights = find(graph, recipe, &taken)?;
    let read: HashSet<ParameterId> = weights.iter().flat_map(|of| of.parameters.iter().copied()).collect();
    if let Some(id) = taken.iter().filter(|id| !read.contains(id)).min() {
        let text = format!("`quantize_aware`: no product reads `{}` as it is stored", graph.parameter(*id).name);
        return Err(CompileError::option("quantize_aware", text, "set `torch_dtype` to the type of the weights"));
    }
    check_readers(graph, &weights, &taken)?;
    let multiplied = activations(graph, &weights);
    let values = of_weights(graph, recipe, options.compute, &weights);
    // Every product with a weight, of either pass, reads its values.
    for node in &mut graph.nodes {
        for input in &mut node.inputs {
            *input = values.get(input).copied().unwrap_or(*input);
        }
    }
    if let Some(form) = recipe.activations {
        of_activations(graph, form, options.compute, multiplied);
    }
    Ok(())
}

/// The weights of all products, each once.
fn find(graph: &Graph, recipe: &QuantizeAware, taken: &HashSet<ParameterId>) -> Result<Vec<Weight>, CompileError> {
    let producers = graph.producers();
    let mut found: Vec<Weight> = Vec::new();
    for node in graph.nodes.iter().filter(|node| node.phase == Phase::Forward && node.layer.is_some()) {
        if !(node.op == id::LINEAR || node.op == id::GROUPED_LINEAR) {
            continue;
        }
        let value = node.inputs[1];
        let parameters = groups::parameters(graph, &producers, value).unwrap_or_default();
        let parameters: Vec<ParameterId> = parameters.into_iter().map(ParameterId).collect();
        if !parameters.iter().any(|id| taken.contains(id)) || found.iter().any(|of| of.value == value) {
            continue;
        }
        let name = &graph.parameter(parameters[0]).name;
        let transposed = node.attrs.flag("transposed").unwrap_or(false);
        let alike = |id: &ParameterId| taken.contains(id) && graph.parameter(*id).transposed == transposed;
        if !parameters.iter().all(alike) {
            let text = format!("`quantize_aware`: `{name}` is one matrix with others that the format has no codes for");
            return Err(CompileError::option("quantize_aware", text, "take another format"));
        }
        let matrices = match node.op == id::GROUPED_LINEAR {
            false => 1,
            true => of_experts(graph, recipe, &parameters, node)?,
        };
        found.push(Weight { value, parameters, matrices, transposed, like: node.clone() });
    }
    Ok(found)
}

/// The number of matrices of experts that are scaled each by itself.
fn of_experts(
    graph: &Graph,
    recipe: &QuantizeAware,
    parameters: &[ParameterId],
    node: &Node,
) -> Result<usize, CompileError> {
    let experts = node.attrs.size("groups").expect("checked by the shape rule");
    let each = parameters.len() / experts;
    let first: Vec<&Parameter> = parameters[..each].iter().map(|id| graph.parameter(*id)).collect();
    let is_shared = first.windows(2).all(|pair| recipe.joins(pair[0], pair[1]));
    let is_even = first.windows(2).all(|pair| pair[0].shape == pair[1].shape);
    match (is_shared, is_even) {
        (true, _) => Ok(experts),
        (false, true) if recipe.weights.codes != Codes::Nvfp4 => Ok(parameters.len()),
        _ => {
            let name = &first[0].name;
            let text =
                format!("`quantize_aware`: `{name}` and other matrices of an expert are one, with a scale for each");
            Err(CompileError::option("quantize_aware", text, "take a format with groups, such as w4a16"))
        }
    }
}

/// Refuses a matrix that something else than a product reads, too: it would compute with other values than those of the files.
fn check_readers(graph: &Graph, weights: &[Weight], taken: &HashSet<ParameterId>) -> Result<(), CompileError> {
    let of: HashMap<ValueId, ParameterId> = taken.iter().map(|id| (graph.parameter(*id).value, *id)).collect();
    let products: HashSet<ValueId> = weights.iter().map(|of| of.value).collect();
    for node in &graph.nodes {
        let is_stack = node.op == id::STACK && products.contains(&node.outputs[0]);
        let other = node.inputs.iter().find(|value| of.contains_key(value) && !products.contains(value) && !is_stack);
        if let Some(id) = other.map(|value| of[value]) {
            let name = &graph.parameter(id).name;
            let text = format!("`quantize_aware`: `{name}` is read by `{}`, which has no quantized weights", node.op);
            return Err(CompileError::option("quantize_aware", text, "train without `quantize_aware`"));
        }
    }
    Ok(())
}

/// Values that products are multiplied with, and the places of the nodes that read them as such: products, and those that give the
/// gradients of their weights.
fn activations(graph: &Graph, weights: &[Weight]) -> Vec<(ValueId, Vec<usize>)> {
    let producers = graph.producers();
    let of: HashMap<ValueId, &Weight> = weights.iter().map(|of| (of.value, of)).collect();
    let mut found: Vec<(ValueId, Vec<usize>)> = Vec::new();
    for (index, node) in graph.nodes.iter().enumerate().filter(|(_, node)| node.phase == Phase::Forward) {
        let is_product = node.op == id::LINEAR || node.op == id::GROUPED_LINEAR;
        let Some(weight) = node.inputs.get(1).filter(|_| is_product).and_then(|value| of.get(value)) else { continue };
        let parameters: Vec<u32> = weight.parameters.iter().map(|id| id.0).collect();
        let (_, gradient) = groups::products(graph, &producers, node, &parameters);
        let places = std::iter::once(index).chain(gradient);
        match found.iter_mut().find(|(x, _)| *x == node.inputs[0]) {
            Some((_, known)) => known.extend(places),
            None => found.push((node.inputs[0], places.collect())),
        }
    }
    found
}

/// The values of all weights: states, made by nodes of their own.
fn of_weights(
    graph: &mut Graph,
    recipe: &QuantizeAware,
    compute: DType,
    weights: &[Weight],
) -> HashMap<ValueId, ValueId> {
    let producers = graph.producers();
    let mut nodes: Vec<Node> = weights
        .iter()
        .filter_map(|of| producers[of.value.0 as usize])
        .map(|index| graph.nodes[index].clone())
        .collect();
    let mut parts: HashMap<ValueId, ValueId> = HashMap::new();
    if needs_parts(recipe.weights) {
        for of in weights {
            let made =
                emit(graph, compute, &mut nodes, &of.like, id::OWN_AMAX, &[of.value], of_matrices(of, Attrs::new()));
            parts.insert(of.value, made[0]);
        }
    }
    let mut values = HashMap::new();
    for of in weights {
        let shared = |other: &&Weight| {
            let [one, two] = [of, *other].map(|of| graph.parameter(of.parameters[0]));
            other.value == of.value
                || recipe.weights.codes == Codes::Nvfp4
                    && other.matrices == of.matrices
                    && recipe.shared(one) == recipe.shared(two)
        };
        let of_parts = weights.iter().filter(shared).filter_map(|of| parts.get(&of.value));
        let inputs: Vec<ValueId> = std::iter::once(of.value).chain(of_parts.copied()).collect();
        let attrs = attributes(recipe.weights, recipe.scales);
        let attrs = if of.transposed { attrs.with("transposed", true) } else { attrs };
        let made = emit(graph, compute, &mut nodes, &of.like, id::FAKE_QUANTISE, &inputs, of_matrices(of, attrs))[0];
        let name = format!("fake.{}", graph.parameter(of.parameters[0]).name);
        graph.keep(made, &name);
        values.insert(of.value, made);
    }
    graph.prepared.extend(nodes);
    values
}

fn of_matrices(of: &Weight, attrs: Attrs) -> Attrs {
    if of.matrices > 1 { attrs.with("groups", of.matrices) } else { attrs }
}

/// Values of activations right before the first product that reads them.
fn of_activations(graph: &mut Graph, form: Form, compute: DType, read: Vec<(ValueId, Vec<usize>)>) {
    let mut before: HashMap<usize, Vec<Node>> = HashMap::new();
    for (x, places) in read {
        let (first, like) = (places[0], graph.nodes[places[0]].clone());
        let mut nodes = Vec::new();
        let mut make =
            |op: OpId, inputs: &[ValueId], attrs: Attrs| emit(graph, compute, &mut nodes, &like, op, inputs, attrs)[0];
        let parts = needs_parts(form).then(|| make(id::OWN_AMAX, &[x], Attrs::new()));
        let inputs: Vec<ValueId> = std::iter::once(x).chain(parts).collect();
        let value = make(id::FAKE_QUANTISE, &inputs, attributes(form, compute));
        before.insert(first, nodes);
        for place in places {
            graph.nodes[place].inputs.iter_mut().filter(|input| **input == x).for_each(|input| *input = value);
        }
    }
    let nodes = std::mem::take(&mut graph.nodes);
    let placed = nodes.into_iter().enumerate();
    graph.nodes = placed.flat_map(|(index, node)| before.remove(&index).into_iter().flatten().chain([node])).collect();
}
