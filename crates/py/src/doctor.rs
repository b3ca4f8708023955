//! The report of `surogate doctor`: the libraries and devices that this machine has, and those that are missing.

use std::path::PathBuf;
use std::time::Duration;

use gpu::disk_cache::DiskCache;
use gpu::{LibraryReport, Missing, Report, Search, Vendor};
use pyo3::prelude::*;
use serde_json::{Value, json};
use train::calibrate::Plan;
use train::conformance::{Checked, Examples};
use train::{TrainError, machines};

use crate::errors::train_error;

/// Looks for libraries and GPUs of each vendor. `site_packages` are the folders of installed Python packages.
/// Gives (text for people, JSON).
#[pyfunction]
pub fn examine_machine(py: Python<'_>, site_packages: Vec<PathBuf>) -> (String, String) {
    py.detach(|| {
        let reports = Vendor::ALL.map(|vendor| Report::new(&Search::of(vendor, site_packages.clone())));
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let verdict = reports.iter().find(|report| report.usable()).map_or("cpu", |report| report.vendor.device());
        let [nvidia, amd] = &reports;
        let text = format!("Default device: {verdict}\nCPU: {cores} threads\n{nvidia}{}{}", of_amd(amd), cache_text());
        (text, to_json(&reports, cores, verdict).to_string())
    })
}

/// Every operation's examples on the device that a run would take, against the CPU references; with `own_kernels` only
/// those that call no library; only of operations whose names begin with one of `names`, if there is one; none is begun
/// after `seconds`. Gives (text for people, number of results that differ).
#[pyfunction]
#[pyo3(signature = (site_packages, own_kernels, names, seconds))]
pub fn check_operations(
    py: Python<'_>,
    site_packages: Vec<PathBuf>,
    own_kernels: bool,
    names: Vec<String>,
    seconds: Option<u64>,
) -> PyResult<(String, usize)> {
    let checked = py.detach(|| {
        let request = train::DeviceRequest { site_packages, ..train::DeviceRequest::default() };
        let device = train::Device::open(&request)?;
        let time = seconds.map(Duration::from_secs);
        let which = Examples { own_kernels, names, time, progress: Some(tell), ..Examples::default() };
        let Checked { rows, left_out, not_taken } =
            train::conformance::check(device.backend.as_ref(), &device.machine, 1, &which)?;
        if rows.is_empty() && left_out + not_taken == 0 {
            return Err(TrainError::Usage("no operation has such a name".to_owned()));
        }
        let failed: Vec<_> = rows.iter().filter(|row| !row.passed()).collect();
        let mut text =
            format!("operations on {}: {} results, {} differ", device.machine.name, rows.len(), failed.len());
        if not_taken > 0 {
            text += &format!("; {not_taken} examples ask for more than this GPU has");
        }
        if left_out > 0 {
            text += &format!("; no time for {left_out} examples");
        }
        for row in &failed {
            let (op, example, dtype, result) = (row.op, row.example, row.dtype, row.result);
            let numbers = format!("{:.1e}, tolerance {:.1e}", row.error, row.limit);
            text += &format!("\n  {op}, example {example} in {dtype}, result {result}: error {numbers}");
        }
        Ok((text, failed.len()))
    });
    checked.map_err(|error| train_error(py, error))
}

fn tell(done: usize, all: usize) {
    eprintln!("surogate: {done} of {all} examples compared");
}

/// Measures the device that a run would take and keeps what was found for plans; `output`: in this file, too. `least`:
/// few and small measurements, kept nowhere else. Gives text for people.
#[pyfunction]
pub fn calibrate(
    py: Python<'_>,
    site_packages: Vec<PathBuf>,
    output: Option<PathBuf>,
    least: bool,
) -> PyResult<String> {
    let calibrated = py.detach(|| {
        let request = train::DeviceRequest { site_packages, ..train::DeviceRequest::default() };
        let device = train::Device::open(&request)?;
        let progress = &mut |text: &str| eprintln!("surogate: calibration: {text}");
        let plan = Plan::of(&device.machine, least);
        let found = train::calibrate::calibrate(&device, plan, progress)?;
        let kept = machines::kept_at(&device.card.0, &device.card.1).filter(|_| !least);
        let mut text = found.table;
        for path in output.iter().chain(&kept) {
            machines::write(&found.machine, path)?;
            text += &format!("\nwritten: {} (use it with --machine)", path.display());
        }
        if output.is_none() && kept.is_none() {
            text += "\nnot saved: name a file with --output";
        }
        text += "\nnot measured, unchanged: f32 products, attention kernels that this device does not choose";
        Ok(text)
    });
    calibrated.map_err(|error| train_error(py, error))
}

/// Returns the report on AMD's libraries and GPUs; one line where there are none.
fn of_amd(report: &Report) -> String {
    let absent = |of: &LibraryReport| of.state.as_ref().is_err_and(|missing| !missing.looked_for.is_empty());
    match report.libraries.first().and_then(|first| first.state.as_ref().err()) {
        Some(first) if report.libraries.iter().all(absent) => {
            format!("AMD GPUs: ROCm was not found (`device: rocm` needs it)\n  to fix it: {}\n", first.mend)
        }
        _ => format!("AMD:\n{report}"),
    }
}

fn to_json(reports: &[Report], cores: usize, verdict: &str) -> Value {
    let missing = |of: &Missing| json!({"missing": of.reason, "looked_for": of.looked_for, "mend": of.mend});
    let library = |vendor: Vendor, of: &LibraryReport| {
        let mut row = match &of.state {
            Ok(found) => json!({"version": found.version, "path": found.path, "origin": found.origin.to_string()}),
            Err(of) => missing(of),
        };
        row["vendor"] = vendor.to_string().into();
        row["library"] = of.kind.name(vendor).into();
        row["title"] = of.kind.title(vendor).into();
        row["found"] = of.state.is_ok().into();
        row["needed_for"] = of.kind.needed_for().into();
        row
    };
    let devices = |report: &Report| match &report.devices {
        Ok(devices) => devices
            .iter()
            .map(|d| json!({"name": d.name, "architecture": d.architecture.to_string(), "memory": d.memory}))
            .collect(),
        Err(of) => missing(of),
    };
    let libraries = reports.iter().flat_map(|report| report.libraries.iter().map(|of| library(report.vendor, of)));
    let conflicts = reports.iter().flat_map(|report| &report.conflicts);
    // The vendor of the device that runs take, or the first.
    let of = reports.iter().find(|report| report.vendor.device() == verdict).unwrap_or(&reports[0]);
    let cache = DiskCache::default_folder().ok().map(|folder| {
        let (entries, bytes) = DiskCache::size_of(&folder).unwrap_or_default();
        json!({"folder": folder, "entries": entries, "bytes": bytes})
    });
    json!({
        "surogate": env!("CARGO_PKG_VERSION"),
        "cpu_threads": cores,
        "libraries": libraries.collect::<Vec<_>>(),
        "conflicts": conflicts.map(missing).collect::<Vec<_>>(),
        "driver_release": of.driver_release,
        "gpus": devices(of),
        "cache": cache,
        "device": verdict,
    })
}

/// The folder of compiled kernels and chosen algorithms in words.
fn cache_text() -> String {
    let folder = match DiskCache::default_folder() {
        Ok(folder) => folder,
        Err(why) => return format!("Cache of kernels: none: {why}"),
    };
    let (entries, bytes) = DiskCache::size_of(&folder).unwrap_or_default();
    let size = bytes as f64 / (1u64 << 20) as f64;
    format!("Cache of kernels, algorithms and plans: {} ({entries} entries, {size:.1} MiB)", folder.display())
}
