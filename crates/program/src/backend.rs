//! The contract between a program and what runs it.

use std::collections::BTreeMap;
use std::sync::Arc;

use thiserror::Error;

use crate::memory::TensorRef;
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

/// What a backend decided by timing, by name, as text to be kept beside a run. Empty where nothing is timed.
pub type Choices = BTreeMap<String, String>;

/// Makes sessions. May be used by several threads.
pub trait Backend: Send + Sync {
    /// `cpu`, `cuda`.
    fn name(&self) -> &'static str;

    /// Allocates the arenas (zeroed), writes the constants, prepares every instruction.
    fn load(&self, program: Arc<Program>) -> Result<Box<dyn Session>, BackendError>;

    /// As [`Backend::load`], with the choices of an earlier session instead of new ones. A backend that
    /// times nothing has no use for them.
    fn load_with(&self, program: Arc<Program>, _choices: &Choices) -> Result<Box<dyn Session>, BackendError> {
        self.load(program)
    }
}

/// A loaded program with its memory. Used by one thread at a time.
pub trait Session: Send {
    fn program(&self) -> &Arc<Program>;

    /// Copies host bytes into a dense tensor; `bytes` has exactly its size.
    fn write(&mut self, at: &TensorRef, bytes: &[u8]) -> Result<(), BackendError>;

    /// Copies a dense tensor to the host after all earlier work on it; `out` has exactly its size.
    fn read(&mut self, at: &TensorRef, out: &mut [u8]) -> Result<(), BackendError>;

    /// Runs one entry point by index. May return before the device has finished.
    fn run(&mut self, entry: usize) -> Result<(), BackendError>;

    /// Runs one entry point with the clock around every instruction: seconds, one for each step. Gaps
    /// between instructions count for the one behind them.
    fn profile(&mut self, entry: usize) -> Result<Vec<f64>, BackendError>;

    /// What was decided by timing while loading: given to [`Backend::load_with`], the same bits follow.
    fn choices(&self) -> Choices {
        Choices::new()
    }

    /// Waits for everything that was started.
    fn synchronize(&mut self) -> Result<(), BackendError>;
}
