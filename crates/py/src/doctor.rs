//! What this machine has and what is missing, for `surogate doctor`.

use std::path::PathBuf;

use cuda::{Report, Search};
use pyo3::prelude::*;
use serde_json::{Value, json};

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
