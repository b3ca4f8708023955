//! Models in other number formats, for Python.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use train::{Calibration, CompressRequest, Device, DeviceRequest, IncludedPart, Method, ModelSource, RangeObserver};

use crate::config::Config;
use crate::errors::train_error;
use crate::model::device_setting;
use crate::signals::Signals;

/// The least time between two reports of the progress.
const PAUSE: Duration = Duration::from_millis(200);

/// Matrices in codes, tensors that stay, (bytes of weights before, after), elements of a group, what should be known; and of
/// measurements (tokens, layers, bytes of values, bytes of moments).
type Planned = (usize, usize, (usize, usize), usize, Vec<String>, Option<(usize, usize, usize, usize)>);

/// Matrices in codes, (bytes of weights before, now), elements of a group, tokens that activations were measured on, what should
/// be known; and of a comparison (targets, cross entropy before, after, KL divergence, of validation data, is much).
type Done = (usize, (usize, usize), usize, usize, Vec<String>, Option<(usize, f64, f64, f64, bool, bool)>);

/// A model that is to be written with its matrices in a number format of compressed-tensors.
#[pyclass(frozen, module = "surogate._native")]
pub struct Compression {
    source: ModelSource,
    request: CompressRequest,
    /// A run, of whose rows up to `samples` are what activations are measured on.
    calibration: Option<train::config::Config>,
    samples: usize,
    device: DeviceRequest,
    output: PathBuf,
}

impl Compression {
    /// The rows of the run, and the device that activations are measured on.
    fn calibration(&self) -> train::Result<Option<Calibration<'_>>> {
        let Some(config) = &self.calibration else { return Ok(None) };
        Ok(Some(Calibration { config, rows: self.samples, device: Arc::new(Device::open(&self.device)?) }))
    }
}

#[pymethods]
impl Compression {
    #[new]
    #[pyo3(signature = (folder, ir, scheme, output, *, method = "rtn", smoothing_strength = None, observer = "minmax", group_size = None,
        asymmetric = false, included = Vec::new(), calibration = None, samples = 256, device = "cpu", site_packages = Vec::new()))]
    #[allow(clippy::too_many_arguments)] // keywords of a Python function
    fn new(
        py: Python<'_>,
        folder: PathBuf,
        ir: &str,
        scheme: String,
        output: PathBuf,
        method: &str,
        smoothing_strength: Option<f64>,
        observer: &str,
        group_size: Option<i64>,
        asymmetric: bool,
        included: Vec<String>,
        calibration: Option<&Config>,
        samples: usize,
        device: &str,
        site_packages: Vec<PathBuf>,
    ) -> PyResult<Compression> {
        let found = Method::ALL.into_iter().find(|of| of.name() == method);
        let method = found.ok_or_else(|| PyValueError::new_err(format!("there is no method `{method}`")))?;
        let found = RangeObserver::ALL.into_iter().find(|of| of.name() == observer);
        let observer = found.ok_or_else(|| PyValueError::new_err(format!("there is no observer `{observer}`")))?;
        let part = |name: &String| {
            let found = IncludedPart::ALL.into_iter().find(|of| of.name() == name);
            found.ok_or_else(|| PyValueError::new_err(format!("there is no part `{name}`")))
        };
        let included = included.iter().map(part).collect::<PyResult<_>>()?;
        Ok(Compression {
            source: ModelSource::open(&folder, ir).map_err(|error| train_error(py, error))?,
            request: CompressRequest { scheme, group_size, asymmetric, method, observer, smoothing_strength, included },
            calibration: calibration.map(|config| config.config.clone()),
            samples,
            device: DeviceRequest { device: device_setting(device)?, site_packages, ..DeviceRequest::default() },
            output,
        })
    }

    /// Plans what [`Compression::write`] would do.
    fn plan(&self, py: Python<'_>) -> PyResult<Planned> {
        let signals = Signals::default();
        let planned = py.detach(|| {
            train::planned(&self.source, &self.request, self.calibration()?.as_ref(), &self.output, &|| {
                signals.raised()
            })
        });
        let of = signals.outcome(py, planned)?;
        let measuring = of.measuring.map(|of| (of.tokens, of.layers, of.values, of.moments));
        Ok((of.matrices, of.others, of.bytes, of.group_size, of.notes, measuring))
    }

    /// Writes the result. `name`: the model as the user calls it; `progress` is called with the bytes that were read, and all.
    #[pyo3(signature = (name, progress = None))]
    fn write(&self, py: Python<'_>, name: &str, progress: Option<Py<PyAny>>) -> PyResult<Done> {
        let signals = Signals::default();
        let done = py.detach(|| {
            let reported = Cell::new(None::<Instant>);
            let tell = |done: usize, all: usize| {
                let Some(progress) =
                    progress.as_ref().filter(|_| reported.get().is_none_or(|at| at.elapsed() >= PAUSE))
                else {
                    return;
                };
                reported.set(Some(Instant::now()));
                // An exception in it does not end the work: it only reports.
                let _ = Python::attach(|py| progress.call1(py, (done, all)));
            };
            let (data, stop) = (self.calibration()?, || signals.raised());
            train::compress(&self.source, name, &self.request, data.as_ref(), &self.output, &tell, &stop)
        });
        let done = signals.outcome(py, done)?;
        let compared =
            done.compared.map(|of| (of.tokens, of.before, of.after, of.divergence, of.are_held_out, of.is_much()));
        Ok((done.matrices, done.bytes, done.group_size, done.measured, done.notes, compared))
    }
}
