//! Makes a model of all layers one stage of a pipeline: a range of its layers, with the nodes before all layers in the
//! first stage, and the head and the loss in the last. Values of earlier layers that it or a later stage reads are
//! inputs; those of all of these that later stages read are outputs. What follows from the batch alone is computed by
//! each stage that reads it. Knows layers and who reads what; not what an operation means.

use std::collections::HashMap;

use graph::{Graph, Origin, Parameter, ParameterId, ValueId};
use ops::id;
use program::scalar;

use super::dead_code;
use crate::CompileError;

/// Beginnings of the names of what crosses: inputs that come from the stage before, outputs for the next one, inputs that are
/// gradients of these, outputs that are gradients of those.
pub const RECEIVED: &str = "stage.received.";
pub const SENT: &str = "stage.sent.";
pub const GRADIENT: &str = "stage.gradient.";
pub const RETURNED: &str = "stage.returned.";

/// Returns the name of a crossing value.
pub fn named(beginning: &str, number: usize) -> String {
    format!("{beginning}{number}")
}

/// A stage, and the layers and parameters of all stages.
pub struct Cut {
    pub stage: usize,
    /// The first layer of each stage, as a number among all layers.
    pub first: Vec<usize>,
    /// The stage of each parameter, by name.
    pub owners: HashMap<String, usize>,
    /// True for the forward pass of a micro-step alone.
    pub forward_alone: bool,
}

pub fn run(graph: &mut Graph, cut: &Cut) -> Result<(), CompileError> {
    let (stage, last) = (cut.stage, cut.first.len() - 1);
    let nodes = nodes(graph, &cut.first);
    let homes = homes(graph, &nodes);
    let crossing = |boundary: usize| crossing(graph, &nodes, &homes, boundary);
    let received = if stage > 0 { crossing(stage) } else { Vec::new() };
    let sent = if stage < last { crossing(stage + 1) } else { Vec::new() };
    for (node, home) in graph.nodes.iter().zip(&nodes) {
        let here = |parameter: &Parameter| home.is_none_or(|home| cut.owners[&parameter.name] == home);
        let read = node.inputs.iter().filter_map(|id| parameter(graph, *id));
        assert!(read.map(|id| graph.parameter(id)).all(here), "a parameter is read by its own stage in all entries");
    }

    let mut keep = nodes.iter().map(|home| home.is_none_or(|home| home == stage));
    graph.nodes.retain(|_| keep.next().expect("a place for each node"));
    // What follows from the batch alone is a result of the last stage.
    graph.outputs.retain(|(_, id)| homes[id.0 as usize].unwrap_or(last) == stage);
    let is_here = |id: &ValueId| homes[id.0 as usize].is_none_or(|home| home == stage) || received.contains(id);
    graph.carried.retain(is_here);
    for (number, id) in received.iter().enumerate() {
        let value = graph.value_mut(*id);
        (value.origin, value.name) = (Origin::Input, named(RECEIVED, number));
    }
    graph.inputs.extend(&received);
    graph.outputs.extend(sent.iter().enumerate().map(|(number, id)| (named(SENT, number), *id)));
    dead_code::run(graph)?;
    keep_read_inputs(graph);
    keep_parameters(graph, |of| cut.owners[&of.name] == stage);
    Ok(())
}

/// The stage of each parameter, by its name, where stages begin with these layers. A parameter that nothing reads is the first
/// stage's.
pub fn owners(graph: &Graph, first: &[usize]) -> Result<HashMap<String, usize>, CompileError> {
    if graph.nodes.iter().any(|node| node.op == id::ROUTE) || graph.output(scalar::ROUTER_REPORT).is_some() {
        return Err(refused(
            first.len(),
            "mixtures of experts, whose routers report over all layers, are not available yet",
        ));
    }
    let mut owners: Vec<Option<usize>> = vec![None; graph.parameters.len()];
    for (node, home) in graph.nodes.iter().zip(nodes(graph, first)) {
        let Some(home) = home else { continue };
        for ParameterId(index) in node.inputs.iter().filter_map(|id| parameter(graph, *id)) {
            let owner = owners[index as usize].get_or_insert(home);
            if *owner != home {
                let name = &graph.parameters[index as usize].name;
                let why = format!("`{name}` would be on two GPUs: stages {owner} and {home} read it");
                return Err(refused(first.len(), &why));
            }
        }
    }
    let names = graph.parameters.iter().map(|of| of.name.clone());
    Ok(names.zip(owners.into_iter().map(Option::unwrap_or_default)).collect())
}

