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

/// True if a file of a model's folder is a link to a place outside of the folder.
#[pyfunction]
pub fn leads_out(folder: PathBuf, file: PathBuf) -> bool {
    train::leads_out(&folder, &file)
}

/// Files of a folder that make a model or an adapter, as paths in it.
#[pyfunction]
pub fn published(py: Python<'_>, folder: PathBuf) -> PyResult<Vec<PathBuf>> {
    train::published(&folder).map_err(|error| train_error(py, error))
}

/// Returns true if a model's files hold a head that differs from the embedding, although its configuration ties them.
#[pyfunction]
pub fn has_own_head(py: Python<'_>, model: PathBuf) -> PyResult<bool> {
    train::has_own_head(&model).map_err(|error| train_error(py, error))
}

/// Tokens of an adapter that its model does not have, and the rows that the model needs for them; none where it has them.
#[pyfunction]
pub fn tokens_of_adapter(py: Python<'_>, model: PathBuf, adapter: PathBuf) -> PyResult<Option<(Vec<String>, usize)>> {
    train::tokens_of_adapter(&model, &adapter).map_err(|error| train_error(py, error))
}

/// The tokens that end answers of a folder's model: (all, the one after an answer in its template, the tokenizer's), and
/// whether its prompts begin with BOS.
#[pyfunction]
pub fn end_tokens(py: Python<'_>, folder: PathBuf) -> PyResult<(Vec<u32>, Option<u32>, Option<u32>, bool)> {
    let of = train::EndTokens::of(&folder).map_err(|error| train_error(py, error))?;
    Ok((of.ids, of.of_turn, of.of_text, of.begins))
}

/// The encoding of GGUF that keeps most of a model's weights.
#[pyfunction]
pub fn default_encoding(py: Python<'_>, model: PathBuf) -> PyResult<&'static str> {
    train::default_encoding(&model).map_err(|error| train_error(py, error))
}

/// The number of tensors in a model's folder that belong to parts which a graph, as JSON, does not compute.
#[pyfunction]
pub fn carried_tensors(py: Python<'_>, model: PathBuf, ir: &str) -> PyResult<usize> {
    train::carried_tensors(&model, ir).map_err(|error| train_error(py, error))
}

/// Writes a model folder to one GGUF file: (tensors, bytes, matrices that have another encoding, which, a sentence on what
/// was rounded).
#[pyfunction]
pub fn write_gguf(
    py: Python<'_>,
    model: PathBuf,
    description: &str,
    encoding: &str,
    output: PathBuf,
) -> PyResult<(usize, u64, Vec<(String, &'static str)>, Option<String>)> {
    let signals = Signals::default();
    let done = py.detach(|| train::write_gguf(&model, description, encoding, &output, &|| signals.raised()));
    let done = signals.outcome(py, done)?;
    Ok((done.tensors, done.bytes, done.otherwise, done.rounded))
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
/// weights that were made again, if the adapter was trained on such, what should be known of it). `names`: what the
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
) -> PyResult<(usize, usize, usize, Option<String>, Vec<String>)> {
    let names: train::ModelNames = serde_json::from_str(names).map_err(|e| PyValueError::new_err(e.to_string()))?;
    let signals = Signals::default();
    let done = py.detach(|| train::merge(&model, &adapter, &output, &names, as_is, &|| signals.raised()));
    let done = signals.outcome(py, done)?;
    Ok((done.adapted, done.tensors, done.bytes, done.quantised, done.notes))
}
