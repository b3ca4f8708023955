//! The end of a run that no longer improves, and the weights of its best evaluation.

use std::path::Path;

use crate::error::{Result, TrainError};
use crate::model::weight_set::WeightSet;
use crate::trainer::Trainer;
use crate::trainer::best::BestTracker;
use crate::trainer::checkpoint::Checkpoint;

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
