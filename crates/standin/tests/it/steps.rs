//! Sessions of one GPU and of ranks run whole programs, replayed graphs included, in any order of streams.

use std::sync::Arc;

use compiler::{CompileOptions, EntryOptions, OffloadOptions, PlanOptions, Sharding, compile};
use gpu::{GpuBackend, Options, Vendor, Ways};
use program::{Arch, Backend, Instruction, Machine, Program};
use tensor::{DType, HostTensor};

use crate::support::training::{bits_of, cases, model};
use crate::support::{TASK, options};

/// Targets of every vendor, with little and much shared memory, and with both widths of waves.
const TARGETS: [&str; 5] = ["sm_80", "sm_89", "gfx942", "gfx1100", "gfx950"];

fn arch(name: &str) -> Arch {
    name.parse().unwrap()
}

fn vendor(arch: Arch) -> Vendor {
    if matches!(arch, Arch::Rocm(_)) { Vendor::Amd } else { Vendor::Nvidia }
}

fn on(name: &str) -> Machine {
    Machine { arch: arch(name), ..Machine::h200() }
}

/// The ranks have rows one after another, so that each of them is waited for.
fn alternate(micro_step: usize) -> usize {
    micro_step
}

/// Numbers of the same results by the CPU and by a stand-in, after enough steps that every entry is replayed.
fn compared(program: Program, change: impl Fn(Options) -> Options, seed: u64, what: &str, limit: f64) {
    let program = Arc::new(program);
    let micro_steps = 2;
    let mut reference = cpu::CpuBackend::new(Some(2)).unwrap().load(program.clone()).unwrap();
    let expected = bits_of(reference.as_mut(), 3, micro_steps, alternate);
    let arch = program.machine.arch;
    let gpus = program.cluster.ranks.max(program.cluster.stages);
    standin::start(standin::machine(arch, gpus), seed);
    let backend = GpuBackend::new(change(standin::options(vendor(arch))));
    let mut session = backend.load(program.clone()).unwrap_or_else(|error| panic!("{what}: {error}"));
    let found = bits_of(session.as_mut(), 3, micro_steps, alternate);
    assert!(standin::computed() > 100, "{what}: {} operations", standin::computed());
    assert_eq!(found.len(), expected.len());
    for ((name, found), (_, expected)) in found.iter().zip(&expected) {
        let dtype = if name.contains("bf16") { DType::BF16 } else { DType::F32 };
        if name.contains("u8") {
            continue;
        }
        let numbers = |bytes: &[u8]| HostTensor::new(dtype, [bytes.len() / dtype.size()], bytes.to_vec()).to_f64();
        let (found, expected) = (numbers(found), numbers(expected));
        // Of all of a tensor: after a step of Adam a gradient of nearly nothing moves its weight either way.
        let norm = |of: &mut dyn Iterator<Item = f64>| of.map(|x| x * x).sum::<f64>().sqrt();
        let size = norm(&mut expected.iter().copied()).max(1e-30);
        let error = norm(&mut found.iter().zip(&expected).map(|(a, b)| a - b)) / size;
        assert!(error <= limit, "{what}: {name} differs by {error:.1e} of its norm");
    }
}

fn same(options: Options) -> Options {
    options
}

/// AdamW in f32, with or without adapters.
fn in_f32(adapters: bool) -> CompileOptions {
    let adapter = adapters.then(crate::support::adapter);
    CompileOptions { adapter, entries: vec![EntryOptions::train(TASK)], ..options() }
}

#[test]
fn training_steps_of_one_gpu_are_those_of_the_cpu() {
    for (turn, target) in TARGETS.into_iter().enumerate() {
        for adapters in [false, true] {
            let program = compile(&model(), &in_f32(adapters), &on(target)).unwrap();
            compared(program, same, turn as u64, &format!("{target}, adapters {adapters}"), 2e-4);
        }
    }
}

/// Every optimizer, in bf16: whichever kernels the plan chooses.
#[test]
fn every_optimizer_takes_its_steps() {
    for (turn, (case, options)) in cases().into_iter().enumerate() {
        let target = TARGETS[turn % TARGETS.len()];
        let program = compile(&model(), &options, &on(target)).unwrap();
        compared(program, same, turn as u64, &format!("{case} on {target}"), 0.1);
    }
}

#[test]
fn bits_do_not_depend_on_the_order_of_streams_or_on_graphs() {
    let offload = OffloadOptions { optimizer: Some(true), slice_bytes: Some(40_000), ..Default::default() };
    let plan = PlanOptions { offload, ..in_f32(false).plan };
    let program = Arc::new(compile(&model(), &CompileOptions { plan, ..in_f32(false) }, &on("gfx942")).unwrap());
    let transfers = |step: &program::Step| matches!(step.instruction, Instruction::Transfer { .. });
    assert!(program.entries.iter().flat_map(|entry| &entry.steps).any(transfers));
    let run = |seed: u64, graphs: bool| {
        standin::start(standin::machine(arch("gfx942"), 1), seed);
        let options = Options { graphs, ..standin::options(Vendor::Amd) };
        let mut session = GpuBackend::new(options).load(program.clone()).unwrap();
        bits_of(session.as_mut(), 3, 2, alternate)
    };
    let first = run(0, true);
    assert!((1..6).all(|seed| run(seed, true) == first) && run(7, false) == first);
}

/// Ranks copy from one another, by way of the host, or through the library of collectives; each of them has rows.
#[test]
fn ranks_give_the_sums_of_the_cpu_in_any_order_of_streams() {
    let by_library = Ways { gather: Some(false), exchange: Some(false), without_peers: false };
    let ways = [Ways::default(), Ways { without_peers: true, ..Ways::default() }, by_library];
    let groups = [(2, "sm_80"), (4, "gfx942"), (3, "gfx1100"), (2, "gfx942"), (4, "sm_80")];
    for (turn, (ranks, target)) in groups.into_iter().enumerate() {
        let cuts = [(false, false), (true, false), (true, true)];
        for (gradients, weights) in crate::support::in_turn(&cuts, turn) {
            let sharding = Sharding { ranks, bucket_bytes: Some(64 << 10), gradients, weights, ..Sharding::default() };
            let program = compile(&model(), &CompileOptions { sharding, ..in_f32(false) }, &on(target)).unwrap();
            let change = |options: Options| Options { ways: ways[turn % 3], ..options };
            let what = format!("{ranks} ranks on {target}, cut {gradients} {weights}");
            (0..2).for_each(|seed| compared(program.clone(), change, seed + 10 * turn as u64, &what, 2e-4));
        }
    }
}
