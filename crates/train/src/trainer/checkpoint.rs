//! Checkpoints: weights or adapter in loadable form, optimizer states, and the place in the run.
//! A checkpoint appears whole or not at all, and says of each of its files what it must contain.
//!
//! Knows one checkpoint; which of several a run goes on from is decided in `run/resume.rs`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use data::safetensors::Weights;
use program::{Choices, Documents, TensorRef, Variant, scalar};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::{GradientCompression, Reasons};
use crate::engine::Engine;
use crate::error::{Result, TrainError};
use crate::files::digest;
use crate::files::staged::remove;
use crate::files::written::Written;
use crate::input::data_digest::DataDigest;
use crate::model::folder::OPTIMIZER;
use crate::model::source::ModelDigest;
use crate::model::weight_source::write_as_stored;
use crate::trainer::progress::Progress;

/// The file that makes a folder a checkpoint.
pub const STATE: &str = digest::LIST;

/// Version of the checkpoint's layout.
pub(super) const VERSION: u32 = 2;

/// Stands for the digest while the digest is computed.
pub(super) const NO_DIGEST: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// The state of a run in a checkpoint's `state.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    pub version: u32,
    /// Digest of this file, with zeros in place of this value.
    pub(super) digest: String,
    /// The run that wrote it, and its name.
    pub run_id: String,
    pub run: String,
    /// Version of the program that wrote it.
    pub surogate: String,
    /// The properties that the bits of its arithmetic depend on besides the program: see
    /// [`crate::engine::device::Device::arithmetic`].
    #[serde(default)]
    pub arithmetic: Option<String>,
    pub task: String,
    /// Counters of the work that is done.
    #[serde(flatten)]
    pub progress: Progress,
    /// Key of all random numbers.
    pub seed: u64,
    /// The next row of the training data.
    pub position: Option<data::Position>,
    /// The options as they were given, and with what was chosen for those that were left open.
    pub options: Value,
    pub resolved: Value,
    /// The options among them that `apply_recommended_values` chose.
    #[serde(default)]
    pub recommended: Reasons,
    pub model: ModelDigest,
    /// The documents that are trained on.
    pub data: Option<DataDigest>,
    /// The documents that are held out for evaluation.
    #[serde(default)]
    pub validation: Option<DataDigest>,
    /// Batch shapes that were compiled.
    pub shapes: Vec<ShapeRecord>,
    /// Choices that the backend made by timing.
    pub choices: Choices,
    /// Every other file of the folder.
    pub files: BTreeMap<String, FileRecord>,
}

/// Steps, rows and tokens of a run that are distinguished: the device counts in 32 bits.
const COUNTED: u64 = i32::MAX as u64;

/// Rows of the data, and passes over them, of a run at most.
const ROWS: u64 = 1 << 53;

impl State {
    /// Checks that the numbers can be those of a run, since a digest can be made for any. The error names those that
    /// cannot.
    fn check(&self) -> std::result::Result<(), String> {
        let Progress {
            step,
            updates,
            frozen,
            micro_step,
            suppressed,
            evaluated,
            loss: _,
            ref best_tracker,
            ref samples,
        } = self.progress;
        let counts = [("step", step), ("updates", updates), ("micro_step", micro_step), ("suppressed", suppressed)];
        if let Some((name, count)) = counts.into_iter().find(|(_, count)| *count > COUNTED) {
            return Err(format!("has `{name}: {count}`, expected at most {COUNTED}"));
        }
        if updates > step
            || suppressed > step
            || micro_step < step
            || frozen.is_some_and(|frozen| frozen > updates || frozen == 0)
            || evaluated.max(best_tracker.best.map(|of| of.step)) > Some(step)
        {
            return Err(format!(
                "contradicts itself: {step} steps with {micro_step} micro-steps, {updates} updates, the last {suppressed} \
                 of them suppressed, evaluated at {evaluated:?}, second moments of {frozen:?} updates"
            ));
        }
        if let Some(number) = self.position.as_ref().map(data::Position::largest).filter(|number| *number > ROWS) {
            return Err(format!("has a `position` with {number}, expected numbers up to {ROWS}"));
        }
        if self.position.as_ref().is_some_and(|position| position.before.iter().any(Vec::is_empty)) {
            return Err("has a `position` before which the data were in no part".to_owned());
        }
        if self.shapes.is_empty() {
            return Err("has no `shapes`, expected those of the batches that were trained on".to_owned());
        }
        samples.as_ref().map_or(Ok(()), |samples| samples.check())?;
        self.shapes.iter().try_for_each(ShapeRecord::check)
    }
}

