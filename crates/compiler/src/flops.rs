//! The arithmetic that a micro-step of a model requires, independent of how a program does it: what model FLOPs utilization
//! (MFU) counts. Counted on the graph of the model before it is divided among ranks and stages, quantized, or recomputed.

use graph::{Axis, Graph, Model, Node, Phase, ValueId};
use ops::{Class, id};
use program::{ArenaId, EntryKind, Machine, TensorRef, Variant};
use tensor::DType;

use crate::adapter::AdapterOptions;
use crate::autodiff::depends_on_trained;
use crate::entry::whole_graph;
use crate::error::CompileError;
use crate::options::{CompileOptions, Sharding, Training};
use crate::pass::Passes;
use crate::passes::trained_logits;

/// FLOPs of a training step, and the part of its forward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Flops {
    pub all: f64,
    pub forward: f64,
}

/// The keys that a query of attention sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// Tokens of its document before it, of the last `window` where there is one.
    Tokens { window: Option<usize> },
    /// The patches of the image that it is a part of.
    Image,
    /// Patches of its window in a vision tower.
    Window,
}

/// FLOPs of a micro-step of one shape.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelFlops {
    /// Products of all tokens of the shape, and what layers with a state from token to token compute.
    pub tokens: Flops,
    /// Products of the tokens with a target, where logits are computed for these alone.
    pub logits: Flops,
    /// Products of all patches, in a tower.
    pub patches: Flops,
    /// Attention, for each pair of a query and a key.
    pub pairs: Vec<(Keys, Flops)>,
}

/// Counts the micro-step of a shape: a product costs once as much again for each of its factors that gets a gradient,
/// attention that is differentiated three times its forward pass. None where nothing is trained.
pub fn model_flops(
    model: &Model,
    options: &CompileOptions,
    machine: &Machine,
    variant: Variant,
) -> Result<Option<ModelFlops>, CompileError> {
    let Some(entry) = options.entries.iter().find(|entry| entry.kind == EntryKind::FirstMicroStep) else {
        return Ok(None);
    };
    // Dropout repeats products, and ranks share rows.
    let alone = CompileOptions {
        sharding: Sharding { sequence: 1, ..options.sharding },
        training: options.training.clone().map(|of| Training { dropout: false, ..of }),
        adapter: options.adapter.clone().map(|of| AdapterOptions { dropout: 0.0, ..of }),
        ..options.clone()
    };
    let graph = whole_graph(model, &alone, machine, entry, variant, &mut Passes::default())?;
    let needed = depends_on_trained(&graph);
    let of_targets = trained_logits::states(&graph);
    let mut sum = ModelFlops::default();
    for node in graph.nodes.iter().filter(|node| node.phase == Phase::Forward) {
        let op = ops::get(node.op);
        let gradients = |inputs: &[ValueId]| inputs.iter().filter(|id| needed[id.0 as usize]).count() as f64;
        if node.op == id::ATTENTION {
            let forward = of_pair(&graph, node);
            let passes = if gradients(&node.inputs) > 0.0 { 3.0 } else { 1.0 };
            sum.add(keys_of(&graph, node), Flops { all: passes * forward, forward });
            continue;
        }
        let (forward, all) = match op.class() {
            Class::Attention => {
                let forward = cost(&graph, node);
                (forward, if gradients(&node.inputs) > 0.0 { 3.0 * forward } else { forward })
            }
            _ if op.multiplies() => {
                let (forward, adapters) = (cost(&graph, node), of_adapters(&graph, node));
                let factors = gradients(&node.inputs[..node.inputs.len().min(2)]);
                let of_last = gradients(&node.inputs[node.inputs.len().saturating_sub(2)..]);
                (forward, (1.0 + factors) * (forward - adapters) + (1.0 + of_last) * adapters)
            }
            _ => continue,
        };
        let of_patches = graph.value(node.outputs[0]).axis(Axis::Patches).is_some();
        let of = match () {
            () if of_patches => &mut sum.patches,
            () if node.inputs.first().is_some_and(|id| of_targets.contains(id)) => &mut sum.logits,
            () => &mut sum.tokens,
        };
        (of.all, of.forward) = (of.all + all, of.forward + forward);
    }
    Ok(Some(sum))
}

impl ModelFlops {
    fn add(&mut self, keys: Keys, more: Flops) {
        match self.pairs.iter_mut().find(|(known, _)| *known == keys) {
            Some((_, of)) => (of.all, of.forward) = (of.all + more.all, of.forward + more.forward),
            None => self.pairs.push((keys, more)),
        }
    }
}

fn dense(graph: &Graph, id: ValueId) -> TensorRef {
    // Element types are not decided yet, and FLOPs do not depend on them.
    TensorRef::dense(ArenaId(0), 0, DType::F32, graph.value(id).shape.clone())
}

/// Returns the FLOPs of the forward pass of a node.
fn cost(graph: &Graph, node: &Node) -> f64 {
    let [inputs, outputs] =
        [&node.inputs, &node.outputs].map(|ids| ids.iter().map(|id| dense(graph, *id)).collect::<Vec<_>>());
    ops::get(node.op).cost(&inputs, &outputs, &node.attrs).flops
}

/// The part of a linear layer's cost that its adapters have, which are its last inputs.
fn of_adapters(graph: &Graph, node: &Node) -> f64 {
    let (w, y) = (graph.value(node.inputs[1]), graph.value(node.outputs[0]));
    let elements = |shape: &[usize]| shape.iter().product::<usize>() as f64;
    let rows = elements(&y.shape) / y.shape.last().copied().unwrap_or(1).max(1) as f64;
    match node.op == id::LINEAR {
        true => (cost(graph, node) - 2.0 * rows * elements(&w.shape)).max(0.0),
        false => 0.0,
    }
}

/// Scores and weighted values of all heads, q [B, T, heads, D] and v [B, T, key heads, DV].
fn of_pair(graph: &Graph, node: &Node) -> f64 {
    let [q, v] = [0, 2].map(|input: usize| &graph.value(node.inputs[input]).shape);
    2.0 * (q[2] * (q[3] + v[3])) as f64
}

fn keys_of(graph: &Graph, node: &Node) -> Keys {
    let reads = |name: &str| node.inputs.iter().any(|id| graph.value(*id).name == name);
    match graph.value(node.outputs[0]).axis(Axis::Patches) {
        None => Keys::Tokens { window: node.attrs.optional_int("window").ok().flatten().map(|window| window as usize) },
        Some(_) if reads("window_first_patch") => Keys::Window,
        Some(_) => Keys::Image,
    }
}
