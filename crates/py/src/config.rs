//! The configuration: loaded here, read by Python only as text.

use std::collections::BTreeMap;
use std::path::PathBuf;

use options::Setting;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde_json::{Value, json};
use train::config::{self, Task};

use crate::errors::{ConfigError, config_error, train_error};

/// The options of one run; immutable.
#[pyclass(frozen, module = "surogate._native")]
pub struct Config {
    pub config: config::Config,
}

fn task(name: &str) -> PyResult<Task> {
    let known = || Task::ALL.iter().map(|task| task.name()).collect::<Vec<_>>().join(", ");
    Task::parse(name).ok_or_else(|| PyValueError::new_err(format!("there is no task `{name}`; there are {}", known())))
}

fn look(reads_data: Option<bool>) -> config::Look {
    match reads_data {
        None => config::Look::Nowhere,
        Some(false) => config::Look::Model,
        Some(true) => config::Look::ModelAndData,
    }
}

#[pymethods]
impl Config {
    /// Loads YAML text. `source` names it in messages, `overrides` are (option, value as in YAML).
    /// With `reads_data` given, local files that are not there are problems: those of the model, and if it is true those of
    /// the datasets.
    /// `run` chooses one of several runs. Raises ConfigError with every problem.
    #[staticmethod]
    #[pyo3(signature = (text, source, task_name, overrides, reads_data = None, run = None))]
    fn from_yaml(
        py: Python<'_>,
        text: &str,
        source: &str,
        task_name: &str,
        overrides: Vec<(String, String)>,
        reads_data: Option<bool>,
        run: Option<&str>,
    ) -> PyResult<Self> {
        let loaded = config::Config::load_run(text, source, task(task_name)?, &overrides, look(reads_data), run);
        loaded.map(|config| Config { config }).map_err(|problems| config_error(py, &problems))
    }

    /// The names of the runs that a text lists; none where it is one run. Raises ConfigError.
    #[staticmethod]
    fn run_names(py: Python<'_>, text: &str, source: &str) -> PyResult<Vec<String>> {
        config::Config::run_names(text, source).map_err(|problems| config_error(py, &problems))
    }

    /// Loads a JSON object. Raises ConfigError with every problem.
    #[staticmethod]
    #[pyo3(signature = (text, task_name, overrides, reads_data = None))]
    fn from_json(
        py: Python<'_>,
        text: &str,
        task_name: &str,
        overrides: Vec<(String, String)>,
        reads_data: Option<bool>,
    ) -> PyResult<Self> {
        let loaded = config::Config::load_json_looking(text, task(task_name)?, &overrides, look(reads_data));
        loaded.map(|config| Config { config }).map_err(|problems| config_error(py, &problems))
    }

