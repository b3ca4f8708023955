//! Observations of a run: evaluation, breakdowns of time and memory, the place where a divergence began. None of them
//! changes a bit.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::stories::{self, Lines, config, device, events, source};
use program::Machine;
use serde_json::{Value, json};
use train::{Device, DeviceRequest, Preview};

fn run(output: &Path, options: &Value) -> Vec<String> {
    let mut observer = Lines::default();
    train::run(config(output, options), source(), device(), &mut observer).unwrap();
    observer.lines
}

fn trained(output: &Path) -> [Vec<u8>; 2] {
    ["adapter/adapter_model.safetensors", "checkpoint-4/optimizer.safetensors"]
        .map(|file| fs::read(output.join(file)).unwrap())
}

fn of_kind(output: &Path, kind: &str) -> Vec<Value> {
    events(output).into_iter().filter(|event| event["event"] == kind).collect()
}

#[test]
fn looking_at_a_run_does_not_change_it() {
    let place = tempfile::tempdir().unwrap();
    let (plain, watched) = (place.path().join("plain"), place.path().join("watched"));
    let options = json!({"max_steps": 4, "eval_steps": 100, "lora_dropout": 0.1, "validation_split_ratio": 0.1});
    run(&plain, &options);
    let mut more = options.clone();
    for (key, value) in
        [("eval_steps", json!(1)), ("debug_time_breakdown", true.into()), ("debug_memory_breakdown", true.into())]
    {
        more[key] = value;
    }
    let lines = run(&watched, &more);
    assert!(trained(&plain) == trained(&watched));
    assert_eq!((of_kind(&plain, "evaluation").len(), of_kind(&watched, "evaluation").len()), (1, 4));
    assert_eq!(of_kind(&plain, "evaluation")[0]["loss"], of_kind(&watched, "evaluation")[3]["loss"]);

    assert!(lines.iter().any(|line| line.starts_with("Time of step 2, instruction by instruction")), "{lines:?}");
    let times = &of_kind(&watched, "time_breakdown")[0];
    let classes = times["classes"].as_array().unwrap();
    let named = |name: &str| classes.iter().find(|of| of["class"] == name).unwrap_or_else(|| panic!("{name}: {times}"));
    assert!(named("gemm, forward")["flops"].as_f64().unwrap() > 0.0);
    assert!(named("gemm, backward")["seconds"].as_f64().unwrap() > 0.0);
    assert!(classes.iter().any(|of| of["class"].as_str().unwrap().ends_with(", update")), "{times}");
    let sum: f64 = classes.iter().map(|of| of["seconds"].as_f64().unwrap()).sum();
    let step = of_kind(&watched, "step")[2]["seconds"].as_f64().unwrap();
    assert!(sum > 0.5 * step && sum < step, "the instructions are the step: {sum} of {step}");

    assert!(lines.iter().any(|line| line.contains("MiB  activations")), "{lines:?}");
    let memory = of_kind(&watched, "memory_breakdown")[0]["memory"].clone();
    for of in memory["classes"].as_array().unwrap().iter().filter(|of| of["class"] != "scratch") {
        assert_eq!(of["planned"], of["allocated"], "{of}");
    }
    assert!(of_kind(&plain, "memory_breakdown").is_empty() && of_kind(&plain, "time_breakdown").is_empty());
}

