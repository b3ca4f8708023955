//! What this machine has and what is missing, for `surogate doctor`.

use std::path::PathBuf;

use cuda::{Report, Search};
use pyo3::prelude::*;
use serde_json::{Value, json};

use crate::errors::train_error;

/// Looks for CUDA libraries and GPUs. `site_packages` are the folders of installed Python packages.
/// Gives (text for people, JSON).
#[pyfunction]
pub fn examine_machine(py: Python<'_>, site_packages: Vec<PathBuf>) -> (String, String) {
    py.detach(|| {
        let report = Report::new(&Search::from_environment(site_packages));
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let verdict = if report.usable() { "cuda" } else { "cpu" };
        let text = format!("CPU: {cores} threads\n{report}runs by default on: {verdict}");
        (text, to_json(&report, cores, verdict).to_string())
    })
}

/// Every operation's examples on the device that a run would take, against the CPU references.
/// Gives (text for people, number of results that differ).
#[pyfunction]
pub fn check_operations(py: Python<'_>, site_packages: Vec<PathBuf>) -> PyResult<(String, usize)> {
    let checked = py.detach(|| {
        let request = train::DeviceRequest { site_packages, ..train::DeviceRequest::default() };
        let device = train::Device::open(&request)?;
        let rows = train::conformance::check(device.backend.as_ref(), &device.machine, 1)?;
        let failed: Vec<_> = rows.iter().filter(|row| !row.passed()).collect();
        let mut text =
            format!("operations on {}: {} results, {} differ", device.machine.name, rows.len(), failed.len());
        for row in &failed {
            let (op, example, dtype, result) = (row.op, row.example, row.dtype, row.result);
            let numbers = format!("{:.1e}, at most {:.1e} is right", row.error, row.limit);
            text += &format!("\n  {op}, example {example} in {dtype}, result {result}: error {numbers}");
        }
        Ok((text, failed.len()))
    });
    checked.map_err(|error| train_error(py, error))
}

fn to_json(report: &Report, cores: usize, verdict: &str) -> Value {
    let libraries: Vec<Value> = report
        .libraries
        .iter()
        .map(|library| match &library.state {
            Ok((path, origin, version)) => {
                json!({"library": library.kind.title(), "version": version, "path": path, "origin": origin})
            }
            Err(reason) => json!({"library": library.kind.title(), "missing": reason}),
        })
        .collect();
    let devices = match &report.devices {
        Ok(devices) => devices
            .iter()
            .map(|d| json!({"name": d.name, "architecture": d.architecture.to_string(), "memory": d.memory}))
            .collect(),
        Err(reason) => json!({"missing": reason}),
    };
    json!({"cpu_threads": cores, "libraries": libraries, "gpus": devices, "device": verdict})
}
