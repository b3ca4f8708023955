//! Check before a run's first step that units of four bits compute what the reference computes. No program with such
//! products was ever run on a GPU that has them, so each run is compared with the CPU again.
//!
//! Knows which calls a recipe makes; neither operations nor how results are compared.

use compiler::Recipe;
use program::{Arch, Backend, Instruction, Program};

use crate::engine::conformance::{self, Examples, Row};
use crate::error::{Result, TrainError};

/// Seed of the drawn operands.
const SEED: u64 = 1;

/// Compares the calls that a recipe makes with the reference, on the backend that the program will run on. An error that
/// names those that differ, or that the backend does not take. Whether there was something to compare: not where the program has
/// no products of four bits.
pub fn check(backend: &dyn Backend, program: &Program, recipe: &Recipe) -> Result<bool> {
    let mut steps = program.entries.iter().flat_map(|entry| &entry.steps);
    let has_blocks = steps.any(|step| matches!(&step.instruction, Instruction::Gemm(gemm) if gemm.has_blocks()));
    if !has_blocks || program.machine.arch == Arch::Cpu {
        return Ok(false);
    }
    let which = Examples { calls: recipe.calls().to_vec(), ..Examples::default() };
    let checked =
        conformance::check(backend, &program.machine, SEED, &which).map_err(|why| refused(&why.to_string()))?;
    let differ: Vec<&Row> = checked.rows.iter().filter(|row| !row.passed()).collect();
    match differ.first() {
        None => Ok(true),
        Some(first) => Err(refused(&format!(
            "{} of {} results differ, first `{}`, example {} in {}: error {:.1e}, tolerance {:.1e}",
            differ.len(),
            checked.rows.len(),
            first.op,
            first.example,
            first.dtype,
            first.error,
            first.limit
        ))),
    }
}

