//! The state of quantizers from earlier steps, in a checkpoint: the largest magnitudes of the last steps, by name, so
//! that another window, another selection of layers or another recipe can go on from it.
//!
//! Knows the file; when it is written and read is the checkpoint's.

use std::collections::BTreeMap;
use std::path::Path;

use data::safetensors::{NamedTensor, SafeTensors, write};
use program::{Scaling, TensorRef};
use tensor::small::kept_factor;
use tensor::{DType, HostTensor};

use crate::engine::Engine;
use crate::error::{Result, TrainError};
use crate::trainer::checkpoint::Checkpoint;
use crate::trainer::trained::ReadTensor;

/// The file of a checkpoint, and its tensor: f32 [quantisers, window], the oldest first.
const FILE: &str = "fp8_state.safetensors";
const HISTORY: &str = "amax_history";

/// Metadata: the quantisers' names as a JSON list, in the order of rows, and the steps that the state has lived.
const NAMES: &str = "names";
const STEPS: &str = "steps";

/// Stands for an entry that is not there yet.
const UNUSED: f32 = -1.0;

/// The tensors that a checkpoint takes from the program's memory for it.
pub(crate) fn tensors(scaling: Option<&Scaling>) -> impl Iterator<Item = &TensorRef> {
    scaling.filter(|scaling| scaling.window > 0).into_iter().flat_map(|scaling| [&scaling.history, &scaling.steps])
}

/// Writes the file; nothing where no magnitudes are kept.
pub(crate) fn save(folder: &Path, scaling: Option<&Scaling>, read: &mut ReadTensor<'_>) -> Result<()> {
    let Some(scaling) = scaling.filter(|scaling| scaling.window > 0) else { return Ok(()) };
    let (history, steps) = (read(&scaling.history)?.to_f32(), read(&scaling.steps)?.to_f64()[0]);
    let rows = scaling.quantisers.iter().zip(history.chunks(scaling.window)).filter(|(of, _)| !of.name.is_empty());
    let names: Vec<&str> = rows.clone().map(|(of, _)| of.name.as_str()).collect();
    let entries = rows.flat_map(|(_, row)| row).map(|entry| if *entry > 0.0 { *entry } else { UNUSED });
    let tensor = HostTensor::from_f32([names.len(), scaling.window], &entries.collect::<Vec<f32>>());
    let names = serde_json::to_string(&names).expect("a list of names is representable as JSON");
    let metadata = BTreeMap::from([(NAMES.to_owned(), names), (STEPS.to_owned(), format!("{steps}"))]);
    let path = folder.join(FILE);
    write(&path, &[NamedTensor::new(HISTORY, &tensor)], &metadata).map_err(|e| TrainError::Failed(e.to_string()))
}

/// Entries by quantiser, the oldest first, and the steps that the state has lived.
struct Kept {
    entries: BTreeMap<String, Vec<f32>>,
    steps: i32,
}

impl Kept {
    fn read(path: &Path) -> Result<Kept> {
        let files = SafeTensors::open(path).map_err(TrainError::model_file)?;
        let wrong = |what: &str| TrainError::Usage(format!("{}: {what}", path.display()));
        let text = |key: &str| {
            files.metadata().get(key).cloned().ok_or_else(|| wrong(&format!("has no `{key}` in its metadata")))
        };
        let names: Vec<String> =
            serde_json::from_str(&text(NAMES)?).map_err(|_| wrong("`names` is not a list of names"))?;
        let steps = text(STEPS)?.parse::<i32>().ok().filter(|steps| *steps >= 0);
        let steps = steps.ok_or_else(|| wrong("`steps` is not a number of steps"))?;
        let view = files.get(HISTORY).map_err(TrainError::model_file)?;
        let [rows, window] = view.shape[..] else { return Err(wrong("`amax_history` is not [quantisers, window]")) };
        if view.dtype != DType::F32 || rows != names.len() || window == 0 {
            return Err(wrong("`amax_history` is not f32 with a row for each name"));
        }
        let history = view.to_host().map_err(TrainError::unreadable)?.to_f32();
        if history.iter().any(|entry| !entry.is_finite() || (*entry <= 0.0 && *entry != UNUSED)) {
            return Err(wrong("`amax_history` holds a number that is not a magnitude"));
        }
        let rows = history.chunks(window).map(|row| row.iter().copied().filter(|entry| *entry > 0.0).collect());
        Ok(Kept { entries: names.into_iter().zip(rows).collect(), steps })
    }