pub fn refused(stages: usize, why: &str) -> CompileError {
    let message = format!("`pipeline_parallel_size: {stages}`: {why}");
    CompileError::option("pipeline_parallel_size", message, "remove `pipeline_parallel_size`")
}

fn parameter(graph: &Graph, id: ValueId) -> Option<ParameterId> {
    match graph.value(id).origin {
        Origin::Parameter(id) => Some(id),
        Origin::Input | Origin::Node | Origin::Constant | Origin::State(_) => None,
    }
}

/// The stage of each node; none of what follows from the batch alone.
fn nodes(graph: &Graph, first: &[usize]) -> Vec<Option<usize>> {
    let layers = graph.layers();
    let last = graph.nodes.iter().rposition(|node| node.layer.is_some());
    let mut of_batch: Vec<bool> =
        graph.values.iter().map(|value| matches!(value.origin, Origin::Input | Origin::Constant)).collect();
    let mut stage = 0;
    let mut result = Vec::with_capacity(graph.nodes.len());
    for (index, node) in graph.nodes.iter().enumerate() {
        if node.inputs.iter().all(|id| of_batch[id.0 as usize]) {
            node.outputs.iter().for_each(|id| of_batch[id.0 as usize] = true);
            result.push(None);
            continue;
        }
        if let Some(layer) = node.layer {
            let number = layers.binary_search(&layer).expect("it is one of them");
            let own = first.iter().rposition(|first| *first <= number).expect("the first stage has the first layer");
            assert!(own >= stage, "layers are run in their order");
            stage = own;
        } else if last.is_some_and(|last| index > last) {
            stage = first.len() - 1;
        }
        result.push(Some(stage));
    }
    result
}

/// The stage of each value that a node computes; none of all others, and of what follows from the batch alone.
fn homes(graph: &Graph, nodes: &[Option<usize>]) -> Vec<Option<usize>> {
    let mut homes = vec![None; graph.values.len()];
    for (node, home) in graph.nodes.iter().zip(nodes) {
        node.outputs.iter().for_each(|id| homes[id.0 as usize] = *home);
    }
    homes
}

/// Returns the values from before `boundary` that stages from it on read.
fn crossing(graph: &Graph, nodes: &[Option<usize>], homes: &[Option<usize>], boundary: usize) -> Vec<ValueId> {
    let after = graph.nodes.iter().zip(nodes).filter(|(_, home)| home.is_some_and(|home| home >= boundary));
    let read = after.flat_map(|(node, _)| node.inputs.iter().copied());
    let mut found: Vec<ValueId> = read.filter(|id| homes[id.0 as usize].is_some_and(|home| home < boundary)).collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// Leaves out inputs that nothing reads. What is only handed on is read by the next stage.
fn keep_read_inputs(graph: &mut Graph) {
    let uses = graph.use_counts();
    let (kept, dropped): (Vec<ValueId>, Vec<ValueId>) =
        graph.inputs.iter().copied().partition(|id| uses[id.0 as usize] > 0);
    graph.inputs = kept;
    dropped.into_iter().for_each(|id| graph.value_mut(id).origin = Origin::Node);
}

/// Leaves out the parameters of other stages.
fn keep_parameters(graph: &mut Graph, keeps: impl Fn(&Parameter) -> bool) {
    for parameter in std::mem::take(&mut graph.parameters) {
        let value = parameter.value;
        if keeps(&parameter) {
            let id = ParameterId(graph.parameters.len() as u32);
            graph.parameters.push(parameter);
            graph.value_mut(value).origin = Origin::Parameter(id);
        } else {
            graph.value_mut(value).origin = Origin::Node;
        }
    }
}
