//! GPUs of each vendor that are not there: every operation's examples, and whole runs, against the CPU.

use std::path::Path;
use std::sync::Arc;

use gpu::{GpuBackend, Vendor};
use program::{Arch, Backend, Machine};
use serde_json::{Value, json};
use train::conformance::{Examples, check};
use train::{Device, Outcome};

use crate::stories::{Lines, config, events, losses, source};

fn machine(target: &str) -> (Vendor, Machine) {
    let arch: Arch = target.parse().unwrap();
    let vendor = if matches!(arch, Arch::Rocm(_)) { Vendor::Amd } else { Vendor::Nvidia };
    (vendor, Machine { arch, ..Machine::h200() })
}

/// A machine of a target, whose programs run on a stand-in or on the CPU.
pub fn device(target: &str, stands_in: bool) -> Arc<Device> {
    devices(target, 1, stands_in)
}

/// A machine with some GPUs of a target, or as many ranks or stages on the CPU.
pub fn devices(target: &str, gpus: usize, stands_in: bool) -> Arc<Device> {
    let (vendor, machine) = machine(target);
    standin::start(standin::machine(machine.arch, gpus), 5);
    let backend: Box<dyn Backend> = match stands_in {
        true => Box::new(GpuBackend::new(standin::options(vendor))),
        false => Box::new(cpu::CpuBackend::new(None).unwrap()),
    };
    Arc::new(Device {
        backend,
        machine,
        because: "requested".into(),
        gpus,
        card: Default::default(),
        arithmetic: "a stand-in".into(),
        nodes: None,
        python: None,
    })
}

/// Lowers, binds and launches the examples: each argument of each launch is what the program says, and products have the
/// numbers of their library. Results are the reference's, but where products round otherwise.
fn launches_every_operation(target: &str) {
    let (vendor, machine) = machine(target);
    standin::start(standin::machine(machine.arch, 1), 1);
    let backend = GpuBackend::new(standin::options(vendor));
    let checked =
        check(&backend, &machine, 1, &Examples::default()).unwrap_or_else(|error| panic!("{target}: {error}"));
    let failed: Vec<_> = checked.rows.iter().filter(|row| !row.passed()).collect();
    assert!(failed.is_empty() && checked.rows.len() > 2000, "{target}: {failed:?} of {}", checked.rows.len());
}

#[test]
fn every_operation_is_launched_with_its_arguments_on_gfx942() {
    launches_every_operation("gfx942");
}

#[test]
#[ignore = "long, as it repeats the test of gfx942 on other targets; ./test.sh --all runs it"]
fn every_operation_is_launched_with_its_arguments_on_other_targets() {
    ["sm_80", "gfx950"].into_iter().for_each(launches_every_operation);
}

/// The losses of a short run, with an evaluation and a checkpoint in the middle.
fn run(output: &Path, device: Arc<Device>, options: &Value) -> Vec<f64> {
    let outcome = train::run(config(output, options), source(), device, &mut Lines::default()).unwrap();
    assert!(matches!(outcome, Outcome::Finished(_)));
    let events = events(output);
    [losses(&events, "step"), losses(&events, "evaluation")].concat()
}

#[test]
fn whole_runs_have_the_losses_of_the_cpu() {
    let base = |more: Value| {
        let mut all = json!({"device": "auto", "max_steps": 4, "eval_steps": 2, "save_steps": 2, "torch_dtype": "float32",
            "validation_split_ratio": 0.02, "sequence_len": 16, "per_device_train_batch_size": 2});
        more.as_object().unwrap().iter().for_each(|(name, value)| all[name] = value.clone());
        all
    };
    for (number, (target, more)) in [
        ("gfx942", json!({})),
        ("sm_80", json!({"lora": false})),
        ("gfx1100", json!({"lora": false, "optimizer": "normuon", "offload_optimizer": true})),
    ]
    .into_iter()
    .enumerate()
    {
        let (place, options) = (tempfile::tempdir().unwrap(), base(more));
        let expected = run(&place.path().join("cpu"), device(target, false), &options);
        let found = run(&place.path().join("gpu"), device(target, true), &options);
        assert_eq!(found.len(), expected.len(), "{number}");
        let all = found.clone();
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found / expected - 1.0).abs() < 1e-4, "{target}: {all:?}: {found} instead of {expected}");
        }
    }
}
