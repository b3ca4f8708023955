//! Whole runs and previews of them, for the command line.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use program::Machine;
use pyo3::prelude::*;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;
use train::{Device, DeviceRequest, ModelSource, Observer, Outcome, Preview, Result, TrainError};

use crate::config::Config;
use crate::errors::train_error;

/// Lines go to standard output, signals come from the system.
struct Console {
    signal: Arc<AtomicUsize>,
}

impl Console {
    /// From now on the first SIGINT, SIGTERM or SIGUSR1 is remembered; a second SIGINT ends the process.
    fn new() -> Result<Console> {
        let (signal, stopping) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let failed = |error: std::io::Error| TrainError::Failed(format!("cannot watch for signals: {error}"));
        // The order matters: the check of the second signal comes before the mark of the first.
        flag::register_conditional_shutdown(SIGINT, 128 + SIGINT, stopping.clone()).map_err(failed)?;
        flag::register(SIGINT, stopping).map_err(failed)?;
        for number in [SIGINT, SIGTERM, SIGUSR1] {
            flag::register_usize(number, signal.clone(), number as usize).map_err(failed)?;
        }
        Ok(Console { signal })
    }

    fn exit_code(&self) -> u8 {
        128 + self.signal.load(Ordering::SeqCst) as u8
    }
}

impl Observer for Console {
    fn line(&mut self, text: &str) {
        // A reader that has gone away does not end a run.
        let _ = writeln!(std::io::stdout(), "{text}").and_then(|()| std::io::stdout().flush());
    }

    fn interrupted(&mut self) -> bool {
        self.signal.load(Ordering::SeqCst) != 0
    }
}

fn device_request(config: &Config, site_packages: Vec<PathBuf>) -> DeviceRequest {
    DeviceRequest::of(&config.config, site_packages)
}

/// Trains from the first step to the result; gives the process's exit code: 0, or 128 + the signal
/// that ended the run after a checkpoint.
#[pyfunction]
pub fn run(py: Python<'_>, config: &Config, folder: PathBuf, ir: &str, site_packages: Vec<PathBuf>) -> PyResult<u8> {
    let outcome = py.detach(|| {
        let source = Arc::new(ModelSource::open(&folder, ir)?.configured(&config.config)?);
        let device = Arc::new(Device::open(&device_request(config, site_packages))?);
        let mut console = Console::new()?;
        match train::run(Arc::new(config.config.clone()), source, device, &mut console)? {
            Outcome::Finished(_) => Ok(0),
            Outcome::Interrupted(_) => Ok(console.exit_code()),
        }
    });
    outcome.map_err(|error| train_error(py, error))
}

/// The machine of that name, or the one that the run would use.
fn machine(config: &Config, name: Option<&str>, site_packages: Vec<PathBuf>) -> Result<Machine> {
    match name {
        None => Ok(Device::open(&device_request(config, site_packages))?.machine),
        Some(name) => Machine::named(name).ok_or_else(|| {
            TrainError::Usage(format!("--machine {name}: this machine is not known; known are: {}", "h200"))
        }),
    }
}

/// One stage of a run as text: `graph`, `program`, `memory`, `plan` or `plan.json`.
#[pyfunction]
pub fn preview(
    py: Python<'_>,
    what: &str,
    config: &Config,
    folder: PathBuf,
    ir: &str,
    machine_name: Option<&str>,
    site_packages: Vec<PathBuf>,
) -> PyResult<String> {
    let text = py.detach(|| {
        let source = ModelSource::open(Path::new(&folder), ir)?.configured(&config.config)?;
        let machine = machine(config, machine_name, site_packages)?;
        if what == "graph" {
            return Ok(train::preview::graph(&config.config, &source, &machine)?.to_string());
        }
        let preview = Preview::advised(&config.config, &source, &machine)?;
        Ok(match what {
            "program" => preview.program.to_string(),
            "memory" => preview.memory_text(),
            "plan" => preview.plan_text(),
            "plan.json" => format!("{:#}\n", preview.to_json()),
            other => return Err(TrainError::Usage(format!("`{other}` is no stage of a run"))),
        })
    });
    text.map_err(|error| train_error(py, error))
}
