//! Runs whose states, copies, activations or gradients are in host memory give the same results as runs without
//! offloading: the program of a GPU, run on the CPU. With `SUROGATE_TEST_DEVICE=cuda` those of several ranks are on GPUs, or on
//! one that they share (`SUROGATE_ONE_GPU=1`).

use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::stories::{self, Lines, config, events, in_turn, losses, names, source};
use program::{ArenaKind, Machine, MemoryClass};
use serde_json::{Value, json};
use train::config::Config;
use train::preview::Preview;
use train::{Device, DeviceRequest, Outcome};

fn device(machine: Machine) -> Arc<Device> {
    let backend = Box::new(cpu::CpuBackend::new(None).unwrap());
    let (because, arithmetic) = ("requested".into(), "a CPU".into());
    Arc::new(Device {
        backend,
        machine,
        because,
        gpus: 4,
        card: Default::default(),
        arithmetic,
        nodes: None,
        python: None,
    })
}

/// Opens the device that a configuration of several ranks runs on.
fn of_ranks(config: &Config) -> Arc<Device> {
    match stories::device_name().as_str() {
        "cuda" => Arc::new(Device::open(&DeviceRequest::of(config, Vec::new())).unwrap()),
        _ => device(Machine::h200()),
    }
}

fn merged(parts: &[&Value]) -> Value {
    let pairs = parts.iter().flat_map(|part| part.as_object().unwrap().clone());
    Value::Object(pairs.collect())
}

/// Losses of steps and evaluations, and every file of weights and states.
fn run(output: &Path, options: &Value, stop_after: Option<usize>) -> (Vec<f64>, Vec<(String, Vec<u8>)>) {
    let config = config(output, options);
    let device = if config.ranks() > 1 { of_ranks(&config) } else { device(Machine::h200()) };
    let mut observer = Lines { stop_after, ..Lines::default() };
    let outcome = train::run(config, source(), device, &mut observer).unwrap();
    assert_eq!(matches!(outcome, Outcome::Interrupted(_)), stop_after.is_some());
    let mut files = Vec::new();
    for folder in
        ["checkpoint-4", "checkpoint-6", "model", "adapter"].map(|name| output.join(name)).iter().filter(|f| f.is_dir())
    {
        for name in names(folder).into_iter().filter(|name| name.ends_with(".safetensors")) {
            files.push((name.clone(), fs::read(folder.join(name)).unwrap()));
        }
    }
    let events = events(output);
    ([losses(&events, "step"), losses(&events, "evaluation")].concat(), files)
}

#[test]
fn a_run_leaves_the_same_whatever_lies_on_the_host() {
    let base = json!({"device": "auto", "max_steps": 6, "eval_steps": 3, "save_steps": 3, "torch_dtype": "bfloat16"});
    let full = json!({"lora": false, "optimizer": "adamw_8bit", "master_dtype": "float32"});
    let adapters = json!({"optimizer": "adamw", "lora_rank": 16});
    let matrices = json!({"lora": false, "optimizer": "normuon", "master_dtype": "float32",
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2});
    let quants = json!({"optimizer": "adamw", "lora_rank": 16, "qlora_bnb": true});
    let eight = json!({"optimizer": "adamw", "lora_rank": 16, "qlora_fp4": true, "recipe": "fp8_hybrid"});
    let four = json!({"lora": false, "optimizer": "adamw", "recipe": "nvfp4", "fp4_backend": "emulate"});
    let all =
        json!({"offload_optimizer": true, "offload_master": true, "offload_residual": true, "offload_grads": true});
    let cases = [
        (
            &full,
            vec![json!({"offload_optimizer": true, "offload_master": true, "offload_residual": true}), all.clone()],
        ),
        (&adapters, vec![json!({"offload_optimizer": true, "use_zero_copy": true, "offload_grads": true})]),
        (&matrices, vec![all]),
        (
            &quants,
            vec![
                json!({"offload_quants": true}),
                json!({"offload_quants": true, "offload_grads": true, "offload_residual": true, "recompute_block": true}),
            ],
        ),
        (&eight, vec![json!({"offload_quants": true, "persistent_quants": true})]),
        (&four, vec![json!({"offload_residual": true, "offload_grads": true, "recompute_block": true})]),
    ];
    for (turn, (trained, choices)) in cases.into_iter().enumerate() {
        let place = tempfile::tempdir().unwrap();
        let options = merged(&[&base, trained]);
        let expected = run(&place.path().join("plain"), &options, None);
        assert!(expected.1.len() >= 3 && expected.0.len() >= 8, "{:?}", expected.0);
        for (index, choice) in in_turn(&choices, turn).iter().enumerate() {
            let options = merged(&[&options, choice]);
            let output = place.path().join(index.to_string());
            assert!(run(&output, &options, None) == expected, "{options}: another result");
            // Begun without, ended with it.
            let output = place.path().join(format!("{index} again"));
            run(&output, &merged(&[&base, trained]), Some(3));
            let again = merged(&[&options, &json!({"resume_from_checkpoint": true})]);
            let (_, files) = run(&output, &again, None);
            assert!(files == expected.1, "{options}: another result after an interruption");
        }
    }
}

