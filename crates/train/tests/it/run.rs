//! A whole run on the shipped example: a real pretrained model on real text.

use std::path::Path;
use std::sync::Arc;

use crate::stories::{Lines, config, device, events, losses, names, source};
use data::Batch;
use serde_json::{Value, json};
use tensor::DType;
use train::{Device, DeviceRequest, Model, Outcome, TrainError, Trainer};

#[test]
fn an_adapter_is_trained_saved_and_exported() {
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("out");
    let mut observer = Lines::default();
    let outcome = train::run(config(&output, &json!({})), source(), device(), &mut observer).unwrap();
    let result = output.join("adapter");
    assert_eq!(outcome, Outcome::Finished(result.clone()));

    let events = events(&output);
    let (steps, evaluations) = (losses(&events, "step"), losses(&events, "evaluation"));
    assert_eq!((steps.len(), evaluations.len()), (12, 2));
    assert!(evaluations[1] < evaluations[0] && steps[11] < steps[0] - 0.2, "{steps:?} {evaluations:?}");
    assert!(observer.lines.iter().any(|line| line.starts_with("Step 0/12 | Loss: ")), "{:?}", observer.lines);
    let checkpoints: Vec<String> = names(&output).into_iter().filter(|n| n.starts_with("checkpoint-")).collect();
    assert_eq!(checkpoints, ["checkpoint-10", "checkpoint-12"]);
    let expected = [
        "adapter_config.json",
        "adapter_model.safetensors",
        "generation_config.json",
        "optimizer.safetensors",
        "state.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(names(&output.join("checkpoint-12")), expected);
    let held: Vec<u64> =
        events.iter().filter(|of| of["held_seconds"].is_number()).filter_map(|of| of["step"].as_u64()).collect();
    assert_eq!(held, [5, 10, 12], "the log says how long steps were held");
    let resolved = std::fs::read_to_string(output.join("resolved.yaml")).unwrap();
    assert!(resolved.contains("torch_dtype: float32  # auto: "), "{resolved}");
    assert!(resolved.contains("recompute_att: false  # auto: "), "the plan's decisions are recorded: {resolved}");

    let manifest: Value =
        serde_json::from_str(&std::fs::read_to_string(output.join("manifest.json")).unwrap()).unwrap();
    let absolute = output.canonicalize().unwrap();
    let expected = ["checkpoint-10", "checkpoint-12", "adapter"].map(|name| json!(absolute.join(name)));
    let written: Vec<&Value> = manifest["written"].as_array().unwrap().iter().map(|of| &of["path"]).collect();
    assert_eq!((written, &manifest["choices"]), (expected.iter().collect(), &json!({})), "the CPU times nothing");

    // The exported adapter is the trained one: at the last step it equals the last checkpoint.
    let file = "adapter_model.safetensors";
    let bytes = |folder: &Path| std::fs::read(folder.join(file)).unwrap();
    assert_eq!(bytes(&result), bytes(&output.join("checkpoint-12")));
    let batch = Batch::from_labels(1, 8, (1..9).collect(), &[1; 8], None, None).unwrap();
    let logits = |adapter: Option<&Path>| {
        Model::load(device(), source(), adapter, DType::F32).unwrap().forward(&batch, false).unwrap().logits
    };
    assert_ne!(logits(Some(&result)), logits(None));

    let again = train::run(config(&output, &json!({})), source(), device(), &mut observer).unwrap_err();
    assert!(matches!(&again, TrainError::Config(_)) && again.exit_code() == 2, "{again}");
}

#[test]
fn a_model_is_trained_whole_in_bf16_on_padded_rows() {
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("out");
    let changed = json!({
        "lora": false, "torch_dtype": "bfloat16", "optimizer": "adamw_8bit", "sample_packing": false,
        "learning_rate": 1e-3, "validation_split_ratio": 0, "save_steps": 100,
    });
    let mut observer = Lines::default();
    let outcome = train::run(config(&output, &changed), source(), device(), &mut observer).unwrap();
    assert_eq!(outcome, Outcome::Finished(output.join("model")));
    let steps = losses(&events(&output), "step");
    assert!(steps[11] < steps[0], "{steps:?}");
    let written: Value =
        serde_json::from_str(&std::fs::read_to_string(output.join("model/config.json")).unwrap()).unwrap();
    let dtype = written.get("torch_dtype").or(written.get("dtype"));
    assert_eq!(dtype.unwrap(), "bfloat16");
    assert!(output.join("model/tokenizer.json").is_file());
}

#[test]
fn the_same_run_gives_the_same_bits() {
    let bits = |threads: usize| {
        let place = tempfile::tempdir().unwrap();
        let cpu = options::Setting::Value(train::config::Device::Cpu);
        let request = DeviceRequest { device: cpu, threads: Some(threads), ..DeviceRequest::default() };
        let device = Arc::new(Device::open(&request).unwrap());
        let changed = json!({"max_steps": 3, "lora_dropout": 0.1});
        train::run(config(&place.path().join("out"), &changed), source(), device, &mut Lines::default()).unwrap();
        std::fs::read(place.path().join("out/adapter/adapter_model.safetensors")).unwrap()
    };
    let one = bits(1);
    assert_eq!(one, bits(1));
    assert_eq!(one, bits(3));
}

#[test]
fn an_interrupted_run_saves_first() {
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("out");
    let mut observer = Lines { stop_after: Some(3), ..Lines::default() };
    let outcome = train::run(config(&output, &json!({})), source(), device(), &mut observer).unwrap();
    assert_eq!(outcome, Outcome::Interrupted(output.join("checkpoint-3")));
    let state = std::fs::read_to_string(output.join("checkpoint-3/state.json")).unwrap();
    let state: Value = serde_json::from_str(&state).unwrap();
    assert_eq!((&state["step"], &state["updates"], &state["micro_step"]), (&json!(3), &json!(3), &json!(6)));
    assert_eq!(state["choices"], json!({}));
    assert!(!output.join("adapter").exists());
}

#[test]
fn a_run_from_nothing_learns() {
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("out");
    let changed = json!({"init": "random", "lora": false, "learning_rate": 3e-3, "save_steps": 100});
    train::run(config(&output, &changed), source(), device(), &mut Lines::default()).unwrap();
    let steps = losses(&events(&output), "step");
    assert!((steps[0] - (512f64).ln()).abs() < 0.3, "an untrained model knows nothing: {}", steps[0]);
    assert!(steps[11] < steps[0] - 0.5, "{steps:?}");
}

#[test]
fn a_run_that_diverges_ends_with_its_own_exit_code() {
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("out");
    let changed = json!({"learning_rate": 1e30, "max_grad_norm": 0, "lora": false});
    let error = train::run(config(&output, &changed), source(), device(), &mut Lines::default()).unwrap_err();
    assert!(matches!(error, TrainError::Diverged { .. }) && error.exit_code() == 5, "{error}");
    let last = events(&output).pop().unwrap();
    assert_eq!((&last["event"], &last["exit_code"]), (&json!("failed"), &json!(5)));
}

#[test]
fn a_run_does_not_start_where_something_else_lies() {
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("out");
    let files =
        ["adapter/adapter_config.json", "checkpoint-7/state.json", "resolved.yaml"].map(|name| output.join(name));
    for file in &files {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, "theirs").unwrap();
    }
    let mut observer = Lines::default();
    let error = train::run(config(&output, &json!({})), source(), device(), &mut observer).unwrap_err();
    let TrainError::Config(problems) = &error else { panic!("{error}") };
    assert_eq!((problems.len(), observer.steps), (3, 0), "{error}");
    let text = error.to_string();
    assert!(text.contains("adapter` is an adapter (`adapter_config.json`) that this run did not write"), "{text}");
    assert!(files.iter().all(|file| std::fs::read_to_string(file).unwrap() == "theirs"));
}

