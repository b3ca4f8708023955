//! The answers of a round as micro-batches of its steps.

use data::Batch;
use serde_json::{Value, json};

use super::rollouts::{Kept, Rollouts};
use crate::error::{Result, TrainError};
use crate::trainer::Trainer;

impl Trainer {
    /// The micro-batches of the next step; none after the last. Samples answers where those of the round are used up.
    pub(crate) fn next_samples(&mut self) -> Result<Vec<Batch>> {
        let step = self.progress.step;
        if self.schedule.is_some_and(|of| step >= of.total) {
            return Ok(Vec::new());
        }
        let iterations = self.config.reinforcement.num_iterations;
        let (round, iteration) = (step / iterations, step % iterations);
        let mut rollouts = self.rollouts.take().expect("a run that samples has prompts");
        let made = self.samples_of(&mut rollouts, round, iteration);
        let batches = made.map(|kept| {
            let batches = rollouts.shapes.batches(&kept.answers);
            rollouts.metrics = kept.metrics.clone();
            self.progress.samples = (iteration + 1 < iterations).then(|| Box::new(kept));
            batches
        });
        self.rollouts = Some(rollouts);
        batches?
    }

    fn samples_of(&mut self, rollouts: &mut Rollouts, round: u64, iteration: u64) -> Result<Kept> {
        if iteration > 0 {
            if let Some(kept) = self.progress.samples.take() {
                return Ok(*kept);
            }
            let text = "the answers of this round are not in the checkpoint: `num_iterations` was changed";
            return Err(TrainError::Usage(text.to_owned()));
        }
        let mut kept = self.sample(rollouts, round)?;
        if self.config.reinforcement.num_iterations > 1 {
            // The policy before its updates, as training computes it.
            let batches = rollouts.shapes.batches(&kept.answers)?;
            let logps = self.policy_logps(&batches)?;
            rollouts.shapes.take_logps(&mut kept.answers, &batches, &logps);
        }
        Ok(kept)
    }

    /// Metrics of the answers that the last step trained on.
    pub(crate) fn metrics_of_samples(&self) -> Vec<(String, f64)> {
        let of_student = || self.on_policy.as_ref().map(|of| of.metrics.clone());
        self.rollouts.as_ref().map(|of| of.metrics.clone()).or_else(of_student).unwrap_or_default()
    }

    /// Takes the answers of a step as an event of the log: of the first step, and of each tenth of the run.
    pub(crate) fn take_samples(&mut self, done: u64) -> Option<Value> {
        let shown = self.rollouts.as_mut().map(|of| &mut of.shown);
        let answers = std::mem::take(shown.or(self.on_policy.as_mut().map(|of| &mut of.shown))?);
        let tenth = self.total_steps().unwrap_or(done).div_ceil(10).max(1);
        let is_due = !answers.is_empty() && (done == 1 || done.is_multiple_of(tenth));
        is_due.then(|| json!({"event": "samples", "step": done, "samples": answers}))
    }
}