/// The sums that a rank keeps, and the whole gradients of ranks that exchange them in the last micro-step.
#[test]
fn gradients_of_several_ranks_may_lie_there() {
    let base = json!({"device": "auto", "max_steps": 4, "eval_steps": 2, "save_steps": 2, "max_grad_norm": 0.05,
        "torch_dtype": "bfloat16"});
    let full = json!({"lora": false, "optimizer": "adamw_8bit", "master_dtype": "float32"});
    let matrices = json!({"lora": false, "optimizer": "normuon", "master_dtype": "float32"});
    let adapters = json!({"optimizer": "adamw", "lora_rank": 16, "lora_dropout": 0.1});
    let alone = json!({"offload_grads": true});
    let all = json!({"offload_grads": true, "offload_optimizer": true, "offload_master": true});
    let of = |ranks: usize, level: usize, micro_steps: usize| {
        json!({"gpus": ranks, "zero_level": level, "gradient_accumulation_steps": micro_steps,
            "per_device_train_batch_size": 1})
    };
    let sequence = json!({"sequence_parallel_size": 2});
    let in_place = json!({"offload_grads": true, "offload_optimizer": true, "use_zero_copy": true});
    let cases = [
        (full.clone(), of(2, 1, 1), &all),
        (full.clone(), of(3, 1, 3), &alone),
        (full.clone(), of(3, 2, 3), &all),
        (full, merged(&[&of(2, 3, 3), &json!({"recompute_block": true, "offload_residual": true})]), &alone),
        (matrices.clone(), of(2, 1, 3), &all),
        (matrices.clone(), of(3, 2, 1), &alone),
        (matrices, merged(&[&of(2, 1, 3), &sequence]), &all),
        (adapters.clone(), of(2, 1, 3), &in_place),
        (adapters, of(3, 3, 3), &json!({"offload_grads": true, "offload_optimizer": true})),
    ];
    for (turn, (trained, spread, moved)) in cases.into_iter().enumerate() {
        let place = tempfile::tempdir().unwrap();
        let plain = merged(&[&base, &trained, &spread]);
        let expected = run(&place.path().join("plain"), &plain, None);
        assert!(expected.1.len() >= 2 && expected.0.len() >= 6, "{:?}", expected.0);
        let options = merged(&[&plain, moved]);
        for interrupted in in_turn(&[false, true], turn) {
            let output = place.path().join(format!("interrupted {interrupted}"));
            if !interrupted {
                assert!(run(&output, &options, None) == expected, "{options}: another result");
                continue;
            }
            // Begun without, ended with it.
            run(&output, &plain, Some(2));
            let again = merged(&[&options, &json!({"resume_from_checkpoint": true})]);
            assert!(run(&output, &again, None).1 == expected.1, "{options}: another result after an interruption");
        }
    }
}

#[test]
fn a_cpu_moves_nothing_to_the_host() {
    let place = tempfile::tempdir().unwrap();
    for option in ["offload_optimizer", "use_zero_copy", "offload_residual", "offload_grads", "offload_quants"] {
        let options = json!({"device": "auto", option: true});
        let cpu = device(Machine::cpu(1 << 30, 2));
        let refused = train::run(config(place.path(), &options), source(), cpu, &mut Lines::default());
        let message = refused.err().unwrap().to_string();
        assert!(message.contains(option) && message.contains("no GPU is visible"), "{message}");
    }
}

#[test]
fn copies_that_are_not_there_are_not_moved() {
    let place = tempfile::tempdir().unwrap();
    let options = json!({"device": "auto", "offload_master": true, "torch_dtype": "bfloat16", "lora": false});
    let refused = train::run(config(place.path(), &options), source(), device(Machine::h200()), &mut Lines::default());
    let message = refused.err().unwrap().to_string();
    assert!(message.contains("offload_master") && message.contains("master_dtype: float32"), "{message}");
}