/// The size and the digest that a file of a checkpoint must have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    pub bytes: u64,
    pub digest: String,
}

/// A batch shape; `packed` only for rows that hold documents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShapeRecord {
    batch: usize,
    seq_len: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    packed: Option<bool>,
    /// Patches of images, where a batch has any.
    #[serde(default, skip_serializing_if = "is_zero")]
    patches: usize,
    /// Tokens whose logits are computed, where these are not all.
    #[serde(default, skip_serializing_if = "is_zero")]
    logits: usize,
    /// The former spelling in earlier checkpoints.
    #[serde(skip_serializing)]
    longest: Option<usize>,
}

impl ShapeRecord {
    fn check(&self) -> std::result::Result<(), String> {
        let ShapeRecord { batch, seq_len, packed: _, patches, logits, longest } = self;
        let tokens = batch.checked_mul(*seq_len).filter(|tokens| (1..=COUNTED as usize).contains(tokens));
        let packed = longest.is_none_or(|longest| (1..=*seq_len).contains(&longest));
        let counted = *patches <= COUNTED as usize && tokens.is_none_or(|tokens| *logits <= tokens);
        let text = || serde_json::to_string(self).expect("a shape is always representable as JSON");
        if tokens.is_some() && packed && counted {
            Ok(())
        } else {
            Err(format!("has the shape {}, which no batch has", text()))
        }
    }
}

impl From<&Variant> for ShapeRecord {
    fn from(of: &Variant) -> ShapeRecord {
        let packed = (of.documents == Documents::Packed).then_some(true);
        ShapeRecord {
            batch: of.batch,
            seq_len: of.seq_len,
            packed,
            patches: of.patches,
            logits: of.logits,
            longest: None,
        }
    }
}

impl From<&ShapeRecord> for Variant {
    fn from(of: &ShapeRecord) -> Variant {
        let packed = of.packed == Some(true) || of.longest.is_some();
        let documents = if packed { Documents::Packed } else { Documents::Rows };
        Variant { batch: of.batch, seq_len: of.seq_len, documents, patches: of.patches, logits: of.logits }
    }
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// A checkpoint whose files are what they were when it was written.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    pub folder: PathBuf,
    pub state: State,
}

/// Returns what is wrong with a folder as a checkpoint, without its name; none where it is whole.
pub fn fault(folder: &Path) -> Option<String> {
    Checkpoint::open(folder).err()
}

impl Checkpoint {
    /// Opens a folder and checks every file. The error says what is wrong, without the folder's name.
    pub fn open(folder: &Path) -> std::result::Result<Checkpoint, String> {
        let text =
            data::small_file::read_text(&folder.join(STATE)).map_err(|e| format!("`{STATE}` cannot be read: {e}"))?;
        let value: Value = serde_json::from_str(&text).map_err(|e| format!("`{STATE}` is not valid JSON: {e}"))?;
        if value["version"] != VERSION {
            return Err(format!("its layout is of version {}, this program reads version {VERSION}", value["version"]));
        }
        let state: State = serde_json::from_value(value).map_err(|e| format!("`{STATE}` is incomplete: {e}"))?;
        if digest::of_bytes(text.replacen(&state.digest, NO_DIGEST, 1).as_bytes()) != state.digest {
            return Err(format!("`{STATE}` was changed after it was written"));
        }
        state.check().map_err(|why| format!("`{STATE}` {why}"))?;
        let found = digest::of_files(folder, |name| state.files.contains_key(name)).map_err(|e| e.to_string())?;
        for (name, of) in &state.files {
            match found.iter().find(|(known, _, _)| known == name) {
                None => return Err(format!("`{name}` is missing")),
                Some((_, bytes, _)) if *bytes != of.bytes => {
                    return Err(format!("`{name}` has {bytes} bytes, expected {}", of.bytes));
                }
                Some((_, _, digest)) if *digest != of.digest => {
                    return Err(format!("`{name}` has other content than when it was written"));
                }
                Some(_) => {}
            }
        }
        Ok(Checkpoint { folder: folder.to_owned(), state })
    }

    pub fn step(&self) -> u64 {
        self.state.progress.step
    }

