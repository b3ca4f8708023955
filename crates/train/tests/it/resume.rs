//! Going on with a run that was ended: the same bits as without the end, and nothing that others wrote is touched.

use std::fs;
use std::path::{Path, PathBuf};

use crate::stories::{self, Lines, config, device, events, names, source};
use serde_json::{Value, json};
use train::{Outcome, Result};

fn merged(options: &Value, more: Value) -> Value {
    let mut options = options.clone();
    for (key, value) in more.as_object().unwrap() {
        options[key] = value.clone();
    }
    options
}

/// A run with the options; requested to stop after a number of steps of this process.
fn run(output: &Path, options: &Value, stop_after: Option<usize>) -> (Result<Outcome>, Vec<String>) {
    let mut observer = Lines { stop_after, ..Lines::default() };
    let outcome = train::run(config(output, options), source(), device(), &mut observer);
    (outcome, observer.lines)
}

fn resumed(output: &Path, options: &Value, stop_after: Option<usize>) -> (Result<Outcome>, Vec<String>) {
    run(output, &merged(options, json!({"resume_from_checkpoint": true})), stop_after)
}

#[test]
fn another_arithmetic_is_reported() {
    let place = tempfile::tempdir().unwrap();
    let options = json!({"max_steps": 2, "eval_steps": 100, "lora": true});
    run(place.path(), &options, Some(1)).0.unwrap();
    let mut other = std::sync::Arc::try_unwrap(device()).ok().expect("it is the only reference");
    other.arithmetic = "a CPU of another kind".into();
    let mut observer = Lines::default();
    let again = config(place.path(), &merged(&options, json!({"resume_from_checkpoint": true})));
    train::run(again, source(), std::sync::Arc::new(other), &mut observer).unwrap();
    let reported =
        |line: &String| line.contains("was written on a CPU with") && line.contains("this is a CPU of another kind");
    assert!(observer.lines.iter().any(reported), "{:?}", observer.lines);
}

/// Resumes as [`resumed`], and stops at a question: see [`Lines::stop_at`].
fn stopped_at(output: &Path, options: &Value, at: (usize, usize)) -> (Outcome, Vec<String>) {
    let mut observer = Lines { stop_at: Some(at), ..Lines::default() };
    let options = merged(options, json!({"resume_from_checkpoint": true}));
    let outcome = train::run(config(output, &options), source(), device(), &mut observer).unwrap();
    (outcome, observer.lines)
}

#[test]
fn an_evaluation_is_aborted_and_done_by_the_next_process() {
    let place = tempfile::tempdir().unwrap();
    let (straight, broken) = (place.path().join("straight"), place.path().join("broken"));
    // Batches of a row, so that an evaluation has several; the last step is evaluated in its own right.
    let options = json!({
        "max_steps": 5, "eval_steps": 2, "save_steps": 100, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
    });
    run(&straight, &options, None).0.unwrap();
    // Two steps and the first batch of the evaluation after them; then again, from its beginning; then, after
    // evaluations of steps 2 and 4, the last one, twice.
    for (at, step) in [((2, 3), 2), ((0, 2), 2), ((3, 3), 5), ((0, 1), 5)] {
        let (outcome, lines) = stopped_at(&broken, &options, at);
        assert_eq!(outcome, Outcome::Interrupted(broken.join(format!("checkpoint-{step}"))), "{lines:?}");
        assert!(lines.iter().any(|line| line.contains("the evaluation is aborted")), "{lines:?}");
        assert!(broken.join(format!("checkpoint-{step}")).is_dir());
    }
    let evaluated = |output: &Path| events(output).iter().filter(|of| of["event"] == "evaluation").count();
    assert_eq!(evaluated(&broken), 2, "none of those that were given up is reported");
    assert!(matches!(resumed(&broken, &options, None).0.unwrap(), Outcome::Finished(_)));
    assert_eq!((evaluated(&straight), evaluated(&broken)), (3, 3));
    assert!(trace(&straight, 5) == trace(&broken, 5), "the same bits");
}

