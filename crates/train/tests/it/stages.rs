//! Training with the layers on several devices is training on one: the same losses and norms for every number of stages, the
//! same bits of weights where nothing is clipped, the same files, and checkpoints that any number goes on from. With
//! `SUROGATE_TEST_DEVICE=cuda` they are on GPUs, or on one that they share (`SUROGATE_ONE_GPU=1`).

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use crate::stories::{self, Lines, assert_close, events, losses, names, root};
use data::Batch;
use program::Machine;
use serde_json::{Value, json};
use tempfile::TempDir;
use train::config::{Config, Task};
use train::{Device, DeviceRequest, ModelSource, Outcome, Preview, Trainer};

const LENGTH: usize = 12;

/// The shipped example with an output head of its own, and drawn weights.
static MODEL: LazyLock<(TempDir, Arc<ModelSource>)> = LazyLock::new(|| {
    let place = tempfile::tempdir().unwrap();
    let from = root().join("examples/stories/model");
    for name in names(&from).iter().filter(|name| name.ends_with(".json") && !name.contains("index")) {
        let text = std::fs::read_to_string(from.join(name)).unwrap();
        let text = text.replace("\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
        std::fs::write(place.path().join(name), text).unwrap();
    }
    let mut ir: Value = serde_json::from_str(include_str!("../ir/stories.json")).unwrap();
    let parameters = ir["parameters"].as_array_mut().unwrap();
    let mut head = parameters[0].clone();
    head["name"] = json!("lm_head.weight");
    parameters.push(head);
    let last = ir["body"].as_array_mut().unwrap().last_mut().unwrap();
    last["inputs"][1] = json!("lm_head.weight");
    let source = ModelSource::open(place.path(), &ir.to_string()).unwrap();
    (place, Arc::new(source))
});

fn model() -> PathBuf {
    MODEL.0.path().to_owned()
}

fn source() -> Arc<ModelSource> {
    MODEL.1.clone()
}

fn merged(mut base: Value, more: &Value) -> Value {
    let (object, more) = (base.as_object_mut().unwrap(), more.as_object().unwrap());
    object.extend(more.iter().map(|(name, value)| (name.clone(), value.clone())));
    base
}

fn device(config: &Config) -> Arc<Device> {
    let request = DeviceRequest { threads: Some(2), ..DeviceRequest::of(config, Vec::new()) };
    Arc::new(Device::open(&request).unwrap())
}

fn config(stages: usize, micro_steps: usize, more: &Value) -> Config {
    let options = json!({
        "model": model(), "init": "random", "lora": false, "optimizer": "adamw", "learning_rate": 1e-3,
        "device": stories::device_name(),
        "gpus": stages, "pipeline_parallel_size": stages, "torch_dtype": "float32",
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": micro_steps,
    });
    Config::load_json(&merged(options, more).to_string(), Task::Sft, &[]).unwrap()
}

fn try_trainer(stages: usize, micro_steps: usize, more: &Value) -> train::Result<Trainer> {
    let config = config(stages, micro_steps, more);
    let device = device(&config);
    Trainer::begin(Arc::new(config), source(), device)
}

/// The micro-batches of a step, some labels untrained; a row of `packed` holds two documents.
fn rows(step: usize, micro_steps: usize, packed: bool) -> Vec<Batch> {
    let number = |i: usize| (step * 7919 + i * 104_729) % 509;
    let row = |row: usize| {
        let ids: Vec<i32> = (0..LENGTH).map(|i| 3 + number(row * LENGTH + i) as i32).collect();
        let untrained = |i: usize| (row + i).is_multiple_of(3) && row > 1;
        let labels: Vec<i32> = (0..LENGTH).map(|i| if untrained(i) { -100 } else { ids[i] }).collect();
        let weights: Vec<f32> = (0..LENGTH).map(|i| 0.5 + (i % 4) as f32 * 0.25).collect();
        let begins = if packed { 4 + row % 3 } else { LENGTH };
        let positions = (0..LENGTH).map(|i| (if i < begins { i } else { i - begins }) as i32).collect();
        Batch::from_labels(1, LENGTH, ids, &labels, Some(positions), Some(&weights)).unwrap()
    };
    (0..micro_steps).map(row).collect()
}

fn curve_of(trainer: &mut Trainer, steps: std::ops::Range<usize>, micro_steps: usize, packed: bool) -> Vec<(f64, f64)> {
    let step = |step: usize| {
        let metrics = trainer.step(&rows(step, micro_steps, packed), Some(1e-3)).unwrap();
        (metrics.loss, metrics.grad_norm)
    };
    steps.map(step).collect()
}

fn curve(stages: usize, micro_steps: usize, steps: usize, packed: bool, more: &Value) -> Vec<(f64, f64)> {
    curve_of(&mut try_trainer(stages, micro_steps, more).unwrap(), 0..steps, micro_steps, packed)
}

/// All numbers of stages on 20 steps, the same bits when run again.
#[track_caller]
fn agree(most: f64, micro_steps: &[usize], packed: bool, more: &Value) {
    for micro_steps in micro_steps.iter().copied() {
        let alone = curve(1, micro_steps, 20, packed, more);
        assert!(alone[19].0 != alone[0].0, "{alone:?}");
        for stages in [2, 3, 4, 5] {
            let found = curve(stages, micro_steps, 20, packed, more);
            let what = format!("{stages} stages, {micro_steps} micro-steps, {more}");
            assert_close(&found, &alone, most, &what);
            if stages == 3 {
                assert_eq!(curve(stages, micro_steps, 20, packed, more), found, "{what}: run again");
            }
        }
    }
}

#[test]
fn full_training_is_the_same_with_any_number_of_stages() {
    agree(1e-5, &[1, 2, 4], false, &json!({}));
}

#[test]
fn packed_rows_are() {
    agree(1e-5, &[1, 2, 4], true, &json!({"max_grad_norm": 0.05}));
}

#[test]
fn adapters_with_dropout_are() {
    agree(1e-5, &[1, 2, 4], true, &json!({"lora": true, "lora_rank": 4, "lora_dropout": 0.1, "learning_rate": 1e-2}));
}

#[test]
fn modules_that_are_trained_as_wholes_are() {
    let more = json!({"lora": true, "lora_rank": 4, "lora_dropout": 0.0, "modules_to_save": ["embed_tokens", "norm"]});
    agree(1e-5, &[3], true, &more);
}

#[test]
fn other_optimizers_and_noise_are() {
    agree(1e-5, &[3], false, &json!({"optimizer": "normuon", "recompute_block": true}));
    // With clipping, a last bit of the norm is a code now and then.
    agree(1e-5, &[3], true, &json!({"optimizer": "adamw_8bit", "max_grad_norm": 0.0}));
    agree(1e-5, &[2], true, &json!({"neftune_noise_alpha": 5.0, "lmhead_chunks": 2}));
}

/// Weights in bf16, rounded stochastically or from copies: rounding lets curves part, but not far.
#[test]
fn rounded_weights_stay_close() {
    for more in [json!({}), json!({"master_dtype": "float32"})] {
        let more = merged(json!({"torch_dtype": "bfloat16"}), &more);
        let alone = curve(1, 3, 6, true, &more);
        for stages in [2, 4] {
            let found = curve(stages, 3, 6, true, &more);
            let twice = |of: &[(f64, f64)]| of.iter().map(|step| (step.0, step.0)).collect::<Vec<_>>();
            assert_close(&twice(&found), &twice(&alone), 2e-3, &format!("{stages} stages, {more}"));
            assert_eq!(curve(stages, 3, 6, true, &more), found, "run again");
        }
    }
}

#[track_caller]
fn assert_same_files(one: &Path, other: &Path) {
    assert_eq!(names(one), names(other));
    let tensors: Vec<String> = names(one).into_iter().filter(|name| name.ends_with(".safetensors")).collect();
    assert!(!tensors.is_empty(), "nothing is compared in {}", one.display());
    for name in tensors {
        let [one, other] = [one, other].map(|folder| std::fs::read(folder.join(&name)).unwrap());
        assert!(one == other, "{name} has other bytes");
    }
}

/// Without clipping no number goes from stage to stage but what is handed on: weights, states and exports are one device's.
#[test]
fn without_clipping_weights_and_files_are_those_of_one_device() {
    let adapter = json!({"lora": true, "lora_rank": 4, "lora_dropout": 0.1, "lora_dtype": "float32"});
    for (more, micro_steps) in [(json!({}), 4), (adapter, 3)] {
        let place = tempfile::tempdir().unwrap();
        let more = merged(more, &json!({"max_grad_norm": 0.0}));
        let saved = |stages: usize| {
            let at = |name: &str| place.path().join(format!("{name}-{stages}"));
            let mut trainer = try_trainer(stages, micro_steps, &more).unwrap();
            curve_of(&mut trainer, 0..3, micro_steps, true);
            trainer.save(&at("checkpoint")).unwrap();
            trainer.export(&at("model")).unwrap();
            [at("checkpoint"), at("model")]
        };
        let one = saved(1);
        for stages in [2, 3, 5] {
            for (one, other) in one.iter().zip(saved(stages)) {
                assert_same_files(one, &other);
            }
        }
    }
}

#[test]
fn a_checkpoint_goes_on_with_any_number_of_stages() {
    for more in [json!({"optimizer": "adamw_8bit"}), json!({"optimizer": "normuon"}), json!({"lora": true})] {
        let place = tempfile::tempdir().unwrap();
        let straight = curve(1, 2, 10, true, &more);
        let mut folder = None;
        for (number, stages) in [2, 1, 3, 2, 4].into_iter().enumerate() {
            let options = match &folder {
                Some(folder) => merged(more.clone(), &json!({"resume_from_checkpoint": folder})),
                None => more.clone(),
            };
            let mut trainer = try_trainer(stages, 2, &options).unwrap();
            let steps = number * 2..number * 2 + 2;
            let found = curve_of(&mut trainer, steps.clone(), 2, true);
            assert_close(&found, &straight[steps], 1e-4, &format!("{stages} stages, {more}"));
            let saved = place.path().join(format!("checkpoint-{number}"));
            trainer.save(&saved).unwrap();
            folder = Some(saved);
        }
    }
}

/// Batches of other lengths come later: every shape has its entries on all stages.
#[test]
fn a_shape_that_comes_later_goes_through_all_stages() {
    let of = |stages: usize| {
        let mut trainer = try_trainer(stages, 2, &json!({})).unwrap();
        let mut found = curve_of(&mut trainer, 0..2, 2, false);
        let short = |row: i32| {
            let ids: Vec<i32> = (0..7).map(|i| 3 + 11 * i + row).collect();
            Batch::from_labels(1, 7, ids.clone(), &ids, None, None).unwrap()
        };
        let mixed = [short(1), rows(2, 1, false).remove(0), short(2)];
        for batches in [&mixed[..], &mixed[1..2]] {
            let metrics = trainer.step(batches, Some(1e-3)).unwrap();
            found.push((metrics.loss, metrics.grad_norm));
        }
        found
    };
    let alone = of(1);
    for stages in [2, 4] {
        assert_close(&of(stages), &alone, 1e-5, &format!("{stages} stages"));
    }
}

/// A run of the command line: what its steps and evaluations say.
fn run(output: &Path, stages: usize, more: &Value, stop_after: Option<usize>) -> (Outcome, Vec<(f64, f64)>, Vec<f64>) {
    let options = json!({
        "model": model(), "init": "random", "device": stories::device_name(), "gpus": stages, "pipeline_parallel_size": stages,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "torch_dtype": "float32",
        "load_best_model_at_end": true, "max_steps": 6, "eval_steps": 3, "save_steps": 3, "lora_dropout": 0.1,
    });
    let config = stories::config(output, &merged(options, more));
    let device = device(&config);
    let mut observer = Lines { stop_after, ..Lines::default() };
    let outcome = train::run(config, source(), device, &mut observer).unwrap();
    let events = events(output);
    let number = |event: &Value, name: &str| event[name].as_f64().unwrap();
    let steps = events.iter().filter(|event| event["event"] == "step");
    let steps = steps.map(|event| (number(event, "loss"), number(event, "grad_norm"))).collect();
    (outcome, steps, losses(&events, "evaluation"))
}

#[test]
fn a_run_evaluates_stops_and_goes_on_with_other_stages() {
    for more in [json!({}), json!({"sample_packing": false})] {
        let place = tempfile::tempdir().unwrap();
        let (_, straight, evaluated) = run(&place.path().join("straight"), 1, &more, None);
        assert!(straight.len() == 6 && evaluated.len() >= 2, "{evaluated:?}");
        let twice = |of: &[f64]| of.iter().map(|loss| (*loss, *loss)).collect::<Vec<_>>();
        let (_, whole, checked) = run(&place.path().join("three"), 3, &more, None);
        assert_close(&whole, &straight, 1e-5, "three stages");
        assert_close(&twice(&checked), &twice(&evaluated), 1e-5, "evaluations");
        let broken = place.path().join("broken");
        assert!(matches!(run(&broken, 2, &more, Some(2)).0, Outcome::Interrupted(_)));
        let again = merged(more, &json!({"resume_from_checkpoint": true}));
        assert!(matches!(run(&broken, 4, &again, Some(2)).0, Outcome::Interrupted(_)));
        let (outcome, found, checked) = run(&broken, 3, &again, None);
        assert!(matches!(outcome, Outcome::Finished(_)));
        assert_close(&found, &straight, 1e-5, "from two stages to four to three");
        assert_close(&twice(&checked), &twice(&evaluated), 1e-5, "evaluations");
        assert_eq!(names(&broken.join("adapter")), names(&place.path().join("straight/adapter")));
    }
}

/// A value that is not finite is traced to the layer that it comes out of, on whichever stage that is.
#[test]
fn what_is_not_finite_is_found_on_its_stage() {
    let place = tempfile::tempdir().unwrap();
    let more = json!({"learning_rate": 1e30, "max_grad_norm": 0.0, "warmup_steps": 0, "lora": false});
    let options = json!({
        "model": model(), "init": "random", "device": stories::device_name(), "gpus": 3, "pipeline_parallel_size": 3,
        "torch_dtype": "float32",
    });
    let config = stories::config(place.path(), &merged(options, &more));
    let device = device(&config);
    let error = train::run(config, source(), device, &mut Lines::default()).expect_err("it diverges").to_string();
    assert!(error.contains("first came out of"), "{error}");
}

/// The plan has what each stage takes, and what sharded weights would.
#[test]
fn a_plan_says_what_each_stage_takes_and_compares() {
    let more = json!({"device": "auto", "torch_dtype": "bfloat16", "sequence_len": 256});
    for (micro_steps, idle) in [(2, 1.0 / 3.0), (8, 1.0 / 9.0)] {
        let config = config(2, micro_steps, &more);
        let preview = Preview::new(&config, &source(), &Machine::h200(), None).unwrap();
        let all = preview.to_json();
        let (of, step) = (&all["stages"], all["estimate"]["step_seconds"].as_f64().unwrap());
        assert!((of["idle_share"].as_f64().unwrap() - idle).abs() < 1e-9);
        let stages = of["stages"].as_array().unwrap();
        let layer = |stage: usize, end: &str| stages[stage][end].as_str().unwrap().parse::<usize>().unwrap();
        assert_eq!((layer(0, "first_layer"), layer(1, "last_layer")), (0, 4));
        assert_eq!(layer(0, "last_layer") + 1, layer(1, "first_layer"));
        // The residual stream of 256 tokens in bf16.
        assert_eq!([0, 1].map(|stage| stages[stage]["handed_bytes"].as_u64().unwrap()), [256 * 64 * 2; 2]);
        let number = |stage: usize, name: &str| stages[stage][name].as_f64().unwrap();
        let busy = |stage: usize| number(stage, "forward_seconds") + number(stage, "backward_seconds");
        let least = micro_steps as f64 * busy(0).max(busy(1));
        assert!(
            step > least && step < 2.0 * least + number(0, "update_seconds") + busy(0) + busy(1),
            "{step}, {least}"
        );
        assert_eq!(all["memory_bytes"], stages.iter().map(|of| of["memory_bytes"].as_u64().unwrap()).max().unwrap());
        assert_eq!(of["zero_3"]["gradient_accumulation_steps"], micro_steps / 2);
        let text = preview.plan_text();
        assert!(!text.contains("requested"), "nothing was: {text}");
        for expected in ["2 × h200", "Stages, one on each GPU:", "`zero_level: 3` with", "times as fast"] {
            assert!(text.contains(expected), "{expected}: {text}");
        }
    }
}

#[test]
fn what_does_not_go_with_stages_is_refused_by_name() {
    let refused = |options: Value| {
        let all = merged(json!({"model": model(), "device": "cpu", "gpus": 2, "pipeline_parallel_size": 2}), &options);
        let problems = Config::load_json(&all.to_string(), Task::Sft, &[]).expect_err("it is refused");
        problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    for (option, value) in [
        ("zero_level", json!(2)),
        ("shard_weights", json!(true)),
        ("shard_gradients", json!(true)),
        ("recipe", json!("fp8_hybrid")),
        ("torch_dtype", json!("float16")),
        ("offload_optimizer", json!(true)),
        ("lora_dora", json!(true)),
        ("qlora_bnb", json!(true)),
        ("sample_prompts", json!(["a"])),
        ("gradient_compression", json!("bf16")),
        ("apply_recommended_values", json!(true)),
        ("sequence_parallel_size", json!(2)),
        ("memcpy_all_gather", json!(false)),
        ("memcpy_send_recv", json!(false)),
    ] {
        let text = refused(json!({option: value}));
        let expected = "is not available yet with `pipeline_parallel_size: 2`";
        assert!(text.contains(expected) && text.contains(&format!("`{option}")), "{option}: {text}");
    }
    let text = refused(json!({"distributed": {"num_nodes": 2}}));
    assert!(text.contains("`distributed.num_nodes: 2` is not available yet with"), "{text}");
    let text = refused(json!({"gpus": 3}));
    assert!(text.contains("needs as many GPUs, one for each stage, but `gpus` is 3"), "{text}");

    let error = try_trainer(6, 1, &json!({})).and_then(|mut of| of.step(&rows(0, 1, false), Some(1e-3)).map(drop));
    let text = error.unwrap_err().to_string();
    assert!(text.contains("`pipeline_parallel_size: 6`") && text.contains("has 5 layers"), "{text}");

    let tied = json!({
        "model": root().join("examples/stories/model"), "device": "cpu", "gpus": 2, "pipeline_parallel_size": 2,
    });
    let config = Config::load_json(&tied.to_string(), Task::Sft, &[]).unwrap();
    let device = device(&config);
    let mut trainer = Trainer::begin(Arc::new(config), stories::source(), device).unwrap();
    let text = trainer.step(&rows(0, 1, false), Some(1e-3)).unwrap_err().to_string();
    assert!(text.contains("`model.embed_tokens.weight` would be on two GPUs"), "{text}");
}
