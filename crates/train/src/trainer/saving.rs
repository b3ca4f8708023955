//! Checkpoints written in the background: tensors are copied to host memory between two steps, a thread writes them,
//! and the folder appears under its name at a later step. At most one checkpoint is being written.
//!
//! Knows how a checkpoint gets into its folder; `checkpoint.rs` knows what it contains.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::path::Path;
use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use program::TensorRef;
use tensor::HostTensor;

use crate::error::{Result, TrainError};
use crate::files::digest;
use crate::files::staged::Staged;
use crate::input::feed::Feed;
use crate::model::folder::OPTIMIZER;
use crate::trainer::Trainer;
use crate::trainer::checkpoint::{FileRecord, NO_DIGEST, STATE, ShapeRecord, State, VERSION};
use crate::trainer::scaling;
use crate::trainer::trained::{ReadTensor, Trained, write_tensors};

/// A checkpoint that a thread is writing.
pub(crate) struct Saving {
    pub step: u64,
    pub folder: PathBuf,
    /// Bytes of the tensors in the checkpoint.
    pub bytes: usize,
    thread: JoinHandle<Result<(Staged, f64)>>,
}

/// The state of a save after its begin.
pub(crate) enum Begun {
    /// The copy is made, the files are being written.
    InTheMaking(Saving),
    /// There is no memory for a copy: every file is written already, this many bytes of tensors.
    Written(Staged, usize),
}

impl Saving {
    /// Copies what a checkpoint takes and begins to write it. Needs host memory for the copy: the bytes of the
    /// checkpoint's tensors, given back tensor by tensor as they are written.
    pub fn begin(trainer: &mut Trainer, outline: Outline, folder: PathBuf) -> Result<Begun> {
        let (step, begun) = (trainer.steps_done(), Instant::now());
        let staged = Staged::begin(&trainer.written, &folder)?;
        let tensors = outline.tensors();
        let bytes: usize = tensors.iter().map(TensorRef::bytes).sum();
        let engine = trainer.engine()?;
        if available().is_some_and(|available| bytes > available / 2) {
            outline.write(&staged, &mut |at| engine.tensor(at))?;
            return Ok(Begun::Written(staged, bytes));
        }
        let mut copied: HashMap<TensorRef, HostTensor> = HashMap::with_capacity(tensors.len());
        for at in tensors {
            let content = engine.tensor(&at)?;
            copied.insert(at, content);
        }
        let write = move || {
            outline
                .write(&staged, &mut |at| Ok(copied.remove(at).expect("each tensor is copied, and written once")))?;
            // The digest of the whole, so that no one waits for it afterwards.
            staged.record()?;
            Ok((staged, begun.elapsed().as_secs_f64()))
        };
        let thread = thread::Builder::new().name("checkpoint".into()).spawn(write);
        let thread = thread.map_err(|e| TrainError::Failed(format!("cannot start a thread for checkpoints: {e}")))?;
        Ok(Begun::InTheMaking(Saving { step, folder, bytes, thread }))
    }

    /// True if [`Saving::finish`] returns at once.
    pub fn is_done(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for the files; the folder appears when it is committed. Also returns the seconds from the begin of the copy to the
    /// last file.
    pub fn finish(self) -> Result<(Staged, f64)> {
        match self.thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// Bytes of host memory that can be taken without swapping, as the system reckons them, and no more than the
/// limit of this process' control group leaves. None where the system does not say.
fn available() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let of_machine = line.split_whitespace().nth(1)?.parse::<usize>().ok()? * 1024;
    Some(left_to_group().map_or(of_machine, |of_group| of_machine.min(of_group)))
}

/// The bytes that the limit of the control group leaves, with those of files that can be dropped; None without a limit.
fn left_to_group() -> Option<usize> {
    let read = |name: &str| std::fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok();
    let number = |name: &str| read(name)?.trim().parse::<usize>().ok();
    let dropped = read("memory.stat")?.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse().ok());
    Some((number("memory.max")? + dropped.unwrap_or(0)).saturating_sub(number("memory.current")?))
}

/// All of a checkpoint but its tensors, apart from the session that holds these.
#[derive(Debug)]
pub(crate) struct Outline {
    trained: Trained,
    state: State,
}

/// The tensors of a checkpoint: what is trained, states of the optimizer and of quantizers.
fn tensors(trained: &Trained) -> Vec<TensorRef> {
    let states = trained.program.layout.states().map(|(_, at)| at);
    let scaling = scaling::tensors(trained.program.layout.scaling.as_ref());
    trained.weights().chain(states).chain(scaling).cloned().collect()
}

impl Outline {
    /// Everything that a checkpoint takes from the program's memory.
    pub fn tensors(&self) -> Vec<TensorRef> {
        tensors(&self.trained)
    }