/// All numbers that a run leaves: every file of weights and states, and what was logged last for
/// each step.
fn trace(output: &Path, last: u64) -> (Vec<(PathBuf, Vec<u8>)>, Vec<Value>) {
    let folders = [output.join(format!("checkpoint-{last}")), output.join("adapter"), output.join("model")];
    let mut files = Vec::new();
    for folder in folders.iter().filter(|folder| folder.is_dir()) {
        for name in names(folder).into_iter().filter(|name| name.ends_with(".safetensors")) {
            let path = folder.join(name);
            files.push((path.strip_prefix(output).unwrap().to_owned(), fs::read(&path).unwrap()));
        }
    }
    assert!(files.len() >= 3, "weights twice, and states");
    let mut logged: Vec<Value> = Vec::new();
    for mut event in events(output) {
        let kind = event["event"].clone();
        if kind != "step" && kind != "evaluation" {
            continue;
        }
        for of_machine in ["seconds", "tokens_per_second", "data_wait_seconds", "memory", "time"] {
            event.as_object_mut().unwrap().remove(of_machine);
        }
        logged.retain(|known| known["event"] != kind || known["step"] != event["step"]);
        logged.push(event);
    }
    logged.sort_by_key(|event| (event["event"].to_string(), event["step"].as_u64()));
    (files, logged)
}

/// Runs once straight through and once with an end after each of `ends` steps; both leave the same.
fn assert_resumes(options: &Value, ends: &[usize]) -> Vec<Value> {
    let place = tempfile::tempdir().unwrap();
    let (straight, broken) = (place.path().join("straight"), place.path().join("broken"));
    run(&straight, options, None).0.unwrap();
    let (outcome, _) = run(&broken, options, Some(ends[0]));
    assert!(matches!(outcome.unwrap(), Outcome::Interrupted(_)));
    for end in &ends[1..] {
        assert!(matches!(resumed(&broken, options, Some(*end)).0.unwrap(), Outcome::Interrupted(_)));
    }
    let (outcome, lines) = resumed(&broken, options, None);
    assert!(matches!(outcome.unwrap(), Outcome::Finished(_)));
    assert!(lines.iter().any(|line| line.contains("resuming after")), "{lines:?}");
    let last = options["max_steps"].as_u64().unwrap();
    let ((files, logged), (files_again, logged_again)) = (trace(&straight, last), trace(&broken, last));
    assert_eq!(logged, logged_again, "{options}");
    let differing: Vec<&PathBuf> =
        files.iter().zip(&files_again).filter(|(a, b)| a != b).map(|((path, _), _)| path).collect();
    assert!(differing.is_empty() && files.len() == files_again.len(), "{options}: {differing:?}");
    logged
}

#[test]
fn an_adapter_goes_on_with_the_same_bits() {
    // Little text: epochs pass, and the run is ended inside of one.
    let place = tempfile::tempdir().unwrap();
    let text = place.path().join("text.txt");
    let whole = fs::read_to_string(stories::root().join("examples/stories/data/shakespeare.txt")).unwrap();
    fs::write(&text, &whole[..4000]).unwrap();
    let datasets = json!([{"path": text, "type": "text"}]);
    for changed in [
        json!({"lora_dropout": 0.1, "neftune_noise_alpha": 5.0}),
        json!({"torch_dtype": "bfloat16", "optimizer": "adamw_8bit", "sample_packing": false}),
        json!({"optimizer": "normuon"}),
        json!({"torch_dtype": "bfloat16", "lora_dtype": "bfloat16"}),
        // The loss scale is still coming down when the run is ended for the first time.
        json!({"torch_dtype": "float16", "lora_dropout": 0.1}),
        json!({"torch_dtype": "float16", "lora_dtype": "float16", "sample_packing": false}),
        json!({"torch_dtype": "bfloat16", "qlora_bnb": true, "recompute_block": true}),
        json!({"qlora_fp4": true, "init": "random"}),
        json!({"torch_dtype": "bfloat16", "qlora_fp4": true, "recipe": "nvfp4", "fp4_backend": "emulate"}),
        json!({"lora_dora": true, "lora_dropout": 0.1}),
        json!({"lora_dora": true, "torch_dtype": "bfloat16", "qlora_bnb": true, "lora_dropout": 0.0}),
        json!({"torch_dtype": "bfloat16", "qlora_bnb": true, "modules_to_save": ["embed_tokens", "layers.1.self_attn"]}),
    ] {
        let options = merged(
            &json!({"datasets": datasets, "max_steps": 7, "eval_steps": 2, "save_steps": 2, "warmup_steps": 3}),
            changed,
        );
        let logged = assert_resumes(&options, &[3, 1]);
        let epochs: Vec<f64> = logged.iter().filter_map(|event| event["epoch"].as_f64()).collect();
        assert!(epochs[2].fract() > 0.05 && epochs[6] > 1.0, "{epochs:?}");
    }
}