#[test]
fn only_what_a_trainer_wrote_is_written_again() {
    let place = tempfile::tempdir().unwrap();
    let trainer = || Trainer::new(config(&place.path().join("out"), &json!({})), source(), device()).unwrap();
    let (mut first, mut second) = (trainer(), trainer());
    let (result, checkpoint) = (place.path().join("result"), place.path().join("checkpoint"));
    let read = |folder: &Path| std::fs::read(folder.join("adapter_model.safetensors")).unwrap();
    first.export(&result).unwrap();
    first.save(&checkpoint).unwrap();
    let before = [read(&result), read(&checkpoint)];
    second.next_step(None).unwrap().unwrap();
    for error in [second.export(&result), second.save(&checkpoint)].map(Result::unwrap_err) {
        assert!(error.exit_code() == 2 && error.to_string().contains("nothing is overwritten"), "{error}");
    }
    assert_eq!([read(&result), read(&checkpoint)], before);

    first.next_step(Some(1e-2)).unwrap().unwrap();
    first.export(&result).unwrap();
    first.save(&checkpoint).unwrap();
    assert!(read(&result) != before[0] && read(&result) == read(&checkpoint));
    assert_eq!(names(place.path()), ["checkpoint", "result"], "nothing is left over");
}

#[test]
fn a_suppressed_update_leaves_no_trace() {
    let place = tempfile::tempdir().unwrap();
    let trained = |infinite_first: bool| {
        let name = if infinite_first { "suppressed" } else { "plain" };
        let mut trainer =
            Trainer::new(config(&place.path().join("out"), &json!({"lora_dropout": 0})), source(), device()).unwrap();
        let batch = |weight: f32| {
            vec![
                Batch::from_labels(1, 8, (1..9).collect(), &[1, 2, 3, 4, 5, 6, 7, 8], None, Some(&[weight; 8]))
                    .unwrap(),
            ]
        };
        if infinite_first {
            assert!(!trainer.step(&batch(f32::MAX), Some(1e-2)).unwrap().applied);
        }
        for _ in 0..2 {
            assert!(trainer.step(&batch(1.0), Some(1e-2)).unwrap().applied);
        }
        let folder = place.path().join(name);
        trainer.save(&folder).unwrap();
        let state: Value = serde_json::from_str(&std::fs::read_to_string(folder.join("state.json")).unwrap()).unwrap();
        assert_eq!((&state["step"], &state["updates"]), (&json!(2 + u64::from(infinite_first)), &json!(2)));
        ["adapter_model.safetensors", "optimizer.safetensors"].map(|file| std::fs::read(folder.join(file)).unwrap())
    };
    assert!(trained(true) == trained(false), "moments and bias corrections know nothing of the suppressed step");
}
