//! Training step by step, for `surogate.Trainer`.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::json;
use train::{Device, DeviceRequest, EvaluationMetrics, Journal, ModelSource, StepMetrics};

use crate::arrays::{self, BatchArrays};
use crate::config::Config;
use crate::console;
use crate::errors::train_error;
use crate::model::Model;

/// A run that is driven by its caller.
#[pyclass(frozen, module = "surogate._native")]
pub struct Trainer {
    driven: Mutex<Driven>,
}

/// A trainer, and the log that its options ask for.
struct Driven {
    trainer: train::Trainer,
    journal: Option<Journal>,
    /// Files that receive the path of the log, as soon as it says what it is of.
    announce: Vec<PathBuf>,
}

/// Model, device and options of a run, ready to train. `ir` is the model's graph as JSON.
fn open(
    config: &Config,
    folder: &std::path::Path,
    ir: &str,
    (site_packages, python): (Vec<PathBuf>, Option<PathBuf>),
    announce: Vec<PathBuf>,
) -> train::Result<Driven> {
    let config = Arc::new(config.config.clone());
    let source = Arc::new(ModelSource::open(folder, ir)?.configured(&config)?);
    let request = DeviceRequest { python, ..DeviceRequest::of(&config, site_packages) };
    let device = Arc::new(Device::open(&request)?);
    let trainer = train::Trainer::begin(config.clone(), source, device)?;
    let journal = Journal::begin(&config, &trainer)?;
    Ok(Driven { trainer, journal, announce })
}

impl Driven {
    /// Reports what was done, where there is a log.
    fn record(
        &mut self,
        write: impl FnOnce(&mut Journal, &mut train::Trainer) -> train::Result<Option<String>>,
    ) -> train::Result<()> {
        let Some(journal) = &mut self.journal else { return Ok(()) };
        let said = write(journal, &mut self.trainer)?;
        said.into_iter().for_each(console::say);
        if journal.is_open() {
            let (log, output) = (json!(journal.path()), json!(journal.output()));
            console::announce(&std::mem::take(&mut self.announce), &log, &output);
        }
        Ok(())
    }
}

impl Trainer {
    /// Calls the engine without the interpreter's lock.
    pub fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut train::Trainer) -> train::Result<T> + Send,
    ) -> PyResult<T> {
        self.with_log(py, |driven| call(&mut driven.trainer))
    }

    /// The same with the log.
    fn with_log<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Driven) -> train::Result<T> + Send,
    ) -> PyResult<T> {
        let result = py.detach(|| call(&mut self.driven.lock().unwrap_or_else(PoisonError::into_inner)));
        result.map_err(|error| train_error(py, error))
    }
}

#[pymethods]
impl Trainer {
    /// The files of `announce` receive the path of the log, once there is one.
    #[new]
    fn new(
        py: Python<'_>,
        config: &Config,
        folder: PathBuf,
        ir: &str,
        site_packages: Vec<PathBuf>,
        announce: Vec<PathBuf>,
    ) -> PyResult<Self> {
        let python = crate::run::interpreter(py);
        let driven = py.detach(|| open(config, &folder, ir, (site_packages, python), announce));
        driven.map(|driven| Trainer { driven: Mutex::new(driven) }).map_err(|error| train_error(py, error))
    }

    /// Ends the log, with an error if there was one.
    fn close(&self, py: Python<'_>, error: Option<String>) -> PyResult<()> {
        self.with_log(py, |driven| driven.journal.take().map_or(Ok(()), |journal| journal.close(error.as_deref())))
    }

    /// One step, on the arrays or on the next batches of the data; None at their end. `marks`: what rows are.
    #[pyo3(signature = (batch, learning_rate, marks = None))]
    fn step<'py>(
        &self,
        py: Python<'py>,
        batch: Option<BatchArrays<'py>>,
        learning_rate: Option<f64>,
        marks: Option<Marks>,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        let batches = batch.as_ref().map(arrays::batches).transpose()?;
        let batches = batches.map(|batches| match marks {
            Some(marks) => marks.of(batches),
            None => batches,
        });
        let metrics = self.with_log(py, |driven| {
            let metrics = match &batches {
                Some(batches) => driven.trainer.step(batches, learning_rate).map(Some)?,
                None => driven.trainer.next_step(learning_rate)?,
            };
            if let Some(metrics) = &metrics {
                driven.record(|journal, trainer| journal.step(trainer, metrics))?;
            }
            Ok(metrics)
        })?;
        metrics.map(|metrics| step_metrics(py, &metrics)).transpose()
    }

    /// The loss over the validation data; None where there is none.
    fn evaluate<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let metrics = self.with_log(py, |driven| {
            let metrics = driven.trainer.evaluate()?;
            if let Some(metrics) = &metrics {
                driven.record(|journal, trainer| journal.evaluation(trainer, metrics).map(|()| None))?;
            }
            Ok(metrics)
        })?;
        metrics.map(|metrics| evaluation_metrics(py, &metrics)).transpose()
    }

    /// Writes a checkpoint to a folder.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.with_log(py, |driven| {
            driven.trainer.save(&path)?;
            driven.record(|journal, trainer| journal.checkpoint(trainer, &path).map(|()| None))
        })
    }

    /// Writes the adapter or the model, loads it again and compares. Says how far it is rounded, if it is.
    fn export(&self, py: Python<'_>, path: PathBuf) -> PyResult<Option<String>> {
        self.with(py, |trainer| {
            trainer.export(&path)?;
            Ok(trainer.rounding_note(false))
        })
    }

    /// Writes the model with the adapter added to its weights, loads it again and compares. Says how far it is rounded.
    fn export_merged(&self, py: Python<'_>, path: PathBuf) -> PyResult<Option<String>> {
        self.with(py, |trainer| {
            trainer.export_merged(&path)?;
            Ok(trainer.rounding_note(true))
        })
    }

    /// Returns what a caller without a terminal should hear of, a sentence each.
    fn warnings(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.with(py, |trainer| Ok(trainer.warnings()))
    }

    /// Returns the time of a micro-step by instruction, as a JSON list of rows.
    fn time_breakdown(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |trainer| Ok(trainer.time_breakdown()?.to_string()))
    }

    /// Steps of the run; None where the options do not say.
    #[getter]
    fn total_steps(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.with(py, |trainer| Ok(trainer.total_steps()))
    }

    /// The number of completed optimizer steps.
    #[getter]
    fn steps_done(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |trainer| Ok(trainer.steps_done()))
    }

    /// Returns true if the options want an evaluation after the steps that are done.
    fn is_evaluation_due(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, train::Trainer::is_evaluation_due)
    }

    /// The reason that the options end the training after the completed steps, or None.
    fn stalled(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.with(py, |trainer| Ok(trainer.stalled()))
    }

    /// Describes the trainer: model, program, memory.
    pub fn summary(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |trainer| Ok(trainer.summary()))
    }

    /// A model over the weights in training.
    fn model(slf: &Bound<'_, Self>) -> Model {
        Model::in_training(slf.clone().unbind())
    }
}