#[test]
fn a_model_goes_on_with_the_same_bits() {
    for changed in [
        json!({"optimizer": "adamw", "init": "random"}),
        json!({"torch_dtype": "bfloat16", "optimizer": "adamw", "neftune_noise_alpha": 10.0}),
        json!({"torch_dtype": "bfloat16", "master_dtype": "float32"}),
        json!({"torch_dtype": "bfloat16", "optimizer": "normuon"}),
        json!({"torch_dtype": "bfloat16", "optimizer": "normuon", "master_dtype": "float32"}),
        json!({"torch_dtype": "bfloat16", "optimizer": "adamw_8bit", "sample_packing": false}),
        json!({"torch_dtype": "float16"}),
        json!({"torch_dtype": "float16", "optimizer": "adamw_8bit", "sample_packing": false}),
        json!({"torch_dtype": "float16", "optimizer": "normuon", "max_steps": 8}),
    ] {
        let options = merged(&json!({"lora": false, "learning_rate": 1e-3, "max_steps": 5, "eval_steps": 2}), changed);
        assert_resumes(&options, &[2]);
    }
}

#[test]
fn rows_of_a_step_may_be_split_again() {
    let place = tempfile::tempdir().unwrap();
    let options = json!({"lora": false, "learning_rate": 1e-3, "max_steps": 6, "save_steps": 3});
    let losses = |output: &Path| stories::losses(&events(output), "step");
    let straight = place.path().join("straight");
    run(&straight, &options, None).0.unwrap();
    for (rows, steps) in [(8, 1), (1, 8)] {
        let output = place.path().join(format!("{rows}x{steps}"));
        run(&output, &options, Some(3)).0.unwrap();
        let split = json!({"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps});
        let (outcome, lines) = resumed(&output, &merged(&options, split), None);
        outcome.unwrap();
        assert!(lines.iter().any(|line| line.contains("it had 4 × 2")), "{lines:?}");
        for (step, (found, expected)) in losses(&output).iter().zip(losses(&straight)).enumerate() {
            assert!((found / expected - 1.0).abs() <= 1e-5, "{rows} × {steps}, step {step}: {found} {expected}");
        }
    }
    let output = place.path().join("more");
    run(&output, &options, Some(3)).0.unwrap();
    let (outcome, _) = resumed(&output, &merged(&options, json!({"gradient_accumulation_steps": 3})), None);
    let text = outcome.unwrap_err().to_string();
    assert!(text.contains("4 × 3 = 12 rows") && text.contains("4 × 2 = 8"), "{text}");
}

#[test]
fn only_marked_options_may_change() {
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("out");
    let options = json!({"max_steps": 4, "warmup_ratio": 0.5});
    run(&output, &options, Some(2)).0.unwrap();
    let before = fs::read(output.join("manifest.json")).unwrap();
    let changed = json!({"weight_decay": 0.2, "lora_rank": 4, "save_steps": 3, "max_steps": 5});
    let error = resumed(&output, &merged(&options, changed), None).0.unwrap_err();
    let text = error.to_string();
    assert_eq!(error.exit_code(), 2);
    assert!(text.contains("`weight_decay` is `0.2`, but the checkpoint was written with `0.1`"), "{text}");
    assert!(text.contains("`lora_rank` is `4`, but the checkpoint was written with `8`"), "{text}");
    assert!(!text.contains("save_steps") && !text.contains("max_steps"), "{text}");
    assert_eq!(fs::read(output.join("manifest.json")).unwrap(), before);

    let datasets = json!([{"path": "examples/other.txt", "type": "text"}]);
    let error = resumed(&output, &merged(&options, json!({"datasets": datasets})), None).0.unwrap_err().to_string();
    assert!(error.contains("`datasets` is") || error.contains("other.txt"), "{error}");

    // The same choice in words.
    let options = merged(&options, json!({"torch_dtype": "float32"}));
    let (outcome, lines) = resumed(&output, &merged(&options, json!({"save_steps": 3, "max_steps": 5})), None);
    outcome.unwrap();
    assert!(lines.iter().any(|line| line.contains("`warmup_steps` is `auto` (3), it was `auto` (2)")), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("`max_steps` is `5`, it was `4`")), "{lines:?}");
    assert!(output.join("checkpoint-5").is_dir());
}

#[test]
fn a_resumed_run_may_have_another_learning_rate_and_more_epochs() {
    let place = tempfile::tempdir().unwrap();
    let (output, rows) = (place.path().join("out"), place.path().join("rows.jsonl"));
    let line = |i: usize| json!({"text": "a cat and a dog ".repeat(3 + i % 4)}).to_string() + "\n";
    fs::write(&rows, (0..120).map(line).collect::<String>()).unwrap();
    let options = json!({
        "datasets": [{"path": rows, "type": "text"}], "max_steps": -1, "num_epochs": 1, "eval_steps": 1000,
        "save_steps": 1000, "lr_scheduler_type": "constant",
    });
    run(&output, &options, None).0.unwrap();
    let steps = stories::losses(&events(&output), "step").len();
    let changed = json!({"learning_rate": 5e-4, "num_epochs": 2.5});
    let (outcome, lines) = resumed(&output, &merged(&options, changed), None);
    outcome.unwrap();
    assert!(lines.iter().any(|line| line.contains("`learning_rate` is `0.0005`, it was `0.01`")), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("`num_epochs` is `2.5`, it was `1`")), "{lines:?}");
    let events = events(&output);
    let rates: Vec<f64> =
        events.iter().filter(|of| of["event"] == "step").map(|of| of["learning_rate"].as_f64().unwrap()).collect();
    assert!(rates[..steps].iter().all(|rate| *rate == 1e-2) && rates[steps..].iter().all(|rate| *rate == 5e-4));
    let expected = steps as f64 * 2.5;
    assert!((rates.len() as f64 - expected).abs() <= 2.0, "{} steps, about {expected} expected", rates.len());
}

