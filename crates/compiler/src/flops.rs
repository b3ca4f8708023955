//! The arithmetic that a micro-step of a model requires, independent of how a program does it: what model FLOPs utilization
//! (MFU) counts. Counted on the graph of the model before it is divided among ranks and stages, quantized, or recomputed.

use graph::{Axis, Graph, Model, Node, Phase, ValueId};
use ops::Class;
use program::{ArenaId, EntryKind, Machine, TensorRef, Variant};
use tensor::DType;

use crate::autodiff::depends_on_trained;
use crate::entry::whole_graph;
use crate::error::CompileError;
use crate::options::{CompileOptions, Sharding};
use crate::pass::Passes;

/// FLOPs of a micro-step of one shape, padding included.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ModelFlops {
    pub tokens: PassFlops,
    /// Patches of images in a vision tower, whose attention sees images whole.
    pub patches: PassFlops,
    /// Attention in the tower that sees windows alone.
    pub windows: PassFlops,
}

/// FLOPs of the rows of one axis. Attention counts the pairs that masks and windows leave in whole rows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PassFlops {
    /// Products, of the forward pass and of the gradients that training needs.
    pub products: f64,
    pub attention: f64,
    /// The part of both that the forward pass takes.
    pub forward_products: f64,
    pub forward_attention: f64,
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
    let alone = CompileOptions { sharding: Sharding { sequence: 1, ..options.sharding }, ..options.clone() };
    let graph = whole_graph(model, &alone, machine, entry, variant, &mut Passes::default())?;
    let needed = depends_on_trained(&graph);
    let mut sum = ModelFlops::default();
    for node in graph.nodes.iter().filter(|node| node.phase == Phase::Forward) {
        let op = ops::get(node.op);
        let is_attention = op.class() == Class::Attention;
        if !is_attention && !op.multiplies() {
            continue;
        }
        let once = cost(&graph, node);
        let differentiated = node.inputs.iter().filter(|id| needed[id.0 as usize]).count();
        let passes = match is_attention {
            true => 1 + 2 * differentiated.min(1),
            false => 1 + node.inputs.iter().take(2).filter(|id| needed[id.0 as usize]).count(),
        };
        let reads = |name: &str| node.inputs.iter().any(|id| graph.value(*id).name == name);
        let of = match graph.value(node.outputs[0]).axis(Axis::Patches) {
            None => &mut sum.tokens,
            Some(_) if is_attention && reads("window_first_patch") => &mut sum.windows,
            Some(_) => &mut sum.patches,
        };
        let (all, forward) = match is_attention {
            true => (&mut of.attention, &mut of.forward_attention),
            false => (&mut of.products, &mut of.forward_products),
        };
        *all += passes as f64 * once;
        *forward += once;
    }
    Ok(Some(sum))
}

/// Returns the FLOPs of the reference of a node, whatever its operands are stored as.
fn cost(graph: &Graph, node: &Node) -> f64 {
    // Element types are not decided yet, and FLOPs do not depend on them.
    let dense = |id: &ValueId| TensorRef::dense(ArenaId(0), 0, DType::F32, graph.value(*id).shape.clone());
    let [inputs, outputs] = [&node.inputs, &node.outputs].map(|ids| ids.iter().map(dense).collect::<Vec<_>>());
    ops::get(node.op).cost(&inputs, &outputs, &node.attrs).flops
}
