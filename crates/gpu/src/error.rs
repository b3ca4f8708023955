//! Errors between the backend and the machine: the call, its result and its context.
//!
//! These are errors of the machine or its limits. A violated invariant of the engine is a panic instead. The type knows
//! no instruction: the executor adds that as context.

use std::path::PathBuf;

/// An error of a CUDA library, or of the search for it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// No file of that name was found in any of the places looked at.
    #[error(
        "{library} was not found; looked for {}\n  hint: {hint}{}",
        tried.join(", "),
        separated("\n  while ", context)
    )]
    LibraryMissing { library: &'static str, tried: Vec<String>, hint: String, context: String },

    /// The file is there but the loader rejects it.
    #[error("{} cannot be loaded: {reason}", path.display())]
    LibraryBroken { path: PathBuf, reason: String },

    /// The library lacks a function that the backend needs: it is too old, or another library.
    #[error("{} has no function `{symbol}` ({reason}); the library is older than this program needs", path.display())]
    SymbolMissing { path: PathBuf, symbol: String, reason: String },

    /// A call answered with an error status.
    #[error("{call} failed with {name} ({code}){}{}", separated(": ", detail), separated("\n  while ", context))]
    Call { call: &'static str, code: u32, name: String, detail: String, context: String },

    /// The device has no room for an allocation.
    #[error(
        "no {wanted} bytes of device memory are free ({free} of {total} bytes are){}",
        separated("\n  while ", context)
    )]
    OutOfMemory { wanted: usize, free: usize, total: usize, context: String },

    /// The runtime compiler rejected a kernel; the log names file and line.
    #[error("kernel `{kernel}` does not compile for {architecture}:\n{log}")]
    Compile { kernel: String, architecture: String, log: String },

    /// A wait was given up after its timeout, or because another participant failed.
    #[error("{what}: {why}{}", separated("\n  while ", context))]
    Waited { what: String, why: String, context: String },

    /// The libraries have no implementation of the request on this device.
    #[error("{what}: {reason}{}", separated("\n  while ", context))]
    Unsupported { what: String, reason: String, context: String },
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Adds the operation during which the error happened; an outer context goes after an inner one.
    pub fn during(mut self, doing: impl FnOnce() -> String) -> Error {
        if let Error::Call { context, .. }
        | Error::OutOfMemory { context, .. }
        | Error::Unsupported { context, .. }
        | Error::Waited { context, .. }
        | Error::LibraryMissing { context, .. } = &mut self
        {
            let outer = doing();
            *context = if context.is_empty() { outer } else { format!("{context}, {outer}") };
        }
        self
    }
}

/// Adds context to a failed result without paying for it on success.
pub trait During<T> {
    fn during(self, doing: impl FnOnce() -> String) -> Result<T>;
}

impl<T> During<T> for Result<T> {
    fn during(self, doing: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| error.during(doing))
    }
}

fn separated(separator: &str, text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("{separator}{text}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call() -> Error {
        Error::Call {
            call: "cuLaunchKernel",
            code: 700,
            name: "CUDA_ERROR_ILLEGAL_ADDRESS".into(),
            detail: "an illegal memory access was encountered".into(),
            context: String::new(),
        }
    }

    #[test]
    fn text_names_call_status_and_context() {
        let text = call().during(|| "rmsnorm".into()).during(|| "layer 3".into()).to_string();
        assert_eq!(
            text,
            "cuLaunchKernel failed with CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered\n  \
             while rmsnorm, layer 3"
        );
        assert!(!call().to_string().contains("while"));
    }
}