#[test]
fn data_that_changed_under_its_name_are_noticed() {
    let place = tempfile::tempdir().unwrap();
    let (output, data) = (place.path().join("out"), place.path().join("data.txt"));
    let text = "A tale of two cities. It was the best of times, it was the worst of times. ".repeat(200);
    fs::write(&data, &text).unwrap();
    let options = json!({"datasets": [{"path": data, "type": "text"}], "max_steps": 4, "validation_split_ratio": 0});
    run(&output, &options, Some(2)).0.unwrap();
    fs::write(&data, text.replacen("cities", "cities!", 1)).unwrap();
    let error = resumed(&output, &options, None).0.unwrap_err();
    assert!(error.exit_code() == 2 && error.to_string().contains("the documents are not those"), "{error}");
}

#[test]
fn other_documents_held_out_are_reported_and_the_run_continues() {
    let place = tempfile::tempdir().unwrap();
    let (output, held_out) = (place.path().join("out"), place.path().join("held_out.txt"));
    let text = "All the world's a stage, and all the men and women merely players. ".repeat(40);
    fs::write(&held_out, &text).unwrap();
    let options = json!({"validation_datasets": [{"path": held_out, "type": "text"}], "max_steps": 4, "eval_steps": 2});
    run(&output, &options, Some(2)).0.unwrap();
    let reported =
        |lines: &[String]| lines.iter().any(|line| line.contains("the documents held out for evaluation are not"));
    let (outcome, lines) = resumed(&output, &options, Some(1));
    assert!(outcome.is_ok() && !reported(&lines), "the same documents: {lines:?}");
    fs::write(&held_out, text.replacen("stage", "page", 1)).unwrap();
    let (outcome, lines) = resumed(&output, &options, None);
    assert!(matches!(outcome.unwrap(), Outcome::Finished(_)) && reported(&lines), "{lines:?}");
}

#[test]
fn an_evaluation_that_was_not_reached_is_made_up_for_once() {
    // The run is ended at a step with an evaluation: the checkpoint comes first, and then there is no more time.
    let options = json!({"max_steps": 6, "eval_steps": 2, "save_steps": 100});
    let logged = assert_resumes(&options, &[2, 2]);
    let evaluated: Vec<&Value> = logged.iter().filter(|e| e["event"] == "evaluation").map(|e| &e["step"]).collect();
    assert_eq!(evaluated, [2, 4, 6]);
}

