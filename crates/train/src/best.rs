//! The best evaluation of a run: which it was, how long ago, and what follows from that. Part of a checkpoint, so a resumed
//! run stops where an uninterrupted one does.
//!
//! Knows numbers and counts; `run.rs` acts on them.

use serde::{Deserialize, Serialize};

use crate::checkpoint::Checkpoint;
use crate::config::Criterion;
use crate::error::{Result, TrainError};
use crate::trainer::Trainer;
use crate::weights::WeightSet;
use std::path::Path;

/// The best and the last evaluation of a run so far, and the number of evaluations since the best.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BestTracker {
    /// The evaluation with the lowest loss, or with the highest reward.
    pub best: Option<Best>,
    /// Evaluations since the last one that was better than the best by more than the threshold.
    pub stale: u64,
    /// Loss or reward of the last evaluation.
    pub last: Option<f64>,
}

/// The step and the number of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Steps that were done before.
    pub step: u64,
    /// The loss or the reward.
    #[serde(rename = "loss")]
    pub value: f64,
}

impl BestTracker {
    /// Takes in the number of one more evaluation. One that is not finite is no improvement.
    pub fn add(&mut self, step: u64, value: f64, threshold: f64, criterion: Criterion) {
        let is_better =
            |by: f64| value.is_finite() && self.best.is_none_or(|best| criterion.gain(best.value, value) > by);
        self.stale = if is_better(threshold) { 0 } else { self.stale + 1 };
        if is_better(0.0) {
            self.best = Some(Best { step, value });
        }
        self.last = value.is_finite().then_some(value);
    }

    /// True if the evaluation after `step` steps is the best so far.
    pub fn is_best(&self, step: u64) -> bool {
        self.best.is_some_and(|best| best.step == step)
    }
}

impl Trainer {
    /// Takes in the loss or the reward of one more evaluation.
    pub(crate) fn add_evaluation(&mut self, value: f64) {
        let (threshold, criterion) = (self.config.training.early_stopping_threshold, self.config.task.criterion());
        self.progress.best_tracker.add(self.progress.step, value, threshold, criterion);
    }

    /// The reason, as a sentence, why early stopping ends the run; None if it continues.
    pub fn stalled(&self) -> Option<String> {
        let patience = self.config.training.early_stopping_patience?;
        let BestTracker { best, stale, .. } = &self.progress.best_tracker;
        let best = best.map(|of| format!(" (the best was {:.4}, after {} steps)", of.value, of.step));
        (*stale >= patience).then(|| {
            let count = crate::words::count(*stale, "evaluation");
            let criterion = self.config.task.criterion();
            let (better, name) = (criterion.better(), criterion.name());
            format!("Stopping early: {count} without a {better} {name}{}", best.unwrap_or_default())
        })
    }

    /// Takes the weights of a checkpoint of this run in place of the present ones, for the result. Nothing is trained
    /// afterwards: the optimizer keeps its states.
    pub(crate) fn take_weights(&mut self, folder: &Path) -> Result<()> {
        let lost = |why| {
            TrainError::Failed(format!(
                "the checkpoint of the best evaluation, {}, cannot be used for the result: {why}\n  hint: set \
                 `load_best_model_at_end: false` and go on with `resume_from_checkpoint: true` to get the last weights",
                folder.display()
            ))
        };
        let checkpoint = Checkpoint::open(folder).map_err(lost)?;
        let adapted = self.plan.compile.adapter.is_some();
        self.load_weights(if adapted { WeightSet::Adapter } else { WeightSet::Base }, &checkpoint.folder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_improvement_below_the_threshold_is_the_best_and_does_not_count() {
        let mut tracker = BestTracker::default();
        let mut after = Vec::new();
        for (step, loss) in [(1, 3.0), (2, 2.0), (3, 1.95), (4, f64::NAN), (5, 1.9), (6, 1.5)] {
            tracker.add(step, loss, 0.1, Criterion::Loss);
            after.push((tracker.best.unwrap().step, tracker.stale));
        }
        assert_eq!(after, [(1, 0), (2, 0), (3, 1), (3, 2), (5, 3), (6, 0)]);
        assert!(tracker.is_best(6) && !tracker.is_best(5));
        let mut without = BestTracker::default();
        without.add(1, f64::NAN, 0.0, Criterion::Loss);
        assert_eq!((without.best, without.stale, without.last), (None, 1, None));
    }

    #[test]
    fn the_highest_reward_is_the_best() {
        let mut tracker = BestTracker::default();
        let mut after = Vec::new();
        for (step, reward) in [(1, -1.0), (2, 0.5), (3, 0.55), (4, 0.2), (5, 0.7)] {
            tracker.add(step, reward, 0.1, Criterion::Reward);
            after.push((tracker.best.unwrap().step, tracker.stale));
        }
        assert_eq!(after, [(1, 0), (2, 0), (3, 1), (3, 2), (5, 0)]);
    }
}
