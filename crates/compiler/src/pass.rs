//! Runs rewrites of a graph one after the other, those of the plan included: each is shown to an observer, and skipped if
//! it is past the limit. Knows the names of the rewrites that may be skipped; not what any of them does.
//!
//! The graph is verified after expansion, after the last rewrite of an entry and after the last of the plan. A check after
//! every rewrite would take a fifth of a plan's time: it is done with an observer or a limit.
//!
//! To find the rewrite that breaks a result: `SUROGATE_PASSES=N` before any command (`train` reads it) leaves only the
//! first N of [`Pass::OPTIONAL`] in force, for every entry. `surogate show graph` then prints the rewritten graph of a
//! micro-step; the graphs with N and with N + 1 differ by what one rewrite did.

use graph::Graph;
use program::EntryKind;

use crate::CompileError;
use crate::options::{CompileOptions, RecomputeOptions};

/// A rewrite of an entry's graph, in the order in which they run: first those of `entry_graph`, then those of the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    Expand,
    Branches,
    Dropout,
    EmbeddingNoise,
    Identities,
    PackedLinears,
    Adapters,
    Rates,
    MergeLinears,
    StackedParameters,
    WithoutAdapters,
    WithoutImages,
    Results,
    Cache,
    TrainedLogits,
    Sequence,
    Stage,
    ExpertBias,
    Autodiff,
    LossScale,
    FoldConstants,
    CommonSubexpressions,
    DeadCode,
    Recipe,
    LowRank,
    DropoutLinear,
    Fuse,
    ProducedCodes,
    JoinForms,
    BatchInvariant,
    SplitHead,
    OffloadResidual,
    Recompute,
    SplitAttention,
    PrepareInLayers,
    Dequantise,
    JoinRecompute,
}

impl Pass {
    /// Rewrites without which a program computes the same, in their order. The others change what the graph means and
    /// always run. Those from [`Pass::SplitHead`] on carry out what the plan decides about memory; without them nothing is
    /// decided.
    pub const OPTIONAL: [Pass; 14] = [
        Pass::Identities,
        Pass::MergeLinears,
        Pass::CommonSubexpressions,
        Pass::DeadCode,
        Pass::LowRank,
        Pass::DropoutLinear,
        Pass::Fuse,
        Pass::ProducedCodes,
        Pass::JoinForms,
        Pass::SplitHead,
        Pass::OffloadResidual,
        Pass::Recompute,
        Pass::SplitAttention,
        Pass::JoinRecompute,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Pass::Expand => "expand",
            Pass::Branches => "branches",
            Pass::Dropout => "dropout",
            Pass::EmbeddingNoise => "embedding_noise",
            Pass::Identities => "identities",
            Pass::PackedLinears => "packed_linears",
            Pass::Adapters => "adapters",
            Pass::Rates => "rates",
            Pass::MergeLinears => "merge_linears",
            Pass::StackedParameters => "stacked_parameters",
            Pass::WithoutAdapters => "without_adapters",
            Pass::WithoutImages => "without_images",
            Pass::Results => "results",
            Pass::Cache => "cache",
            Pass::TrainedLogits => "trained_logits",
            Pass::Sequence => "sequence",
            Pass::Stage => "stage",
            Pass::ExpertBias => "expert_bias",
            Pass::Autodiff => "autodiff",
            Pass::LossScale => "loss_scale",
            Pass::FoldConstants => "fold_constants",
            Pass::CommonSubexpressions => "common_subexpressions",
            Pass::DeadCode => "dead_code",
            Pass::Recipe => "recipe",
            Pass::LowRank => "low_rank",
            Pass::DropoutLinear => "dropout_linear",
            Pass::Fuse => "fuse",
            Pass::ProducedCodes => "produced_codes",
            Pass::JoinForms => "join_forms",
            Pass::BatchInvariant => "batch_invariant",
            Pass::SplitHead => "split_head",
            Pass::OffloadResidual => "offload_residual",
            Pass::Recompute => "recompute",
            Pass::SplitAttention => "split_attention",
            Pass::PrepareInLayers => "prepare_in_layers",
            Pass::Dequantise => "dequantise",
            Pass::JoinRecompute => "join_recompute",
        }
    }
}

