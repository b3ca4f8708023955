//! Model → program, a pure function: no device, no file, no clock, no environment, no model name.
//!
//! The order of the rewrites stands in two places, each on one screen: [`entry_graph`] (`entry.rs`) up to `join_forms`, and
//! `Decision::rewrites` in `plan/mod.rs` for those that carry out what is decided about memory, which `join_recompute`
//! follows. After `join_forms` no rewrite looks for equal computations: what is recomputed must not be found equal to
//! what it repeats. The order of the nodes that the plan leaves is the order of the instructions.

mod adapter;
mod autodiff;
mod call;
mod entry;
mod error;
mod flops;
mod load_groups;
mod lower;
mod lowering;
mod matrices;
pub mod memory;
mod options;
mod pass;
mod passes;
mod plan;
mod probes;
mod programs;
mod rates;
mod recipes;
mod reduce;
mod residency;
mod rule;
mod stages;
mod tied;
mod time;
mod update;

use std::collections::BTreeSet;

use entry::first_entry;
use graph::{Model, Parameter};
use program::{Machine, Program};

pub use adapter::{
    AdapterExceptions, AdapterOf, AdapterOptions, AdapterRules, RANKS_OF_SLOTS, SLOT_OF_TOKEN, Stacked, converted,
};
pub use autodiff::differentiate;
pub use call::compile_call;
pub use entry::entry_graph;
pub use error::CompileError;
pub use flops::{Flops, Keys, ModelFlops, model_flops};
pub use matrices::{MatrixUse, matrices};
pub use ops::optimizer::Blocks;
pub use ops::sampling;
pub use options::{
    CompileOptions, Compression, EntryOptions, KeyValueCache, OffloadOptions, OptimizerKind, OptimizerOptions,
    PlanOptions, RecomputeOptions, Scope, Sharding, Training,
};
pub use pass::{Observer, Pass, PassTrace, Passes};
pub use passes::expand::expand;
pub use probes::{Links, Probe, links, probes};
pub use rates::Rates;
pub use recipes::{Fp8Hybrid, GradientFormat, Nvfp4, QuantizeAware, Recipe};
pub use tied::tied;

/// The parameters of a model and of its adapter, before anything is planned: cheap. Errors: those of the model, and a target
/// of the adapter that matches nothing.
pub fn parameters(model: &Model, options: &CompileOptions) -> Result<Vec<Parameter>, CompileError> {
    let mut graph = first_entry(model, options)?;
    passes::adapters::run(&mut graph, options, options.entries.first().expect("at least one entry is requested"))?;
    entry::set_rates(&mut graph, options)?;
    Ok(graph.parameters)
}

/// The reason why documents of up to `longest` tokens cannot hold branches that share a beginning; none where they can. Cheap,
/// as [`parameters`] is.
pub fn branches_obstacle(
    model: &Model,
    options: &CompileOptions,
    longest: usize,
) -> Result<Option<String>, CompileError> {
    Ok(passes::branches::obstacle(&first_entry(model, options)?, longest))
}

/// True if the logits of a micro-step can be computed for the tokens with a target alone. Cheap, as [`parameters`] is.
pub fn takes_trained_logits(model: &Model, options: &CompileOptions) -> Result<bool, CompileError> {
    let mut graph = first_entry(model, options)?;
    passes::results::run(&mut graph, options.entries.first().expect("at least one entry is requested"))?;
    passes::trained_logits::applies(&mut graph)
}

/// The weights of the layers' products that the recipe leaves in the compute type, by their names with a star for the layer;
/// none where it quantises nothing at all. Cheap, as [`parameters`] is.
pub fn unquantised(model: &Model, options: &CompileOptions) -> Result<Vec<String>, CompileError> {
    if !matches!(options.recipe, Recipe::Fp8Hybrid(_) | Recipe::Nvfp4(_)) {
        return Ok(Vec::new());
    }
    Ok(recipes::unquantised(&first_entry(model, options)?))
}

/// The matrices whose values in another format the products of layers read, by name; none where the recipe is another. Cheap, as
/// [`parameters`] is.
pub fn quantize_aware(model: &Model, options: &CompileOptions) -> Result<BTreeSet<String>, CompileError> {
    Ok(recipes::quantize_aware(&first_entry(model, options)?, &options.recipe))
}

/// The matrices that the products of the text's layers read, those of experts too. Left out: routers, scores that weigh a
/// shared expert, and towers. Cheap, as [`parameters`] is.
pub fn layer_matrices(model: &Model, options: &CompileOptions) -> Result<Vec<Parameter>, CompileError> {
    let all = matrices(model, options)?.into_iter();
    Ok(all.filter(|(_, of)| *of == MatrixUse::Layer).map(|(parameter, _)| parameter).collect())
}

/// True if layers have products with a matrix for each expert.
pub fn has_experts(model: &Model, options: &CompileOptions) -> Result<bool, CompileError> {
    let graph = first_entry(model, options)?;
    Ok(graph.nodes.iter().any(|node| node.layer.is_some() && node.op == ops::id::GROUPED_LINEAR))
}

/// Compiles every entry that the options ask for over one arena plan.
pub fn compile(model: &Model, options: &CompileOptions, machine: &Machine) -> Result<Program, CompileError> {
    compile_observed(model, options, machine, &mut Passes::limited(options.plan.passes))
}

/// [`compile`] with rewrites run as the caller says: shown to an observer, limited.
pub fn compile_observed(
    model: &Model,
    options: &CompileOptions,
    machine: &Machine,
    passes: &mut Passes<'_>,
) -> Result<Program, CompileError> {
    if options.sharding.stages > 1 {
        return stages::compile(model, options, machine, passes);
    }
    let mut graphs = Vec::new();
    let (usual, own): (Vec<_>, Vec<_>) = options.entries.iter().partition(|entry| entry.shapes.is_empty());
    let usual = options.variants.iter().flat_map(|variant| usual.iter().map(move |entry| (*entry, *variant)));
    let own = own.iter().flat_map(|entry| entry.shapes.iter().map(move |variant| (*entry, *variant)));
    for (entry, variant) in usual.chain(own) {
        graphs.push((entry.kind, variant, entry_graph(model, options, machine, entry, variant, passes)?));
    }
    programs::compile_graphs(&model.architecture, &graphs, options, machine, passes)
}