    /// The name of the task, as in `task: dpo`.
    #[getter]
    fn task(&self) -> &'static str {
        self.config.task.name()
    }

    /// The losses that the model's graph is recorded with, as a JSON object: each with its settings.
    #[getter]
    fn recorded_tasks(&self) -> String {
        self.config.recorded_tasks().to_string()
    }

    /// The model's folder, or its name on the hub.
    #[getter]
    fn model(&self) -> &str {
        &self.config.model.model
    }

    /// Special tokens that the model gets.
    #[getter]
    fn new_tokens(&self) -> Vec<String> {
        self.config.model.new_tokens.clone()
    }

    /// The adapter that the run goes on with.
    #[getter]
    fn adapter(&self) -> Option<&str> {
        self.config.lora.adapter.as_deref()
    }

    /// Folder of what the run writes.
    #[getter]
    fn output_dir(&self) -> &str {
        &self.config.run.output_dir
    }

    /// False when the weights are drawn, so that a config.json is enough.
    #[getter]
    fn needs_weights(&self) -> bool {
        self.config.model.init == config::Init::Pretrained
    }

    /// `auto`, `cuda`, `rocm` or `cpu`.
    #[getter]
    fn device(&self) -> String {
        match &self.config.hardware.device {
            Setting::Auto => "auto".to_owned(),
            Setting::Value(device) => device.to_string(),
        }
    }

    /// A model's configuration (JSON text) as the options change it. Raises ConfigError.
    fn model_config(&self, py: Python<'_>, fields: &str) -> PyResult<String> {
        let fields = serde_json::from_str(fields).map_err(|e| PyValueError::new_err(e.to_string()))?;
        let changed = train::model_config(&self.config, &fields).map_err(|error| train_error(py, error))?;
        Ok(changed.to_string())
    }

    /// Returns true if the first rows of a dataset have images.
    fn data_have_images(&self, py: Python<'_>) -> bool {
        py.detach(|| train::images_are_in_data(&self.config))
    }

    /// The datasets as (place, path, subset, split), such as `datasets[0]`.
    #[getter]
    fn data_sets(&self) -> Vec<(String, String, Option<String>, String)> {
        let data = &self.config.data;
        let lists = [("datasets", &data.datasets), ("validation_datasets", &data.validation_datasets)];
        let place = |list: &str, i: usize| format!("{list}[{i}]");
        lists
            .into_iter()
            .flat_map(|(list, sets)| sets.iter().flatten().enumerate().map(move |(i, set)| (place(list, i), set)))
            .map(|(place, set)| (place, set.path.clone(), set.subset.clone(), set.split.clone()))
            .collect()
    }

    /// The same configuration with the local files of datasets whose path is a name, by their places.
    fn with_files(&self, files: BTreeMap<String, Vec<PathBuf>>) -> Config {
        Config { config: self.config.with_fetched(files) }
    }

    /// True if the training datasets are streamed.
    #[getter]
    fn streams(&self) -> bool {
        self.config.data.streaming
    }

    /// The same configuration with files elsewhere of streamed datasets, by their places: address, bytes and version of
    /// each. `python` is the interpreter of the process that fetches them.
    fn with_remote(&self, python: PathBuf, files: BTreeMap<String, Vec<(String, u64, String)>>) -> Config {
        let file = |(name, bytes, version)| data::StreamFile { name, bytes, version };
        let of_set = |(place, files): (String, Vec<_>)| (place, files.into_iter().map(file).collect());
        let files = files.into_iter().map(of_set).collect();
        Config { config: self.config.with_remote(config::Remote { python, files }) }
    }

    /// The same configuration of a run that writes to this folder.
    fn with_output_dir(&self, folder: String) -> Config {
        let mut config = self.config.clone();
        config.run.output_dir = folder;
        Config { config }
    }

    /// True if the run continues from the newest checkpoint of `output_dir`.
    #[getter]
    fn resumes_newest(&self) -> bool {
        self.config.run.resume_from_checkpoint == config::Resume::Newest
    }

    /// Number of checkpoints to keep.
    #[getter]
    fn save_total_limit(&self) -> u64 {
        self.config.run.save_total_limit
    }

    /// The teacher of distillation: its folder, or its name on the hub.
    #[getter]
    fn teacher(&self) -> Option<&str> {
        self.config.teacher()
    }

    /// The tasks that the graph of the teacher is recorded with, as a JSON object: each with its settings.
    #[getter]
    fn recorded_of_teacher(&self) -> String {
        self.config.recorded_of_teacher().to_string()
    }

    /// The same configuration with the local folder of the teacher, whose graph is `ir` as JSON.
    fn with_teacher(&self, folder: PathBuf, ir: &str) -> Config {
        Config { config: self.config.with_fetched_teacher(folder, ir) }
    }

    /// Services that get the metrics, as a JSON list: each with what its client needs.
    #[getter]
    fn trackers(&self) -> String {
        Value::Array(self.config.logging.trackers()).to_string()
    }

    /// True if standard output gets the events of the log.
    #[getter]
    fn logs_json(&self) -> bool {
        self.config.logging.log_format == config::LogFormat::Json
    }

    /// Seconds from a signal to the end of the process.
    #[getter]
    fn save_grace_seconds(&self) -> Option<u64> {
        self.config.run.save_grace_seconds
    }

    /// Folder of the checkpoints, if `checkpoint_dir` names one.
    #[getter]
    fn checkpoint_dir(&self) -> Option<&str> {
        self.config.run.checkpoint_dir.value().map(String::as_str)
    }

    /// The repository that the result is uploaded to, and whether a new one is private.
    #[getter]
    fn push_to_hub(&self) -> Option<(String, bool)> {
        self.config.run.push_to_hub.clone().map(|name| (name, self.config.run.hub_private_repo))
    }

    /// Returns the settings for starting the nodes of a run, as JSON: `on_ray`, the options of `distributed`, the ranks
    /// of a node, the micro-batches that each accumulates, and `divides_rows` if the rows of a step are those of
    /// `batch_size`; then it is the rows of each.
    #[getter]
    fn nodes(&self) -> String {
        let of = &self.config.multi_node.distributed;
        json!({
            "on_ray": train::starts_on_ray(&self.config),
            "ray_address": of.ray_address,
            "num_nodes": of.num_nodes,
            "min_nodes": of.min_nodes.unwrap_or(of.num_nodes),
            "max_nodes": of.most_nodes(),
            "saves": self.config.run.save_strategy != config::Strategy::No,
            "ranks": self.config.local_ranks(),
            "timeout": of.timeout,
            "max_restarts": of.max_restarts,
            "accumulation": match self.config.training.batch_size {
                Some(rows) => rows as usize / self.config.replicas().max(1),
                None => self.config.training.gradient_accumulation_steps as usize,
            },
            "divides_rows": self.config.training.batch_size.is_some(),
        })
        .to_string()
    }

    /// True if the adapter is also merged into its model.
    #[getter]
    fn merge_adapter(&self) -> bool {
        self.config.lora.merge_adapter
    }

    /// Every option with its value, as YAML. What is still open is as `auto`.
    fn resolved_yaml(&self) -> String {
        self.config.resolved_yaml(&BTreeMap::new())
    }
}

