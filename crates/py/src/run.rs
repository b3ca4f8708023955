//! Runs and previews, for the command line.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use program::Machine;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use train::preview::Stage;
use train::{Device, DeviceRequest, ModelSource, Outcome, Result, TrainError};

use crate::config::Config;
use crate::console::{self, Console, Show};
use crate::errors::train_error;

fn device_request(py: Python<'_>, config: &Config, site_packages: Vec<PathBuf>) -> DeviceRequest {
    DeviceRequest { python: interpreter(py), ..DeviceRequest::of(&config.config, site_packages) }
}

/// The path of the running interpreter.
pub(crate) fn interpreter(py: Python<'_>) -> Option<PathBuf> {
    let path = py.import("sys").and_then(|sys| sys.getattr("executable")?.extract::<PathBuf>()).ok()?;
    Some(path).filter(|path| path.is_file())
}

/// Trains from the first step to the result. `show` says what goes to standard output: `lines`, `events` or `nothing`;
/// the files of `announce` receive the path of the log, once there is one. Gives the process's exit code: 0, or 128 +
/// the signal that ended the run, after a checkpoint if a step was done; none where another node has finished the run.
#[pyfunction]
pub fn run(
    py: Python<'_>,
    config: &Config,
    folder: PathBuf,
    ir: &str,
    site_packages: Vec<PathBuf>,
    show: &str,
    announce: Vec<PathBuf>,
) -> PyResult<Option<u8>> {
    let show = match show {
        "lines" => Show::Lines,
        "events" => Show::Events,
        "nothing" => Show::Nothing,
        other => return Err(PyValueError::new_err(format!("a run does not show `{other}`"))),
    };
    let request = device_request(py, config, site_packages);
    let outcome = py.detach(|| {
        let source = Arc::new(ModelSource::open(&folder, ir)?.configured(&config.config)?);
        let mut console = Console::new(show, announce);
        let nodes = match train::come_together(&config.config, &request, &mut console) {
            Err(TrainError::Stopped) => return Ok(Some(console.exit_code())),
            nodes => nodes?,
        };
        if let Some(nodes) = nodes.as_ref().map(Arc::downgrade) {
            let words = "it was ended by a signal before the first step";
            console::on_leave(move || {
                if let Some(nodes) = nodes.upgrade() {
                    nodes.abort(words, FAILED);
                }
            });
        }
        let device = Arc::new(Device::open(&DeviceRequest { nodes, ..request })?);
        match train::run(Arc::new(config.config.clone()), source, device, &mut console)? {
            Outcome::Finished(_) => Ok(Some(0)),
            Outcome::Followed => Ok(None),
            Outcome::Interrupted(_) | Outcome::NotBegun => Ok(Some(console.exit_code())),
        }
    });
    outcome.map_err(|error| train_error(py, error))
}

/// The exit code of other nodes after a signal to one that had not begun: they are not to start again.
const FAILED: u8 = 1;

/// True if a run that received a signal has written nothing yet: the process may end at once, and other nodes know.
#[pyfunction]
pub fn leave() -> bool {
    console::leave()
}

/// Removes what commands of this process are writing and what has no name yet: the process ends at once.
#[pyfunction]
pub fn abandon(py: Python<'_>) {
    py.detach(train::abandon);
}

/// Notes that the process received a signal which ends the run in progress; 0 forgets those before.
#[pyfunction]
pub fn signalled(number: u8) {
    console::signalled(number);
}

/// A sentence to be shown in between what a run shows by itself. For other threads than the run's.
#[pyfunction]
pub fn say(text: String) {
    console::say(text);
}

/// A text without what steers a terminal: see [`options::visible`].
#[pyfunction]
pub fn visible(text: &str) -> Cow<'_, str> {
    options::visible(text)
}

/// The same of prose, whose joiners and marks of direction stay: see [`options::visible_text`].
#[pyfunction]
pub fn visible_text(text: &str) -> Cow<'_, str> {
    options::visible_text(text)
}

/// A text without the passwords and keys in its addresses: see [`options::without_userinfo`].
#[pyfunction]
pub fn without_userinfo(text: &str) -> Cow<'_, str> {
    options::without_userinfo(text)
}

/// A folder among the user's caches, which is made. Errors: it is another user's, or there is no place for it.
#[pyfunction]
pub fn cache_folder(py: Python<'_>, name: &str) -> PyResult<PathBuf> {
    let folder = options::cache::folder_of_user(name);
    let made = folder.and_then(|folder| options::cache::prepare(&folder).map(|()| folder));
    made.map_err(|why| train_error(py, TrainError::Usage(format!("there is no cache of {name}: {why}"))))
}

/// Reads a checkpoint as a whole: what is wrong with it, or none.
#[pyfunction]
pub fn checkpoint_fault(py: Python<'_>, folder: PathBuf) -> Option<String> {
    py.detach(|| train::checkpoint_fault(&folder))
}

/// Takes the messages of a run that were reported but not shown.
#[pyfunction]
pub fn unsaid() -> Vec<String> {
    console::unsaid()
}

/// The names that `--machine` knows.
#[pyfunction]
pub fn machine_names() -> Vec<String> {
    program::machine_names().into_iter().map(|name| name.to_string()).collect()
}

/// The machine of that name, or the one that the run would use, and the options with as many GPUs as it has.
fn machine(
    config: &Config,
    name: Option<&str>,
    site_packages: Vec<PathBuf>,
) -> Result<(Machine, train::config::Config)> {
    let config = &config.config;
    match name {
        None => {
            let device = Device::open(&DeviceRequest::of(config, site_packages))?;
            let config = config.with_visible_gpus(device.gpus).map_err(TrainError::Config)?;
            Ok((device.machine, config))
        }
        Some(text) => {
            let of = train::machines::requested(text)?;
            let config = config.with_planned_gpus(of.gpus, text).map_err(TrainError::Config)?;
            Ok((of.machine, config))
        }
    }
}

/// One stage of a run as text, by its name (`train::preview::Stage`). `unavailable`: why datasets are not available, which are
/// read otherwise.
#[pyfunction]
#[allow(clippy::too_many_arguments)] // the stages of the command line
pub fn preview(
    py: Python<'_>,
    what: &str,
    config: &Config,
    folder: PathBuf,
    ir: &str,
    machine_name: Option<&str>,
    site_packages: Vec<PathBuf>,
    unavailable: Vec<String>,
) -> PyResult<String> {
    let text = py.detach(|| {
        let stage = Stage::named(what)?;
        let source = ModelSource::open(Path::new(&folder), ir)?.configured(&config.config)?;
        let (machine, config) = machine(config, machine_name, site_packages)?;
        train::preview::show(stage, &config, &source, &machine, machine_name, &unavailable)
    });
    text.map_err(|error| train_error(py, error))
}
