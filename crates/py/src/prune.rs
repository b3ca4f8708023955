//! Pruning called from Python: reads the request, reports what was kept.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use train::{Calibration, Device, DeviceRequest, Latency, ModelSource, Over, PruneRequest, Sizes, Summing, TrainError};

use crate::config::Config;
use crate::model::device_setting;
use crate::signals::Signals;

/// Parameters before and now; milliseconds of a request before and now, where they were limited, and the machine; sizes that changed, each with its name, before and now; tokens that activations were measured on; and
/// of a comparison targets, cross entropy before and after, KL divergence, of validation data.
type Done =
    ((usize, usize), Option<(f64, f64, String)>, Vec<(String, usize, usize)>, usize, (usize, f64, f64, f64, bool));

/// Writes a model with its most important channels, heads and layers. `calibration`: a run, of whose rows up to `samples` are what
/// activations are measured on; `build` gives the graph of a configuration, both as JSON; `latency`: milliseconds at most of a
/// request with the tokens of prompt and answer of `request`, on the machine of that name, or this one; `over_tokens` and
/// `over_rows`: `mean` or `l2`.
#[pyfunction]
#[pyo3(signature = (folder, ir, name, output, *, calibration, build, layers = None, hidden_size = None,
    intermediate_size = None, heads = None, key_value_heads = None, experts = None, parameters = None,
    latency = None, request = (512, 128), machine = None, layers_by = "influence", over_tokens = "mean",
    over_rows = "l2", scores = None, samples = 256, device = "cpu", site_packages = Vec::new()))]
#[allow(clippy::too_many_arguments)] // keywords of a Python function
pub fn prune(
    py: Python<'_>,
    folder: PathBuf,
    ir: &str,
    name: &str,
    output: PathBuf,
    calibration: &Config,
    build: Py<PyAny>,
    layers: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    heads: Option<usize>,
    key_value_heads: Option<usize>,
    experts: Option<usize>,
    parameters: Option<f64>,
    latency: Option<f64>,
    request: (usize, usize),
    machine: Option<String>,
    layers_by: &str,
    over_tokens: &str,
    over_rows: &str,
    scores: Option<PathBuf>,
    samples: usize,
    device: &str,
    site_packages: Vec<PathBuf>,
) -> PyResult<Done> {
    let over = |text: &str| match text {
        "mean" => Ok(Over::Mean),
        "l2" => Ok(Over::L2),
        _ => Err(PyValueError::new_err(format!("expected mean or l2, not `{text}`"))),
    };
    let signals = Signals::default();
    let summing = Summing { tokens: over(over_tokens)?, rows: over(over_rows)? };
    let sizes = Sizes {
        layers,
        hidden: hidden_size,
        intermediate: intermediate_size,
        heads,
        key_value_heads,
        experts,
        parameters,
    };
    let layers_by_loss = layers_by == "loss";
    let device = DeviceRequest { device: device_setting(device)?, site_packages, ..DeviceRequest::default() };
    let done = py.detach(|| {
        let source = ModelSource::open(&folder, ir)?;
        let device = Arc::new(Device::open(&device)?);
        let machine = match machine {
            Some(text) => train::machines::alone(&text)?,
            None => device.machine.clone(),
        };
        let (prompt, answer) = request;
        let latency = latency.map(|limit| Latency { limit: limit / 1e3, prompt, answer, machine });
        let request = PruneRequest { sizes, latency, summing, layers_by_loss, scores: scores.as_deref() };
        let data = Calibration { config: &calibration.config, rows: samples, device };
        let graph = |fields: &serde_json::Value| {
            let made = Python::attach(|py| build.call1(py, (fields.to_string(),))?.extract::<String>(py));
            made.map_err(|error| TrainError::Usage(error.to_string()))
        };
        train::prune(&source, name, &request, &data, &graph, &output, &|| signals.raised())
    });
    let done = signals.outcome(py, done)?;
    let of = done.compared;
    let latency = done.latency.map(|(of, before, after)| (1e3 * before, 1e3 * after, of.machine.name));
    Ok((
        done.parameters,
        latency,
        done.sizes,
        done.measured,
        (of.tokens, of.before, of.after, of.divergence, of.are_held_out),
    ))
}
