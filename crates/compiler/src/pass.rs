//! Runs rewrites of a graph one after the other, those of the plan included: each is verified, shown to an observer,
//! and skipped if it is behind the limit. Knows the names of the rewrites that may be skipped; not what any of them
//! does.
//!
//! To find the rewrite that breaks a result: `SUROGATE_PASSES=N` before any command (`train` reads it) leaves only the
//! first N of [`OPTIONAL`] in force, for every entry. `surogate show graph` then prints the rewritten graph of a
//! micro-step; the graphs with N and with N + 1 differ by what one rewrite did.

use graph::Graph;
use program::EntryKind;

use crate::CompileError;
use crate::options::{CompileOptions, RecomputeOptions};

/// Rewrites without which a program computes the same, in their order. The others change what the graph means and
/// always run. Those from `split_head` on carry out what the plan decides about memory; without them nothing is
/// decided.
pub const OPTIONAL: [&str; 12] = [
    "identities",
    "merge_linears",
    "common_subexpressions",
    "dead_code",
    "low_rank",
    "dropout_linear",
    "fuse",
    "split_head",
    "offload_residual",
    "recompute",
    "split_attention",
    "join_recompute",
];

/// What an observer sees after each rewrite.
pub struct PassTrace<'a> {
    pub entry: EntryKind,
    pub pass: &'static str,
    /// False when it was skipped by the limit.
    pub ran: bool,
    pub graph: &'a Graph,
}

/// Called after each rewrite.
pub type Observer<'a> = Box<dyn FnMut(PassTrace<'_>) + 'a>;

/// How rewrites are run. The default only verifies.
#[derive(Default)]
pub struct Passes<'a> {
    observer: Option<Observer<'a>>,
    limit: Option<usize>,
}

impl<'a> Passes<'a> {
    /// Runs only the first `limit` of [`OPTIONAL`]; none: all of them.
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
        if !self.runs("split_head") {
            plan.head_chunks = Some(1);
        }
        if !self.runs("offload_residual") {
            plan.offload.residual = Some(false);
        }
        if !self.runs("recompute") {
            let no = Some(false);
            plan.recompute =
                RecomputeOptions { swiglu: no, rmsnorm: no, ffn: no, qkv: no, att: no, block: no, lora: no };
        }
        if !self.runs("split_attention") {
            plan.attention_chunks = Some(1);
        }
        options
    }

    fn runs(&self, pass: &str) -> bool {
        let place = OPTIONAL.iter().position(|optional| *optional == pass);
        place.is_none_or(|place| self.limit.is_none_or(|limit| place < limit))
    }

    pub(crate) fn run(
        &mut self,
        entry: EntryKind,
        pass: &'static str,
        graph: &mut Graph,
        rewrite: impl FnOnce(&mut Graph) -> Result<(), CompileError>,
    ) -> Result<(), CompileError> {
        let ran = self.runs(pass);
        if ran {
            rewrite(graph)?;
            self.check(pass, graph)?;
        }
        if let Some(observer) = &mut self.observer {
            observer(PassTrace { entry, pass, ran, graph });
        }
        Ok(())
    }

    /// Structure and shapes, those of what is prepared from weights too. After the first stage the model is to blame, later
    /// the rewrite is.
    pub(crate) fn check(&self, pass: &'static str, graph: &Graph) -> Result<(), CompileError> {
        let verified = |graph: &Graph| graph::verify(graph).and_then(|()| ops::verify(graph));
        let result = verified(graph).and_then(|()| graph.preparation().map_or(Ok(()), |prepared| verified(&prepared)));
        match result {
            Ok(()) => Ok(()),
            Err(message) if pass == "expand" => Err(CompileError::Model(message)),
            Err(message) => panic!("pass `{pass}` left a graph that does not verify: {message}\n{graph}"),
        }
    }
}
