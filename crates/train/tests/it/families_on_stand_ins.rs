//! Every family in a small form: training steps on GPUs that are not there, of each vendor, against the CPU.

use std::path::Path;
use std::sync::Arc;

use data::Batch;
use serde::Deserialize;
use serde_json::{Value, json};
use train::config::{Config, Task};
use train::{Device, ModelSource, Trainer};

use crate::standin::devices;
use crate::stories::in_turn;

/// A row of `families.jsonl`.
#[derive(Deserialize)]
struct Family {
    name: String,
    config: Value,
    ir: Value,
}

impl Family {
    /// The number of tokens, of the text where the configuration has parts.
    fn vocabulary(&self) -> i32 {
        let of_text = self.config.get("text_config").filter(|of| of.get("vocab_size").is_some());
        of_text.unwrap_or(&self.config)["vocab_size"].as_i64().unwrap() as i32
    }

    /// Two rows of tokens that differ by place and step; every fifth has no target.
    fn batch(&self, step: i32) -> Batch {
        let (rows, length, size) = (2, 12, self.vocabulary());
        let ids: Vec<i32> = (0..rows * length).map(|at| (at as i32 * 37 + step * 11 + 5) % size).collect();
        let labels: Vec<i32> = ids.iter().enumerate().map(|(at, id)| if at % 5 == 4 { -100 } else { *id }).collect();
        Batch::from_labels(rows, length, ids, &labels, None, None).unwrap()
    }

    /// Losses and norms of three steps, the last of which replays graphs: two micro-steps for each of `gpus`.
    fn curve(&self, folder: &Path, device: Arc<Device>, more: &Value) -> Vec<[f64; 2]> {
        let mut options = json!({"model": folder, "init": "random", "torch_dtype": "float32", "optimizer": "adamw",
            "lora_dropout": 0.0, "max_grad_norm": 1.0, "device": "auto", "adamw_epsilon": 1e-3});
        options.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let config = Arc::new(Config::load_json(&options.to_string(), Task::Sft, &[]).unwrap());
        let source = Arc::new(ModelSource::open(folder, &self.ir.to_string()).unwrap());
        let mut trainer =
            Trainer::new(config, source, device.clone()).unwrap_or_else(|error| panic!("{}: {error}", self.name));
        let each = 2 * device.gpus as i32;
        let step = |number: i32| {
            let batches: Vec<Batch> = (0..each).map(|batch| self.batch(each * number + batch)).collect();
            let metrics = trainer.step(&batches, Some(1e-3)).unwrap();
            [metrics.loss, metrics.grad_norm]
        };
        (0..3).map(step).collect()
    }

    /// Trains on GPUs of a target that are not there, and on the CPU.
    fn agrees(&self, target: &str, more: &Value) {
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("config.json"), self.config.to_string()).unwrap();
        let gpus = more.get("gpus").and_then(Value::as_u64).unwrap_or(1) as usize;
        let of = |stands_in: bool| self.curve(place.path(), devices(target, gpus, stands_in), more);
        let (expected, found) = (of(false), of(true));
        assert!(standin::computed() > 100, "{} operations", standin::computed());
        for ([loss, norm], [expected_loss, expected_norm]) in found.iter().zip(&expected) {
            let [loss, norm] = [loss / expected_loss, norm / expected_norm].map(|of| (of - 1.0).abs());
            // Attention without a scale makes what Gemma 4 computes depend on the last bits.
            let most = if self.name.starts_with("gemma4") { [1e-5, 1e-3] } else { [1e-6, 1e-5] };
            let is_near = loss < most[0] && norm < most[1];
            assert!(is_near, "{} on {target}, {more}: {found:?} instead of {expected:?}", self.name);
        }
    }
}

fn families() -> Vec<Family> {
    include_str!("../ir/families.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Takes every family to one of the targets, another one for the next.
fn every_family_agrees(first: usize, more: &Value) {
    for (number, family) in families().iter().enumerate() {
        for target in in_turn(&["gfx942", "sm_80", "gfx1100", "sm_90"], number + first) {
            family.agrees(target, more);
        }
    }
}

#[test]
fn every_family_trains_adapters_as_on_the_cpu() {
    every_family_agrees(0, &json!({"lora": true}));
}

#[test]
fn every_family_trains_its_weights_as_on_the_cpu() {
    every_family_agrees(1, &json!({"lora": false}));
}

/// Ranks, shards, shared rows and stages, on two to four GPUs.
#[test]
fn gpus_train_together_as_on_the_cpu() {
    let families = families();
    let cases = [
        json!({"gpus": 2}),
        json!({"gpus": 4, "zero_level": 3, "lora": false}),
        json!({"gpus": 2, "zero_level": 2, "lora": false, "offload_optimizer": true}),
        json!({"gpus": 2, "sequence_parallel_size": 2}),
        json!({"gpus": 2, "pipeline_parallel_size": 2, "lora": false}),
        json!({"gpus": 2, "pipeline_parallel_size": 2}),
    ];
    for (number, more) in cases.iter().enumerate() {
        // Mixtures are not trained in stages.
        let other = if more.get("pipeline_parallel_size").is_some() { "olmo3" } else { "qwen3_moe" };
        for (turn, name) in ["mistral", other].into_iter().enumerate() {
            let family = families.iter().find(|of| of.name == name).unwrap();
            family.agrees(["gfx942", "sm_80", "gfx1100"][(number + turn) % 3], more);
        }
    }
}
