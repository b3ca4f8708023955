//! Errors between a file and a batch.
//!
//! Two levels: [`DataError`] ends the work; [`RowError`] drops one row, which is counted by its reason. Knows no
//! logging.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The work cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The machine is wrong: a system call failed.
    #[error("cannot {action} {}: {source}", shown(path.display()))]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    /// The user's file or setting is wrong.
    #[error("{}: {}{}", shown(place), shown(problem), hint_suffix(hint))]
    Invalid { place: String, problem: String, hint: String },
    /// A user requested the end.
    #[error("stopped")]
    Stopped,
}

/// Asked now and then by what takes long: true ends it with [`DataError::Stopped`].
pub type Stop<'a> = &'a dyn Fn() -> bool;

fn hint_suffix(hint: &str) -> String {
    if hint.is_empty() { String::new() } else { format!(" ({})", shown(hint)) }
}

/// Names and words of others inside of a message: on one line, and with nothing that steers a terminal.
pub(crate) fn shown(text: impl fmt::Display) -> String {
    options::visible(&text.to_string()).replace('\n', "\\n")
}

impl DataError {
    pub fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        DataError::Io { action, path: path.to_owned(), source }
    }

    /// A problem at a file, setting or row, with nothing to add.
    pub fn invalid(place: impl fmt::Display, problem: impl fmt::Display) -> Self {
        DataError::Invalid { place: place.to_string(), problem: problem.to_string(), hint: String::new() }
    }

    /// Adds what the user can do about it.
    pub fn hint(self, text: impl fmt::Display) -> Self {
        match self {
            DataError::Invalid { place, problem, .. } => DataError::Invalid { place, problem, hint: text.to_string() },
            other => other,
        }
    }
}

/// The reason why a row is left out. Rows are counted by `reason`; `detail` is shown for the first of each reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowError {
    pub reason: RowReason,
    pub detail: String,
}

/// The classes under which dropped rows are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum RowReason {
    /// Not JSON, not UTF-8, or a damaged parquet value.
    Unreadable,
    MissingField,
    WrongType,
    /// The chat template refused the conversation.
    Template,
    /// The sentinel renderings do not agree on where a message lies.
    Span,
    Tokenizer,
    Empty,
    /// Longer than the limit, and `truncation_strategy: delete`.
    TooLong,
    /// Nothing in the row would be trained.
    Untrained,
    /// More bytes or values than `max_row_size` allows.
    TooLarge,
}

impl RowReason {
    /// The reason's name in the table of the data check.
    pub const fn name(self) -> &'static str {
        match self {
            RowReason::Unreadable => "unreadable",
            RowReason::MissingField => "missing field",
            RowReason::WrongType => "wrong type",
            RowReason::Template => "template error",
            RowReason::Span => "message not found in the rendering",
            RowReason::Tokenizer => "tokenizer error",
            RowReason::Empty => "empty",
            RowReason::TooLong => "too long",
            RowReason::Untrained => "nothing trained",
            RowReason::TooLarge => "too large",
        }
    }

    /// A hint for a set of which most rows are dropped for this reason.
    pub(crate) const fn help(self) -> &'static str {
        match self {
            RowReason::Template => {
                "the model's chat template rejects these conversations: change them, or set `template` to another one"
            }
            RowReason::Span => {
                "the chat template does not show these messages in full: set `template` to one that does, or \
                 `agent_template` for tool calls"
            }
            RowReason::Unreadable => "check that the file holds what its name says",
            RowReason::TooLarge => "raise `max_row_size` of the dataset",
            RowReason::Untrained => "check the roles of the messages and `loss_scale`",
            _ => "check the dataset's type and column names",
        }
    }

    /// True if the row is broken, false if the user's own settings leave it out.
    pub const fn is_failure(self) -> bool {
        !matches!(self, RowReason::TooLong | RowReason::Empty)
    }
}

impl RowError {
    pub fn new(reason: RowReason, detail: impl fmt::Display) -> Self {
        RowError { reason, detail: detail.to_string() }
    }
}

impl fmt::Display for RowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason.name(), shown(&self.detail))
    }
}
