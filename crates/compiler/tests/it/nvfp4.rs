//! Programs of `nvfp4`: one for a GPU has the numbers of the reference; gradients are rounded in every micro-step;
//! codes of weights follow the weights.

use std::collections::BTreeSet;

use crate::support::quantised::{ODD, prepared, relative, run, value};
use crate::support::{self, adapter, model, numbers, options};
use compiler::{AdapterOptions, CompileOptions, EntryOptions, Nvfp4, Passes, Recipe, compile, entry_graph};
use graph::{Graph, Origin, ValueId};
use ops::id;
use program::{Entry, EntryKind, Instruction, Machine, Program, Session, scalar};
use tensor::packed::{Quantisation, Target};
use tensor::{DType, Storage};

fn four(stochastic: bool, adapted: bool) -> CompileOptions {
    with_units(false, stochastic, adapted)
}

/// For units of four bits, or emulated.
fn with_units(units: bool, stochastic: bool, adapted: bool) -> CompileOptions {
    let recipe = Recipe::Nvfp4(Nvfp4 { emulate: !units, stochastic, skip_first: 0, skip_last: 0 });
    CompileOptions { recipe, adapter: adapted.then(adapter), variants: vec![ODD], ..options() }
}

fn set_micro_step(session: &mut dyn Session, step: i32) {
    let at = session.program().scalar(scalar::MICRO_STEP).unwrap().clone();
    session.write(&at, &step.to_le_bytes()).unwrap();
}

/// All gradients one after another.
fn gradients(session: &mut dyn Session) -> Vec<f32> {
    let program = session.program().clone();
    let trained = program.layout.parameters.iter().filter_map(|slot| slot.gradient.as_ref());
    trained.flat_map(|at| numbers(session, at)).collect()
}

#[test]
fn a_program_for_a_gpu_has_the_numbers_of_the_reference() {
    let all = [(false, false), (true, false), (true, true)];
    let machines = [(Machine::h200(), false), (Machine::named("b200").unwrap(), true)];
    for ((machine, units), (stochastic, adapted)) in
        machines.iter().flat_map(|of| all.iter().map(move |more| (of, more)))
    {
        let (units, stochastic, adapted) = (*units, *stochastic, *adapted);
        let mut here = prepared(&four(stochastic, adapted), &Machine::cpu(1 << 30, 2));
        let mut there = prepared(&with_units(units, stochastic, adapted), machine);
        assert_eq!(products(there.program()).iter().all(|gemm| gemm.has_blocks()), units);
        for step in 0..2 {
            for session in [&mut here, &mut there] {
                for (part, kind) in [EntryKind::FirstMicroStep, EntryKind::NextMicroStep].into_iter().enumerate() {
                    set_micro_step(session.as_mut(), 2 * step + part as i32);
                    run(session.as_mut(), kind);
                }
            }
            let error = relative(&gradients(there.as_mut()), &gradients(here.as_mut()));
            assert!(error < 1e-4, "{units} {stochastic} {adapted} step {step}: {error:e}");
            for session in [&mut here, &mut there] {
                run(session.as_mut(), EntryKind::Update);
            }
            for name in [scalar::LOSS_SUM, scalar::GRADIENT_NORM] {
                let [a, b] = [&mut here, &mut there].map(|session| value(session.as_mut(), name));
                assert!((a - b).abs() <= 1e-4 * a.abs(), "{stochastic} {adapted} step {step}: {name} {a} and {b}");
            }
        }
    }
}

