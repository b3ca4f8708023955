//! A check before the first step that the files of a run fit on its disks.
//!
//! Knows sizes and folders; what is in them is the business of others.

use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use crate::error::{Result, TrainError};
use crate::files::room::free;
use crate::files::staged::{create_new, free_name};
use crate::model::weight_set::WeightSet;
use crate::plan::milestones::Milestones;
use crate::run::folder::RunFolder;
use crate::trainer::Trainer;
use crate::words::{count, size};

/// Largest amount that a run will have written, beyond what is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Needed {
    /// Bytes of one checkpoint, and how many will come to those that are there.
    checkpoint: usize,
    checkpoints: u64,
    /// Bytes of the final results.
    results: usize,
}

/// Errors: the disk of the checkpoints or that of the result has less room than they take.
pub fn check(trainer: &mut Trainer, place: &RunFolder, when: &Milestones) -> Result<()> {
    let needed = needed(trainer, place, when)?;
    let checkpoints = needed.checkpoint.saturating_mul(needed.checkpoints as usize);
    let device = |path: &Path| std::fs::metadata(path).map(|of| of.dev()).ok();
    if device(&place.checkpoints) == device(&place.output) {
        return require(&place.output, checkpoints.saturating_add(needed.results), free(&place.output), needed);
    }
    let of_results = Needed { checkpoints: 0, ..needed };
    require(&place.checkpoints, checkpoints, free(&place.checkpoints), Needed { results: 0, ..needed })?;
    require(&place.output, needed.results, free(&place.output), of_results)
}

/// Bytes of the trial that [`checkpoint_seconds`] writes, at most.
const TRIAL: usize = 64 << 20;

/// Returns the bytes of a checkpoint's tensors, and the seconds that they take at the rate of a trial: a file in the folder of
/// checkpoints that is written, synced, and has no name.
pub fn checkpoint_seconds(trainer: &mut Trainer, place: &RunFolder) -> Result<(usize, f64)> {
    let folder = &place.checkpoints;
    let failed = |e| TrainError::io("write", folder, e);
    let bytes = trainer.checkpoint_bytes()?;
    let (trial, mut file) = free_name(folder, "trial".as_ref(), "", create_new)?;
    std::fs::remove_file(&trial).map_err(failed)?;
    let content = vec![0x5a_u8; bytes.clamp(1, TRIAL)];
    let begun = Instant::now();
    file.write_all(&content).and_then(|()| file.sync_all()).map_err(failed)?;
    Ok((bytes, begun.elapsed().as_secs_f64() * bytes as f64 / content.len() as f64))
}

fn needed(trainer: &mut Trainer, place: &RunFolder, when: &Milestones) -> Result<Needed> {
    let (done, total) = (trainer.steps_done(), trainer.total_steps().unwrap_or(0));
    let of = &trainer.config.run;
    let (limit, best) = (of.save_total_limit, u64::from(of.load_best_model_at_end));
    // A new checkpoint is there before an old one is removed.
    let most = limit.saturating_add(best).saturating_add(1);
    let there = place.checkpoint_folders()?.iter().filter(|(_, path)| trainer.written.holds(path)).count() as u64;
    let coming = if best > 0 { most } else { when.count_of_checkpoints(done, total).saturating_add(there).min(most) };
    let checkpoint = trainer.checkpoint_bytes()?;
    let (adapted, merged) = (trainer.plan.compile.adapter.is_some(), trainer.config.lora.merge_adapter);
    let program = trainer.engine()?.program().clone();
    let part = |part: WeightSet| part.of(&program).map(|slot| slot.weight.bytes()).sum::<usize>();
    let result = part(if adapted { WeightSet::Adapter } else { WeightSet::Base });
    let results = result + if merged { part(WeightSet::Base) } else { 0 };
    Ok(Needed { checkpoint, checkpoints: coming.saturating_sub(there), results })
}

fn require(folder: &Path, bytes: usize, free: Option<usize>, of: Needed) -> Result<()> {
    let Some(free) = free.filter(|free| *free < bytes) else { return Ok(()) };
    let mut parts = Vec::new();
    if of.checkpoints > 0 {
        parts.push(format!("{} of {} each", count(of.checkpoints, "checkpoint"), size(of.checkpoint)));
    }
    if of.results > 0 {
        parts.push(format!("a result of {}", size(of.results)));
    }
    Err(TrainError::Failed(format!(
        "not enough space in {}: {} need {}, {} are free\n  hint: free some space, lower `save_total_limit`, or choose \
         another `checkpoint_dir` or `output_dir`",
        folder.display(),
        parts.join(" and "),
        size(bytes),
        size(free)
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_told_by_its_parts() {
        let of = Needed { checkpoint: 3 << 30, checkpoints: 2, results: 1 << 30 };
        let place = Path::new("/place");
        assert!(require(place, 7 << 30, Some(7 << 30), of).is_ok() && require(place, 7 << 30, None, of).is_ok());
        let error = require(place, 7 << 30, Some(5 << 30), of).unwrap_err();
        let text = error.to_string();
        let expected = "not enough space in /place: 2 checkpoints of 3.00 GiB each and a result of 1.00 GiB need 7.00 GiB, \
                        5.00 GiB are free";
        assert!(text.starts_with(expected) && text.contains("`save_total_limit`"), "{text}");
        assert_eq!(error.exit_code(), 1);
    }
}
