//! Files that a run in progress writes: checkpoints and results.

use std::cell::RefCell;
use std::path::Path;
use std::time::Instant;

use serde_json::json;

use super::{MERGED, Observer, Outcome, Run, result_folder};
use crate::config::Criterion;
use crate::error::{Result, TrainError};
use crate::files::staged::Staged;
use crate::run::ending;
use crate::trainer::Trainer;
use crate::trainer::checkpoint;
use crate::trainer::saving::{Begun, Saving};
use crate::words;

/// A checkpoint from the begin of the copy to its last file.
#[derive(Clone, Copy, Debug)]
struct Took {
    /// Bytes of the tensors in the checkpoint.
    bytes: usize,
    seconds: f64,
}

impl Took {
    /// Returns a sentence if a step, of at most `step` seconds, and the checkpoint after it take longer than a signal leaves.
    fn beyond(self, grace: u64, step: f64) -> Option<String> {
        let Took { bytes, seconds } = self;
        let rate = bytes as f64 / 1e9 / seconds.max(1e-9);
        (step + seconds > grace as f64).then(|| {
            format!(
                "a checkpoint of {} takes {seconds:.1} s ({rate:.2} GB/s) after a step of up to {step:.1} s, more than \
                 `save_grace_seconds: {grace}`: a run that is interrupted loses the steps since its last checkpoint (raise the \
                 grace period, or lower `save_steps`)",
                words::size(bytes)
            )
        })
    }
}