#[test]
fn gradients_are_rounded_anew_in_every_micro_step_and_weights_coded_anew_by_the_update() {
    for stochastic in [false, true] {
        let mut session = prepared(&four(stochastic, false), &Machine::cpu(1 << 30, 2));
        let session = session.as_mut();
        let mut of = |step: i32| {
            set_micro_step(session, step);
            run(session, EntryKind::FirstMicroStep);
            (value(session, scalar::LOSS_SUM), gradients(session))
        };
        let (first, again, other) = (of(0), of(0), of(1));
        assert!(first == again, "the same micro-step has the same random numbers");
        assert_eq!(first.0, other.0, "the forward pass rounds to nearest");
        assert_eq!(first.1 != other.1, stochastic);
        if stochastic {
            let error = relative(&other.1, &first.1);
            assert!((1e-3..0.5).contains(&error), "{error}");
        }
        run(session, EntryKind::Update);
        set_micro_step(session, 0);
        run(session, EntryKind::FirstMicroStep);
        assert_ne!(first.0, value(session, scalar::LOSS_SUM));
    }
}

/// Products whose factors have a factor each.
fn products(program: &Program) -> Vec<&program::Gemm> {
    program.entries.iter().flat_map(products_of).collect()
}

fn products_of(entry: &Entry) -> Vec<&program::Gemm> {
    let gemms = entry.steps.iter().filter_map(|step| match &step.instruction {
        Instruction::Gemm(gemm) => Some(gemm),
        _ => None,
    });
    gemms.filter(|gemm| gemm.scales.is_some()).collect()
}

/// In bf16, as GPUs train: sums of the same terms in f32.
#[test]
fn units_of_four_bits_have_the_bits_of_emulated_products() {
    for adapted in [false, true] {
        let in_bf16 = |units: bool| CompileOptions {
            weights: DType::BF16,
            compute: DType::BF16,
            ..with_units(units, true, adapted)
        };
        let blackwell = |units: bool| {
            let mut session = prepared(&in_bf16(units), &Machine::named("rtx5090").unwrap());
            for kind in [EntryKind::FirstMicroStep, EntryKind::NextMicroStep] {
                set_micro_step(session.as_mut(), 3);
                run(session.as_mut(), kind);
            }
            (value(session.as_mut(), scalar::LOSS_SUM), gradients(session.as_mut()))
        };
        let (units, emulated) = (blackwell(true), blackwell(false));
        assert_eq!(units.0, emulated.0, "{adapted}");
        assert!(units.1 == emulated.1, "{adapted}: {:e}", relative(&units.1, &emulated.1));
    }
}

#[test]
fn gpus_without_units_of_four_bits_are_refused_by_name() {
    for machine in [Machine::h200(), Machine::named("l40s").unwrap()] {
        let refused = compile(&model(), &with_units(true, true, false), &machine).unwrap_err().to_string();
        assert!(refused.contains("needs a GPU from sm_100a on"), "{refused}");
        compile(&model(), &with_units(false, true, false), &machine).unwrap();
    }
    // A CPU emulates.
    let program = compile(&model(), &with_units(true, true, false), &Machine::cpu(1 << 30, 2)).unwrap();
    assert!(products(&program).iter().all(|gemm| !gemm.has_blocks()));
}

#[test]
fn products_are_of_numbers_or_codes_and_adapters_ride_on_them() {
    for (adapted, units) in [(false, false), (true, false), (false, true), (true, true)] {
        let options = CompileOptions { weights: DType::BF16, compute: DType::BF16, ..with_units(units, true, adapted) };
        let machine = if units { Machine::named("b200").unwrap() } else { Machine::h200() };
        let program = compile(&model(), &options, &machine).unwrap();
        let products = products(&program);
        let dtype = if units { DType::U8 } else { DType::BF16 };
        assert!(!products.is_empty() && products.iter().all(|gemm| gemm.a.dtype == dtype));
        if units {
            let first = program.entries.iter().find(|entry| entry.kind == EntryKind::FirstMicroStep).unwrap();
            let count = products_of(first).len();
            assert!(first.to_string().lines().next().unwrap().ends_with(&format!(", {count} products of four bits")));
        }
        assert_eq!(products.iter().any(|gemm| !gemm.low_rank.is_empty()), adapted);
        assert_eq!(products.iter().any(|gemm| gemm.d.dtype == DType::F32), !adapted, "gradients of weights are f32");
    }
}

