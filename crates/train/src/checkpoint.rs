//! Checkpoints: weights or adapter in loadable form, optimizer states, and the place in the run.
//! A checkpoint appears whole or not at all.

use std::path::{Path, PathBuf};

use data::safetensors::{NamedTensor, write};
use program::{Choices, OptimizerState};
use serde::{Deserialize, Serialize};
use tensor::HostTensor;

use crate::error::{Result, TrainError};
use crate::staged::Written;
use crate::trainer::Trainer;

/// The file that makes a folder a checkpoint.
const STATE: &str = "state.json";
const OPTIMIZER: &str = "optimizer.safetensors";

/// Version of the layout.
const VERSION: u32 = 1;

/// Where a run is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    pub version: u32,
    /// The run that wrote it.
    pub run: String,
    /// Optimizer steps that are done.
    pub step: u64,
    /// Updates that were applied: those of steps with a norm that is not finite were suppressed. The
    /// optimizer's bias corrections follow it.
    pub updates: u64,
    /// Micro-steps that are done: part of every dropout counter.
    pub micro_step: u64,
    /// Key of all random numbers.
    pub seed: u64,
    /// The next row of the training data.
    pub position: Option<data::Position>,
    /// The options, as in `resolved.yaml`.
    pub options: serde_json::Value,
    /// What the backend chose by timing.
    pub choices: Choices,
}

impl Trainer {
    /// Writes a checkpoint to a folder that then appears whole. A folder that this trainer wrote is
    /// replaced; anything else that is there already is an error.
    pub fn save(&mut self, folder: &Path) -> Result<()> {
        let staged = self.written.stage(folder)?;
        self.write_result(staged.path())?;
        self.write_optimizer(&staged.path().join(OPTIMIZER))?;
        let state = State {
            version: VERSION,
            run: self.name.clone(),
            step: self.steps_done(),
            updates: self.updates_applied(),
            micro_step: self.micro_steps_done(),
            seed: self.config.data.train_seed,
            position: self.position(),
            options: self.config.to_json(),
            choices: self.choices()?,
        };
        let text = serde_json::to_string_pretty(&state).expect("a state is always representable as JSON");
        staged.write(STATE, &(text + "\n"))?;
        staged.commit(&mut self.written)
    }

    fn write_optimizer(&mut self, path: &Path) -> Result<()> {
        let engine = self.engine()?;
        let program = engine.program().clone();
        let mut tensors: Vec<(String, HostTensor)> = Vec::new();
        for slot in &program.parameters {
            let parts = match &slot.state {
                None => vec![],
                Some(OptimizerState::Full { first, second }) => vec![("first", first), ("second", second)],
                Some(OptimizerState::Blockwise { first, second, first_scale, second_scale }) => vec![
                    ("first", first),
                    ("second", second),
                    ("first_scale", first_scale),
                    ("second_scale", second_scale),
                ],
            };
            for (part, at) in parts.into_iter().chain(slot.master.as_ref().map(|at| ("master", at))) {
                tensors.push((format!("{}.{part}", slot.name), engine.tensor(at)?));
            }
        }
        let named: Vec<NamedTensor<'_>> = tensors.iter().map(|(name, t)| NamedTensor::new(name.clone(), t)).collect();
        write(path, &named, &Default::default()).map_err(|e| TrainError::Failed(e.to_string()))
    }
}

/// The checkpoint of a step inside a run's folder.
pub fn folder_of(place: &Path, step: u64) -> PathBuf {
    place.join(format!("checkpoint-{step}"))
}

/// The step of which a folder's name says that it is the checkpoint.
pub fn step_of(folder: &Path) -> Option<u64> {
    folder.file_name()?.to_str()?.strip_prefix("checkpoint-")?.parse().ok()
}

/// Removes the oldest checkpoints in `place` beyond `keep`, of those that this run wrote and nobody
/// has changed since. Everything else is left alone.
pub fn rotate(place: &Path, written: &Written, keep: u64) -> Result<()> {
    let place = place.canonicalize().map_err(|e| TrainError::io("read", place, e))?;
    let inside = written.paths().into_iter().filter(|path| path.parent() == Some(&place));
    let mut own: Vec<(u64, PathBuf)> = inside.filter_map(|path| Some((step_of(&path)?, path))).collect();
    own.sort_unstable();
    let surplus = own.len().saturating_sub(keep as usize);
    for (_, path) in own.into_iter().take(surplus) {
        std::fs::remove_dir_all(&path).map_err(|e| TrainError::io("remove", &path, e))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_oldest_checkpoints_of_the_run_are_removed() {
        let place = tempfile::tempdir().unwrap();
        let write = |written: &mut Written, name: &str| {
            let staged = written.stage(&place.path().join(name)).unwrap();
            staged.write(STATE, "{}").unwrap();
            staged.commit(written).unwrap();
        };
        let (mut mine, mut others) = (Written::default(), Written::default());
        for name in ["checkpoint-5", "checkpoint-7", "checkpoint-10", "checkpoint-100", "keep-this"] {
            write(&mut mine, name);
        }
        write(&mut others, "checkpoint-1");
        std::fs::write(place.path().join("checkpoint-7/notes.txt"), "by hand").unwrap();
        rotate(place.path(), &mine, 2).unwrap();
        let mut names: Vec<String> =
            std::fs::read_dir(place.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names, ["checkpoint-1", "checkpoint-10", "checkpoint-100", "checkpoint-7", "keep-this"]);
    }
}