    /// Writes the optimizer's states into a session, whose gradients are compressed so. Gives what was left out, a sentence
    /// each.
    pub fn load_optimizer(&self, engine: &mut Engine, compression: GradientCompression) -> Result<Vec<String>> {
        let path = self.folder.join(OPTIMIZER);
        let files = Weights::open(&path).map_err(TrainError::model_file)?;
        let program = engine.program().clone();
        let mut wanted: Vec<(String, &TensorRef)> = program.layout.states().collect();
        let errors = |name: &str| name == scalar::GRADIENT_ERRORS;
        let mut notes = Vec::new();
        // They are those of ranks, each of its share, and of one compression.
        let now = wanted.iter().find(|(name, _)| errors(name)).map(|(_, at)| at.shape.clone());
        let then = files.get(scalar::GRADIENT_ERRORS).ok().map(|view| view.shape.to_vec());
        let same = now == then && self.state.options["gradient_compression"] == compression.name();
        if !same {
            wanted.retain(|(name, _)| !errors(name));
        }
        if then.is_some() && !same {
            notes.push("what compression had left of gradients is dropped: it is that of other ranks, or of another compression".to_owned());
        }
        for name in files.names().into_iter().filter(|name| same || !errors(name)) {
            if !wanted.iter().any(|(known, _)| known == name) {
                return Err(TrainError::Usage(format!("{}: `{name}` does not belong to the run", path.display())));
            }
        }
        for (name, at) in wanted.drain(..) {
            let view = files.get(&name).map_err(TrainError::model_file)?;
            if (view.dtype, view.shape) != (at.dtype, at.shape.as_slice()) {
                return Err(TrainError::Usage(format!(
                    "{}: `{name}` is {}{:?}, the run needs {}{:?}",
                    path.display(),
                    view.dtype,
                    view.shape,
                    at.dtype,
                    at.shape
                )));
            }
            write_as_stored(engine.session(), at, &view)?;
        }
        Ok(notes)
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

/// Removes the checkpoints in `place` that were written first, beyond `keep`, of those that this run wrote and
/// are unchanged since; the one of the step `spared` is kept as well. Everything else is left alone.
pub fn rotate(place: &Path, written: &Written, keep: u64, spared: Option<u64>) -> Result<()> {
    let place = place.canonicalize().map_err(|e| TrainError::io("read", place, e))?;
    let mut own = written.paths();
    own.retain(|path| path.parent() == Some(&place) && step_of(path).is_some());
    let surplus = own.len().saturating_sub(keep as usize);
    let is_spared = |path: &PathBuf| spared.is_some() && step_of(path) == spared;
    own.into_iter().take(surplus).filter(|path| !is_spared(path)).try_for_each(|path| remove(written, &path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::staged::Staged;

    #[test]
    fn only_the_oldest_checkpoints_of_the_run_are_removed() {
        let place = tempfile::tempdir().unwrap();
        let write = |written: &mut Written, name: &str| {
            let staged = Staged::begin(written, &place.path().join(name)).unwrap();
            staged.write(STATE, "{}").unwrap();
            staged.commit(written).unwrap();
        };
        let (mut mine, mut others) = (Written::by("mine"), Written::by("others"));
        for name in ["checkpoint-100", "checkpoint-5", "checkpoint-7", "checkpoint-10", "keep-this"] {
            write(&mut mine, name);
        }
        write(&mut others, "checkpoint-1");
        std::fs::write(place.path().join("checkpoint-7/notes.txt"), "by hand").unwrap();
        rotate(place.path(), &mine, 2, None).unwrap();
        let mut names: Vec<String> =
            std::fs::read_dir(place.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        // The run went back to an earlier step: what it wrote last is what it needs.
        assert_eq!(names, ["checkpoint-1", "checkpoint-10", "checkpoint-5", "checkpoint-7", "keep-this"]);
        rotate(place.path(), &mine, 1, Some(5)).unwrap();
        assert!(place.path().join("checkpoint-5").exists(), "the best one is kept");
        rotate(place.path(), &mine, 1, None).unwrap();
        assert!(!place.path().join("checkpoint-5").exists());
    }

    /// A forged checkpoint without files, whose digest is right.
    fn sealed(folder: &Path, change: impl FnOnce(&mut State)) -> std::result::Result<Checkpoint, String> {
        let mut state = State {
            version: VERSION,
            digest: NO_DIGEST.to_owned(),
            run_id: "run".into(),
            run: "run".into(),
            surogate: "0".into(),
            arithmetic: None,
            task: "sft".into(),
            progress: Progress { step: 3, updates: 3, micro_step: 6, evaluated: Some(2), ..Progress::default() },
            seed: 0,
            position: None,
            options: Value::Null,
            resolved: Value::Null,
            recommended: Reasons::default(),
            model: ModelDigest { config: String::new(), weights: None },
            data: None,
            validation: None,
            shapes: vec![ShapeRecord { batch: 1, seq_len: 8, packed: None, patches: 0, logits: 0, longest: None }],
            choices: Choices::new(),
            files: BTreeMap::new(),
        };
        change(&mut state);
        let text = serde_json::to_string_pretty(&state).unwrap();
        let digest = digest::of_bytes(text.as_bytes());
        std::fs::write(folder.join(STATE), text.replacen(NO_DIGEST, &digest, 1)).unwrap();
        Checkpoint::open(folder)
    }

    #[test]
    fn a_state_that_no_run_has_is_refused_though_its_digest_is_right() {
        let place = tempfile::tempdir().unwrap();
        sealed(place.path(), |_| {}).unwrap();
        let refused = |change: fn(&mut State)| sealed(place.path(), change).unwrap_err();
        assert!(refused(|state| state.shapes.clear()).contains("has no `shapes`"));
        assert!(refused(|state| state.shapes[0].batch = 0).contains("which no batch has"));
        assert!(refused(|state| state.progress.step = u64::MAX).contains("`step: 18446744073709551615`"));
        assert!(refused(|state| state.progress.micro_step = 1 << 31).contains("`micro_step: 2147483648`"));
        for change in [
            |state: &mut State| state.progress.updates = 4,
            |state: &mut State| state.progress.frozen = Some(4),
            |state: &mut State| state.progress.frozen = Some(0),
            |state: &mut State| state.progress.micro_step = 2,
            |state: &mut State| state.progress.suppressed = 4,
            |state: &mut State| state.progress.evaluated = Some(4),
        ] {
            assert!(refused(change).contains("contradicts itself"));
        }
        let at = |text: &str| Some(serde_json::from_str::<data::Position>(text).unwrap());
        sealed(place.path(), |state| state.position = at(r#"{"epoch": 9, "window": 8, "bin": 7}"#)).unwrap();
        for text in [
            r#"{"epoch": 18446744073709551615, "window": 0, "bin": 0}"#,
            r#"{"epoch": 0, "window": 0, "bin": 0, "others": [{"window": 18446744073709551615, "bin": 0}]}"#,
            r#"{"epoch": 0, "window": 0, "bin": 0, "before": [[{"window": 0, "bin": 18446744073709551615}]]}"#,
            r#"{"epoch": 0, "window": 0, "bin": 0, "stream": {"window": 0, "drawn": 18446744073709551615, "sets": []}}"#,
            r#"{"epoch": 0, "window": 0, "bin": 0, "stream": {"window": 0, "drawn": 0,
                "sets": [{"epoch": 0, "file": 0, "row": 18446744073709551615}]}}"#,
        ] {
            let refused = sealed(place.path(), |state| state.position = at(text)).unwrap_err();
            assert!(refused.contains("`position` with 18446744073709551615"), "{refused}");
        }
        let deep = format!("{{\"version\": {VERSION}, \"options\": {}1{}}}", "[".repeat(10_000), "]".repeat(10_000));
        std::fs::write(place.path().join(STATE), deep).unwrap();
        assert!(Checkpoint::open(place.path()).unwrap_err().contains("is not valid JSON"));
    }

    #[test]
    fn shapes_that_no_batch_has_are_refused() {
        let check = |text: &str| serde_json::from_str::<ShapeRecord>(text).unwrap().check();
        for text in [
            "{\"batch\": 1, \"seq_len\": 2147483647}",
            "{\"batch\": 2, \"seq_len\": 64, \"packed\": true}",
            "{\"batch\": 2, \"seq_len\": 64, \"documents\": 128, \"longest\": 64}",
        ] {
            check(text).unwrap();
        }
        for text in [
            "{\"batch\": 0, \"seq_len\": 64}",
            "{\"batch\": 1, \"seq_len\": 0}",
            "{\"batch\": 4294967296, \"seq_len\": 4294967296}",
            "{\"batch\": 2, \"seq_len\": 64, \"documents\": 8, \"longest\": 65}",
            "{\"batch\": 2, \"seq_len\": 64, \"longest\": 0}",
        ] {
            assert!(check(text).unwrap_err().contains("which no batch has"), "{text}");
        }
    }

    #[test]
    fn shapes_are_read_as_they_were_written() {
        for (documents, patches) in [(Documents::Rows, 0), (Documents::Packed, 0), (Documents::Packed, 128)] {
            let variant = Variant { batch: 2, seq_len: 64, documents, patches, logits: 0 };
            let text = serde_json::to_string(&ShapeRecord::from(&variant)).unwrap();
            assert_eq!(Variant::from(&serde_json::from_str::<ShapeRecord>(&text).unwrap()), variant);
        }
    }
}
