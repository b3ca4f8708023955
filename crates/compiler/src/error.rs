//! The reasons why a model does not become a program.

use thiserror::Error;

/// The reason why a model does not become a program.
#[derive(Debug, Error)]
pub enum CompileError {
    /// The model is wrong: a name, a shape, an attribute. Names the source line where there is one.
    #[error("{0}")]
    Model(String),
    /// The options do not fit the model: an adapter target that matches nothing, for example.
    #[error("{0}")]
    Options(String),
    /// One option does not fit the model or the others, by its name in the user's file.
    #[error("{message}{}", .hint.as_ref().map(|hint| format!("\n  hint: {hint}")).unwrap_or_default())]
    Option { option: &'static str, message: String, hint: Option<String> },
    /// A module that is to be trained as a whole is not there, or cannot be.
    #[error("{0}")]
    Saved(String),
    /// The plan needs more memory than there is.
    #[error(
        "the smallest plan needs {} ({needed} bytes), {} {}",
        size(*.needed),
        if *.limited { "`memory_limit` allows" } else { "the machine has" },
        size(*.available)
    )]
    DoesNotFit {
        needed: usize,
        available: usize,
        /// The limit is the user's, not the machine's.
        limited: bool,
    },
}

impl CompileError {
    pub(crate) fn option(option: &'static str, message: impl Into<String>, hint: &str) -> CompileError {
        CompileError::Option { option, message: message.into(), hint: Some(hint.into()) }
    }
}

/// Formats a number of bytes as MiB or GiB.
fn size(bytes: usize) -> String {
    match bytes {
        0..0x4000_0000 => format!("{:.2} MiB", bytes as f64 / (1u64 << 20) as f64),
        _ => format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64),
    }
}
