//! The contract between a program and what runs it.

use std::collections::BTreeMap;
use std::sync::Arc;

use thiserror::Error;

use crate::gauges::Gauges;
use crate::memory::{MemoryLine, TensorRef};
use crate::program::Program;

/// The machine failed: the call, and where known the instruction and its source line.
#[derive(Debug, Error)]
pub enum BackendError {
    /// The backend cannot run on this host.
    #[error("{0}")]
    Unavailable(String),
    /// The program does not fit.
    #[error("{needed} bytes are needed for {what}, {available} are available")]
    OutOfMemory { what: String, needed: usize, available: usize },
    /// A call failed while an instruction was prepared or run.
    #[error("{call} failed: {message}{}", .context.as_ref().map(|c| format!(" (in {c})")).unwrap_or_default())]
    Failed { call: String, message: String, context: Option<String> },
}

/// The decisions that a backend made by timing, by name, as text to be kept next to a run. Empty where nothing is
/// timed.
pub type Choices = BTreeMap<String, String>;

/// Makes sessions. May be used by several threads.
pub trait Backend: Send + Sync {
    /// The backend's name: `cpu`, `cuda`.
    fn name(&self) -> &'static str;

    /// Allocates the arenas (zeroed), writes the constants, prepares every instruction.
    fn load(&self, program: Arc<Program>) -> Result<Box<dyn Session>, BackendError>;

    /// Loads like [`Backend::load`], with the choices of an earlier session instead of new ones. A backend that times
    /// nothing ignores them.
    fn load_with(&self, program: Arc<Program>, _choices: &Choices) -> Result<Box<dyn Session>, BackendError> {
        self.load(program)
    }

    /// Reads the device's sensors; `None` where the device has none of its own.
    fn gauges(&self) -> Result<Option<Gauges>, BackendError> {
        Ok(None)
    }
}

/// Bytes that are being copied to the host: see [`Session::read_later`].
#[derive(Debug)]
#[must_use = "a reading is handed to `Session::finish`"]
pub enum Reading {
    /// All bytes of the reading have arrived.
    Done(Vec<u8>),
    /// The copy is in flight; the backend knows it by this number.
    Pending(u64),
}

/// A loaded program with its memory. Used by one thread at a time.
pub trait Session: Send {
    fn program(&self) -> &Arc<Program>;

    /// Continues with the entries of another program over the same layout ([`Program::has_layout_of`]). What lives from
    /// step to step stays where it is; gradients and everything of single entries are undefined afterwards. After
    /// an error the session is of no more use.
    fn adopt(&mut self, program: Arc<Program>) -> Result<(), BackendError>;

    /// Copies host bytes into a dense tensor; `bytes` has exactly its size. On all ranks: each gets what it keeps of a
    /// tensor that is sharded.
    fn write(&mut self, at: &TensorRef, bytes: &[u8]) -> Result<(), BackendError>;

    /// Copies a dense tensor to the host after all earlier work on it; `out` has exactly its size. A tensor that is
    /// sharded is put together; of others the ranks have the same, and the first is asked.
    fn read(&mut self, at: &TensorRef, out: &mut [u8]) -> Result<(), BackendError>;

    /// Writes like [`Session::write`], to the tensor that one rank has at this place.
    fn write_rank(&mut self, rank: usize, at: &TensorRef, bytes: &[u8]) -> Result<(), BackendError> {
        assert_eq!(rank, 0, "there is one rank");
        self.write(at, bytes)
    }

    /// Reads like [`Session::read`], from one rank.
    fn read_rank(&mut self, rank: usize, at: &TensorRef, out: &mut [u8]) -> Result<(), BackendError> {
        assert_eq!(rank, 0, "there is one rank");
        self.read(at, out)
    }

    /// Starts to copy dense tensors to the host, one after the other, after all earlier work and before all later. A
    /// backend whose runs return when they are done has nothing to wait for and reads at once.
    fn read_later(&mut self, at: &[TensorRef]) -> Result<Reading, BackendError> {
        let mut bytes = vec![0; at.iter().map(TensorRef::bytes).sum()];
        let mut rest = bytes.as_mut_slice();
        for tensor in at {
            let (part, after) = rest.split_at_mut(tensor.bytes());
            self.read(tensor, part)?;
            rest = after;
        }
        Ok(Reading::Done(bytes))
    }

    /// Waits for a reading of this session, but not for what was started after it.
    fn finish(&mut self, reading: Reading) -> Result<Vec<u8>, BackendError> {
        match reading {
            Reading::Done(bytes) => Ok(bytes),
            Reading::Pending(number) => panic!("reading {number} is of another session: this one reads at once"),
        }
    }

    /// Runs one entry point by index. May return before the device has finished.
    fn run(&mut self, entry: usize) -> Result<(), BackendError>;

    /// Runs one instruction of an entry point, by indices, and waits for it.
    fn run_instruction(&mut self, entry: usize, index: usize) -> Result<(), BackendError>;

    /// Executes a command of the leading process of the run: bytes that its session of the same program made.
    fn serve(&mut self, _command: &[u8]) -> Result<(), BackendError> {
        panic!("this session has no ranks in other processes")
    }

    /// Allocations, by arena and other use: bytes as requested from the system.
    fn allocated(&self) -> Vec<MemoryLine>;

    /// Bytes of the device's memory in use by all processes; `None` where the memory is the host's.
    fn memory_in_use(&self) -> Result<Option<usize>, BackendError> {
        Ok(None)
    }

    /// Runs one entry point timing every instruction: seconds, one for each step. A gap between instructions counts for
    /// the one after it.
    fn profile(&mut self, entry: usize) -> Result<Vec<f64>, BackendError>;

    /// The decisions made by timing while loading: given to [`Backend::load_with`], they give the same bits.
    fn choices(&self) -> Choices {
        Choices::new()
    }

    /// The phases of loading, in order, with their seconds. Empty where they are too short to report.
    fn load_times(&self) -> Vec<(&'static str, f64)> {
        Vec::new()
    }

    /// Decisions and findings of loading that a user may want to know, a sentence each.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// Waits for everything that was started.
    fn synchronize(&mut self) -> Result<(), BackendError>;
}
