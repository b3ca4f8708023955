//! Programs of pipelines: what each stage has, what it hands on, what is refused, and that a wrong one is found when it is made.

use std::collections::BTreeSet;

use crate::support::{self, adapter, fill, loaded, options, read};
use compiler::{CompileError, CompileOptions, OffloadOptions, Sharding, compile};
use program::{ArenaKind, EntryKind, Machine, Program, STAGE, check_stages, scalar};

const LAYERS: usize = 5;
const HIDDEN: usize = 64;

/// The shipped example with an output head of its own.
fn model() -> graph::Model {
    let mut model = support::training::model();
    let head = graph::ParameterSpec { name: "lm_head.weight".into(), ..model.parameters[0].clone() };
    model.parameters.push(head);
    let graph::Item::Node(last) = model.body.last_mut().unwrap() else { panic!("the head is the last") };
    last.inputs[1] = "lm_head.weight".into();
    model
}

fn staged(stages: usize, options: &CompileOptions) -> CompileOptions {
    CompileOptions { sharding: Sharding { stages, ..Sharding::default() }, ..options.clone() }
}

fn cases() -> Vec<(&'static str, CompileOptions)> {
    let adapters = CompileOptions { adapter: Some(adapter()), ..options() };
    vec![("full", options()), ("adapters", adapters)]
}

#[test]
fn every_parameter_is_on_one_stage_in_the_order_of_the_model() {
    for (case, options) in cases() {
        let one = compile(&model(), &options, &Machine::h200()).unwrap();
        for stages in [2, 3] {
            let program = compile(&model(), &staged(stages, &options), &Machine::h200()).unwrap();
            let names = |of: &Program| of.layout.parameters.iter().map(|slot| slot.name.clone()).collect::<Vec<_>>();
            assert_eq!(names(&program), names(&one), "{case}");
            let mut layers = vec![BTreeSet::new(); stages];
            for entry in &program.entries {
                let of = entry.steps.iter().filter_map(|step| step.provenance.layer.as_ref());
                layers[entry.stage.number].extend(of.map(|layer| layer.index));
                let arenas = entry.steps.iter().flat_map(|step| [step.instruction.reads(), step.instruction.writes()]);
                let here = |at: &&program::TensorRef| program.stage_of(at.arena) == entry.stage.number;
                assert!(arenas.flatten().all(|at| here(&at)), "{case}: {} reaches another stage", entry.kind.name());
            }
            let in_order: Vec<usize> = layers.iter().flatten().copied().collect();
            assert_eq!(in_order, (0..LAYERS).collect::<Vec<_>>(), "{case}: every layer once, in order: {layers:?}");
            let stage = |name: &str| program.stage_of(program.parameter(name).unwrap().weight.arena);
            assert_eq!((stage("model.embed_tokens.weight"), stage("lm_head.weight")), (0, stages - 1), "{case}");
        }
    }
}

#[test]
fn only_the_residual_stream_is_handed_on_and_only_what_was_received_is_kept() {
    for (case, options) in cases() {
        let program = compile(&model(), &staged(3, &options), &Machine::h200()).unwrap();
        for entry in program.entries.iter().filter(|entry| entry.variant.is_some()) {
            let (of, last) = (&entry.stage, entry.stage.number == 2);
            let counts = [&of.from_previous, &of.to_next, &of.from_next, &of.to_previous].map(Vec::len);
            let [before, after] = [usize::from(of.number > 0), usize::from(!last)];
            let expected = match (entry.kind, entry.name.as_str()) {
                (EntryKind::Forward, STAGE) | (EntryKind::Evaluate, _) => [before, after, 0, 0],
                _ if last => [1, 0, 0, 1],
                // What was handed on lies there since the forward pass.
                _ => [0, 0, 1, before],
            };
            assert_eq!(counts, expected, "{case}: {} {} of stage {}", entry.kind.name(), entry.name, of.number);
            let tokens = support::VARIANT.batch * support::VARIANT.seq_len;
            for at in of.received().iter().chain(&of.sent()).flat_map(|(_, tensors)| *tensors) {
                assert_eq!(at.len(), tokens * HIDDEN, "{case}: {at}");
            }
            // What crosses is recomputed, not handed on, where it follows from the batch.
            let scalars = [scalar::LOSS_SUM, scalar::WEIGHT_SUM];
            assert!(last || entry.outputs.iter().all(|(name, _)| !scalars.contains(&name.as_str())), "{case}");
        }
        let batch = |stage: usize| program.of_stage(stage).arenas[ArenaKind::Batch.id().0 as usize].bytes;
        for stage in 0..3 {
            assert_eq!(batch(stage), program.slots(stage) * program.in_slots(stage), "{case}");
        }
    }
}