#[test]
fn prompts_are_answered_at_every_evaluation() {
    let place = tempfile::tempdir().unwrap();
    let (plain, sampled) = (place.path().join("plain"), place.path().join("sampled"));
    // Rows of several lengths: shapes come up between the answers.
    let options = json!({
        "max_steps": 4, "eval_steps": 2, "validation_split_ratio": 0.1, "learning_rate": 0.01, "sample_packing": false,
    });
    run(&plain, &options);
    let mut more = options.clone();
    more["sample_prompts"] = json!(["Once upon a time", "Lily", "Tom and his dog went to the"]);
    more["sample_tokens"] = 12.into();
    let lines = run(&sampled, &more);
    assert!(trained(&plain) == trained(&sampled));
    assert!(of_kind(&plain, "samples").is_empty());
    let found = of_kind(&sampled, "samples");
    let steps: Vec<u64> = found.iter().map(|event| event["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [2, 4]);
    assert_eq!(lines.iter().filter(|line| line.starts_with("Sample after 4 steps: \"")).count(), 3, "{lines:?}");
    let opening = of_kind(&sampled, "start").remove(0);
    let planned = opening["plan"]["memory"].as_array().unwrap().iter().find(|line| line["class"] == "cache");
    assert!(planned.unwrap()["bytes"].as_u64().unwrap() > 0);
    let adapter = Some(sampled.join("adapter"));
    assert_answers(&found[1], train::Generator::new(device(), source(), adapter, tensor::DType::F32).unwrap());
}

/// The answers are those of a result.
#[track_caller]
fn assert_answers(event: &Value, mut generator: train::Generator) {
    let given = [("max_new_tokens", "12")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    let given = train::GenerationOptions::read(&given).unwrap();
    for sample in event["samples"].as_array().unwrap() {
        let prompt = train::Prompt::from_json(&sample["prompt"]).unwrap();
        let mut generation = train::Generation::start(&mut generator, &[prompt], &given).unwrap();
        let (mut text, mut tokens) = (String::new(), 0);
        while !generation.is_done() {
            for piece in generation.step(&mut generator).unwrap() {
                (text, tokens) = (text + &piece.text, generation.answer(0).len());
            }
        }
        assert_eq!((sample["text"].as_str(), sample["tokens"].as_u64()), (Some(&*text), Some(tokens as u64)));
    }
}

/// Several ranks answer prompts as one rank does, from the same weights. With `SUROGATE_TEST_DEVICE=cuda` on GPUs.
#[test]
fn prompts_are_answered_by_several_ranks() {
    let base = json!({
        "max_steps": 4, "eval_steps": 2, "save_steps": 4, "validation_split_ratio": 0.1, "learning_rate": 0.01,
        "sample_packing": false, "device": stories::device_name(), "torch_dtype": "float32",
    });
    let prompts = json!({
        "sample_prompts": ["Once upon a time", "Lily", "Tom and his dog went to the"], "sample_tokens": 12,
    });
    for (ranks, more) in [
        (2, json!({"zero_level": 1})),
        (3, json!({"zero_level": 2, "lora": false, "learning_rate": 1e-3})),
        (2, json!({"zero_level": 3, "lora": false, "optimizer": "normuon", "learning_rate": 1e-3})),
        (3, json!({"zero_level": 3})),
        (2, json!({"zero_level": 3, "sequence_parallel_size": 2, "lora": false, "learning_rate": 1e-3})),
    ] {
        let place = tempfile::tempdir().unwrap();
        let of = |name: &str, prompts: &Value| {
            let mut options = base.clone();
            let all = [&more, &json!({"gpus": ranks}), prompts].map(|of| of.as_object().unwrap().clone());
            options.as_object_mut().unwrap().extend(all.into_iter().flatten());
            let output = place.path().join(name);
            let config = config(&output, &options);
            train::run(config.clone(), source(), opened(&config), &mut Lines::default()).unwrap();
            output
        };
        let (plain, sampled) = (of("plain", &json!({})), of("sampled", &prompts));
        // The program of GPUs has the same entries.
        let mut options = json!({"device": "auto", "gpus": ranks});
        let all = [&more, &prompts].map(|of| of.as_object().unwrap().clone());
        options.as_object_mut().unwrap().extend(all.into_iter().flatten());
        Preview::new(&config(place.path(), &options), &source(), &Machine::h200(), None).unwrap();
        let states = |of: &Path| fs::read(of.join("checkpoint-4/optimizer.safetensors")).unwrap();
        assert!(states(&plain) == states(&sampled), "{more}: answers move the run");
        let found = of_kind(&sampled, "samples");
        let steps: Vec<u64> = found.iter().map(|event| event["step"].as_u64().unwrap()).collect();
        assert_eq!(steps, [2, 4], "{more}");
        let (model, adapter) = (sampled.join("model"), Some(sampled.join("adapter")).filter(|of| of.is_dir()));
        let source = if adapter.is_some() { source() } else { stories::source_at(&model) };
        let one = opened(&config(place.path(), &base));
        assert_answers(&found[1], train::Generator::new(one, source, adapter, tensor::DType::F32).unwrap());
    }
}

/// Programs that generate have caches before the states of a recipe: what these are stays the same.
#[test]
fn answers_leave_the_scales_of_a_recipe_alone() {
    for ranks in [1, 2] {
        let place = tempfile::tempdir().unwrap();
        let of = |prompts: &[&str]| {
            let options = json!({
                "max_steps": 4, "eval_steps": 2, "save_steps": 4, "validation_split_ratio": 0.1, "learning_rate": 0.01,
                "recipe": "fp8_hybrid", "fp8_amax_history": 2, "device": stories::device_name(), "gpus": ranks,
                "sample_prompts": prompts, "sample_tokens": 4,
            });
            let output = place.path().join(prompts.len().to_string());
            let config = config(&output, &options);
            train::run(config.clone(), source(), opened(&config), &mut Lines::default()).unwrap();
            output
        };
        let (plain, sampled) = (of(&[]), of(&["Once upon a time"]));
        for file in ["optimizer.safetensors", "fp8_state.safetensors"] {
            let read = |of: &Path| fs::read(of.join("checkpoint-4").join(file)).unwrap();
            assert!(read(&plain) == read(&sampled), "{ranks} ranks: answers move {file}");
        }
        let flushed = |of: &Path| of_kind(of, "step")[0]["fp8_flushed"].clone();
        assert!(flushed(&plain).is_object() && flushed(&plain) == flushed(&sampled), "{ranks} ranks");
    }
}

/// Opens the device that a configuration runs on.
fn opened(config: &train::config::Config) -> Arc<Device> {
    let request = DeviceRequest { threads: Some(2), ..DeviceRequest::of(config, Vec::new()) };
    Arc::new(Device::open(&request).unwrap())
}

#[test]
fn prompts_that_cannot_be_answered_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let refused = |options: Value| {
        let options = options.to_string();
        let loaded = train::config::Config::load_json(&options, train::config::Task::Sft, &[]);
        loaded.err().map(|problems| format!("{problems:?}")).unwrap_or_default()
    };
    let of = |more: Value| {
        let mut options = json!({"model": "m", "sample_prompts": ["Once"]});
        more.as_object().unwrap().iter().for_each(|(key, value)| options[key] = value.clone());
        refused(options)
    };
    let stages = of(json!({"gpus": 2, "device": "cpu", "pipeline_parallel_size": 2}));
    assert!(stages.contains("`sample_prompts` is not available yet with `pipeline_parallel_size: 2`"), "{stages}");
    assert!(of(json!({"eval_strategy": "no"})).contains("but `eval_strategy: no` has none"));
    assert!(of(json!({"sample_prompts": ["a", ""]})).contains("`sample_prompts[1]` is empty"));
    assert!(of(json!({"sample_tokens": 0})).contains("sample_tokens"));
    let output = place.path().join("out");
    let long = json!({"max_steps": 1, "sample_prompts": ["word ".repeat(5000)]});
    let error = train::run(config(&output, &long), source(), device(), &mut Lines::default()).unwrap_err().to_string();
    assert!(error.contains("sample_prompts") && error.contains("the model allows sequences of"), "{error}");
}

#[test]
fn evaluation_sees_every_token_of_the_validation_data_once() {
    let place = tempfile::tempdir().unwrap();
    let evaluated = |rows: u64, packing: bool| {
        let output = place.path().join(format!("{rows}-{packing}"));
        let options = json!({
            "max_steps": 1, "per_device_train_batch_size": rows, "sample_packing": packing, "learning_rate": 0,
            "validation_split_ratio": 0.1, "gradient_accumulation_steps": 1,
        });
        run(&output, &options);
        let event = of_kind(&output, "evaluation").remove(0);
        (event["tokens"].as_u64().unwrap(), event["loss"].as_f64().unwrap())
    };
    let (tokens, loss) = evaluated(1, true);
    assert!(tokens > 200);
    // The last batch of the others holds empty rows.
    for (rows, packing) in [(3, true), (7, true), (3, false)] {
        let (found, other) = evaluated(rows, packing);
        assert_eq!(found, tokens, "{rows} rows, packing {packing}");
        assert!((other / loss - 1.0).abs() < 1e-5, "{rows} rows, packing {packing}: {other} {loss}");
    }
}

#[test]
fn a_divergence_is_named_with_the_place_where_it_began() {
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("out");
    let options = json!({
        "learning_rate": 1e30, "max_grad_norm": 0, "lora": false, "save_steps": 1, "optimizer": "adamw",
        "weight_decay": 0, "max_steps": 12,
    });
    let mut observer = Lines::default();
    let error = train::run(config(&output, &options), source(), device(), &mut observer).unwrap_err();
    let text = error.to_string();
    assert_eq!(error.exit_code(), 5);
    let place = text.split("first came out of ").nth(1).unwrap_or_else(|| panic!("{text}"));
    assert!(place.contains("ward, ") && place.contains("llama.py:"), "{text}");
    // The step that diverged was not saved; what was saved before is whole.
    let newest = fs::read_dir(&output).unwrap().map(|entry| entry.unwrap().path());
    let newest = newest.filter_map(|path| path.file_name()?.to_str()?.strip_prefix("checkpoint-")?.parse::<u64>().ok());
    let failed = of_kind(&output, "failed");
    assert_eq!(newest.max(), Some(of_kind(&output, "step").len() as u64 - 1));
    assert_eq!(failed[0]["exit_code"], 5);
}

#[test]
fn the_manifest_says_what_the_run_is_made_of() {
    let place = tempfile::tempdir().unwrap();
    let manifest = |name: &str, changed: Value| -> Value {
        let output = place.path().join(name);
        run(&output, &changed);
        serde_json::from_str(&fs::read_to_string(output.join("manifest.json")).unwrap()).unwrap()
    };
    let first = manifest("first", json!({"max_steps": 2}));
    let second = manifest("second", json!({"max_steps": 2, "train_seed": 7}));
    assert_eq!(first["digests"]["model"], second["digests"]["model"]);
    assert_ne!(first["digests"]["options"], second["digests"]["options"]);
    assert_ne!(first["run_id"], second["run_id"]);
    assert_eq!(first["digests"]["data"]["digest"].as_str().unwrap().len(), 64);
    assert!(first["plan"].is_array() && first["machine"]["backend"] == "cpu");
    let measured = &first["measured"];
    assert_eq!(measured["steps"], 2);
    assert!(measured["tokens_per_second"].as_f64().unwrap() > 0.0 && measured["memory"].as_u64().unwrap() > 0);
    assert!(measured["planned_seconds_per_step"].is_null(), "a CPU has no measured ceilings: {measured}");
}

#[test]
fn the_log_says_what_a_reader_of_it_alone_needs_to_know() {
    let place = tempfile::tempdir().unwrap();
    let options = json!({"max_steps": 4, "log_gpu_util": 2, "report_to": ["tensorboard"]});
    struct Seen(Vec<Value>);
    impl train::Observer for Seen {
        fn line(&mut self, _: &str) {}
        fn event(&mut self, event: &Value) {
            self.0.push(event.clone());
        }
        fn interrupted(&mut self) -> bool {
            false
        }
    }
    let mut seen = Seen(Vec::new());
    train::run(config(place.path(), &options), source(), device(), &mut seen).unwrap();
    let reported = |events: &[Value]| -> Vec<String> {
        events.iter().map(|of| format!("{} {} {}", of["event"], of["time"], of["step"])).collect()
    };
    assert_eq!(reported(&seen.0), reported(&events(place.path())), "what is reported is what is written");

    let start = &of_kind(place.path(), "start")[0];
    assert_eq!((&start["options"]["max_steps"], &start["options"]["device"]), (&json!(4), &json!("cpu")));
    assert!(start["given"].as_array().unwrap().contains(&json!("max_steps")), "{start}");
    assert!(start["because"]["device"].is_string() && start["because"].get("max_steps").is_none(), "{start}");
    let bytes: u64 = start["plan"]["memory"].as_array().unwrap().iter().map(|of| of["bytes"].as_u64().unwrap()).sum();
    assert_eq!(start["manifest"]["memory_bytes"], json!(bytes));
    assert_eq!(start["data"]["datasets"][0]["rows_read"], json!(1), "a text is one row: {start}");

    let looks = of_kind(place.path(), "device");
    assert_eq!(looks.iter().map(|of| of["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 3]);
    for of in &looks {
        assert!(of["memory_used"].as_u64().unwrap() > 1 << 20 && of["power_watts"].is_null(), "{of}");
        assert!((0.0..=1.0).contains(&of["utilization"].as_f64().unwrap()), "{of}");
    }
    let never = place.path().join("never");
    run(&never, &json!({"max_steps": 2, "log_gpu_util": 0}));
    assert!(of_kind(&never, "device").is_empty());
}
