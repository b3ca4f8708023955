//! Number formats of a run: master copies, types of files, first values, and what is refused.

use std::path::Path;
use std::sync::Arc;

use crate::stories::{device, root, source};
use data::Batch;
use data::safetensors::{NamedTensor, Weights, write};
use serde_json::{Value, json};
use tensor::{DType, HostTensor};
use train::config::{Config, Task};
use train::{ModelSource, Trainer};

fn try_trainer(source: Arc<ModelSource>, changed: &Value) -> train::Result<Trainer> {
    let mut options = json!({
        "model": source.folder, "sequence_len": 64, "optimizer": "adamw", "lora": false, "lora_dropout": 0.0,
    });
    for (key, value) in changed.as_object().unwrap() {
        options[key] = value.clone();
    }
    let config = Config::load_json(&options.to_string(), Task::Sft, &[]).map_err(train::TrainError::Config)?;
    Trainer::new(Arc::new(config), source, device())
}

fn trainer(changed: Value) -> Trainer {
    try_trainer(source(), &changed).unwrap()
}

fn train(trainer: &mut Trainer, steps: std::ops::Range<usize>, rate: f64) -> Vec<f64> {
    let rows = |step: usize| {
        let ids: Vec<i32> = (0..32).map(|i| ((i * 37 + step * 11) % 400 + 3) as i32).collect();
        Batch::from_labels(2, 16, ids.clone(), &ids, None, None).unwrap()
    };
    steps.map(|step| trainer.step(&[rows(step)], Some(rate)).unwrap().loss).collect()
}

fn tensors(file: &Path) -> Vec<(String, HostTensor)> {
    let files = Weights::open(file).unwrap();
    files.names().into_iter().map(|name| (name.to_owned(), files.get(name).unwrap().to_host().unwrap())).collect()
}

/// Saves and checks that every trained weight is its copy rounded to nearest; gives the copies.
fn masters(trainer: &mut Trainer, folder: &Path, weights: &str) -> Vec<(String, HostTensor)> {
    trainer.save(folder).unwrap();
    let states = Weights::open(&folder.join("optimizer.safetensors")).unwrap();
    let mut found = Vec::new();
    for (name, weight) in tensors(&folder.join(weights)) {
        let master = states.get(&format!("{name}.master")).unwrap().to_host().unwrap();
        assert_eq!((weight.dtype, master.dtype), (DType::BF16, DType::F32), "{name}");
        assert_eq!(master.cast(DType::BF16), weight, "{name}");
        found.push((name, master));
    }
    found
}

#[test]
fn an_f32_copy_keeps_what_bf16_would_lose() {
    let place = tempfile::tempdir().unwrap();
    let options = json!({"torch_dtype": "bfloat16", "master_dtype": "fp32", "weight_decay": 0.0});
    let mut with = trainer(options.clone());
    let files = Weights::open(&root().join("examples/stories/model")).unwrap();
    for (name, master) in masters(&mut with, &place.path().join("start"), "model.safetensors") {
        assert_eq!(
            master,
            files.get(&name).unwrap().to_host().unwrap().cast(DType::F32),
            "the copy begins with the file's digits"
        );
    }
    // Steps far below the distance of bf16 numbers: the copies follow f32 training.
    let mut exact = trainer(json!({"torch_dtype": "float32", "weight_decay": 0.0}));
    train(&mut with, 0..5, 1e-6);
    train(&mut exact, 0..5, 1e-6);
    exact.export(&place.path().join("exact")).unwrap();
    let reference = Weights::open(&place.path().join("exact")).unwrap();
    let (mut error, mut moved) = (0.0, 0.0);
    for (name, master) in masters(&mut with, &place.path().join("five"), "model.safetensors") {
        let (f32_run, start) =
            (reference.get(&name).unwrap().to_host().unwrap(), files.get(&name).unwrap().to_host().unwrap());
        for ((m, f), s) in master.to_f64().iter().zip(f32_run.to_f64()).zip(start.to_f64()) {
            error += (m - f).powi(2);
            moved += (f - s).powi(2);
        }
    }
    assert!(error < 0.05 * moved, "{error:e} of {moved:e}");

    // A run continues with the copies: the same bits as without a break.
    let straight = train(&mut with, 5..8, 1e-3);
    let mut again = trainer(options);
    again.resume(&place.path().join("five")).unwrap();
    assert_eq!(train(&mut again, 5..8, 1e-3), straight);
    assert_eq!(
        masters(&mut again, &place.path().join("again"), "model.safetensors"),
        masters(&mut with, &place.path().join("straight"), "model.safetensors")
    );
}

