//! The split of a step into micro-steps: what the plan chooses, what ties it, and that it changes no sum.

use std::path::Path;

use crate::stories::{Lines, config, device, events, source};
use program::Machine;
use serde_json::{Value, json};
use train::config::{Config, Task};
use train::{ModelSource, Preview, recommended};

fn qwen3(folder: &Path) -> ModelSource {
    let fields = json!({
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 2,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
    });
    std::fs::write(folder.join("config.json"), fields.to_string()).unwrap();
    ModelSource::open(folder, include_str!("../ir/qwen3.json")).unwrap()
}

fn options(changed: &[(&str, Value)]) -> Config {
    let mut all = json!({"model": "m", "sequence_len": 2048});
    for (name, value) in changed {
        all[*name] = value.clone();
    }
    let config = Config::load_json(&all.to_string(), Task::Sft, &[]).unwrap();
    config.with_visible_gpus(1).unwrap()
}

/// Rows of a micro-step and micro-steps, and the notes of the plan.
fn planned(changed: &[(&str, Value)], machine: &Machine) -> ((u32, u32), Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let source = qwen3(folder.path());
    let config = recommended(&options(changed), &source, machine, None, &|| false).unwrap();
    let preview = Preview::new(&config, &source, machine, None).unwrap();
    assert_eq!(preview.shapes.variants[0].batch, config.micro_rows() as usize);
    ((config.micro_rows(), config.micro_steps()), preview.notes)
}

#[test]
fn micro_steps_run_together_where_the_plan_expects_more_speed() {
    let (split, notes) = planned(&[("sequence_len", json!(512))], &Machine::h200());
    assert_eq!(split, (8, 1));
    let note = notes.iter().find(|note| note.starts_with("4 micro-steps of 2 rows run as 1 of 8: +")).unwrap();
    assert!(note.contains("GiB instead of") && note.ends_with("`micro_batch_size: 2` keeps them"), "{note}");
    let all = [("sequence_len", json!(512)), ("batch_size", json!(12))];
    assert_eq!(planned(&all, &Machine::h200()).0, (12, 1));
}

#[test]
fn rows_that_do_not_fit_at_once_are_split_further() {
    // Rows of 8192 tokens: logits and what the backward pass reads of two of them are more than the card has.
    let changed = [("sequence_len", json!(8192)), ("per_device_train_batch_size", json!(64))];
    let small = Machine { memory: 2200 << 20, ..Machine::h200() };
    let (split, notes) = planned(&changed, &small);
    assert!(split.0 < 64 && split.0 * split.1 == 256, "{split:?}");
    let found = notes.iter().any(|note| note.contains("micro-steps of 64 rows run as") && note.contains("keeps them"));
    assert!(found, "{notes:?}");
}

#[test]
fn a_written_split_a_cpu_and_losses_that_compare_rows_keep_theirs() {
    let pinned = [("per_device_train_batch_size", json!(2)), ("micro_batch_size", json!(4))];
    assert_eq!(planned(&pinned, &Machine::h200()).0, (4, 2));
    assert_eq!(planned(&[("sequence_len", json!(128))], &Machine::cpu(8 << 30, 4)).0, (2, 4));
    let text = json!({"model": "m", "lora": true, "per_device_train_batch_size": 4});
    let config = Config::load_json(&text.to_string(), Task::Kto, &[]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(recommended(&config, &qwen3(folder.path()), &Machine::h200(), None, &|| false).unwrap(), config);
}

/// Losses and norms of a few steps of the example.
fn trained(changed: &Value) -> Vec<(f64, f64)> {
    let folder = tempfile::tempdir().unwrap();
    let mut all = json!({"max_steps": 3, "lora_dropout": 0.0});
    all.as_object_mut().unwrap().extend(changed.as_object().unwrap().clone());
    let config = config(&folder.path().join("output"), &all);
    train::run(config, source(), device(), &mut Lines::default()).unwrap();
    let steps = events(&folder.path().join("output")).into_iter().filter(|event| event["event"] == "step");
    steps.map(|step| (step["loss"].as_f64().unwrap(), step["grad_norm"].as_f64().unwrap())).collect()
}

#[test]
fn a_split_changes_sums_by_rounding_only() {
    let with = |rows: Value| {
        trained(&json!({
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "micro_batch_size": rows
        }))
    };
    let own = with(json!("auto"));
    assert_eq!(own, with(json!(2)), "the written split of a CPU");
    let alone = trained(&json!({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}));
    assert_eq!(alone, with(json!(1)), "the same micro-steps by other options");
    for rows in [1, 4] {
        for (a, b) in own.iter().zip(with(json!(rows))) {
            assert!((a.0 - b.0).abs() < 1e-5 * a.0 && (a.1 - b.1).abs() < 1e-4 * a.1, "{rows} rows: {a:?} {b:?}");
        }
    }
}
