//! Failures of the machine, and what a user reads of them.

use std::sync::Arc;

use compiler::{CompileOptions, EntryOptions, compile};
use gpu::{GpuBackend, Vendor};
use program::{Backend, BackendError, Machine, Program, Session};
use standin::Fault;

use crate::support::training::{fill, model};
use crate::support::{TASK, VARIANT, options};

fn program(target: &str) -> Arc<Program> {
    let options = CompileOptions { entries: vec![EntryOptions::train(TASK)], ..options() };
    let machine = Machine { arch: target.parse().unwrap(), ..Machine::h200() };
    Arc::new(compile(&model(), &options, &machine).unwrap())
}

fn begin(target: &str) -> (Arc<Program>, GpuBackend) {
    let program = program(target);
    standin::start(standin::machine(program.machine.arch, 1), 1);
    let vendor = if target.starts_with("gfx") { Vendor::Amd } else { Vendor::Nvidia };
    (program, GpuBackend::new(standin::options(vendor)))
}

/// One micro-step with its batch, to its end.
fn run(session: &mut dyn Session) -> Result<(), BackendError> {
    let program = session.program().clone();
    let entry = program.micro_step(true, true, Some(VARIANT)).unwrap();
    program.entries[entry].inputs.iter().for_each(|(name, at)| fill(session, name, at, 0));
    session.run(entry)?;
    session.synchronize()
}

#[test]
fn too_little_memory_is_told_with_what_it_was_for() {
    for target in ["sm_80", "gfx942"] {
        let (program, backend) = begin(target);
        standin::inject(Fault::Memory(100_000));
        let error = backend.load(program).err().unwrap();
        let BackendError::OutOfMemory { what, needed, available } = &error else { panic!("{error}") };
        assert!(what.starts_with("allocating the arena of ") && *needed > *available, "{error}");
    }
}

#[test]
fn a_failed_launch_names_call_kernel_instruction_and_layer() {
    for (target, call, name) in [
        ("sm_80", "cuLaunchKernel failed: CUDA_ERROR_LAUNCH_FAILED (719)", "CUDA"),
        ("gfx1100", "hipModuleLaunchKernel failed: hipErrorLaunchFailure (719)", "hip"),
    ] {
        let (program, backend) = begin(target);
        let mut session = backend.load(program.clone()).unwrap();
        let kernel =
            &program.kernels.iter().find(|kernel| kernel.entry.starts_with("attention_forward")).unwrap().entry;
        standin::inject(Fault::Launch(kernel.clone()));
        let text = run(session.as_mut()).unwrap_err().to_string();
        assert!(text.starts_with(call) && text.contains(&format!("kernel {kernel}")), "{name}: {text}");
        assert!(text.contains("instruction ") && text.contains("layer "), "{text}");
    }
}

#[test]
fn a_lost_device_fails_every_later_call_with_its_name() {
    for (target, name) in [("sm_80", "CUDA_ERROR_ILLEGAL_ADDRESS (700)"), ("gfx942", "hipErrorIllegalAddress (700)")] {
        let (program, backend) = begin(target);
        let mut session = backend.load(program).unwrap();
        standin::inject(Fault::Lost(standin::computed() + 40));
        let text = run(session.as_mut()).unwrap_err().to_string();
        assert!(text.contains(name), "{text}");
        let again = session.synchronize().unwrap_err().to_string();
        assert!(again.contains(name), "{again}");
    }
}

/// A program for another GPU is refused by name, of the same vendor or of the other.
#[test]
fn a_program_for_another_gpu_is_refused() {
    let (program, backend) = begin("gfx942");
    standin::start(standin::machine("gfx1100".parse().unwrap(), 1), 1);
    let text = backend.load(program).err().unwrap().to_string();
    assert!(text.contains("it was compiled for gfx942, this GPU (Stand-in) is gfx1100"), "{text}");
}