#[test]
fn adapters_in_bf16_have_copies_and_those_in_f32_need_none() {
    let place = tempfile::tempdir().unwrap();
    let adapter = |dtype: &str, master: &str| {
        let options = json!({"lora": true, "lora_dtype": dtype, "torch_dtype": "bfloat16", "optimizer": "adamw_8bit"});
        let mut options = options.as_object().unwrap().clone();
        options.insert("master_dtype".into(), json!(master));
        trainer(Value::Object(options))
    };
    let mut with = adapter("bf16", "fp32");
    let losses = train(&mut with, 0..6, 1e-2);
    assert!(losses[5] < losses[0]);
    assert_eq!(masters(&mut with, &place.path().join("with"), "adapter_model.safetensors").len(), 2 * 7 * 5);
    let mut without = adapter("fp32", "fp32");
    without.save(&place.path().join("without")).unwrap();
    let names = tensors(&place.path().join("without/optimizer.safetensors"));
    assert!(!names.is_empty() && names.iter().all(|(name, _)| !name.ends_with(".master")));
}

/// The example in another type, as its files and its configuration say.
fn example_in(dtype: DType, word: &str, folder: &Path) -> Arc<ModelSource> {
    let from = root().join("examples/stories/model");
    let converted: Vec<(String, HostTensor)> =
        tensors(&from).into_iter().map(|(name, tensor)| (name, tensor.cast(dtype))).collect();
    let named: Vec<_> = converted.iter().map(|(name, t)| NamedTensor::new(name.clone(), t)).collect();
    write(&folder.join("model.safetensors"), &named, &Default::default()).unwrap();
    let mut config = source().config.clone();
    config.0["torch_dtype"] = json!(word);
    std::fs::write(folder.join("config.json"), config.0.to_string()).unwrap();
    Arc::new(ModelSource::open(folder, include_str!("../ir/stories.json")).unwrap())
}

#[test]
fn f16_files_are_trained_in_bf16_and_that_is_said() {
    let place = tempfile::tempdir().unwrap();
    let source = example_in(DType::F16, "float16", place.path());
    let mut half = try_trainer(source.clone(), &json!({})).unwrap();
    assert!(half.plan.notes.iter().any(|note| note.contains("saved in f16; it is loaded and trained in bf16")));
    assert_eq!(half.plan.reasons["torch_dtype"].value, "bfloat16");
    let out = place.path().join("out");
    half.export(&out).unwrap();
    for (name, tensor) in tensors(&out) {
        let file = Weights::open(place.path()).unwrap();
        assert_eq!(tensor, file.get(&name).unwrap().to_host().unwrap().cast(DType::BF16), "{name}");
    }
    let losses = train(&mut half, 0..6, 1e-2);
    assert!(losses[5] < losses[0], "{losses:?}");
    // Every digit of f16 is a digit of f32.
    let mut whole = try_trainer(source, &json!({"torch_dtype": "float32"})).unwrap();
    assert!(!whole.plan.notes.iter().any(|note| note.contains("saved in")), "{:?}", whole.plan.notes);
    whole.export(&place.path().join("whole")).unwrap();
    for (name, tensor) in tensors(&place.path().join("whole")) {
        assert_eq!(
            tensor,
            Weights::open(place.path()).unwrap().get(&name).unwrap().to_host().unwrap().cast(DType::F32)
        );
    }
}

