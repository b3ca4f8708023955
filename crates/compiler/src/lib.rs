//! Model → program, a pure function: no device, no file, no clock, no environment, no model name.
//!
//! The order of the rewrites stands in two places, each on one screen: [`entry_graph`] up to `join_forms`, and
//! `Decision::rewrites` in `plan/mod.rs` for those that carry out what is decided about memory, which `join_recompute`
//! follows. After `join_forms` no rewrite looks for equal computations: what is recomputed must not be found equal to
//! what it repeats. The order of the nodes that the plan leaves is the order of the instructions.

mod adapter;
mod autodiff;
mod call;
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

use graph::{Graph, Model, Parameter};
use load_groups::LoadGroups;
use program::{Documents, EntryKind, Machine, Program, Variant};
use thiserror::Error;

pub use adapter::{AdapterExceptions, AdapterOf, AdapterOptions, AdapterRules, Stacked, converted};
pub use autodiff::differentiate;
pub use call::compile_call;
pub use matrices::{MatrixUse, matrices};
pub use ops::optimizer::Blocks;
pub use ops::sampling;
pub use options::{
    CompileOptions, Compression, EntryOptions, KeyValueCache, OffloadOptions, OptimizerKind, OptimizerOptions,
    PlanOptions, RecomputeOptions, Scope, Sharding, Training,
};
pub use pass::{Observer, Pass, PassTrace, Passes};
pub use passes::expand::expand;
use passes::stage::Cut;
pub use probes::{Links, Probe, links, probes};
pub use rates::Rates;
pub use recipes::{Fp8Hybrid, GradientFormat, Nvfp4, QuantizeAware, Recipe};
pub use tied::tied;

/// Formats a number of bytes as MiB or GiB.
fn size(bytes: usize) -> String {
    match bytes {
        0..0x4000_0000 => format!("{:.2} MiB", bytes as f64 / (1u64 << 20) as f64),
        _ => format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64),
    }
}

/// The reason why a model does not become a program.
#[derive(Debug, Error)]
pub enum CompileError {
    /// The model is wrong: a name, a shape, an attribute. Names the source line where there is one.
    #[error("{0}")]
    Model(String),
    /// The options do not fit the model: an adapter target that matches nothing, for example.
    #[error("{0}")]
    Options(String),
    /// One option does not fit the model or the others, by its name in the user's file.
    #[error("{message}{}", .hint.as_ref().map(|hint| format!("\n  hint: {hint}")).unwrap_or_default())]
    Option { option: &'static str, message: String, hint: Option<String> },
    /// A module that is to be trained as a whole is not there, or cannot be.
    #[error("{0}")]
    Saved(String),
    /// The plan needs more memory than there is.
    #[error(
        "the smallest plan needs {} ({needed} bytes), {} {}",
        size(*.needed),
        if *.limited { "`memory_limit` allows" } else { "the machine has" },
        size(*.available)
    )]
    DoesNotFit {
        needed: usize,
        available: usize,
        /// The limit is the user's, not the machine's.
        limited: bool,
    },
}

impl CompileError {
    fn option(option: &'static str, message: impl Into<String>, hint: &str) -> CompileError {
        CompileError::Option { option, message: message.into(), hint: Some(hint.into()) }
    }
}

/// The parameters of a model and of its adapter, before anything is planned: cheap. Errors: those of the model, and a target
/// of the adapter that matches nothing.
pub fn parameters(model: &Model, options: &CompileOptions) -> Result<Vec<Parameter>, CompileError> {
    let mut graph = first_entry(model, options)?;
    passes::adapters::run(&mut graph, options, options.entries.first().expect("at least one entry is requested"))?;
    set_rates(&mut graph, options)?;
    Ok(graph.parameters)
}

