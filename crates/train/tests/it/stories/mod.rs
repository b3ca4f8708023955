//! The shipped example, a real pretrained model on real text, as a short run for tests.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use train::config::{Config, Task};
use train::{Device, DeviceRequest, ModelSource, Observer};

pub fn root() -> PathBuf {
    let own = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| env!("CARGO_MANIFEST_DIR").to_owned());
    Path::new(&own).ancestors().nth(2).expect("crates/train lies in the repository").to_owned()
}

/// The device of tests that do not name one: `SUROGATE_TEST_DEVICE`, or the CPU.
pub fn device_name() -> String {
    std::env::var("SUROGATE_TEST_DEVICE").unwrap_or_else(|_| "cpu".to_owned())
}

pub fn source() -> Arc<ModelSource> {
    source_at(&root().join("examples/stories/model"))
}

/// A model of the same shape in another folder.
pub fn source_at(folder: &Path) -> Arc<ModelSource> {
    Arc::new(ModelSource::open(folder, include_str!("../../ir/stories.json")).unwrap())
}

pub fn device() -> Arc<Device> {
    let cpu = options::Setting::Value(train::config::Device::Cpu);
    Arc::new(Device::open(&DeviceRequest { device: cpu, ..DeviceRequest::default() }).unwrap())
}

/// The example's options, shorter, with some of them replaced.
pub fn config(output: &Path, replaced: &Value) -> Arc<Config> {
    let root = root();
    let mut options = json!({
        "run_name": "test", "output_dir": output, "model": root.join("examples/stories/model"),
        "datasets": [{"path": root.join("examples/stories/data/shakespeare.txt"), "type": "text", "samples": 200}],
        "validation_split_ratio": 0.1, "sequence_len": 64, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "max_steps": 12, "eval_steps": 6, "save_steps": 5, "save_total_limit": 2,
        "optimizer": "adamw", "learning_rate": 1e-2, "lora_rank": 8, "lora_alpha": 16,
    });
    for (key, value) in replaced.as_object().unwrap() {
        options[key] = value.clone();
    }
    Arc::new(Config::load_json(&options.to_string(), Task::Sft, &[]).unwrap())
}

/// An observer that collects lines and can stop the run.
#[derive(Default)]
pub struct Lines {
    pub lines: Vec<String>,
    /// Stops after this number of steps of this process.
    pub stop_after: Option<usize>,
    /// At the question with this number among those that follow this many steps: the first is asked after the step,
    /// the others before batches of an evaluation, then before tensors of the result.
    pub stop_at: Option<(usize, usize)>,
    /// Questions before this are those of reading data.
    pub begun: bool,
    pub steps: usize,
    pub questions: usize,
}

impl Observer for Lines {
    fn line(&mut self, text: &str) {
        self.lines.push(text.to_owned());
    }

    fn event(&mut self, event: &Value) {
        if event["event"] == "step" {
            self.steps += 1;
        } else if event["event"] != "start" && event["event"] != "resume" {
            return;
        }
        (self.begun, self.questions) = (true, 0);
    }

    fn interrupted(&mut self) -> bool {
        self.questions += 1;
        if !self.begun {
            return false;
        }
        self.stop_after.is_some_and(|steps| self.steps >= steps) || self.stop_at == Some((self.steps, self.questions))
    }
}

pub fn events(output: &Path) -> Vec<Value> {
    let logs = std::fs::read_dir(output).unwrap().map(|entry| entry.unwrap().path());
    let log =
        logs.into_iter().find(|path| path.file_name().unwrap().to_string_lossy().starts_with("log-test-")).unwrap();
    std::fs::read_to_string(log).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

pub fn losses(events: &[Value], kind: &str) -> Vec<f64> {
    events.iter().filter(|e| e["event"] == kind).map(|e| e["loss"].as_f64().unwrap()).collect()
}

pub fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Holds losses and norms of steps against others.
#[track_caller]
pub fn assert_close(found: &[(f64, f64)], expected: &[(f64, f64)], most: f64, what: &str) {
    assert_eq!(found.len(), expected.len());
    for (step, (f, e)) in found.iter().zip(expected).enumerate() {
        let far = (f.0 / e.0 - 1.0).abs().max((f.1 / e.1 - 1.0).abs());
        assert!(far < most, "{what}, step {step}: {f:?} instead of {e:?}, {far:e} apart");
    }
}

/// The value whose turn it is, so that a test walks through its other axes and tries each value of this one; all of them
/// under `./test.sh --all`.
pub fn in_turn<T: Clone>(values: &[T], turn: usize) -> Vec<T> {
    match std::env::var_os("SUROGATE_TEST_ALL") {
        Some(_) => values.to_vec(),
        None => vec![values[turn % values.len()].clone()],
    }
}
