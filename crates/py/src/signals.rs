//! Python's signals while the engine works: what a handler raises ends the work.
//!
//! Knows no signal by name; a run has handlers of its own (`console`).

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use train::Result;

use crate::errors::train_error;

/// Between two looks: Python is needed, and others may have it.
const LOOK: Duration = Duration::from_millis(50);

/// Keeps the exception that a signal handler of Python raised.
#[derive(Default)]
pub struct Signals {
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    looked: Option<Instant>,
    raised: Option<PyErr>,
}

impl Signals {
    /// Runs pending signal handlers and returns true if one has raised. Only for the thread that Python called.
    pub fn raised(&self) -> bool {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.raised.is_none() && seen.looked.is_none_or(|looked| looked.elapsed() >= LOOK) {
            seen.looked = Some(Instant::now());
            seen.raised = Python::attach(|py| py.check_signals()).err();
        }
        seen.raised.is_some()
    }

    /// Returns the exception of a handler if there is one, else the result of the work.
    pub fn outcome<T>(self, py: Python<'_>, result: Result<T>) -> PyResult<T> {
        match self.seen.into_inner().unwrap_or_else(PoisonError::into_inner).raised {
            Some(raised) => Err(raised),
            None => result.map_err(|error| train_error(py, error)),
        }
    }
}
