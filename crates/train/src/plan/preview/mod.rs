//! The preview of a run without running it: its graph, its program, its memory and its time, for any machine. Reads no
//! weights; if the data is available locally, it is the program of the run.

mod across;
mod expected;
mod local_data;
mod options;
mod sampling;
mod shapes;
mod stage;
mod stages;
mod text;

use std::sync::Arc;

use compiler::{PassTrace, Passes};
use data::DatasetSummary;
use graph::Graph;
use program::{EntryKind, Machine, Program};

use crate::config::{Config, Reasons};
use crate::engine::programs;
use crate::error::{Result, TrainError};
use crate::input::encoded::Encoded;
use crate::model::source::ModelSource;
use crate::plan::reference;
use crate::plan::{self, Plan};
use crate::plan::{exact_sampling, formats};
pub use across::Across;
pub(crate) use expected::Expected;
pub use expected::{Estimate, HostEstimate};
pub use local_data::documents;
pub use options::resolved;
pub use sampling::Sampling;
pub use shapes::Shapes;
pub use stage::{Stage, show};
pub use stages::Stages;

/// The run's program and what follows from it.
pub struct Preview {
    pub program: Arc<Program>,
    /// Notes for the user, a sentence each.
    pub notes: Vec<String>,
    /// Sentences on rows that are dropped or cut because they are too long.
    pub warnings: Vec<String>,
    recommended: Option<Reasons>,
    /// The same, a line each.
    recommendations: Vec<String>,
    rows: usize,
    sequence_len: usize,
    accumulation: usize,
    /// Steps that train on the same answers.
    steps_of_round: u64,
    /// The shapes that the program is compiled for.
    pub shapes: Shapes,
    /// The reason why the data are not available locally, if they are not.
    pub unavailable: Option<String>,
    /// The estimate for several nodes of this kind, if requested.
    pub across: Option<Across>,
    /// The memory and time of pipeline stages, and of ZeRO-3 instead.
    pub stages: Option<Stages>,
    /// The cost of sampling the answers of a step, where the run samples.
    pub sampling: Option<Sampling>,
}

/// The model as a flat graph, in the shape of the run's longest batches. Where only some of the rewrites run
/// (`SUROGATE_PASSES`), the graph of a micro-step after them.
pub fn graph(config: &Config, source: &ModelSource, machine: &Machine, data: Option<&Encoded>) -> Result<Graph> {
    let plan = data.into_iter().fold(Plan::new(config, source)?, Plan::with_data);
    let shapes = Shapes::new(config, &plan, source, data)?;
    let variant = *shapes.variants.last().expect("a run has at least one shape");
    if plan.compile.plan.passes.is_none() {
        let trained = plan.compile.entries.first().expect("a run has entries");
        return Ok(compiler::expand(&source.model, &plan.compile, trained, variant)?);
    }
    let mut found = Graph::default();
    let last = Box::new(|trace: PassTrace<'_>| {
        if trace.entry == EntryKind::FirstMicroStep {
            found.clone_from(trace.graph);
        }
    });
    let mut options = plan.compile;
    options.variants = vec![variant];
    let mut passes = Passes::limited(options.plan.passes).observed(last);
    compiler::compile_observed(&source.model, &options, machine, &mut passes)?;
    drop(passes);
    Ok(found)
}

impl Preview {
    /// Compiles for a machine, which need not be this one. `data`: the documents of the run, where they are available
    /// locally.
    pub fn new(config: &Config, source: &ModelSource, machine: &Machine, data: Option<&Encoded>) -> Result<Preview> {
        plan::require_machine(config, machine, config.hardware.gpus as usize)?;
        let plan = data.into_iter().fold(Plan::new(config, source)?, Plan::with_data);
        let mut options = plan.compile.clone();
        let shapes = Shapes::new(config, &plan, source, data)?;
        options.variants = shapes.variants.clone();
        let options = reference::reserved(options, config, plan.others(), source, machine)?;
        let program = programs::compiled(&source.model, &options, machine)
            .map_err(|error| config.located(TrainError::from(error)))?;
        let sampling = Sampling::new(config, &plan, source, &program, machine)?;
        let of_data = data.iter().flat_map(|data| data.notes.clone()).chain(shapes.notes.clone());
        let warnings = data.iter().flat_map(|data| data.summary.datasets.iter().filter_map(DatasetSummary::warning));
        let mut preview = Preview {
            program,
            warnings: warnings.collect(),
            notes: plan
                .notes
                .iter()
                .cloned()
                .chain(plan.note_on_teacher(config))
                .chain(formats::notes_on_recipe(config, machine))
                .chain(exact_sampling::note(config, source, plan.compile.compute, machine)?)
                .chain(of_data)
                .collect(),
            recommended: config.recommended.clone(),
            recommendations: config.recommendations(),
            rows: config.micro_rows() as usize,
            sequence_len: plan.sequence_len,
            accumulation: config.micro_steps() as usize,
            steps_of_round: config.reinforcement.num_iterations.max(1),
            shapes,
            unavailable: None,
            across: None,
            stages: None,
            sampling,
        };
        if config.stages() > 1 {
            preview.stages = Some(Stages::new(&preview, config, source, machine, data));
        }
        Ok(preview)
    }

    /// Bytes of everything that the plan holds.
    pub fn memory_bytes(&self) -> usize {
        self.program.memory.iter().map(|line| line.bytes).sum()
    }

    /// Time of the run's steps. That of the whole run has the sampling of answers, a round for every `num_iterations`
    /// steps.
    pub fn estimate(&self) -> Estimate {
        let of = self.expected().estimate();
        let sampled = |seconds, sampling: &Sampling| {
            let rounds = self.shapes.steps.unwrap_or_default().div_ceil(self.steps_of_round);
            seconds + rounds as f64 * sampling.seconds
        };
        let run_seconds = of.run_seconds.map(|seconds| self.sampling.iter().fold(seconds, sampled));
        Estimate { run_seconds, ..of }
    }

    /// Tokens of documents that a step takes a second, those of a pipeline where the layers are in stages.
    pub(crate) fn tokens_per_second(&self) -> f64 {
        self.stages.as_ref().map_or_else(|| self.estimate().tokens_per_second, |stages| stages.tokens_per_second)
    }

    pub(crate) fn expected(&self) -> Expected<'_> {
        Expected { program: &self.program, shapes: &self.shapes, accumulation: self.accumulation }
    }
}