#[test]
fn weights_that_changed_under_an_adapter_are_noticed_before_anything_is_written() {
    let place = tempfile::tempdir().unwrap();
    let (output, model) = (place.path().join("out"), place.path().join("model"));
    fs::create_dir(&model).unwrap();
    let shipped = stories::root().join("examples/stories/model");
    for name in names(&shipped) {
        fs::copy(shipped.join(&name), model.join(&name)).unwrap();
    }
    let from = || {
        let ir = include_str!("../ir/stories.json");
        std::sync::Arc::new(train::ModelSource::open(&model, ir).unwrap())
    };
    let options = json!({"model": model, "max_steps": 4});
    let go = |more: Value, stop_after: Option<usize>| {
        let mut observer = Lines { stop_after, ..Lines::default() };
        train::run(config(&output, &merged(&options, more)), from(), device(), &mut observer)
    };
    go(json!({}), Some(2)).unwrap();
    let weights = model.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    let manifest = || fs::read(output.join("manifest.json")).unwrap();
    let before = (manifest(), events(&output).len());
    let error = go(json!({"resume_from_checkpoint": true}), None).unwrap_err();
    assert!(error.exit_code() == 2 && error.to_string().contains("the model's weights are not those"), "{error}");
    assert!((manifest(), events(&output).len()) == before);
}

#[test]
fn without_a_checkpoint_a_run_starts_at_step_0_and_says_so() {
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("out");
    let options = json!({"max_steps": 2});
    let (outcome, lines) = resumed(&output, &options, None);
    outcome.unwrap();
    assert!(lines.iter().any(|line| line.contains("there is no checkpoint of this run")), "{lines:?}");
    // A run that has come to its end has nothing to do but to give its result again.
    let result = |output: &Path| fs::read(output.join("adapter/adapter_model.safetensors")).unwrap();
    let before = result(&output);
    let (outcome, lines) = resumed(&output, &options, None);
    assert_eq!(outcome.unwrap(), Outcome::Finished(output.join("adapter")));
    assert!(!lines.iter().any(|line| line.starts_with("Step ")) && result(&output) == before);
}