    /// Writes all files; the last says of the others what they must contain.
    pub fn write(mut self, staged: &Staged, read: &mut ReadTensor<'_>) -> Result<()> {
        let folder = staged.path();
        self.trained.write(folder, read)?;
        let states = self.trained.program.layout.states();
        let states = states.map(|(name, at)| Ok((name, read(at)?))).collect::<Result<Vec<_>>>()?;
        write_tensors(&folder.join(OPTIMIZER), &states)?;
        drop(states);
        scaling::save(folder, self.trained.program.layout.scaling.as_ref(), read)?;
        let files = digest::of_files(folder, |_| true).map_err(|e| TrainError::io("read", folder, e))?;
        let files = files.into_iter().map(|(name, bytes, digest)| (name, FileRecord { bytes, digest }));
        self.state.files = files.collect();
        let text = serde_json::to_string_pretty(&self.state).expect("a state is always representable as JSON") + "\n";
        let digest = digest::of_bytes(text.as_bytes());
        staged.write(STATE, &text.replacen(NO_DIGEST, &digest, 1))
    }
}

impl Trainer {
    /// Writes a checkpoint to a folder that then appears whole. A folder that this trainer wrote is
    /// replaced; anything else that is there already is an error.
    pub fn save(&mut self, folder: &Path) -> Result<()> {
        let staged = self.stage_checkpoint(folder)?;
        staged.commit(&mut self.written)
    }

    /// Writes a checkpoint that appears when it is committed.
    fn stage_checkpoint(&mut self, folder: &Path) -> Result<Staged> {
        let staged = Staged::begin(&self.written, folder)?;
        let outline = self.outline()?;
        let engine = self.engine()?;
        outline.write(&staged, &mut |at| engine.tensor(at))?;
        Ok(staged)
    }

    /// Bytes of the tensors of a checkpoint.
    pub(crate) fn checkpoint_bytes(&mut self) -> Result<usize> {
        Ok(tensors(&self.trained()?).iter().map(TensorRef::bytes).sum())
    }

    /// All of a checkpoint but its tensors, as the run is now.
    pub(crate) fn outline(&mut self) -> Result<Outline> {
        let state = State {
            version: VERSION,
            digest: NO_DIGEST.to_owned(),
            run_id: self.written.owner.clone(),
            run: self.name.clone(),
            surogate: env!("CARGO_PKG_VERSION").to_owned(),
            arithmetic: Some(self.device.arithmetic.clone()),
            task: self.config.task.name().to_owned(),
            progress: self.progress.clone(),
            seed: self.config.data.train_seed,
            position: self.position(),
            options: self.config.recorded_json(),
            resolved: self.config.resolved_json(&self.reasons()),
            recommended: self.config.recommended.clone().unwrap_or_default(),
            model: self.model_digest()?.clone(),
            data: self.data_digest(),
            validation: self.feed.as_ref().and_then(Feed::validation_digest),
            shapes: self.engine()?.options().variants.iter().map(ShapeRecord::from).collect(),
            choices: self.choices()?,
            files: BTreeMap::new(),
        };
        Ok(Outline { trained: self.trained()?, state })
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_machine_says_what_is_available() {
        assert!(super::available().is_some_and(|bytes| bytes > 1 << 20));
    }
}
