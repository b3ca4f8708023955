//! The reference of losses of preferences: log-probabilities of the targets under the weights that training starts from, or
//! under those of another folder. Computed for each micro-batch before it is trained on. Knows no loss.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use compiler::{CompileOptions, EntryOptions, PlanOptions, Recipe, Sharding};
use data::{Batch, Mark, Placed, Purpose};
use graph::TaskEntry;
use program::{Choices, EntryKind, Machine, Variant};

use crate::config::{Config, Init, Task};
use crate::engine::{Engine, variant_of};
use crate::error::{Result, TrainError};
use crate::model::TOKEN_LOSS;
use crate::plan::Plan;
use crate::source::ModelSource;
use crate::trainer::Trainer;
use crate::weights::{self, WeightSet};

/// The model whose log-probabilities a task compares with.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Reference {
    /// The model in training without its adapter.
    WithoutAdapter,
    /// The weights of a folder, which stay as they are.
    Folder(PathBuf),
}

/// The reference of a run. Errors: weights that are drawn, whose beginning no folder has.
pub(crate) fn choose(config: &Config, source: &ModelSource) -> Result<Option<Reference>> {
    let task = source.model.tasks.iter().find(|task| task.name == config.task.loss());
    if !task.is_some_and(|task| task.entries.0.contains(&TaskEntry::Reference)) {
        return Ok(None);
    }
    Ok(Some(match &config.preferences.reference {
        Some(folder) => Reference::Folder(PathBuf::from(folder)),
        None if config.lora.lora => Reference::WithoutAdapter,
        None if config.model.init == Init::Random => {
            let message = format!(
                "`task: {}` compares with the weights that training starts from, and these are drawn",
                config.task
            );
            let hint = "set `reference`, `lora: true` or `init: pretrained`";
            return Err(TrainError::Config(vec![config.mistake("init", message, Some(hint.into()))]));
        }
        None => Reference::Folder(source.folder.clone()),
    }))
}

/// The forward pass of the model without its adapter, or of another model.
pub(crate) const REFERENCE: &str = "reference";

/// The forward pass of the model as it is, for answers that do not belong to their prompts.
pub(crate) const POLICY: &str = "policy";

/// Forward passes of the reference and of the policy before each micro-step, in the mean.
pub(crate) fn passes(config: &Config, reference: Option<&Reference>) -> f64 {
    let of = &config.preferences;
    let of_reference = match reference {
        Some(_) if of.precompute_ref_log_probs => 0.0,
        // Answers to the prompts of others, by the reference and by the policy.
        Some(_) if config.task.purpose() == Purpose::Answers && of.estimates_divergence() => 3.0,
        Some(_) => 1.0,
        None => 0.0,
    };
    let iterations = config.reinforcement.num_iterations;
    let samples_again = config.task.purpose() == Purpose::Prompts && iterations > 1;
    of_reference + if samples_again { 1.0 / iterations as f64 } else { 0.0 }
}

/// The entries of a task: training first, which has what all of them report.
pub(crate) fn entries(config: &Config, reference: Option<&Reference>) -> Vec<EntryOptions> {
    let (task, scoring) = (config.task, config.scoring());
    let mut entries = vec![EntryOptions::train(task.loss()), EntryOptions::evaluate(task.loss())];
    if reference == Some(&Reference::WithoutAdapter) {
        entries.push(EntryOptions { adapter: false, ..forward(REFERENCE, scoring) });
    }
    if reference.is_some() && task.purpose() == Purpose::Answers || task.purpose() == Purpose::Prompts {
        entries.push(forward(POLICY, scoring));
    }
    entries
}

