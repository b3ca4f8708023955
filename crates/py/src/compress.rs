//! Models in other number formats, for Python.

use std::cell::Cell;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use train::{CompressRequest, ModelSource};

use crate::signals::Signals;

/// Between two calls of what is told of the progress.
const PAUSE: Duration = Duration::from_millis(200);

/// Writes a model with its matrices in a number format of compressed-tensors: (matrices in codes, (bytes of weights before,
/// now), elements of a group, what should be known of it). `name`: the model as the user calls it; `progress` is called with
/// the bytes that were read, and all.
#[pyfunction]
#[pyo3(signature = (folder, ir, name, scheme, output, group_size = None, asymmetric = false, progress = None))]
#[allow(clippy::too_many_arguments)] // keywords of a Python function
pub fn compress(
    py: Python<'_>,
    folder: PathBuf,
    ir: &str,
    name: &str,
    scheme: String,
    output: PathBuf,
    group_size: Option<i64>,
    asymmetric: bool,
    progress: Option<Py<PyAny>>,
) -> PyResult<(usize, (usize, usize), usize, Vec<String>)> {
    let signals = Signals::default();
    let request = CompressRequest { scheme, group_size, asymmetric };
    let done = py.detach(|| {
        let told = Cell::new(None::<Instant>);
        let tell = |done: usize, all: usize| {
            let Some(progress) = progress.as_ref().filter(|_| told.get().is_none_or(|at| at.elapsed() >= PAUSE)) else {
                return;
            };
            told.set(Some(Instant::now()));
            // What it raises does not end the work: it only tells.
            let _ = Python::attach(|py| progress.call1(py, (done, all)));
        };
        let source = ModelSource::open(&folder, ir)?;
        train::compress(&source, name, &request, &output, &tell, &|| signals.raised())
    });
    let done = signals.outcome(py, done)?;
    Ok((done.matrices, done.bytes, done.group_size, done.notes))
}