/// Advantages of rows, and log-probabilities of labels: old, of the reference, of the sampler.
type SampledArrays = (Vec<f32>, Option<Vec<f32>>, Option<Vec<f32>>, Option<Vec<f32>>);

/// The kind of the rows of micro-batches, a list for each of them.
#[derive(FromPyObject)]
enum Marks {
    /// Every two rows are the chosen and the rejected side of a pair; how much better the former is, if that is known.
    Pairs {
        #[pyo3(item)]
        pairs: Vec<Vec<Option<f32>>>,
    },
    /// Rows are answers with a verdict each.
    Verdicts {
        #[pyo3(item)]
        desirable: Vec<Vec<bool>>,
    },
    /// Rows are answers that were sampled.
    Samples {
        #[pyo3(item)]
        samples: Vec<SampledArrays>,
    },
    /// Labels have the tokens of a teacher and their log-probabilities, row after row.
    Taught {
        #[pyo3(item)]
        taught: Vec<(Vec<i32>, Vec<f32>)>,
    },
}

impl Marks {
    fn of(self, batches: Vec<data::Batch>) -> Vec<data::Batch> {
        let batches = batches.into_iter();
        match self {
            Marks::Pairs { pairs } => batches.zip(pairs).map(|(batch, of)| batch.with_margins(&of)).collect(),
            Marks::Verdicts { desirable } => batches.zip(desirable).map(|(batch, of)| batch.of_answers(&of)).collect(),
            Marks::Samples { samples } => batches.zip(samples).map(sampled).collect(),
            Marks::Taught { taught } => {
                batches.zip(taught).map(|(batch, (ids, logps))| batch.taught(&ids, &logps)).collect()
            }
        }
    }
}

/// A micro-batch as sampled answers.
fn sampled((batch, (advantages, old, reference, sampling)): (data::Batch, SampledArrays)) -> data::Batch {
    let batch = batch.of_samples(&advantages);
    let [old_logps, reference_logps, sampling_logps] =
        [old, reference, sampling].map(|of| of.map(|values| batch.at_targets(&values)).unwrap_or_default());
    data::Batch { old_logps, reference_logps, sampling_logps, ..batch }
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
    if let Some(scale) = metrics.loss_scale {
        dict.set_item("loss_scale", scale)?;
        dict.set_item("skipped", !metrics.applied)?;
    }
    dict.set_item("epoch", metrics.epoch)?;
    dict.set_item("data_wait_seconds", metrics.data_wait)?;
    dict.set_item("mfu", metrics.mfu)?;
    dict.set_item("memory", metrics.memory)?;
    if let Some(clipped) = metrics.fp8_clipped {
        dict.set_item("fp8_clipped", clipped)?;
    }
    if let Some(flushed) = &metrics.fp8_flushed {
        let of = PyDict::new(py);
        of.set_item("tensor", &flushed.tensor)?;
        of.set_item("share", flushed.share)?;
        dict.set_item("fp8_flushed", of)?;
    }
    if let Some(of) = &metrics.routers {
        dict.set_item("expert_load", of.load.clone())?;
        dict.set_item("busiest_expert", of.busiest())?;
        dict.set_item("router_entropy", of.entropy)?;
        dict.set_item("router_loss", of.loss)?;
    }
    for (name, value) in &metrics.task {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

fn evaluation_metrics<'py>(py: Python<'py>, metrics: &EvaluationMetrics) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("step", metrics.step)?;
    dict.set_item("loss", metrics.loss)?;
    dict.set_item("tokens", metrics.tokens)?;
    dict.set_item("seconds", metrics.seconds)?;
    for (name, value) in &metrics.task {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}
