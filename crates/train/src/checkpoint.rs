//! Checkpoints: weights or adapter in loadable form, optimizer states, and the place in the run.
//! A checkpoint appears whole or not at all.

use std::path::{Path, PathBuf};

use data::safetensors::{NamedTensor, write};
use program::OptimizerState;
use serde::{Deserialize, Serialize};
use tensor::HostTensor;

use crate::error::{Result, TrainError};
use crate::staged::Staged;
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
    /// Micro-steps that are done: part of every dropout counter.
    pub micro_step: u64,
    /// Key of all random numbers.
    pub seed: u64,
    /// The next row of the training data.
    pub position: Option<data::Position>,
    /// The options, as in `resolved.yaml`.
    pub options: serde_json::Value,
}

impl Trainer {
    /// Writes a checkpoint to a folder that then appears whole.
    pub fn save(&mut self, folder: &Path) -> Result<()> {
        let staged = Staged::new(folder, &[STATE])?;
        self.write_result(staged.path())?;
        self.write_optimizer(&staged.path().join(OPTIMIZER))?;
        let state = State {
            version: VERSION,
            run: self.name.clone(),
            step: self.steps_done(),
            micro_step: self.micro_steps_done(),
            seed: self.config.data.train_seed,
            position: self.position(),
            options: self.config.to_json(),
        };
        let text = serde_json::to_string_pretty(&state).expect("a state is always representable as JSON");
        staged.write(STATE, &(text + "\n"))?;
        staged.commit()
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

/// Removes the oldest checkpoints of one run beyond `keep`. Folders of other runs are left alone.
pub fn rotate(place: &Path, run: &str, keep: u64) -> Result<()> {
    let mut own: Vec<(u64, PathBuf)> = Vec::new();
    let entries = std::fs::read_dir(place).map_err(|e| TrainError::io("read", place, e))?;
    for entry in entries.flatten() {
        let state = std::fs::read_to_string(entry.path().join(STATE)).ok();
        let state = state.and_then(|text| serde_json::from_str::<State>(&text).ok());
        if let Some(state) = state.filter(|state| state.run == run && entry.path() == folder_of(place, state.step)) {
            own.push((state.step, entry.path()));
        }
    }
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
        let write = |name: &str, run: &str, step: u64| {
            let folder = place.path().join(name);
            std::fs::create_dir(&folder).unwrap();
            let options = serde_json::Value::Null;
            let state =
                State { version: VERSION, run: run.into(), step, micro_step: 0, seed: 0, position: None, options };
            std::fs::write(folder.join(STATE), serde_json::to_string(&state).unwrap()).unwrap();
        };
        for step in [5, 10, 100] {
            write(&format!("checkpoint-{step}"), "mine", step);
        }
        write("checkpoint-1", "other", 1);
        write("keep-this", "mine", 2);
        rotate(place.path(), "mine", 2).unwrap();
        let mut names: Vec<String> =
            std::fs::read_dir(place.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names, ["checkpoint-1", "checkpoint-10", "checkpoint-100", "keep-this"]);
    }
}
