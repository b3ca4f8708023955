//! The options against the machine: promises that it cannot keep, each with its place, the expectation and a remedy.

use options::{Problem, Setting};
use program::{Arch, Architecture, Machine};

use super::checks::gpu_promises;
use super::{Config, Device, Fp4Backend, Recipe};

/// Facts of the machine that the checks of a configuration need.
#[derive(Clone, Copy, Debug)]
pub struct MachineFacts {
    /// The number of GPUs that are visible to this process.
    pub gpus: u32,
    /// The target of kernels; the CPU without a GPU.
    pub arch: Arch,
}

/// The abilities of an NVIDIA GPU in the words of its maker.
fn capability(of: Architecture) -> String {
    format!("{}.{}", of.major, of.minor)
}

impl MachineFacts {
    /// The facts of a plan's machine with `gpus` visible GPUs.
    pub fn of(machine: &Machine, gpus: usize) -> MachineFacts {
        let gpus = if machine.arch.is_gpu() { gpus.max(1) as u32 } else { 0 };
        MachineFacts { gpus, arch: machine.arch }
    }

    /// Says that this GPU lacks units for codes of `bits` bits, which NVIDIA's have from `least` on and AMD's where `amd` says.
    fn lacks(&self, what: &str, least: Architecture, bits: &str, amd: &str) -> String {
        match self.arch {
            Arch::Cuda(has) => {
                let (least, has) = (capability(least), capability(has));
                format!("{what} needs a GPU of compute capability {least} or more, this one has {has}")
            }
            other => format!("{what} needs matrix units for codes of {bits} bits, which {other} lacks ({amd})"),
        }
    }
}

impl Config {
    /// Promises that this machine cannot keep. Permissions (`use_cuda_graphs`, ...) are no promises.
    pub fn check_machine(&self, machine: &MachineFacts) -> Vec<Problem> {
        let mut problems = Vec::new();
        let on_cpu = self.hardware.device == Setting::Value(Device::Cpu);
        if let Setting::Value(device @ (Device::Cuda | Device::Rocm)) = self.hardware.device
            && machine.arch.device() != device.name()
        {
            let hint = Some("`device: auto` runs on the CPU where there is no GPU".to_string());
            let what = match machine.gpus {
                0 => "no GPU is visible".to_owned(),
                _ => format!("this is {}", machine.arch),
            };
            problems.push(self.mistake("device", format!("`device: {device}`, but {what}"), hint));
        }
        if !on_cpu && machine.gpus > 0 && self.hardware.gpus > machine.gpus {
            let message = format!("`gpus: {}`, but {} are visible", self.hardware.gpus, machine.gpus);
            problems.push(self.mistake("gpus", message, Some(format!("set `gpus` to at most {}", machine.gpus))));
        }
        if machine.gpus == 0 && !on_cpu && self.hardware.gpus > 1 {
            let message = format!("`gpus: {}`, but no GPU is visible", self.hardware.gpus);
            let hint = "`device: cpu` trains with as many ranks, as threads of the CPU";
            problems.push(self.mistake("gpus", message, Some(hint.to_owned())));
        }
        if machine.gpus == 0 && !on_cpu {
            let promises = gpu_promises(self).into_iter();
            problems.extend(promises.map(|(path, why)| {
                let message = format!("`{path}` {why}, but no GPU is visible");
                self.mistake(path, message, Some(format!("remove `{path}`")))
            }));
        }
        let fp8 = self.precision.recipe == Recipe::Fp8Hybrid;
        if fp8 && machine.arch.is_gpu() && machine.arch.codes().is_none() {
            let message = machine.lacks("`recipe`", Architecture::ADA, "eight", "gfx942, gfx950 and gfx12 have them");
            let hint = "leave `recipe` at `bf16`; `qlora_bnb: true` saves memory on any GPU";
            problems.push(self.mistake("recipe", message, Some(hint.to_owned())));
        }
        problems.extend(self.check_four_bits(machine).filter(|_| !on_cpu));
        problems
    }

    /// Units of four bits, where requested on a GPU: it must have them. A CPU emulates them.
    fn check_four_bits(&self, machine: &MachineFacts) -> Option<Problem> {
        let backend = self.precision.fp4_backend;
        if self.precision.recipe != Recipe::Nvfp4 || backend == Fp4Backend::Emulate {
            return None;
        }
        if !machine.arch.is_gpu() || machine.arch.has_four_bits() {
            return None;
        }
        let what = format!("`fp4_backend: {backend}`");
        let amd = "no AMD GPU has them with the scales of `nvfp4`";
        let message = machine.lacks(&what, Architecture::BLACKWELL, "four", amd);
        let hint = "`fp4_backend: emulate` has the same codes on any machine; `recipe: fp8_hybrid` is faster than bf16";
        let path = if self.is_written("fp4_backend") { "fp4_backend" } else { "recipe" };
        Some(self.mistake(path, message, Some(hint.to_owned())))
    }
}
