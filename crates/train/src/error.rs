//! The errors that end a run early, with their exit codes.

use compiler::CompileError;
use data::{DataError, Stop};
use options::{Availability, OptionPosition, Problem, render_problems};
use program::BackendError;
use thiserror::Error;

/// Exit code of a program that was given a wrong configuration or wrong arguments.
const EXIT_CONFIG: u8 = 2;

/// The errors of this crate.
#[derive(Debug, Error)]
pub enum TrainError {
    /// The user's options are wrong: every problem at once.
    #[error("{}", render_problems(.0))]
    Config(Vec<Problem>),
    /// The model folder, an adapter or an argument is wrong.
    #[error("{0}")]
    Usage(String),
    /// The plan needs more memory than there is.
    #[error("{0}")]
    Memory(String),
    /// The data cannot be trained on.
    #[error("{0}")]
    Data(DataError),
    /// The loss or the gradients are no longer numbers.
    #[error("the run has diverged: {what}")]
    Diverged { what: String },
    /// A file, a library or the device failed.
    #[error("{0}")]
    Failed(String),
    /// Another node ended the run, with the code that its process ends with: [`net::LOST`] where it is gone.
    #[error("{text}")]
    Node { text: String, code: u8 },
    /// A user requested the end, before there was anything to keep.
    #[error("stopped")]
    Stopped,
}

pub type Result<T> = std::result::Result<T, TrainError>;

/// Ends what takes long if a user requested the end.
pub fn go_on(stop: Stop<'_>) -> Result<()> {
    if stop() { Err(TrainError::Stopped) } else { Ok(()) }
}

impl TrainError {
    /// The exit code of the process.
    pub fn exit_code(&self) -> u8 {
        match self {
            TrainError::Failed(_) | TrainError::Stopped => 1,
            TrainError::Config(_) | TrainError::Usage(_) => EXIT_CONFIG,
            TrainError::Memory(_) => 3,
            TrainError::Data(_) => 4,
            TrainError::Diverged { .. } => 5,
            TrainError::Node { code, .. } => *code,
        }
    }

    /// A system call on a file that failed.
    pub fn io(action: &str, path: &std::path::Path, error: std::io::Error) -> TrainError {
        TrainError::Failed(format!("cannot {action} {}: {error}", path.display()))
    }

    /// The same with a word on how a run goes on after its disk was full.
    pub fn with_way_on(self) -> TrainError {
        // As Linux numbers them: no space left, and none of this user's share of it.
        let is_full = |text: &str| ["(os error 28)", "(os error 122)"].iter().any(|code| text.contains(code));
        match self {
            TrainError::Failed(text) if is_full(&text) => TrainError::Failed(format!(
                "{text}\n  hint: free some space, then use the same command with --resume-from-checkpoint true: the run goes \
                 on from its last complete checkpoint"
            )),
            other => other,
        }
    }

    /// A problem with the files of a model or adapter: wrong content is the user's, a failed call
    /// the machine's.
    pub fn model_file(error: DataError) -> TrainError {
        match error {
            DataError::Io { .. } => TrainError::Failed(error.to_string()),
            DataError::Invalid { .. } => TrainError::Usage(error.to_string()),
            DataError::Stopped => TrainError::Stopped,
        }
    }

    /// Converts an error of reading data.
    pub fn data(error: DataError) -> TrainError {
        if matches!(error, DataError::Stopped) { TrainError::Stopped } else { TrainError::Data(error) }
    }

    /// A file of a model that was whole when it was opened, and is no more.
    pub fn unreadable(error: DataError) -> TrainError {
        TrainError::Failed(error.to_string())
    }
}

impl From<BackendError> for TrainError {
    fn from(error: BackendError) -> TrainError {
        match error {
            BackendError::OutOfMemory { .. } => TrainError::Memory(error.to_string()),
            BackendError::Unavailable(_) | BackendError::Failed { .. } => TrainError::Failed(error.to_string()),
        }
    }
}

impl From<CompileError> for TrainError {
    fn from(error: CompileError) -> TrainError {
        match error {
            CompileError::DoesNotFit { .. } => TrainError::Memory(error.to_string()),
            CompileError::Option { option, message, hint } => {
                let place = OptionPosition { path: option.to_owned(), location: None };
                TrainError::Config(vec![Problem { availability: Availability::Mistake, place, message, hint }])
            }
            CompileError::Model(_) | CompileError::Options(_) | CompileError::Saved(_) => {
                TrainError::Usage(error.to_string())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_says_how_to_go_on() {
        let full = TrainError::io("write", "x".as_ref(), std::io::Error::from_raw_os_error(28)).with_way_on();
        assert!(full.to_string().contains("--resume-from-checkpoint true"), "{full}");
        let other = TrainError::io("write", "x".as_ref(), std::io::Error::from_raw_os_error(13)).with_way_on();
        assert!(!other.to_string().contains("hint"), "{other}");
    }
}