/// The parameters that a weight consists of.
fn parts(graph: &Graph, weight: ValueId) -> Vec<u32> {
    match graph.value(weight).origin {
        Origin::Parameter(id) => vec![id.0],
        _ => {
            let stack = graph.prepared.iter().find(|node| node.outputs.contains(&weight)).unwrap();
            stack.inputs.iter().flat_map(|id| parts(graph, *id)).collect()
        }
    }
}

/// The parameters that a recipe scales by one magnitude: those of a group, or of an expert's matrix.
fn scaled_at_once(graph: &Graph) -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    for node in graph.prepared.iter().filter(|node| node.op == id::OWN_AMAX) {
        let members: Vec<u32> = node.inputs.iter().flat_map(|id| parts(graph, *id)).collect();
        match node.attrs.size("groups") {
            Ok(experts) if members.len() >= experts => {
                all.extend(members.chunks(members.len() / experts).map(<[u32]>::to_vec));
            }
            // One parameter with the matrices of all experts, or no experts.
            _ => all.push(members),
        }
    }
    all
}

/// Weights in tiles are scaled with those that the recipe scales them with, merged or not; without the recipe, too.
#[test]
fn weights_in_tiles_share_the_magnitudes_of_the_recipe() {
    let models = [
        include_str!("../../../train/tests/ir/llama.json"),
        include_str!("../../../train/tests/ir/qwen3.json"),
        include_str!("../../../train/tests/ir/olmoe.json"),
        include_str!("../../../train/tests/ir/gemma4.json"),
        include_str!("../../../train/tests/ir/stories.json"),
    ];
    let mut shared = 0;
    for model in models.map(|text| graph::from_json(text).unwrap()) {
        let own = AdapterOptions { targets: vec!["q_proj".into()], form: model.adapters.clone(), ..adapter() };
        let graph_of = |recipe: Recipe, quantised: Quantisation, passes: Option<usize>| {
            let quantised = Some(quantised);
            let options = CompileOptions { recipe, quantised, adapter: Some(own.clone()), ..four(false, true) };
            let entry = EntryOptions::train(support::TASK);
            entry_graph(&model, &options, &Machine::h200(), &entry, ODD, &mut Passes::limited(passes)).unwrap()
        };
        let tables = [(four(false, true).recipe, None), (four(false, true).recipe, Some(0)), (Recipe::Uniform, None)];
        let graphs = tables.map(|(recipe, passes)| graph_of(recipe, Quantisation::Fp4Tiles, passes));
        let groups = |graph: &Graph| graph.parameters.iter().map(|of| of.magnitude_group).collect::<Vec<_>>();
        assert!(graphs.iter().all(|graph| groups(graph) == groups(&graphs[0])), "{}", model.architecture);
        for graph in &graphs[..2] {
            let mut seen = BTreeSet::new();
            for members in scaled_at_once(graph) {
                let of = |id: &u32| &graph.parameters[*id as usize];
                assert!(members.iter().all(|id| matches!(of(id).storage, Storage::Packed(_))));
                let group = of(&members[0]).magnitude_group;
                assert_eq!(group.is_some(), members.len() > 1, "{}", of(&members[0]).name);
                assert!(members.iter().all(|id| of(id).magnitude_group == group), "{}", of(&members[0]).name);
                if let Some(group) = group {
                    let all = graph.parameters.iter().filter(|of| of.magnitude_group == Some(group)).count();
                    assert_eq!(all, members.len(), "{}", of(&members[0]).name);
                    assert!(seen.insert(group), "a group is scaled at once");
                }
            }
            let marked: BTreeSet<u32> = graph.parameters.iter().filter_map(|of| of.magnitude_group).collect();
            assert!(!marked.is_empty() && marked == seen, "{}", model.architecture);
            shared += marked.len();
        }
        let rows = graph_of(Recipe::Uniform, Quantisation::Fp4 { target: Target::Six }, None);
        assert!(groups(&rows).iter().all(Option::is_none), "other forms are scaled tensor by tensor");
    }
    assert!(shared >= 2 * 5 * 2, "{shared}");
}