/// Evaluation and the update are the same as one device's.
#[test]
fn a_step_of_stages_has_the_bits_of_one_device() {
    let mut options = options();
    options.training.as_mut().unwrap().optimizer.as_mut().unwrap().max_grad_norm = 0.0;
    let bits = |stages: usize| {
        let mut session = loaded(compile(&model(), &staged(stages, &options), &Machine::h200()).unwrap());
        let session = session.as_mut();
        let program = session.program().clone();
        for (name, value) in
            [(scalar::LEARNING_RATE, 0.01), (scalar::BIAS_CORRECTION_1, 0.1), (scalar::BIAS_CORRECTION_2, 0.001)]
        {
            session.write(program.scalar(name).unwrap(), &f32::to_le_bytes(value)).unwrap();
        }
        for kind in [EntryKind::FirstMicroStep, EntryKind::NextMicroStep, EntryKind::NextMicroStep] {
            let entry = program.entry(kind, Some(support::VARIANT)).unwrap();
            program.parts(entry).into_iter().for_each(|part| fill(session, part));
            session.run(entry).unwrap();
        }
        session.run(program.entry(EntryKind::Update, None).unwrap()).unwrap();
        let entry = program.entry(EntryKind::Evaluate, Some(support::VARIANT)).unwrap();
        program.parts(entry).into_iter().for_each(|part| fill(session, part));
        session.run(entry).unwrap();
        let scalars = [scalar::LOSS_SUM, scalar::WEIGHT_SUM, scalar::GRADIENT_SCALE, scalar::UPDATE_APPLIED];
        let mut found: Vec<Vec<u8>> = scalars.iter().map(|name| read(session, program.scalar(name).unwrap())).collect();
        found.extend(program.layout.parameters.iter().map(|slot| read(session, &slot.weight)));
        found
    };
    let one = bits(1);
    assert!([2, 3, 5].into_iter().all(|stages| bits(stages) == one));
}

/// Left out, doubled, of another size, or at another entry: what crosses is checked when a program is made.
#[test]
fn a_pipeline_that_would_wait_for_ever_or_take_the_wrong_bytes_is_refused() {
    let program = compile(&model(), &staged(3, &options()), &Machine::h200()).unwrap();
    assert_eq!(check_stages(&program), Ok(()));
    let mut tried = 0;
    for index in 0..program.entries.len() {
        for side in 0..4 {
            let change = |change: &dyn Fn(&mut Vec<program::TensorRef>)| {
                let mut changed = program.clone();
                let of = &mut changed.entries[index].stage;
                let side = [&mut of.from_previous, &mut of.to_next, &mut of.from_next, &mut of.to_previous]
                    .into_iter()
                    .nth(side)
                    .expect("one of four");
                if side.is_empty() {
                    return None;
                }
                change(side);
                Some(check_stages(&changed))
            };
            let changes = [
                change(&|of| of.clear()),
                change(&|of| of.push(of[0].clone())),
                change(&|of| of[0].shape[0] = 1),
                change(&|of| of[0].dtype = tensor::DType::BF16),
            ];
            for found in changes.into_iter().flatten() {
                assert!(found.is_err(), "side {side} of {}", program.entries[index].kind.name());
                tried += 1;
            }
        }
    }
    assert!(tried > 40, "{tried}");
    for kind in [EntryKind::FirstMicroStep, EntryKind::NextMicroStep, EntryKind::Forward, EntryKind::Evaluate] {
        let mut without = program.clone();
        let last = without.entries.iter().rposition(|entry| entry.kind == kind).unwrap();
        without.entries.remove(last);
        assert!(check_stages(&without).is_err(), "without {}", kind.name());
    }
}

#[test]
fn what_does_not_go_with_stages_is_refused_by_name() {
    let refused = |model: &graph::Model, options: &CompileOptions| {
        let error = compile(model, options, &Machine::h200()).unwrap_err();
        assert!(matches!(&error, CompileError::Option { option: "pipeline_parallel_size", .. }), "{error}");
        error.to_string()
    };
    let text = refused(&support::model(), &staged(2, &options()));
    assert!(text.contains("`pipeline_parallel_size: 2`") && text.contains("would be on two GPUs"), "{text}");
    let text = refused(&model(), &staged(6, &options()));
    assert!(text.contains("has 5 layers, and every GPU needs one"), "{text}");
    let moved = OffloadOptions { optimizer: Some(true), ..OffloadOptions::default() };
    let mut offloading = staged(2, &options());
    offloading.plan.offload = moved;
    assert!(refused(&model(), &offloading).contains("offloading"));
    let mut adapted = staged(2, &CompileOptions { adapter: Some(adapter()), ..options() });
    adapted.adapter.as_mut().unwrap().magnitudes = true;
    assert!(refused(&model(), &adapted).contains("`lora_dora`"));
    let mut ranks = staged(2, &options());
    ranks.sharding.ranks = 2;
    assert!(refused(&model(), &ranks).contains("several GPUs each"));
    let mut half = staged(2, &options());
    (half.compute, half.weights) = (tensor::DType::F16, tensor::DType::F16);
    assert!(refused(&model(), &half).contains("float16"));
}
