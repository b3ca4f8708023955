//! The exceptions of the engine. `surogate/errors.py` gives them to users.

use options::{Problem, render_problems};
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use serde_json::Value;
use train::TrainError;

create_exception!(
    surogate.errors,
    SurogateError,
    PyException,
    "Base of every exception that is not a mistake of the engine."
);
create_exception!(
    surogate.errors,
    ConfigError,
    SurogateError,
    "The configuration or the arguments are wrong: every problem at once."
);
create_exception!(surogate.errors, MemoryPlanError, SurogateError, "The plan needs more memory than there is.");
create_exception!(surogate.errors, DataError, SurogateError, "The data cannot be trained on.");
create_exception!(surogate.errors, DivergedError, SurogateError, "The loss or the gradient norm is not finite.");
create_exception!(surogate.errors, RunError, SurogateError, "A file, a library or the device failed.");
create_exception!(
    surogate.errors,
    NodeLostError,
    RunError,
    "Another node of the run is gone or does not answer; the run can continue from its last checkpoint."
);

/// One exception for all problems of a configuration; its `problems` attribute holds them as JSON text.
pub fn config_error(py: Python<'_>, problems: &[Problem]) -> PyErr {
    let error = ConfigError::new_err(render_problems(problems));
    let list: Vec<Value> = problems.iter().map(Problem::to_json).collect();
    match error.value(py).setattr("problems", Value::from(list).to_string()) {
        Ok(()) => error,
        Err(failed) => failed,
    }
}

/// The exception for an engine error.
pub fn train_error(py: Python<'_>, error: TrainError) -> PyErr {
    match error {
        TrainError::Config(problems) => config_error(py, &problems),
        TrainError::Usage(message) => ConfigError::new_err(message),
        TrainError::Memory(message) => MemoryPlanError::new_err(message),
        TrainError::Data(error) => DataError::new_err(error.to_string()),
        diverged @ TrainError::Diverged { .. } => DivergedError::new_err(diverged.to_string()),
        TrainError::Failed(message) => RunError::new_err(message),
        TrainError::Node { text, code } => match code {
            2 => ConfigError::new_err(text),
            3 => MemoryPlanError::new_err(text),
            4 => DataError::new_err(text),
            5 => DivergedError::new_err(text),
            train::LOST => NodeLostError::new_err(text),
            _ => RunError::new_err(text),
        },
        stopped @ TrainError::Stopped => RunError::new_err(stopped.to_string()),
    }
}
