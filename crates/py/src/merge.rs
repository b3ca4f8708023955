//! Adapters and models as folders: nothing is compiled and nothing runs.

use std::path::PathBuf;

use pyo3::prelude::*;

use crate::errors::train_error;

/// The name or folder of the model that an adapter was trained on, as the adapter says.
#[pyfunction]
pub fn adapter_base(py: Python<'_>, adapter: PathBuf) -> PyResult<Option<String>> {
    train::adapter_base(&adapter).map_err(|error| train_error(py, error))
}

/// Writes a model with an adapter added to its weights: (adapted weights, tensors, bytes).
#[pyfunction]
pub fn merge(py: Python<'_>, model: PathBuf, adapter: PathBuf, output: PathBuf) -> PyResult<(usize, usize, usize)> {
    let done = py.detach(|| train::merge(&model, &adapter, &output)).map_err(|error| train_error(py, error))?;
    Ok((done.adapted, done.tensors, done.bytes))
}