/// The entry, pass and graph that an observer sees after each rewrite.
pub struct PassTrace<'a> {
    pub entry: EntryKind,
    pub pass: Pass,
    /// False when it was skipped by the limit.
    pub ran: bool,
    pub graph: &'a Graph,
}

/// A function that is called after each rewrite.
pub type Observer<'a> = Box<dyn FnMut(PassTrace<'_>) + 'a>;

/// A runner of rewrites. The default runs them all.
#[derive(Default)]
pub struct Passes<'a> {
    observer: Option<Observer<'a>>,
    limit: Option<usize>,
}

impl<'a> Passes<'a> {
    /// Runs only the first `limit` of [`Pass::OPTIONAL`]; none: all of them.
    pub fn limited(limit: Option<usize>) -> Self {
        Passes { limit, ..Self::default() }
    }

    /// The same, shown to an observer.
    pub fn observed(self, observer: Observer<'a>) -> Self {
        Passes { observer: Some(observer), ..self }
    }

    /// The options without what the plan could decide by rewrites that are skipped.
    pub(crate) fn allowed(&self, options: &CompileOptions) -> CompileOptions {
        let mut options = options.clone();
        let plan = &mut options.plan;
        if !self.runs(Pass::SplitHead) {
            plan.head_chunks = Some(1);
        }
        if !self.runs(Pass::OffloadResidual) {
            plan.offload.residual = Some(false);
        }
        if !self.runs(Pass::Recompute) {
            let no = Some(false);
            plan.recompute =
                RecomputeOptions { swiglu: no, rmsnorm: no, ffn: no, qkv: no, att: no, block: no, lora: no };
        }
        if !self.runs(Pass::SplitAttention) {
            plan.attention_chunks = Some(1);
        }
        options
    }

    fn runs(&self, pass: Pass) -> bool {
        let place = Pass::OPTIONAL.iter().position(|optional| *optional == pass);
        place.is_none_or(|place| self.limit.is_none_or(|limit| place < limit))
    }

    /// True if the graph is verified after every pass.
    fn verifies_each(&self) -> bool {
        self.observer.is_some() || self.limit.is_some()
    }

    pub(crate) fn run(
        &mut self,
        entry: EntryKind,
        pass: Pass,
        graph: &mut Graph,
        rewrite: impl FnOnce(&mut Graph) -> Result<(), CompileError>,
    ) -> Result<(), CompileError> {
        let ran = self.runs(pass);
        if ran {
            rewrite(graph)?;
            if self.verifies_each() || matches!(pass, Pass::BatchInvariant | Pass::JoinRecompute) {
                self.check(pass, graph)?;
            }
        }
        if let Some(observer) = &mut self.observer {
            observer(PassTrace { entry, pass, ran, graph });
        }
        Ok(())
    }

    /// Structure and shapes, those of what is prepared from weights too. After the first stage the model is to blame, later
    /// the rewrite is.
    pub(crate) fn check(&self, pass: Pass, graph: &Graph) -> Result<(), CompileError> {
        let verified = |graph: &Graph| graph::verify(graph).and_then(|()| ops::verify(graph));
        let result = verified(graph).and_then(|()| graph.preparation().map_or(Ok(()), |prepared| verified(&prepared)));
        match result {
            Ok(()) => Ok(()),
            Err(message) if pass == Pass::Expand => Err(CompileError::Model(message)),
            Err(message) if self.verifies_each() => {
                panic!("pass `{}` left a graph that does not verify: {message}\n{graph}", pass.name())
            }
            Err(message) => panic!(
                "the graph after pass `{}` does not verify: {message}; `SUROGATE_PASSES={}` verifies after each\n{graph}",
                pass.name(),
                Pass::OPTIONAL.len(),
            ),
        }
    }
}
