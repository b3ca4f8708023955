//! Merging of adapters, further tokens and export of models, on folders: nothing is compiled or run.

use std::path::PathBuf;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::train_error;
use crate::signals::Signals;

/// The name or folder of the model that an adapter was trained on, as the adapter says.
#[pyfunction]
pub fn adapter_base(py: Python<'_>, adapter: PathBuf) -> PyResult<Option<String>> {
    train::adapter_base(&adapter).map_err(|error| train_error(py, error))
}

/// Whether a file of a model's folder is a link that leads out of it.
#[pyfunction]
pub fn leads_out(folder: PathBuf, file: PathBuf) -> bool {
    train::leads_out(&folder, &file)
}

/// Files of a folder that make a model or an adapter, as paths in it.
#[pyfunction]
pub fn published(py: Python<'_>, folder: PathBuf) -> PyResult<Vec<PathBuf>> {
    train::published(&folder).map_err(|error| train_error(py, error))
}

/// Writes a model folder to one GGUF file: (tensors, bytes, matrices that have another encoding, which).
#[pyfunction]
pub fn write_gguf(
    py: Python<'_>,
    model: PathBuf,
    description: &str,
    encoding: &str,
    output: PathBuf,
) -> PyResult<(usize, u64, Vec<(String, &'static str)>)> {
    let signals = Signals::default();
    let done = py.detach(|| train::write_gguf(&model, description, encoding, &output, &|| signals.raised()));
    let done = signals.outcome(py, done)?;
    Ok((done.tensors, done.bytes, done.otherwise))
}

/// Writes a model with further special tokens, without `weights` all but those: (id of the first, rows of the tables before and now, names of the tables).
#[pyfunction]
#[pyo3(signature = (model, tokens, multiple, output, weights = true))]
pub fn extend(
    py: Python<'_>,
    model: PathBuf,
    tokens: Vec<String>,
    multiple: usize,
    output: PathBuf,
    weights: bool,
) -> PyResult<(usize, usize, usize, Vec<String>)> {
    let signals = Signals::default();
    let of_weights = if weights { train::Extend::Whole } else { train::Extend::WithoutWeights };
    let done = py.detach(|| train::extend(&model, &tokens, multiple, &output, of_weights, &|| signals.raised()));
    let done = signals.outcome(py, done)?;
    Ok((done.first_id, done.rows.0, done.rows.1, done.tensors))
}

/// Writes a model with an adapter added to its weights: (adapted weights, tensors, bytes, the form of the quantised
/// weights that were made again, if the adapter was trained on such). `names`: what the
/// architecture says of names, as JSON; `as_is`: added to the weights as they are.
#[pyfunction]
#[pyo3(signature = (model, adapter, output, names = "{}", as_is = false))]
pub fn merge(
    py: Python<'_>,
    model: PathBuf,
    adapter: PathBuf,
    output: PathBuf,
    names: &str,
    as_is: bool,
) -> PyResult<(usize, usize, usize, Option<String>)> {
    let names: train::ModelNames = serde_json::from_str(names).map_err(|e| PyValueError::new_err(e.to_string()))?;
    let signals = Signals::default();
    let done = py.detach(|| train::merge(&model, &adapter, &output, &names, as_is, &|| signals.raised()));
    let done = signals.outcome(py, done)?;
    Ok((done.adapted, done.tensors, done.bytes, done.quantised))
}