/// Refuses batches that are not what the task trains on.
pub(crate) fn check_batches(task: Task, batches: &[Batch]) -> Result<()> {
    let is_wanted = |mark: Option<&Placed>| match (task.purpose(), mark.map(|of| of.mark)) {
        (Purpose::Documents, mark) => mark.is_none(),
        (Purpose::Pairs | Purpose::Scores, mark) => matches!(mark, Some(Mark::Pair { .. })),
        (Purpose::Answers, mark) => matches!(mark, Some(Mark::Answer { .. })),
        (Purpose::Prompts, mark) => matches!(mark, Some(Mark::Sample { .. })),
    };
    let expected = match task.purpose() {
        Purpose::Documents => "`input_ids` and `labels`",
        Purpose::Pairs | Purpose::Scores => "`chosen` and `rejected`",
        Purpose::Answers => "`input_ids`, `labels` and `desirable`",
        Purpose::Prompts => "`input_ids`, `labels` and `advantages`",
    };
    // What a node does not have it cannot look at, and the last batches of an epoch may be empty.
    let wrong = |batch: &Batch| batch.remote.is_none() && batch.trained_tokens() > 0 && !is_wanted(batch.marks.first());
    match batches.iter().any(wrong) {
        true => Err(TrainError::Usage(format!("`task: {task}` trains on batches of {expected}"))),
        false => Ok(()),
    }
}

impl Trainer {
    /// Gives micro-batches the log-probabilities of the reference and the estimate of the divergence from it, where the
    /// task reads them.
    pub(crate) fn with_reference(&mut self, mut batches: Vec<Batch>, one_per_row: bool) -> Result<Vec<Batch>> {
        let Some(reference) = self.plan.reference.clone() else { return Ok(batches) };
        if batches.iter().all(|batch| !batch.reference_logps.is_empty()) {
            return Ok(batches);
        }
        if self.config.preferences.precompute_ref_log_probs {
            let logps = self.known_logps(&batches)?;
            batches.iter_mut().zip(logps).for_each(|(batch, logps)| batch.reference_logps = logps);
            return Ok(batches);
        }
        let logps = self.reference_losses(&reference, &batches, one_per_row)?;
        for (batch, losses) in batches.iter_mut().zip(logps) {
            batch.reference_logps = losses.into_iter().map(|loss| -loss).collect();
        }
        if self.config.task.purpose() != Purpose::Answers || !self.config.preferences.estimates_divergence() {
            return Ok(batches);
        }
        let others: Vec<Batch> = batches.iter().map(data::mismatched).collect();
        let of_reference = self.reference_losses(&reference, &others, false)?;
        let of_policy = self.forward_losses(POLICY, &others, false)?;
        for (index, batch) in batches.iter_mut().enumerate() {
            let ratios = of_reference[index].iter().zip(&of_policy[index]).zip(&others[index].weights);
            let sum: f64 = ratios.map(|((of, own), weight)| f64::from(of - own) * f64::from(*weight)).sum();
            batch.divergence = (sum / batch.marks.len().max(1) as f64).max(0.0) as f32;
        }
        Ok(batches)
    }

    /// Log-probabilities of the targets of each batch in the model as it is.
    pub(crate) fn policy_logps(&mut self, batches: &[Batch]) -> Result<Vec<Vec<f32>>> {
        let losses = self.forward_losses(POLICY, batches, true)?;
        Ok(losses.into_iter().map(|of| of.into_iter().map(|loss| -loss).collect()).collect())
    }

    /// The losses of the targets of each batch under the reference.
    pub(crate) fn reference_losses(
        &mut self,
        reference: &Reference,
        batches: &[Batch],
        one_per_row: bool,
    ) -> Result<Vec<Vec<f32>>> {
        let replicas = self.config.replicas();
        match reference {
            Reference::WithoutAdapter => self.forward_losses(REFERENCE, batches, one_per_row),
            Reference::Folder(folder) => {
                if !self.config.preferences.precompute_ref_log_probs {
                    // The model in training first: the plan has left room for the reference.
                    self.engine_for(&batches[..replicas], one_per_row)?;
                }
                let engine = self.reference_model(folder, variant_of(&batches[..replicas], one_per_row))?;
                losses(engine, REFERENCE, batches, one_per_row)
            }
        }
    }

