//! Training step by step, for `surogate.Trainer`.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use train::{Device, DeviceRequest, EvaluationMetrics, ModelSource, StepMetrics};

use crate::arrays::{self, BatchArrays};
use crate::config::Config;
use crate::errors::train_error;

/// A run that is driven by its caller.
#[pyclass(frozen, module = "surogate._native")]
pub struct Trainer {
    trainer: Mutex<train::Trainer>,
}

/// Model, device and options of a run, ready to train. `ir` is the model's graph as JSON.
pub fn open(
    config: &Config,
    folder: &std::path::Path,
    ir: &str,
    site_packages: Vec<PathBuf>,
) -> train::Result<train::Trainer> {
    let config = Arc::new(config.config.clone());
    let source = Arc::new(ModelSource::open(folder, ir)?.configured(&config)?);
    let request = DeviceRequest::of(&config, site_packages);
    let device = Arc::new(Device::open(&request)?);
    let mut trainer = train::Trainer::new(config, source, device)?;
    trainer.resume_as_configured()?;
    Ok(trainer)
}

impl Trainer {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut train::Trainer) -> train::Result<T> + Send,
    ) -> PyResult<T> {
        let result = py.detach(|| call(&mut self.trainer.lock().unwrap_or_else(PoisonError::into_inner)));
        result.map_err(|error| train_error(py, error))
    }
}

#[pymethods]
impl Trainer {
    #[new]
    fn new(py: Python<'_>, config: &Config, folder: PathBuf, ir: &str, site_packages: Vec<PathBuf>) -> PyResult<Self> {
        let trainer = py.detach(|| open(config, &folder, ir, site_packages));
        trainer.map(|trainer| Trainer { trainer: Mutex::new(trainer) }).map_err(|error| train_error(py, error))
    }

    /// One step, on the arrays or on the next batches of the data; None at their end.
    fn step<'py>(
        &self,
        py: Python<'py>,
        batch: Option<BatchArrays<'py>>,
        learning_rate: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        let batches = batch.as_ref().map(arrays::batches).transpose()?;
        let metrics = self.with(py, |trainer| match &batches {
            Some(batches) => trainer.step(batches, learning_rate).map(Some),
            None => trainer.next_step(learning_rate),
        })?;
        metrics.map(|metrics| step_metrics(py, &metrics)).transpose()
    }

    /// The loss over the validation data; None where there is none.
    fn evaluate<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let metrics = self.with(py, train::Trainer::evaluate)?;
        metrics.map(|metrics| evaluation_metrics(py, &metrics)).transpose()
    }

    /// Writes a checkpoint.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.with(py, |trainer| trainer.save(&path))
    }

    /// Writes the adapter or the model, loads it again and compares.
    fn export(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.with(py, |trainer| trainer.export(&path))
    }

    /// Writes the model with the adapter added to its weights, loads it again and compares.
    fn export_merged(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.with(py, |trainer| trainer.export_merged(&path))
    }

    /// Where the time of a micro-step goes, a row for each instruction, as JSON.
    fn time_breakdown(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |trainer| Ok(trainer.time_breakdown()?.to_string()))
    }

    /// Steps of the run; None where the options do not say.
    #[getter]
    fn total_steps(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.with(py, |trainer| Ok(trainer.total_steps()))
    }
}

fn step_metrics<'py>(py: Python<'py>, metrics: &StepMetrics) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("step", metrics.step)?;
    dict.set_item("loss", metrics.loss)?;
    dict.set_item("grad_norm", metrics.grad_norm)?;
    dict.set_item("learning_rate", metrics.learning_rate)?;
    dict.set_item("tokens", metrics.tokens)?;
    dict.set_item("tokens_per_second", metrics.tokens_per_second())?;
    dict.set_item("seconds", metrics.seconds)?;
    dict.set_item("applied", metrics.applied)?;
    dict.set_item("epoch", metrics.epoch)?;
    dict.set_item("mfu", metrics.mfu)?;
    dict.set_item("memory", metrics.memory)?;
    Ok(dict)
}

fn evaluation_metrics<'py>(py: Python<'py>, metrics: &EvaluationMetrics) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("step", metrics.step)?;
    dict.set_item("loss", metrics.loss)?;
    dict.set_item("tokens", metrics.tokens)?;
    dict.set_item("seconds", metrics.seconds)?;
    Ok(dict)
}
