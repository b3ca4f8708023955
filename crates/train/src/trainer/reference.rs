//! The reference of losses of preferences: log-probabilities of the targets under the weights that training starts from, or
//! under those of another folder. Computed for each micro-batch before it is trained on. Knows no loss.

use std::path::Path;

use compiler::CompileOptions;
use data::{Batch, Mark, Placed, Purpose};
use program::{Choices, Variant};

use crate::config::Task;
use crate::engine::{Engine, variant_of, weights};
use crate::error::{Result, TrainError};
use crate::inference::model::TOKEN_LOSS;
use crate::model::weight_set::WeightSet;
use crate::plan::reference::{POLICY, REFERENCE, Reference, options, source_of};
use crate::trainer::Trainer;

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
