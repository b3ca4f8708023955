//! Checkpoints written while the run goes on: the tensors are copied to host memory between two steps, a thread
//! writes them, and the folder appears under its name at a later step. At most one is in the making.
//!
//! Knows how a checkpoint comes to its folder; what it consists of stands in `checkpoint.rs`.

use std::collections::HashMap;
use std::path::PathBuf;
use std::thread::{self, JoinHandle};

use program::TensorRef;
use tensor::HostTensor;

use crate::checkpoint::Outline;
use crate::error::{Result, TrainError};
use crate::staged::Staged;
use crate::trainer::Trainer;

/// A checkpoint in the making.
pub(crate) struct Saving {
    pub step: u64,
    pub folder: PathBuf,
    thread: JoinHandle<Result<Staged>>,
}

/// How a save began.
pub(crate) enum Begun {
    /// The copy is made, the files are being written.
    InTheMaking(Saving),
    /// There is no memory for a copy: every file is written already.
    Written(Staged),
}

impl Saving {
    /// Copies what a checkpoint takes and begins to write it. Needs host memory for the copy: the bytes of the
    /// checkpoint's tensors, given back tensor by tensor as they are written.
    pub fn begin(trainer: &mut Trainer, outline: Outline, folder: PathBuf) -> Result<Begun> {
        let step = trainer.steps_done();
        let staged = Staged::begin(&trainer.written, &folder)?;
        let tensors = outline.tensors();
        let bytes: usize = tensors.iter().map(TensorRef::bytes).sum();
        let engine = trainer.engine()?;
        if available().is_some_and(|available| bytes > available / 2) {
            outline.write(&staged, &mut |at| engine.tensor(at))?;
            return Ok(Begun::Written(staged));
        }
        let mut copied: HashMap<TensorRef, HostTensor> = HashMap::with_capacity(tensors.len());
        for at in tensors {
            let content = engine.tensor(&at)?;
            copied.insert(at, content);
        }
        let write = move || {
            outline
                .write(&staged, &mut |at| Ok(copied.remove(at).expect("each tensor is copied, and written once")))?;
            // The digest of the whole, so that nobody waits for it afterwards.
            staged.record()?;
            Ok(staged)
        };
        let thread = thread::Builder::new().name("checkpoint".into()).spawn(write);
        let thread = thread.map_err(|e| TrainError::Failed(format!("cannot start a thread for checkpoints: {e}")))?;
        Ok(Begun::InTheMaking(Saving { step, folder, thread }))
    }

    /// Whether [`Saving::finish`] returns at once.
    pub fn is_done(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for the files; the folder appears when it is committed.
    pub fn finish(self) -> Result<Staged> {
        match self.thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

/// Bytes of host memory that can be taken without swapping, as the system reckons them.
fn available() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    line.split_whitespace().nth(1)?.parse::<usize>().ok().map(|kilobytes| kilobytes * 1024)
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_machine_says_what_is_available() {
        assert!(super::available().is_some_and(|bytes| bytes > 1 << 20));
    }
}