impl Run {
    /// Ends the run on request, after a checkpoint of the present step in the run's own place.
    pub(super) fn stop(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<Outcome> {
        let folder = checkpoint::folder_of(&self.place.checkpoints, trainer.steps_done());
        self.publish_checkpoint(trainer, observer)?;
        if !trainer.written.holds(&folder) {
            observer.line("Stopping: saving a checkpoint");
            // A run that began at a checkpoint of another one has none here yet.
            self.saved = None;
            self.save(trainer, observer)?;
            self.publish_checkpoint(trainer, observer)?;
        }
        observer.line("To resume this run, use the same command with --resume-from-checkpoint true");
        Ok(Outcome::Interrupted(folder))
    }

    /// Writes the result, and returns its folder.
    pub(super) fn finish(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<Outcome> {
        let result = result_folder(&self.place, trainer);
        let (steps, tracker) = (trainer.steps_done(), trainer.progress.best_tracker.clone());
        let best = tracker.best.filter(|best| trainer.config.run.load_best_model_at_end && best.step != steps);
        if let Some(best) = best {
            trainer.take_weights(&checkpoint::folder_of(&self.place.checkpoints, best.step))?;
            let after = words::count(best.step, "step");
            let best = match trainer.config.task.criterion() {
                Criterion::Loss => format!("the lowest loss: {:.4}", best.value),
                Criterion::Reward => format!("the highest reward: {:.4}", best.value),
            };
            observer.line(&format!("The result has the weights after {after}, with {best}"));
        }
        if !self.publish(trainer, &result, false, observer)? {
            return self.stop(trainer, observer);
        }
        let rounded = trainer.rounding_note(false);
        if trainer.config.lora.merge_adapter {
            let merged = self.place.output.join(MERGED);
            if !self.publish(trainer, &merged, true, observer)? {
                return self.stop(trainer, observer);
            }
            observer.line(&format!("Merged: {} (read back and compared with the model in memory)", merged.display()));
            if let Some(text) = trainer.rounding_note(true) {
                observer.line(&format!("Note: {text}"));
            }
        }
        observer.line(&format!("Result: {} (read back and compared with the model in memory)", result.display()));
        rounded.iter().for_each(|text| observer.line(&format!("Note: {text}; checkpoints keep the f32 weights")));
        observer.line(&ending::summary(steps, self.began.elapsed().as_secs_f64(), &tracker));
        Ok(Outcome::Finished(result))
    }

    /// Writes a result: a process that is killed meanwhile knows it as its own afterwards. False: a user requested to stop,
    /// and it was given up; a later process writes it then.
    fn publish(
        &mut self,
        trainer: &mut Trainer,
        folder: &Path,
        merged: bool,
        observer: &mut dyn Observer,
    ) -> Result<bool> {
        let asked = RefCell::new(&mut *observer);
        let stop = || asked.borrow_mut().interrupted();
        let staged = if merged { trainer.stage_merged(folder, &stop) } else { trainer.stage_export(folder, &stop) };
        let staged = match staged {
            Err(TrainError::Stopped) => {
                observer.line(&format!("Stopping: the export to {} is aborted", folder.display()));
                return Ok(false);
            }
            staged => staged?,
        };
        self.record(trainer, Some(&staged))?;
        staged.commit(&mut trainer.written)?;
        self.record(trainer, None)?;
        Ok(true)
    }

    /// Begins a checkpoint of the present step: it appears when its files are written. One at a time.
    pub(super) fn save(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<()> {
        let step = trainer.steps_done();
        if self.saved == Some(step) {
            return Ok(());
        }
        self.publish_checkpoint(trainer, observer)?;
        self.place.check_present()?;
        let folder = checkpoint::folder_of(&self.place.checkpoints, step);
        let begin = Instant::now();
        if trainer.is_digesting() {
            observer.line("Waiting until all files of the model are read: a checkpoint has their digest");
        }
        let outline = trainer.outline()?;
        match Saving::begin(trainer, outline, folder.clone())? {
            Begun::InTheMaking(saving) => self.saving = Some(saving),
            Begun::Written(staged, bytes) => {
                if !std::mem::replace(&mut self.reported_waiting, true) {
                    observer.line(
                        "Note: not enough host memory for a copy of the checkpoint: training waits until it is written",
                    );
                }
                let took = Took { bytes, seconds: begin.elapsed().as_secs_f64() };
                self.publish_staged(trainer, staged, (step, &folder), took, observer)?;
            }
        }
        self.saved = Some(step);
        let held = begin.elapsed().as_secs_f64();
        self.emit(json!({"event": "saving", "step": step, "held_seconds": held}), observer)
    }

    /// Waits for the checkpoint in the making, if there is one, and lets it appear.
    pub(super) fn publish_checkpoint(&mut self, trainer: &mut Trainer, observer: &mut dyn Observer) -> Result<()> {
        let Some(saving) = self.saving.take() else { return Ok(()) };
        let (step, folder, bytes) = (saving.step, saving.folder.clone(), saving.bytes);
        let finished = saving.finish();
        // A folder that is gone is the reason for what the writing says.
        self.place.check_present()?;
        let (staged, seconds) = finished?;
        self.publish_staged(trainer, staged, (step, &folder), Took { bytes, seconds }, observer)
    }

    /// Lets a checkpoint appear, and removes those that are too many.
    fn publish_staged(
        &mut self,
        trainer: &mut Trainer,
        staged: Staged,
        (step, folder): (u64, &Path),
        took: Took,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        self.record(trainer, Some(&staged))?;
        staged.commit(&mut trainer.written)?;
        let of = &trainer.config.run;
        let spared = trainer.progress.best_tracker.best.filter(|_| of.load_best_model_at_end).map(|best| best.step);
        checkpoint::rotate(&self.place.checkpoints, &trainer.written, of.save_total_limit, spared)?;
        self.record(trainer, None)?;
        observer.line(&format!("Saved {}", folder.display()));
        if let Some(grace) = trainer.config.run.save_grace_seconds
            && let Some(note) = took.beyond(grace, self.measured.longest)
            && !std::mem::replace(&mut self.reported_grace, true)
        {
            observer.line(&format!("Note: {note}"));
        }
        let Took { bytes, seconds } = took;
        self.emit(
            json!({"event": "checkpoint", "step": step, "path": folder, "bytes": bytes, "seconds": seconds}),
            observer,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::Took;

    #[test]
    fn a_checkpoint_that_outlasts_the_grace_period_is_told_with_its_rate() {
        let took = Took { bytes: 16 << 30, seconds: 40.0 };
        assert_eq!(took.beyond(45, 5.0), None);
        let note = took.beyond(44, 5.0).unwrap();
        assert!(
            note.starts_with("a checkpoint of 16.00 GiB takes 40.0 s (0.43 GB/s) after a step of up to 5.0 s"),
            "{note}"
        );
        assert!(note.contains("`save_grace_seconds: 44`"), "{note}");
    }
}