    /// The losses of the targets of each batch in a forward pass of the model in training.
    fn forward_losses(&mut self, name: &str, batches: &[Batch], one_per_row: bool) -> Result<Vec<Vec<f32>>> {
        let replicas = self.config.replicas();
        losses(self.engine_for(&batches[..replicas], one_per_row)?, name, batches, one_per_row)
    }

    /// The model of another folder, read when it is first needed.
    fn reference_model(&mut self, folder: &Path, variant: Variant) -> Result<&mut Engine> {
        if self.reference.is_none() {
            let options =
                CompileOptions { variants: vec![variant], ..options(&self.plan.compile, self.config.scoring()) };
            let source = source_of(folder, &self.source)?;
            let mut engine = Engine::new(self.device.clone(), source.clone(), options, &Choices::new())?;
            let name = folder.display().to_string();
            weights::load(&mut engine, WeightSet::Base, source.weights(folder)?, &name)?;
            engine.weights_written()?;
            self.reference = Some(engine);
        }
        Ok(self.reference.as_mut().expect("just made"))
    }
}

/// The losses of the targets of each batch in a forward pass.
fn losses(engine: &mut Engine, name: &str, batches: &[Batch], one_per_row: bool) -> Result<Vec<Vec<f32>>> {
    let mut losses = Vec::new();
    for round in batches.chunks(engine.replicas()) {
        let variant = engine.prepare(engine.variant_of(round, one_per_row))?;
        losses.extend(engine.forward(name, variant, round, TOKEN_LOSS)?);
    }
    Ok(losses)
}

/// The forward pass of a name that gives the losses of targets.
fn forward(name: &str, scoring: &str) -> EntryOptions {
    let of = EntryOptions { name: name.to_owned(), ..EntryOptions::new(EntryKind::Forward, Some(scoring)) };
    of.keeping([TOKEN_LOSS])
}

/// The options of the program of a reference with weights of its own, next to those of the training.
pub(crate) fn options(training: &CompileOptions, scoring: &str) -> CompileOptions {
    CompileOptions {
        variants: Vec::new(),
        weights: training.weights,
        quantised: None,
        stored: Default::default(),
        compute: training.compute,
        // The same rounding on both sides: the log-ratio of the beginning is 0. A model that is trained for another format is
        // compared with what it was.
        recipe: match training.recipe {
            Recipe::QuantizeAware(_) => Recipe::Uniform,
            recipe => recipe,
        },
        training: None,
        adapter: None,
        entries: vec![forward(REFERENCE, scoring)],
        seed: 0,
        plan: PlanOptions::default(),
        sharding: Sharding { gradients: false, open: false, compression: Default::default(), ..training.sharding },
        branches: training.branches,
    }
}

/// The architecture in training with the weights of another folder.
pub(crate) fn source_of(folder: &Path, training: &ModelSource) -> Result<Arc<ModelSource>> {
    let config = crate::source::config_of(folder)?;
    Ok(Arc::new(ModelSource {
        folder: folder.to_owned(),
        config,
        model: training.model.clone(),
        pixels: training.pixels,
    }))
}

/// The options of a training that leaves room for a reference or a teacher with weights of its own.
pub(crate) fn reserved(
    mut training: CompileOptions,
    config: &Config,
    plan: &Plan,
    source: &ModelSource,
    machine: &Machine,
) -> Result<CompileOptions> {
    if let Some(teacher) = &plan.teacher {
        training.plan.reserved = teacher.bytes(&training, machine)?;
    }
    let stays = !config.preferences.precompute_ref_log_probs;
    if let Some(Reference::Folder(_)) = plan.reference.as_ref().filter(|_| stays) {
        let options = CompileOptions { variants: training.variants.clone(), ..options(&training, config.scoring()) };
        let program = compiler::compile(&source.model, &options, machine)?;
        let own = program.memory.iter().filter(|line| line.class.is_per_program());
        training.plan.reserved = own.map(|line| line.bytes).sum();
    }
    Ok(training)
}
