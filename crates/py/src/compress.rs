//! Models in other number formats, for Python.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use train::{Calibration, CompressRequest, Device, DeviceRequest, Method, ModelSource, RangeObserver};

use crate::config::Config;
use crate::model::device_setting;
use crate::signals::Signals;

/// The least time between two reports of the progress.
const PAUSE: Duration = Duration::from_millis(200);

/// Matrices in codes, (bytes of weights before, now), elements of a group, tokens that activations were measured on, what should
/// be known; and of a comparison (targets, cross entropy before, after, KL divergence, of validation data, is much).
type Done = (usize, (usize, usize), usize, usize, Vec<String>, Option<(usize, f64, f64, f64, bool, bool)>);

/// Writes a model with its matrices in a number format of compressed-tensors. `name`: the model as the user calls it;
/// `calibration`: a run, of whose rows up to `samples` are what activations are measured on; `progress` is called with the bytes
/// that were read, and all.
#[pyfunction]
#[pyo3(signature = (folder, ir, name, scheme, output, *, method = "rtn", smoothing_strength = None, observer = "minmax", group_size = None,
    asymmetric = false, calibration = None, samples = 256, device = "cpu", site_packages = Vec::new(), progress = None))]
#[allow(clippy::too_many_arguments)] // keywords of a Python function
pub fn compress(
    py: Python<'_>,
    folder: PathBuf,
    ir: &str,
    name: &str,
    scheme: String,
    output: PathBuf,
    method: &str,
    smoothing_strength: Option<f64>,
    observer: &str,
    group_size: Option<i64>,
    asymmetric: bool,
    calibration: Option<&Config>,
    samples: usize,
    device: &str,
    site_packages: Vec<PathBuf>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Done> {
    let signals = Signals::default();
    let found = Method::ALL.into_iter().find(|of| of.name() == method);
    let method = found.ok_or_else(|| PyValueError::new_err(format!("there is no method `{method}`")))?;
    let found = RangeObserver::ALL.into_iter().find(|of| of.name() == observer);
    let observer = found.ok_or_else(|| PyValueError::new_err(format!("there is no observer `{observer}`")))?;
    let request = CompressRequest { scheme, group_size, asymmetric, method, observer, smoothing_strength };
    let device = DeviceRequest { device: device_setting(device)?, site_packages, ..DeviceRequest::default() };
    let config = calibration.map(|config| &config.config);
    let done = py.detach(|| {
        let reported = Cell::new(None::<Instant>);
        let tell = |done: usize, all: usize| {
            let Some(progress) = progress.as_ref().filter(|_| reported.get().is_none_or(|at| at.elapsed() >= PAUSE))
            else {
                return;
            };
            reported.set(Some(Instant::now()));
            // An exception in it does not end the work: it only reports.
            let _ = Python::attach(|py| progress.call1(py, (done, all)));
        };
        let source = ModelSource::open(&folder, ir)?;
        let data = match config {
            Some(config) => Some(Calibration { config, rows: samples, device: Arc::new(Device::open(&device)?) }),
            None => None,
        };
        train::compress(&source, name, &request, data.as_ref(), &output, &tell, &|| signals.raised())
    });
    let done = signals.outcome(py, done)?;
    let compared =
        done.compared.map(|of| (of.tokens, of.before, of.after, of.divergence, of.are_held_out, of.is_much()));
    Ok((done.matrices, done.bytes, done.group_size, done.measured, done.notes, compared))
}