#[test]
fn projections_into_the_residual_stream_begin_at_zero_where_that_is_asked_for() {
    let place = tempfile::tempdir().unwrap();
    let drawn = |zero: bool| {
        let folder = place.path().join(format!("zero-{zero}"));
        let options = json!({"init": "random", "init_projections_to_zero": zero, "torch_dtype": "float32"});
        trainer(options).export(&folder).unwrap();
        tensors(&folder)
    };
    let mut zeros = 0;
    for ((name, with), (_, without)) in drawn(true).into_iter().zip(drawn(false)) {
        if name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight") {
            zeros += 1;
            assert!(with.to_f32().iter().all(|x| *x == 0.0) && without.to_f32().iter().any(|x| *x != 0.0), "{name}");
        } else {
            assert_eq!(with, without, "{name}");
        }
    }
    assert_eq!(zeros, 2 * 5);
}

#[test]
fn what_cannot_be_is_reported() {
    for (options, word) in [
        (
            json!({"torch_dtype": "float32", "master_dtype": "bf16"}),
            "`master_dtype: bfloat16`, but trained parameters are stored in float32",
        ),
        (
            json!({"torch_dtype": "float32", "gradient_dtype": "bf16"}),
            "the gradients of float32 weights are kept in float32",
        ),
        (json!({"gradient_dtype": "e5m2"}), "`gradient_dtype` says how `recipe: fp8_hybrid` quantises"),
        (
            json!({"master_dtype": "float16"}),
            "`master_dtype: float16`: master weights are kept in float32, or not at all",
        ),
        (
            json!({"torch_dtype": "float16", "lora": false, "master_dtype": "bf16"}),
            "`master_dtype: bfloat16`, but float16 is trained with master weights in float32",
        ),
        (
            json!({"torch_dtype": "float16", "gradient_dtype": "bf16"}),
            "the gradients of float16 weights are kept in float16",
        ),
        (json!({"grad_accumulation_dtype": "bf16"}), "`grad_accumulation_dtype: bfloat16` is not available yet"),
        (json!({"init_projections_to_zero": true}), "`init_projections_to_zero: true` needs `init: random`"),
    ] {
        let error = try_trainer(source(), &options).map(|_| ()).unwrap_err();
        assert!(error.exit_code() == 2 && error.to_string().contains(word), "{error}");
    }
    for (deterministic, reported) in [(json!(true), 0), (json!("auto"), 0), (json!(false), 1)] {
        let options = json!({"torch_dtype": "bfloat16", "gradient_dtype": "bf16", "deterministic": deterministic});
        let trainer = trainer(options);
        assert_eq!(trainer.plan.compile.compute, DType::BF16);
        let notes = trainer.plan.notes.iter().filter(|note| note.contains("`deterministic: false` changes nothing"));
        assert_eq!(notes.count(), reported, "{deterministic}");
    }
}

#[test]
fn what_decays_is_what_was_recorded() {
    for (name, ir) in [("llama", include_str!("../ir/llama.json")), ("qwen3", include_str!("../ir/qwen3.json"))] {
        let folder = root().join("tests/golden").join(name);
        let curve = std::fs::read_to_string(folder.join("train_curve.json")).unwrap();
        let curve: Value = serde_json::from_str(&curve).unwrap();
        let source = ModelSource::open(&folder, ir).unwrap();
        for (which, lora) in [("full", false), ("lora", true)] {
            let options =
                json!({"model": folder, "lora": lora, "sequence_len": 8, "adapter": lora.then(|| folder.join("lora"))});
            let config = Config::load_json(&options.to_string(), Task::Sft, &[]).unwrap();
            let program = train::Preview::new(&config, &source, &device().machine, None).unwrap().program;
            let of = |decay: bool| {
                let slots = program.layout.parameters.iter().filter(|slot| slot.trainable && slot.decay == decay);
                let mut names: Vec<&str> = slots.map(|slot| slot.name.as_str()).collect();
                names.sort_unstable();
                json!(names)
            };
            assert_eq!(of(true), curve[which]["decay_names"], "{name} {which}");
            if !lora {
                assert_eq!(of(false), curve[which]["no_decay_names"], "{name} {which}");
            }
        }
    }
}
