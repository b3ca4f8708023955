//! One training step of small models of several families, on both vendors' targets.

use std::sync::Arc;

use compiler::{CompileOptions, EntryOptions, compile};
use gpu::{GpuBackend, Vendor};
use program::{Backend, Machine, Session, TensorRef, scalar};
use tensor::{DType, HostTensor};

use crate::support::training::{numbers, read, write};
use crate::support::{TASK, VARIANT, fill_parameters, options};

const FAMILIES: [(&str, &str); 7] = [
    ("llama", include_str!("../../../train/tests/ir/llama.json")),
    ("qwen3", include_str!("../../../train/tests/ir/qwen3.json")),
    ("olmoe", include_str!("../../../train/tests/ir/olmoe.json")),
    ("gemma4", include_str!("../../../train/tests/ir/gemma4.json")),
    ("hybrid", include_str!("../../../compiler/tests/fixtures/hybrid.json")),
    ("gated", include_str!("../../../compiler/tests/fixtures/gated.json")),
    ("stories", include_str!("../../../train/tests/ir/stories.json")),
];

fn fill(session: &mut dyn Session, name: &str, at: &TensorRef) {
    let ints: Vec<i32> = match name {
        "input_ids" | "targets" => (0..at.len()).map(|i| ((i * 37 + name.len()) % 30) as i32).collect(),
        "position_ids" => (0..at.len()).map(|i| (i % VARIANT.seq_len) as i32).collect(),
        "weights" | "present" => return write(session, at, std::iter::repeat(1.0)),
        _ if at.dtype == DType::F32 => return write(session, at, std::iter::repeat(0.0)),
        _ => vec![0; at.len()],
    };
    session.write(at, &HostTensor::from_i32(at.shape.clone(), &ints).bytes).unwrap();
}

/// Loss, gradient norm and every gradient of a step.
fn step(session: &mut dyn Session) -> Vec<(String, Vec<f64>)> {
    let program = session.program().clone();
    fill_parameters(session, |session, index, slot| {
        let one = if slot.name.contains("norm") { 1.0 } else { 0.0 };
        write(session, &slot.weight, numbers(index).map(|x| one + x));
    });
    let entry = program.micro_step(true, true, Some(VARIANT)).unwrap();
    for (name, at) in &program.entries[entry].inputs {
        fill(session, name, at);
    }
    session.run(entry).unwrap();
    let mut found = Vec::new();
    let loss = program.scalar(scalar::LOSS_SUM).unwrap();
    let gradients =
        program.layout.parameters.iter().filter_map(|slot| Some((slot.name.as_str(), slot.gradient.as_ref()?)));
    for (name, at) in [(scalar::LOSS_SUM, loss)].into_iter().chain(gradients) {
        found.push((name.to_owned(), HostTensor::new(at.dtype, at.shape.clone(), read(session, at)).to_f64()));
    }
    found
}

#[test]
fn every_family_takes_the_step_of_the_cpu() {
    for (turn, (family, text)) in FAMILIES.into_iter().enumerate() {
        let model = graph::from_json(text).unwrap();
        for target in ["gfx942", ["sm_80", "gfx1100"][turn % 2]] {
            let options = CompileOptions { entries: vec![EntryOptions::train(TASK)], ..options() };
            let machine = Machine { arch: target.parse().unwrap(), ..Machine::h200() };
            let program = Arc::new(compile(&model, &options, &machine).unwrap_or_else(|e| panic!("{family}: {e}")));
            let mut reference = cpu::CpuBackend::new(Some(2)).unwrap().load(program.clone()).unwrap();
            let expected = step(reference.as_mut());
            standin::start(standin::machine(machine.arch, 1), turn as u64);
            let vendor = if target.starts_with("gfx") { Vendor::Amd } else { Vendor::Nvidia };
            let loaded = GpuBackend::new(standin::options(vendor)).load(program);
            let found = step(loaded.unwrap_or_else(|error| panic!("{family}, {target}: {error}")).as_mut());
            assert!(expected[0].1[0] > 1.0, "{family}: a loss of {:?}", expected[0].1);
            for ((name, found), (_, expected)) in found.iter().zip(&expected) {
                let size = expected.iter().fold(1e-6, |most: f64, x| most.max(x.abs()));
                let error = found.iter().zip(expected).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs() / size));
                assert!(error < 1e-4, "{family}, {target}: {name} differs by {error:.1e} of {size:.1e}");
            }
        }
    }
}