fn set_rates(graph: &mut Graph, options: &CompileOptions) -> Result<(), CompileError> {
    options.training.as_ref().map_or(Ok(()), |training| rates::run(graph, &training.rates))
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

/// The model as the first entry asks for it, for one token.
fn first_entry(model: &Model, options: &CompileOptions) -> Result<Graph, CompileError> {
    let entry = options.entries.first().expect("at least one entry is requested");
    let variant = Variant { batch: 1, seq_len: 1, documents: Documents::Rows, patches: 0 };
    expand(model, options, entry, variant)
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
    compile_graphs(&model.architecture, &graphs, options, machine, passes)
}

/// Compiles graphs that are ready to be lowered. The first has the parameters of all.
fn compile_graphs(
    name: &str,
    graphs: &[(EntryKind, Variant, Graph)],
    options: &CompileOptions,
    machine: &Machine,
    passes: &mut Passes<'_>,
) -> Result<Program, CompileError> {
    let options = &passes.allowed(options);
    let table = &graphs.first().expect("at least one entry is requested").2;
    let sharded = |options: &CompileOptions| {
        let load_groups = LoadGroups::find(graphs, options);
        let placed = |options: &CompileOptions| {
            memory::plan_parameters(table, memory::plan_states(graphs, options), &load_groups, options)
        };
        let compiled = |options: &CompileOptions| {
            let mut graphs = graphs.to_vec();
            // Codes have an arena of their own on the host.
            let parameters = placed(options);
            // What is kept, recomputed, offloaded or done in parts. Nothing may share computations after it.
            let plan = plan::decide(&mut graphs, &parameters, options, machine, passes)?;
            lower::program(name, graphs, &parameters, plan, options, machine)
        };
        // States that only the update needs may lie on the host, as may codes of frozen weights: of the programs that
        // this makes, the one with the shortest step is taken. Codes on the device are among the weights.
        let mut offloaded = options.clone();
        offloaded.plan.offload.quants = Some(true);
        let parameters = placed(&offloaded);
        plan::least_step(options, machine, |arena| parameters.bytes(arena).unwrap_or(0), compiled)
    };
    // Several ranks may each keep only their shards of more than the states.
    plan::nearest_scope(options, sharded)
}

/// The graph of one entry, ready to be lowered.
pub fn entry_graph(
    model: &Model,
    options: &CompileOptions,
    machine: &Machine,
    entry: &EntryOptions,
    variant: Variant,
    passes: &mut Passes<'_>,
) -> Result<Graph, CompileError> {
    graph_of(model, options, machine, entry, variant, None, passes)
}

/// [`entry_graph`], of one stage of a pipeline where a cut is given.
fn graph_of(
    model: &Model,
    options: &CompileOptions,
    machine: &Machine,
    entry: &EntryOptions,
    variant: Variant,
    cut: Option<&Cut>,
    passes: &mut Passes<'_>,
) -> Result<Graph, CompileError> {
    let kind = entry.kind;
    let mut graph = whole_graph(model, options, machine, entry, variant, passes)?;
    if let Some(cut) = cut {
        // Before autodiff, which begins and ends at the values that cross; after all passes that may join layers.
        passes.run(kind, Pass::Stage, &mut graph, |g| passes::stage::run(g, cut))?;
    }
    if kind == EntryKind::FirstMicroStep && !cut.is_some_and(|cut| cut.forward_alone) {
        // Before autodiff, which looks for parameters that nothing moves.
        passes.run(kind, Pass::ExpertBias, &mut graph, passes::expert_bias::run)?;
        passes.run(kind, Pass::Autodiff, &mut graph, differentiate)?;
        // Right after autodiff: the value that starts the backward pass still stands alone.
        passes.run(kind, Pass::LossScale, &mut graph, |g| passes::loss_scale::run(g, options))?;
    }
    // Constants first: what they replace may leave others dead or equal.
    passes.run(kind, Pass::FoldConstants, &mut graph, passes::fold_constants::run)?;
    passes.run(kind, Pass::CommonSubexpressions, &mut graph, passes::common_subexpressions::run)?;
    passes.run(kind, Pass::DeadCode, &mut graph, passes::dead_code::run)?;
    // Element types are decided once the graph holds everything that computes.
    passes.run(kind, Pass::Recipe, &mut graph, |g| recipes::run(g, options, machine))?;
    // Before an adapter's part of the gradient of its input becomes part of an elementwise sum.
    passes.run(kind, Pass::LowRank, &mut graph, |g| passes::low_rank::run(g, machine))?;
    // Before what an adapter gives the gradient of its input becomes part of an element-wise sum.
    passes.run(kind, Pass::DropoutLinear, &mut graph, |g| passes::dropout_linear::run(g, machine))?;
    // Last: fused nodes are opaque to every rule above.
    passes.run(kind, Pass::Fuse, &mut graph, passes::fuse::run)?;
    // After the rules, which take some of what has a form; codes are then joined with what is left.
    passes.run(kind, Pass::ProducedCodes, &mut graph, passes::produced_codes::run)?;
    passes.run(kind, Pass::JoinForms, &mut graph, passes::join_forms::run)?;
    Ok(graph)
}

/// All layers of an entry, each by itself: what stages of a pipeline are cut from.
fn whole_graph(
    model: &Model,
    options: &CompileOptions,
    machine: &Machine,
    entry: &EntryOptions,
    variant: Variant,
    passes: &mut Passes<'_>,
) -> Result<Graph, CompileError> {
    let kind = entry.kind;
    // Tokens that are generated one by one are not shared: every rank computes them all.
    let alone = Sharding { sequence: 1, ..options.sharding };
    let sharding = if entry.generates() { &alone } else { &options.sharding };
    // Layers become nodes, the entry's task follows them, batch symbols become numbers; every shape is checked against
    // its rule.
    let mut graph = expand(model, options, entry, passes::sequence::part(variant, sharding)?)?;
    passes.check(Pass::Expand, &graph)?;
    // Before anything looks at what attention reads.
    passes.run(kind, Pass::Branches, &mut graph, |g| passes::branches::run(g, options, entry))?;
    // Before the adapters add dropout of their own.
    passes.run(kind, Pass::Dropout, &mut graph, |g| passes::dropout::run(g, options, kind))?;
    // Before anything else reads the embedding.
    passes.run(kind, Pass::EmbeddingNoise, &mut graph, |g| passes::embedding_noise::run(g, options, kind))?;
    // After dropout, which switches places off; before anything looks at who reads what.
    passes.run(kind, Pass::Identities, &mut graph, passes::identities::run)?;
    // Before adapters add linears of their own, and before merging, which puts alike weights together.
    passes.run(kind, Pass::PackedLinears, &mut graph, |g| passes::packed_linears::run(g, options))?;
    // Before merging: an adapter belongs to one weight by its name.
    passes.run(kind, Pass::Adapters, &mut graph, |g| passes::adapters::run(g, options, entry))?;
    // After the adapters, which have parameters of their own; before merging and differentiation look at what is trained.
    passes.run(kind, Pass::Rates, &mut graph, |g| set_rates(g, options))?;
    // Before autodiff: the backward pass of a merged linear is merged by construction.
    passes.run(kind, Pass::MergeLinears, &mut graph, |g| passes::merge_linears::run(g, options))?;
    // After merging, which also decides how parameters lie.
    passes.run(kind, Pass::StackedParameters, &mut graph, passes::stacked_parameters::run)?;
    // After both: parameters lie alike in every entry.
    passes.run(kind, Pass::WithoutAdapters, &mut graph, |g| passes::without_adapters::run(g, entry))?;
    // After all that gives parameters their places, in every entry alike; before anything keeps or continues a value.
    passes.run(kind, Pass::WithoutImages, &mut graph, |g| passes::without_images::run(g, variant))?;
    passes.run(kind, Pass::Results, &mut graph, |g| passes::results::run(g, entry))?;
    // After adapters and merging, so that parameters lie as ever; before dead code takes what only whole rows need.
    passes.run(kind, Pass::Cache, &mut graph, |g| passes::cache::run(g, entry, variant, machine))?;
    // Before autodiff, which sends gradients the way back; after the passes that add dropout.
    passes.run(kind, Pass::Sequence, &mut graph, |g| passes::sequence::run(g, sharding, variant))?;
    Ok(graph)
}