/// The JSON Schema of a configuration file, for editors.
#[pyfunction]
pub fn config_schema() -> String {
    serde_json::to_string_pretty(&config::schema()).expect("a schema is always representable as JSON")
}

/// The options as a JSON list of `{name, section, type, default, help, …}`, for `--help`.
#[pyfunction]
pub fn config_help() -> String {
    config::help_rows().to_string()
}

/// The files of a dataset among the names of a folder: those of a subset and a split. `card` is the text of its
/// README.md. Raises DataError where there is no such subset or split; `source` names the set in the message.
#[pyfunction]
pub fn choose_files(
    source: &str,
    names: Vec<String>,
    card: Option<&str>,
    subset: Option<&str>,
    split: &str,
) -> PyResult<Vec<String>> {
    let chosen = train::choose_files(&names, card, subset, split);
    chosen.map_err(|(problem, hint)| crate::errors::DataError::new_err(format!("{source}: {problem} ({hint})")))
}

/// A path of the command line with the user's own folder in place of `~`. Raises ConfigError where a variable, or the
/// folder of another user, is in it.
#[pyfunction]
pub fn expand_path(text: &str) -> PyResult<String> {
    let refused = |why: options::home::Unexpanded| ConfigError::new_err(format!("{} ({})", why.message, why.hint));
    options::home::expand(text).map(std::borrow::Cow::into_owned).map_err(refused)
}

/// A YAML text as JSON text. Raises ConfigError with every problem; `source` names the text in them.
#[pyfunction]
pub fn read_yaml(py: Python<'_>, text: &str, source: &str) -> PyResult<String> {
    let mut reader = options::Reader::new(&[]);
    let node = reader.read_yaml(source, text);
    match (node, reader.finish().1) {
        (Some(node), problems) if problems.is_empty() => Ok(node.to_json().to_string()),
        (_, problems) => Err(config_error(py, &problems)),
    }
}

/// The option of a name of another trainer where it has the same values, and the hint for the name and a value of one word:
/// both none where the name is not known.
#[pyfunction]
pub fn foreign_option(name: &str, value: Option<&str>) -> (Option<&'static str>, Option<String>) {
    (config::foreign_name(name), config::foreign_hint(name, value))
}

/// The names that a pattern means, in their order.
#[pyfunction]
pub fn matching_names(pattern: &str, names: Vec<String>) -> Vec<String> {
    train::matching_names(pattern, names)
}