fn refused(why: &str) -> TrainError {
    TrainError::Failed(format!(
        "the 4-bit operations of this GPU were checked before the first step and are not those of the CPU: {why}\n  hint: \
         `fp4_backend: emulate` has the same codes on any GPU; `recipe: fp8_hybrid` is faster than bf16; `surogate doctor \
         --operations` shows every result"
    ))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use compiler::Nvfp4;
    use cpu::CpuBackend;
    use program::{Backend, BackendError, Machine, Session};
    use serde_json::json;

    use super::{Instruction, Program, Recipe, check};
    use crate::config::{Config, Task};
    use crate::model::source::ModelSource;
    use crate::plan::preview::Preview;

    /// The CPU, with programs that are changed before they run: what units that compute something else would give.
    struct Altered {
        cpu: CpuBackend,
        change: fn(&mut Instruction) -> Result<(), BackendError>,
    }

    impl Backend for Altered {
        fn name(&self) -> &'static str {
            "altered"
        }

        fn load(&self, program: Arc<Program>) -> Result<Box<dyn Session>, BackendError> {
            let mut program = Program::clone(&program);
            let steps = program.entries.iter_mut().flat_map(|entry| &mut entry.steps);
            steps.map(|step| &mut step.instruction).try_for_each(self.change)?;
            self.cpu.load(Arc::new(program))
        }
    }

    fn program(machine: &Machine, backend: &str) -> (Program, Recipe) {
        let preview = preview(machine, json!({"recipe": "nvfp4", "fp4_backend": backend}));
        let emulate = backend == "emulate";
        (
            Arc::unwrap_or_clone(preview.program),
            Recipe::Nvfp4(Nvfp4 { emulate, stochastic: true, skip_first: 0, skip_last: 0 }),
        )
    }

    fn preview(machine: &Machine, more: serde_json::Value) -> Preview {
        let (_folder, source) = ModelSource::of_two_layers();
        let mut options = json!({"model": "m", "sequence_len": 2048, "lora": false});
        options.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let config = Config::load_json(&options.to_string(), Task::Sft, &[]).unwrap();
        Preview::new(&config, &source, machine, None).unwrap()
    }

    fn checked(change: fn(&mut Instruction) -> Result<(), BackendError>) -> Result<bool, String> {
        let (program, recipe) = program(&Machine::named("b200").unwrap(), "cutlass");
        let backend = Altered { cpu: CpuBackend::new(Some(2)).unwrap(), change };
        check(&backend, &program, &recipe).map_err(|why| why.to_string())
    }

    #[test]
    fn units_that_compute_what_the_reference_does_pass() {
        assert_eq!(checked(|_| Ok(())), Ok(true));
    }

    #[test]
    fn units_that_compute_something_else_stop_the_run() {
        let wrong_scales = checked(|instruction| {
            if let Instruction::Gemm(gemm) = instruction
                && let Some([a, b]) = gemm.scales.as_mut().and_then(|scales| scales.blocks.as_mut())
                && a.shape == b.shape
            {
                std::mem::swap(a, b);
            }
            Ok(())
        });
        let wrong_factor = checked(|instruction| {
            if let Instruction::Gemm(gemm) = instruction {
                gemm.scale *= 1.02;
            }
            Ok(())
        });
        for why in [wrong_scales.unwrap_err(), wrong_factor.unwrap_err()] {
            assert!(
                why.contains("results differ, first `matmul_codes`") && why.contains("`fp4_backend: emulate`"),
                "{why}"
            );
            assert!(why.contains("`recipe: fp8_hybrid`"), "{why}");
        }
        let other_dice = checked(|instruction| {
            if let Instruction::Launch(launch) = instruction
                && launch.op == "quantise_blocks"
                && launch.attrs.get("stream").is_some()
            {
                launch.attrs = launch.attrs.clone().with("seed", 1u64);
            }
            Ok(())
        });
        assert!(other_dice.unwrap_err().contains("first `quantise_blocks`"));
    }

    #[test]
    fn products_that_the_library_does_not_offer_stop_the_run() {
        let none = checked(|instruction| match instruction {
            Instruction::Gemm(gemm) if gemm.has_blocks() => {
                Err(BackendError::Unavailable("cuBLASLt offers no algorithm for it".into()))
            }
            _ => Ok(()),
        });
        let why = none.unwrap_err();
        assert!(why.contains("cuBLASLt offers no algorithm") && why.contains("`fp4_backend: emulate`"), "{why}");
    }

    /// Emulated products are of numbers, which are made before each.
    #[test]
    fn plans_for_blackwell_are_those_of_its_units() {
        let planned = |backend: &str| {
            let more = json!({"recipe": "nvfp4", "fp4_backend": backend});
            let preview = preview(&Machine::named("b200").unwrap(), more);
            (preview.estimate().tokens_per_second, preview.memory_bytes(), preview.notes)
        };
        let (units, emulated) = (planned("cutlass"), planned("emulate"));
        assert!(units.0 > 1.1 * emulated.0, "{} {}", units.0, emulated.0);
        let unseen = |notes: &[String]| notes.iter().any(|note| note.contains("never run on a Blackwell GPU"));
        assert!(unseen(&units.2) && !unseen(&emulated.2));
        let other = planned("cudnn");
        assert_eq!((units.0, units.1), (other.0, other.1), "the word changes no program");
    }

    /// Products that are emulated, on a CPU or because the options say so, are not checked.
    #[test]
    fn emulated_products_are_not_checked() {
        let broken = Altered {
            cpu: CpuBackend::new(Some(2)).unwrap(),
            change: |_| Err(BackendError::Unavailable("nothing is to be loaded".into())),
        };
        for (machine, backend) in [
            (Machine::named("b200").unwrap(), "emulate"),
            (Machine::cpu(8 << 30, 2), "cutlass"),
            (Machine::h200(), "emulate"),
        ] {
            let (program, recipe) = program(&machine, backend);
            assert!(!check(&broken, &program, &recipe).unwrap());
        }
    }
}
