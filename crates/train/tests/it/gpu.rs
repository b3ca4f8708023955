//! On a machine with a GPU: every operation's examples on CUDA against the reference, and runs with something on the
//! host against runs without. Ignored unless requested: `cargo test --release --workspace --test it -- --ignored gpu::` on a
//! machine with a GPU, without which they fail.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::stories;
use serde_json::{Value, json};
use train::conformance::Examples;
use train::device::{Device, DeviceRequest};

/// The GPU. `eager`: without CUDA graphs.
fn device(eager: bool) -> Device {
    let sites = std::env::var_os("SUROGATE_SITE_PACKAGES").unwrap_or_default();
    let request = DeviceRequest {
        device: options::Setting::Value(train::config::Device::Cuda),
        site_packages: std::env::split_paths(&sites).collect(),
        eager,
        ..DeviceRequest::default()
    };
    Device::open(&request).unwrap()
}

/// Losses of steps and evaluations, and every file of weights and states.
fn run(output: &Path, options: &Value, device: &Arc<Device>) -> (Vec<f64>, Vec<(String, Vec<u8>)>) {
    let config = stories::config(output, options);
    train::run(config, stories::source(), device.clone(), &mut stories::Lines::default()).unwrap();
    let mut files = Vec::new();
    for folder in ["checkpoint-12", "model", "adapter"].map(|name| output.join(name)).iter().filter(|f| f.is_dir()) {
        for name in stories::names(folder).into_iter().filter(|name| name.ends_with(".safetensors")) {
            files.push((name.clone(), fs::read(folder.join(name)).unwrap()));
        }
    }
    let events = stories::events(output);
    ([stories::losses(&events, "step"), stories::losses(&events, "evaluation")].concat(), files)
}

/// Everything that can lie on the host, replayed and queued one by one.
#[test]
#[ignore = "needs a GPU"]
fn what_lies_on_the_host_changes_no_bit() {
    let full = json!({"lora": false, "torch_dtype": "bfloat16", "optimizer": "adamw_8bit", "master_dtype": "float32"});
    let adapters = json!({"torch_dtype": "bfloat16"});
    let states = json!({"offload_optimizer": true, "offload_master": true});
    let residual = json!({"offload_residual": true, "recompute_block": true});
    let in_place = json!({"offload_optimizer": true, "offload_master": true, "use_zero_copy": true});
    let matrices = json!({"lora": false, "torch_dtype": "bfloat16", "optimizer": "normuon", "master_dtype": "float32"});
    let gradients = json!({"offload_grads": true});
    let all = json!({"offload_optimizer": true, "offload_master": true, "offload_grads": true});
    let cases = [
        (&full, vec![states, in_place, residual, gradients, all.clone()]),
        (&adapters, vec![json!({"offload_optimizer": true, "offload_residual": true, "offload_grads": true})]),
        (&matrices, vec![json!({"offload_optimizer": true}), all]),
    ];
    for eager in [false, true] {
        let device = Arc::new(device(eager));
        for (base, choices) in &cases {
            let place = tempfile::tempdir().unwrap();
            let expected = run(&place.path().join("plain"), base, &device);
            assert!(expected.1.len() >= 3 && expected.0.len() >= 14, "{:?}", expected.0);
            for (index, choice) in choices.iter().enumerate() {
                let mut options = (*base).clone();
                options.as_object_mut().unwrap().extend(choice.as_object().unwrap().clone());
                let found = run(&place.path().join(index.to_string()), &options, &device);
                println!("eager {eager}, {options}: {:?}", found.0.last());
                assert_eq!(found.0, expected.0, "eager {eager}, {options}");
                assert!(found == expected, "eager {eager}, {options}: other weights or states");
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_operation_agrees_with_its_reference() {
    let device = device(false);
    let rows =
        train::conformance::check(device.backend.as_ref(), &device.machine, 1, &Examples::default()).unwrap().rows;
    for row in &rows {
        let verdict = if row.passed() { "ok" } else { "FAILED" };
        println!("{:26} {} {:4} result {} {:9.2e} {verdict}", row.op, row.example, row.dtype, row.result, row.error);
    }
    let failed: Vec<_> = rows.iter().filter(|row| !row.passed()).collect();
    assert!(failed.is_empty(), "{} of {} results differ: {failed:?}", failed.len(), rows.len());
}

/// An order that depends on timing shows in the low bits, and so in the errors.
#[test]
#[ignore = "needs a GPU"]
fn every_operation_gives_the_same_bits_again() {
    let device = device(false);
    let check =
        || train::conformance::check(device.backend.as_ref(), &device.machine, 2, &Examples::default()).unwrap().rows;
    let first = check();
    for _ in 0..3 {
        for (row, again) in first.iter().zip(check()) {
            assert!(row.error.to_bits() == again.error.to_bits(), "{row:?} and then {again:?}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_instruments_of_the_gpu_are_in_the_log() {
    let device = Arc::new(device(false));
    let place = tempfile::tempdir().unwrap();
    let _ = run(place.path(), &json!({"log_gpu_util": 3}), &device);
    let events = stories::events(place.path());
    let looks: Vec<&Value> = events.iter().filter(|event| event["event"] == "device").collect();
    assert_eq!(looks.len(), 4);
    for look in looks {
        let number = |name: &str| look[name].as_f64().unwrap_or_else(|| panic!("{name}: {look}"));
        assert!((0.0..=1.0).contains(&number("utilization")), "{look}");
        assert!(number("power_watts") > 10.0 && number("clock_mhz") > 100.0, "{look}");
        assert!(number("memory_used") > 1e8 && number("memory_used") < number("memory_total"), "{look}");
        let share = number("memory_total") / device.machine.memory as f64;
        assert!((0.9..1.1).contains(&share), "the same card, but for what the driver keeps: {look}");
    }
}