    /// The device's form of the state: the newest entries of every quantizer, and the factors that follow from them.
    fn placed(&self, scaling: &Scaling) -> (Vec<f32>, Vec<f32>) {
        let (mut history, mut factors) = (Vec::new(), Vec::new());
        for of in &scaling.quantisers {
            let known = self.entries.get(&of.name).map_or(&[][..], Vec::as_slice);
            let newest = &known[known.len().saturating_sub(scaling.window)..];
            history.extend(newest.iter().copied().chain(std::iter::repeat_n(0.0, scaling.window - newest.len())));
            let most = newest.iter().copied().fold(0.0, f32::max);
            factors.push(kept_factor(most, of.top, self.steps));
        }
        (history, factors)
    }
}

impl Checkpoint {
    /// Writes what quantisers know into a session, and gives the steps that this has lived. A checkpoint of another recipe has
    /// nothing of it: they begin again. Without histories there is nothing either, and all steps of the run count.
    pub(crate) fn load_scaling(&self, engine: &mut Engine) -> Result<i32> {
        let program = engine.program().clone();
        let Some(scaling) = &program.layout.scaling else { return Ok(0) };
        if scaling.window == 0 {
            return Ok(i32::try_from(self.state.progress.step).unwrap_or(i32::MAX));
        }
        if !self.state.files.contains_key(FILE) {
            return Ok(0);
        }
        let kept = Kept::read(&self.folder.join(FILE))?;
        let (history, factors) = kept.placed(scaling);
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        engine.session().write(&scaling.history, &bytes(&history))?;
        engine.session().write(&scaling.factors, &bytes(&factors))?;
        engine.session().write(&scaling.steps, &kept.steps.to_le_bytes())?;
        Ok(kept.steps)
    }
}

#[cfg(test)]
mod tests {
    use program::{ArenaId, Quantiser};

    use super::*;

    fn scaling(names: &[&str], window: usize) -> Scaling {
        let at = |dtype, shape: &[usize]| TensorRef::dense(ArenaId(0), 0, dtype, shape);
        Scaling {
            quantisers: names.iter().map(|name| Quantiser { name: (*name).into(), top: 7 }).collect(),
            window,
            history: at(DType::F32, &[names.len(), window]),
            factors: at(DType::F32, &[names.len()]),
            counts: at(DType::F64, &[2, names.len()]),
            steps: at(DType::I32, &[1]),
        }
    }

    #[test]
    fn another_window_keeps_the_newest_entries_and_names_decide() {
        let folder = tempfile::tempdir().unwrap();
        let before = scaling(&["a.x", "", "b.x"], 3);
        let values = [1.0, 2.0, 300.0, 0.0, 0.0, 0.0, 5.0, 0.0, 0.0];
        let mut read = |at: &TensorRef| match at.dtype {
            DType::I32 => Ok(HostTensor::from_i32([1], &[7])),
            _ => Ok(HostTensor::from_f32([3, 3], &values)),
        };
        save(folder.path(), Some(&before), &mut read).unwrap();
        let kept = Kept::read(&folder.path().join(FILE)).unwrap();
        assert_eq!(kept.steps, 7);
        assert_eq!(kept.entries["b.x"], [5.0]);
        let (history, factors) = kept.placed(&scaling(&["b.x", "new.x", "a.x"], 2));
        assert_eq!(history, [5.0, 0.0, 0.0, 0.0, 2.0, 300.0]);
        assert_eq!(factors, [32.0, 1.0, 0.5], "224 over 5 and over 300, and 1 where nothing is known");
        let (history, _) = kept.placed(&scaling(&["a.x"], 5));
        assert_eq!(history, [1.0, 2.0, 300.0, 0.0, 0.0]);
        assert_eq!(Kept { steps: 1, ..kept }.placed(&scaling(&["new.x"], 1)).1, [0.0], "its own magnitude decides");
    }
}