#[test]
fn the_plan_says_what_lies_on_the_host_and_from_when_it_is_free() {
    let place = tempfile::tempdir().unwrap();
    let options = json!({"device": "auto", "lora": false, "offload_optimizer": true, "use_write_combined": true,
        "offload_residual": true, "recompute_block": true, "memory_limit": null});
    let preview = |more: Value| {
        Preview::advised(&config(place.path(), &merged(&[&options, &more])), &source(), &Machine::h200(), None)
    };
    for in_place in [false, true] {
        let found = preview(json!({"use_zero_copy": in_place})).unwrap();
        let (text, host) = (found.plan_text(), found.estimate().host.unwrap());
        assert!(text.contains("On the host:") && text.contains("tokens per step"), "{text}");
        assert!(
            text.contains("optimizer      page-locked\n") && text.contains("page-locked, write-combined"),
            "{text}"
        );
        // f32 states of the whole model, there and back.
        let class = MemoryClass::Arena(ArenaKind::Optimizer);
        let states: usize = found.program.host_memory().iter().filter(|l| l.class == class).map(|l| l.bytes).sum();
        assert!((host.update_bytes / (2 * states) as f64 - 1.0).abs() < 0.02, "{} of {states}", host.update_bytes);
        assert!(host.micro_step_bytes > 0.0 && host.update_seconds > 0.0);
    }
    // Only what the host never reads may be write-combined, and only where that is allowed.
    let forbidden = preview(json!({"use_write_combined": false})).unwrap().plan_text();
    assert!(forbidden.contains("page-locked\n") && !forbidden.contains("write-combined"), "{forbidden}");
    let tight = json!({"offload_optimizer": "auto", "per_device_train_batch_size": 4, "sequence_len": 512,
        "lmhead_chunks": 1, "attn_bwd_chunks": 1});
    let stays = json!({"offload_optimizer": false, "offload_grads": false});
    let below = |bytes: usize| json!({"memory_limit": bytes - 100_000});
    // The smallest plan that leaves everything on the device.
    let mut least = preview(merged(&[&tight, &stays])).unwrap().memory_bytes();
    while let Ok(smaller) = preview(merged(&[&tight, &stays, &below(least)])) {
        least = smaller.memory_bytes();
    }
    // Nothing else makes it fit: the plan moves what was left open, and says so.
    let limit = below(least);
    let found = preview(merged(&[&tight, &limit])).unwrap();
    assert!(found.memory_bytes() < least);
    let text = found.plan_text();
    let reported =
        ["optimizer states (needed to fit: `offload_optimizer`)", "gradients (needed to fit: `offload_grads`)"];
    assert!(reported.iter().any(|reported| text.contains(&format!(": {reported}"))), "{text}");
    // What was requested is obeyed; the rejection says that it stands in the way.
    let refused = preview(merged(&[&tight, &limit, &stays]));
    let message = refused.err().unwrap().to_string();
    assert!(message.contains("leave `offload_optimizer`"), "{message}");
}

/// Decisions of the plan are in the log and in `resolved.yaml`, and the results are those of a run without them.
#[test]
fn a_run_that_would_not_fit_moves_states_and_tells() {
    let place = tempfile::tempdir().unwrap();
    let options = json!({"device": "auto", "max_steps": 6, "eval_steps": 3, "save_steps": 3, "lora": false,
        "optimizer": "adamw", "torch_dtype": "bfloat16", "master_dtype": "float32", "lmhead_chunks": 1,
        "attn_bwd_chunks": 1, "recompute_block": true, "offload_residual": true, "sequence_len": 256});
    let expected = run(&place.path().join("plain"), &options, None);
    let begun = events(&place.path().join("plain"));
    let whole = begun.iter().find_map(|event| event["manifest"]["memory_bytes"].as_u64()).unwrap();
    let output = place.path().join("limited");
    let limited = merged(&[&options, &json!({"memory_limit": whole - 1_000_000})]);
    let mut observer = Lines::default();
    train::run(config(&output, &limited), source(), device(Machine::h200()), &mut observer).unwrap();
    let reported = observer.lines.join("\n");
    assert!(reported.contains("in host memory: needed to fit; `offload_"), "{reported}");
    let resolved = fs::read_to_string(output.join("resolved.yaml")).unwrap();
    let line = |text: &str| resolved.lines().any(|line| line.starts_with("offload_") && line.contains(text));
    assert!(line("true") && line("needed to fit"), "{resolved}");
    assert_eq!(losses(&events(&output), "step"), expected.0[..6]);
}
