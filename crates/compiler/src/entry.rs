//! The graph of one entry, ready to be lowered: which rewrites run, in which order, and why there.

use graph::{Graph, Model};
use program::{Documents, EntryKind, Machine, Variant};

use crate::autodiff::differentiate;
use crate::error::CompileError;
use crate::options::{CompileOptions, EntryOptions, Sharding};
use crate::pass::{Pass, Passes};
use crate::passes::expand::expand;
use crate::passes::stage::Cut;
use crate::{passes, rates, recipes};

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
pub(crate) fn graph_of(
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
    // The sampler has the loss alone: joined to its gradient it is summed in another order.
    let joins_losses = !options.batch_invariant;
    passes.run(kind, Pass::Fuse, &mut graph, |g| passes::fuse::run(g, joins_losses))?;
    // After the rules, which take some of what has a form; codes are then joined with what is left.
    passes.run(kind, Pass::ProducedCodes, &mut graph, passes::produced_codes::run)?;
    passes.run(kind, Pass::JoinForms, &mut graph, passes::join_forms::run)?;
    // After all that makes products and attention.
    passes.run(kind, Pass::BatchInvariant, &mut graph, |g| passes::batch_invariant::run(g, options, machine))?;
    Ok(graph)
}

/// All layers of an entry, each by itself: what stages of a pipeline are cut from.
pub(crate) fn whole_graph(
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
    passes.run(kind, Pass::Dropout, &mut graph, |g| {
        passes::dropout::run(g, options, kind);
        Ok(())
    })?;
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
    passes.run(kind, Pass::Cache, &mut graph, |g| passes::cache::run(g, options, entry, variant, machine))?;
    // Before autodiff, which spreads the gradients of hidden states; after the results, of which some read other tokens.
    passes.run(kind, Pass::TrainedLogits, &mut graph, |g| passes::trained_logits::run(g, variant))?;
    // Before autodiff, which sends gradients the way back; after the passes that add dropout.
    passes.run(kind, Pass::Sequence, &mut graph, |g| passes::sequence::run(g, sharding, variant))?;
    Ok(graph)
}

pub(crate) fn set_rates(graph: &mut Graph, options: &CompileOptions) -> Result<(), CompileError> {
    options.training.as_ref().map_or(Ok(()), |training| rates::run(graph, &training.rates))
}

/// The model as the first entry asks for it, for one token.
pub(crate) fn first_entry(model: &Model, options: &CompileOptions) -> Result<Graph, CompileError> {
    let entry = options.entries.first().expect("at least one entry is requested");
    let variant = Variant { batch: 1, seq_len: 1, documents: Documents::Rows, patches: 0, logits: 0 };
    expand(model, options, entry, variant)
}
