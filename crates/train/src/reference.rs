//! The reference of losses of preferences: log-probabilities of the targets under the weights that training starts from, or
//! under those of another folder. Computed for each micro-batch before it is trained on. Knows no loss.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use compiler::EntryOptions;
use data::Batch;
use graph::TaskEntry;
use program::{Arch, EntryKind};
use tensor::DType;

use crate::config::{CAUSAL_LM, Config, Init, Task};
use crate::error::{Result, TrainError};
use crate::model::{Model, TOKEN_LOSS};
use crate::source::ModelSource;
use crate::trainer::Trainer;

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

/// The entries of a task: training first, which has what all of them report.
pub(crate) fn entries(task: &str, reference: Option<&Reference>) -> Vec<EntryOptions> {
    let mut entries = vec![EntryOptions::train(task), EntryOptions::evaluate(task)];
    if reference == Some(&Reference::WithoutAdapter) {
        let of = EntryOptions { adapter: false, ..EntryOptions::new(EntryKind::Forward, Some(CAUSAL_LM)) };
        entries.push(of.keeping([TOKEN_LOSS]));
    }
    entries
}

/// Refuses batches that are not what the task trains on.
pub(crate) fn check_batches(task: Task, batches: &[Batch]) -> Result<()> {
    let (wanted, expected) = match task {
        Task::Sft | Task::Pt => (false, "`input_ids` and `labels`"),
        Task::Dpo => (true, "`chosen` and `rejected`"),
    };
    // What a node does not have it cannot look at, and the last batches of an epoch may be empty.
    let wrong = |batch: &Batch| batch.away.is_none() && batch.trained_tokens() > 0 && batch.marks.is_empty() == wanted;
    match batches.iter().any(wrong) {
        true => Err(TrainError::Usage(format!("`task: {task}` trains on batches of {expected}"))),
        false => Ok(()),
    }
}

impl Trainer {
    /// Gives micro-batches the log-probabilities of the reference, where the task reads them.
    pub(crate) fn with_reference(&mut self, mut batches: Vec<Batch>, one_per_row: bool) -> Result<Vec<Batch>> {
        let replicas = self.config.replicas();
        match self.plan.reference.clone() {
            None => {}
            Some(Reference::WithoutAdapter) => {
                let engine = self.engine_for(&batches[..replicas], one_per_row)?;
                for round in batches.chunks_mut(replicas) {
                    let variant = engine.prepare(engine.variant_of(round, one_per_row))?;
                    engine.run(EntryKind::Forward, variant, round)?;
                    for (rank, batch) in round.iter_mut().enumerate() {
                        let losses = engine.output_of_rank(rank, EntryKind::Forward, variant, TOKEN_LOSS)?;
                        batch.reference_logps = losses.to_f32().iter().map(|loss| -loss).collect();
                    }
                }
            }
            Some(Reference::Folder(folder)) => {
                let model = self.reference_model(&folder)?;
                for batch in &mut batches {
                    batch.reference_logps = model.token_scores(batch)?.losses.iter().map(|loss| -loss).collect();
                }
            }
        }
        Ok(batches)
    }

    /// The model of another folder, read when it is first needed.
    fn reference_model(&mut self, folder: &Path) -> Result<&mut Model> {
        if self.reference.is_none() {
            if self.device.machine.arch != Arch::Cpu || self.config.ranks() > 1 {
                let message = "a reference with weights of its own is only available on one CPU yet: the memory plan does \
                               not know it";
                let hint = "set `lora: true` without `reference`, or `reference_free: true`";
                return Err(TrainError::Config(vec![self.config.mistake("reference", message, Some(hint.into()))]));
            }
            let config = crate::source::config_of(folder)?;
            let model = self.source.model.clone();
            let source = Arc::new(ModelSource { folder: folder.to_owned(), config, model });
            let dtype: DType = self.plan.compile.compute;
            self.reference = Some(Model::load(self.device.clone(), source, None, dtype)?);
        }
        Ok(self.reference.as_mut().expect("just made"))
    }
}
