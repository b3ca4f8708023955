//! Experts under `nvfp4`: programs for GPUs have the numbers of the reference; products are of numbers with the factor of each
//! expert's matrix, also where a GPU has units of four bits.

use crate::support::quantised::{
    ODD, error_of_experts, launches, mixture, of_experts, prepared_of, relative, run, value,
};
use crate::support::{VARIANT, in_turn, numbers, options};
use compiler::{CompileOptions, Nvfp4, Recipe, compile};
use program::{Arithmetic, EntryKind, Instruction, Machine, Phase, Realisation, Session, scalar};
use tensor::DType;

fn four(emulate: bool, stochastic: bool, adapted: bool) -> CompileOptions {
    let recipe = Recipe::Nvfp4(Nvfp4 { emulate, stochastic, skip_first: 0, skip_last: 0 });
    let adapter = adapted.then(|| of_experts(&mixture()));
    CompileOptions { recipe, adapter, variants: vec![ODD], ..options() }
}

/// Two micro-steps; all gradients one after another.
fn gradients(session: &mut dyn Session, step: i32) -> Vec<f32> {
    let program = session.program().clone();
    for (part, kind) in (0..).zip([EntryKind::FirstMicroStep, EntryKind::NextMicroStep]) {
        session.write(program.scalar(scalar::MICRO_STEP).unwrap(), &(2 * step + part).to_le_bytes()).unwrap();
        run(session, kind);
    }
    let trained = program.layout.parameters.iter().filter_map(|slot| slot.gradient.as_ref());
    trained.flat_map(|at| numbers(session, at)).collect()
}

#[test]
fn programs_for_gpus_have_the_numbers_of_the_reference() {
    let model = mixture();
    for (turn, (stochastic, adapted)) in [(false, false), (true, false), (true, true)].into_iter().enumerate() {
        let mut here = prepared_of(&model, &four(true, stochastic, adapted), &Machine::cpu(1 << 30, 2));
        let machines = [("h200", true), ("rtx4090", true), ("b200", false)];
        let prepare =
            |(name, emulate)| prepared_of(&model, &four(emulate, stochastic, adapted), &Machine::named(name).unwrap());
        let mut others: Vec<_> = in_turn(&machines, turn).into_iter().map(prepare).collect();
        for step in 0..2 {
            let expected = gradients(here.as_mut(), step);
            run(here.as_mut(), EntryKind::Update);
            let [loss, norm] =
                [scalar::LOSS_SUM, scalar::GRADIENT_NORM].map(|name| f64::from(value(here.as_mut(), name)));
            for there in &mut others {
                let what = format!("{}, {stochastic} {adapted} step {step}", there.program().machine.name);
                let error = relative(&gradients(there.as_mut(), step), &expected);
                assert!(error < 1e-4, "{what}: {error:e}");
                run(there.as_mut(), EntryKind::Update);
                for (name, expected) in [(scalar::LOSS_SUM, loss), (scalar::GRADIENT_NORM, norm)] {
                    let found = f64::from(value(there.as_mut(), name));
                    assert!((found - expected).abs() <= 1e-4 * expected.abs(), "{what}: {name} {expected} and {found}");
                }
            }
        }
    }
}

#[test]
fn experts_have_nearly_the_gradients_of_numbers() {
    let median = error_of_experts(&four(true, false, false));
    assert!((0.1..0.6).contains(&median), "{median}");
}

#[test]
fn experts_are_multiplied_as_numbers() {
    let model = mixture();
    for (name, emulate, by) in [("h200", true, Realisation::Hopper), ("b200", false, Realisation::Portable)] {
        for adapted in [false, true] {
            let options = CompileOptions {
                weights: DType::BF16,
                compute: DType::BF16,
                variants: vec![VARIANT],
                ..four(emulate, true, adapted)
            };
            let program = compile(&model, &options, &Machine::named(name).unwrap()).unwrap();
            // Two layers, of which each has a product for gate and up, and one for down.
            for phase in [Phase::Forward, Phase::Backward] {
                let products = launches(&program, "grouped_codes", phase);
                assert_eq!(products.len(), 4, "{name} {phase:?}");
                for launch in &products {
                    assert_eq!(launch.inputs.len(), if adapted { 7 } else { 5 }, "adapters ride on the products");
                    assert!(launch.inputs[..2].iter().all(|of| of.dtype == DType::BF16));
                    assert_eq!(launch.inputs[4].shape, [launch.inputs[2].len() - 1], "a factor for each expert");
                    assert_eq!(launch.attrs.flag("transposed").unwrap(), phase == Phase::Backward);
                    assert_eq!(launch.arithmetic, Arithmetic::Grouped { gradient: false, by });
                }
            }
            let gradients = launches(&program, "grouped_weight_gradient", Phase::Backward);
            let scaled = gradients.iter().filter(|launch| launch.inputs.len() == 5).count();
            assert_eq!(scaled, if adapted { 0 } else { 4 }, "{name}");
            let mut experts =
                program.layout.parameters.iter().filter(|of| of.name.contains(".experts.") && !of.adapter);
            assert!(experts.all(|of| of.load_group.is_some() == adapted), "frozen ones are codes when they are loaded");
            let entry = &program.entries[program.entry(EntryKind::FirstMicroStep, Some(VARIANT)).unwrap()];
            let units = entry.steps.iter().filter(|step| match &step.instruction {
                Instruction::Gemm(gemm) => gemm.has_blocks(),
                _ => false,
            });
            assert_eq!(units.count() > 0, !emulate, "{name}: other linears have products of four bits");
        }
    }
}