#[test]
fn a_damaged_checkpoint_is_set_aside_and_named() {
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("out");
    let options = json!({"max_steps": 6, "save_steps": 2});
    run(&output, &options, Some(5)).0.unwrap();
    let damage = |step: u64, file: &str, at: usize| {
        let path = output.join(format!("checkpoint-{step}/{file}"));
        let mut bytes = fs::read(&path).unwrap();
        bytes[at] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let optimizer = output.join("checkpoint-5/optimizer.safetensors");
    let bytes = fs::read(&optimizer).unwrap();
    fs::write(&optimizer, &bytes[..bytes.len() / 2]).unwrap();
    let (outcome, lines) = resumed(&output, &options, Some(1));
    outcome.unwrap();
    assert!(
        lines.iter().any(|line| line.contains("checkpoint-5 is damaged (`optimizer.safetensors` has")),
        "{lines:?}"
    );
    assert!(lines.iter().any(|line| line.contains("resuming after 4 steps")), "{lines:?}");
    let kept = output.join("damaged-checkpoint-5-1/optimizer.safetensors");
    assert_eq!(fs::read(kept).unwrap().len(), bytes.len() / 2, "nothing is thrown away");

    // What was requested by its path is not replaced by something else.
    damage(5, "adapter_model.safetensors", 200);
    let requested = merged(&options, json!({"resume_from_checkpoint": output.join("checkpoint-5")}));
    let error = run(&output, &requested, None).0.unwrap_err();
    assert!(error.exit_code() == 2 && error.to_string().contains("other content than when it was written"), "{error}");

    for step in [2, 4] {
        let state = fs::read_to_string(output.join(format!("checkpoint-{step}/state.json"))).unwrap_or_default();
        if !state.is_empty() {
            let changed = state.replacen("\"micro_step\": ", "\"micro_step\": 1", 1);
            fs::write(output.join(format!("checkpoint-{step}/state.json")), changed).unwrap();
        }
    }
    let error = resumed(&output, &options, None).0.unwrap_err();
    assert!(error.exit_code() == 1 && error.to_string().contains("every checkpoint of this run is damaged"), "{error}");
    assert!(output.join("checkpoint-5").is_dir(), "nothing is set aside without something to go on from");
}

#[test]
fn a_run_may_begin_at_a_checkpoint_of_another() {
    let place = tempfile::tempdir().unwrap();
    let (first, second) = (place.path().join("first"), place.path().join("second"));
    let options = json!({"max_steps": 6, "save_steps": 2});
    run(&first, &options, None).0.unwrap();
    let before = names(&first);
    let requested = merged(&options, json!({"resume_from_checkpoint": first.join("checkpoint-4")}));
    run(&second, &requested, None).0.unwrap();
    let result = |output: &Path| fs::read(output.join("adapter/adapter_model.safetensors")).unwrap();
    assert_eq!(result(&first), result(&second));
    assert_eq!(names(&first), before);
    assert!(!second.join("checkpoint-2").exists() && second.join("checkpoint-6").is_dir());
    let error = run(&second, &merged(&requested, json!({"run_name": "test"})), None).0.unwrap_err();
    assert!(error.to_string().contains("holds another run than"), "{error}");
}

#[test]
fn a_run_goes_back_to_an_earlier_checkpoint_of_its_own() {
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("out");
    let options = json!({"max_steps": 6, "save_steps": 2, "save_total_limit": 3});
    run(&output, &options, None).0.unwrap();
    let before = trace(&output, 6);
    let requested = merged(&options, json!({"resume_from_checkpoint": output.join("checkpoint-2")}));
    run(&output, &requested, Some(1)).0.unwrap();
    assert!(output.join("checkpoint-3").is_dir(), "what was written last is kept, whatever its number");
    let (outcome, lines) = resumed(&output, &options, None);
    outcome.unwrap();
    assert!(lines.iter().any(|line| line.contains("resuming after 3 steps")), "{lines:?}");
    assert!(trace(&output, 6) == before, "the same bits on the second way");
}

#[test]
fn a_folder_that_was_moved_is_still_the_runs() {
    let place = tempfile::tempdir().unwrap();
    let (output, moved) = (place.path().join("out"), place.path().join("moved"));
    let options = json!({"max_steps": 6, "save_steps": 2, "save_total_limit": 2});
    run(&output, &options, Some(4)).0.unwrap();
    fs::rename(&output, &moved).unwrap();
    fs::write(moved.join("checkpoint-2/note.txt"), "by hand").unwrap();
    resumed(&moved, &options, None).0.unwrap();
    let checkpoints: Vec<String> = names(&moved).into_iter().filter(|name| name.starts_with("checkpoint")).collect();
    assert_eq!(
        checkpoints,
        ["checkpoint-2", "checkpoint-4", "checkpoint-6"],
        "a changed one is not the run's any more"
    );
    assert_eq!(names(&moved).iter().filter(|name| name.starts_with("log-")).count(), 1);
    assert!(!output.exists());
}

#[test]
fn two_processes_do_not_write_one_run() {
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("out");
    fs::create_dir(&output).unwrap();
    let held = fs::File::open(&output).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let error = run(&output, &json!({}), None).0.unwrap_err();
    assert!(error.exit_code() == 2 && error.to_string().contains("another process is running in"), "{error}");
    drop(held);
    run(&output, &json!({"max_steps": 1}), None).0.unwrap();
}

#[test]
fn a_folder_of_checkpoints_that_vanishes_ends_the_run_and_keeps_what_was_saved() {
    let place = tempfile::tempdir().unwrap();
    let (output, checkpoints, away) =
        (place.path().join("out"), place.path().join("checkpoints"), place.path().join("away"));
    struct Unmounted<'a>(&'a Path, &'a Path, bool);
    impl train::Observer for Unmounted<'_> {
        fn line(&mut self, _: &str) {}
        fn interrupted(&mut self) -> bool {
            if !self.2 && self.0.join("checkpoint-2").is_dir() {
                self.2 = true;
                fs::rename(self.0, self.1).unwrap();
                fs::create_dir(self.0).unwrap();
            }
            false
        }
    }
    let options = json!({"max_steps": 8, "save_steps": 2, "checkpoint_dir": checkpoints});
    let mut observer = Unmounted(&checkpoints, &away, false);
    let error = train::run(config(&output, &options), source(), device(), &mut observer).unwrap_err();
    assert!(error.exit_code() == 1 && error.to_string().contains("is something unmounted?"), "{error}");
    let kept: Vec<String> = names(&away).into_iter().filter(|name| !name.starts_with('.')).collect();
    assert!(names(&checkpoints).is_empty() && kept.first().is_some_and(|name| name == "checkpoint-2"), "{kept:?}");
    fs::remove_dir(&checkpoints).unwrap();
    fs::rename(&away, &checkpoints).unwrap();
    let (outcome, lines) = resumed(&output, &options, None);
    outcome.unwrap();
    assert!(lines.iter().any(|line| line.contains("resuming after")), "{lines:?}");
}
