//! Frozen weights in codes: a program over them has the bits of one over the values that the codes stand for, whatever
//! else the plan decides, and its arenas have the bytes of the codes.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::support::{TASK, adapter, contents, fill_parameters, in_turn, model, options, read, run};
use compiler::{
    AdapterOptions, CompileError, CompileOptions, EntryOptions, Fp8Hybrid, GradientFormat, Nvfp4, OffloadOptions,
    PlanOptions, Recipe, RecomputeOptions, compile,
};
use ops::optimizer::dynamic_map;
use program::{Backend, EntryKind, Instruction, Machine, Program, Session};
use tensor::packed::{Packed, Quantisation, Target, nested, normal, nvfp4, tiles};
use tensor::storage::{Block, NVFP4, NVFP4_TILES, Packing, fp8_tiles, nf4, nf4_nested};
use tensor::{DType, HostTensor};

const FORMS: [Quantisation; 6] = [
    Quantisation::Nf4 { block: 64, nested: true },
    Quantisation::Nf4 { block: 512, nested: false },
    Quantisation::Fp8 { extent: 64 },
    Quantisation::Fp4 { target: Target::FourOrSix },
    Quantisation::Fp4 { target: Target::Six },
    Quantisation::Fp4Tiles,
];

fn quantised(form: Quantisation, x: &[f32], shape: &[usize]) -> Packed {
    match form {
        Quantisation::Nf4 { block, nested: false } => normal(x, shape, block),
        Quantisation::Nf4 { block, nested: true } => nested(x, shape, block, &dynamic_map(true)),
        Quantisation::Fp8 { extent } => tiles(x, shape, extent),
        Quantisation::Fp4 { target } => nvfp4(NVFP4, x, shape, target),
        Quantisation::Fp4Tiles => nvfp4(NVFP4_TILES, x, shape, Target::Six),
    }
}

fn drawn(name: &str, elements: usize) -> Vec<f32> {
    let mut graph = graph::Graph::default();
    let id = graph.add_parameter(name, vec![elements], graph::Init::Ones, DType::F32);
    contents::<f32>(&graph)[&graph.parameter(id).value].real().to_vec()
}

/// A program on the CPU. What `form` packs holds its codes where the program keeps codes, else their values.
fn loaded(program: &Program, packed: &Program, form: Quantisation) -> Box<dyn Session> {
    let program = Arc::new(program.clone());
    let mut session = cpu::CpuBackend::new(Some(2)).unwrap().load(program.clone()).unwrap();
    fill_parameters(session.as_mut(), |session, _, slot| {
        let x = drawn(&slot.name, slot.elements());
        let is_packed = packed.layout.parameter(&slot.name).unwrap().packed.is_some();
        let of = is_packed.then(|| quantised(form, &x, slot.shape()));
        let bytes = match (&of, &slot.packed) {
            (Some(of), Some(_)) => of.to_bytes(),
            (Some(of), None) => HostTensor::from_f32(slot.shape().clone(), &of.values()).cast(slot.dtype()).bytes,
            (None, _) => HostTensor::from_f32(slot.shape().clone(), &x).cast(slot.dtype()).bytes,
        };
        session.write(&slot.weight, &bytes).unwrap();
    });
    session
}

/// Loss, gradients and logits after two micro-steps and an evaluation.
fn results(session: &mut dyn Session) -> Vec<Vec<u8>> {
    let program = session.program().clone();
    let mut results = Vec::new();
    for kind in [EntryKind::FirstMicroStep, EntryKind::NextMicroStep, EntryKind::Evaluate] {
        let entry = program.entries.iter().position(|entry| entry.kind == kind).unwrap();
        run(session, entry);
        results.push(read(session, program.scalar("loss_sum").unwrap()));
        let gradients = program.layout.parameters.iter().filter_map(|slot| slot.gradient.as_ref());
        results.extend(gradients.map(|at| read(session, at)));
    }
    results
}

fn lora(compute: DType, recompute: Option<bool>) -> CompileOptions {
    let recompute = RecomputeOptions { block: recompute, ..Default::default() };
    CompileOptions {
        adapter: Some(adapter()),
        weights: compute,
        compute,
        plan: PlanOptions { recompute, ..options().plan },
        entries: vec![EntryOptions::train(TASK), EntryOptions::evaluate(TASK)],
        ..options()
    }
}

fn count(program: &Program, kind: EntryKind, phase: fn(&str) -> bool) -> usize {
    let entry = &program.entries[program.entry(kind, program.entries[0].variant).unwrap()];
    let makes = |step: &&program::Step| matches!(&step.instruction, Instruction::Launch(l) if l.op == "dequantise");
    entry.steps.iter().filter(makes).filter(|step| phase(step.provenance.phase.name())).count()
}

#[test]
fn bits_are_those_of_the_values_that_the_codes_stand_for() {
    let machines = [Machine::cpu(1 << 30, 2), Machine::h200()];
    for (form, compute) in FORMS.into_iter().flat_map(|form| [(form, DType::F32), (form, DType::BF16)]) {
        for (machine, recompute) in machines.iter().flat_map(|m| [(m, Some(false)), (m, Some(true)), (m, None)]) {
            let plain = compile(&model(), &lora(compute, recompute), machine).unwrap();
            let options = CompileOptions { quantised: Some(form), ..lora(compute, recompute) };
            let packed = compile(&model(), &options, machine).unwrap();
            let mut sessions = [&plain, &packed].map(|program| loaded(program, &packed, form));
            let [wanted, found] = sessions.each_mut().map(|session| results(session.as_mut()));
            assert!(wanted == found, "{form:?} {compute} {} recompute {recompute:?}", machine.name);
            assert!(wanted.iter().all(|bytes| bytes.iter().any(|byte| *byte != 0)), "nothing was computed");
        }
    }
}

/// A recipe makes its own codes of the values that a weight's codes stand for, once: nothing else reads these.
#[test]
fn a_recipe_quantises_the_values_that_codes_stand_for() {
    let fp8 = Fp8Hybrid { gradient: GradientFormat::E5M2, amax_history: 2, skip_first: 0, skip_last: 0 };
    let fp4 = Nvfp4 { emulate: true, stochastic: true, skip_first: 0, skip_last: 0 };
    let unquantised = Fp8Hybrid { gradient: GradientFormat::Unquantised, skip_first: 1, ..fp8 };
    for recipe in [Recipe::Fp8Hybrid(fp8), Recipe::Nvfp4(fp4), Recipe::Fp8Hybrid(unquantised)] {
        for (form, machine) in FORMS
            .into_iter()
            .flat_map(|form| [Machine::cpu(1 << 30, 2), Machine::h200()].map(|machine| (form, machine)))
        {
            let options = CompileOptions { recipe, ..lora(DType::BF16, None) };
            let plain = compile(&model(), &options, &machine).unwrap();
            let packed = compile(&model(), &CompileOptions { quantised: Some(form), ..options }, &machine).unwrap();
            let mut sessions = [&plain, &packed].map(|program| loaded(program, &packed, form));
            let [wanted, found] = sessions.each_mut().map(|session| results(session.as_mut()));
            assert!(wanted == found, "{recipe:?} {form:?} {}", machine.name);
            let of_values = |program: &Program, kind: EntryKind| {
                let variant = program.entries[0].variant.filter(|_| kind != EntryKind::Prepare);
                let entries = program.entries.iter().filter(|of| of.kind == kind && of.variant == variant);
                let launches = entries.flat_map(|entry| &entry.steps).filter_map(|step| match &step.instruction {
                    Instruction::Launch(launch) if launch.op == "dequantise" => Some(launch),
                    _ => None,
                });
                launches.filter(|launch| !launch.attrs.flag("unscaled").unwrap()).count()
            };
            // Two products of a layer: one of two layers, or both.
            let (prepared, read) = if recipe == Recipe::Fp8Hybrid(unquantised) { (2, 2) } else { (4, 0) };
            assert_eq!(of_values(&packed, EntryKind::Prepare), prepared, "{recipe:?}");
            assert_eq!(of_values(&packed, EntryKind::Evaluate), read, "{recipe:?}");
        }
    }
}

#[test]
fn values_are_made_once_in_each_direction_and_codes_are_all_that_is_kept() {
    let form = FORMS[0];
    for recompute in [false, true] {
        let plain = compile(&model(), &lora(DType::BF16, Some(recompute)), &Machine::h200()).unwrap();
        let options = CompileOptions { quantised: Some(form), ..lora(DType::BF16, Some(recompute)) };
        let packed = compile(&model(), &options, &Machine::h200()).unwrap();
        // Two layers of three linears, two of which are one product: their values are made at once.
        assert_eq!(count(&packed, EntryKind::FirstMicroStep, |phase| phase == "forward"), 4);
        assert_eq!(count(&packed, EntryKind::Evaluate, |_| true), 4);
        let again = count(&packed, EntryKind::FirstMicroStep, |phase| phase != "forward");
        // No gradient reaches the input of the first layer's first product, unless its outputs are recomputed.
        assert_eq!(again, if recompute { 4 } else { 3 });
        let products = |program: &Program| {
            let steps = program.entries[0].steps.iter();
            steps.filter(|step| matches!(step.instruction, Instruction::Gemm(_))).count()
        };
        assert_eq!(products(&packed), products(&plain), "products merge as those of plain weights");
        let bytes = |program: &Program| -> usize {
            program.layout.parameters.iter().filter(|slot| !slot.adapter).map(|slot| slot.weight.bytes()).sum()
        };
        let slots = packed.layout.parameters.iter().filter(|slot| slot.packed.is_some());
        let (codes, values) = slots.fold((0, 0), |(codes, values), slot| {
            (codes + form.packing().bytes(slot.shape()), values + 2 * slot.elements())
        });
        assert_eq!(bytes(&packed), bytes(&plain) - values + codes);
    }
}

/// Codes that are at home on the host come for the products of a layer in each direction, and never go back.
#[test]
fn codes_on_the_host_are_fetched_for_each_direction() {
    use program::{ArenaKind, StreamId};
    for (form, recompute) in FORMS.into_iter().flat_map(|form| [(form, Some(false)), (form, Some(true)), (form, None)])
    {
        let stays = CompileOptions { quantised: Some(form), ..lora(DType::BF16, recompute) };
        let mut moves = stays.clone();
        moves.plan.offload.quants = Some(true);
        let [stays, moves] = [stays, moves].map(|options| compile(&model(), &options, &Machine::h200()).unwrap());
        let mut sessions = [&stays, &moves].map(|program| loaded(program, &stays, form));
        let [wanted, found] = sessions.each_mut().map(|session| results(session.as_mut()));
        assert!(wanted == found, "{form:?} {recompute:?}");
        let quants = moves.arenas.iter().position(|arena| arena.kind == ArenaKind::Quants).unwrap();
        assert!(moves.arenas[quants].is_on_host());
        let bytes =
            |program: &Program| program.arenas.iter().find(|arena| arena.kind == ArenaKind::Weights).unwrap().bytes;
        assert_eq!(bytes(&stays), bytes(&moves) + moves.arenas[quants].bytes);
        let fetched = |kind: EntryKind| {
            let entry = moves.entries.iter().find(|entry| entry.kind == kind).unwrap();
            let copies = entry.steps.iter().filter_map(|step| match &step.instruction {
                Instruction::Transfer { from, to, stream } => Some((from, to, *stream)),
                _ => None,
            });
            let of_quants = copies.filter(|(from, to, _)| [from, to].iter().any(|at| at.arena.0 as usize == quants));
            let mut count = 0;
            for (from, _, stream) in of_quants {
                assert!(from.arena.0 as usize == quants && stream == StreamId::ToDevice, "codes are only read");
                count += 1;
            }
            count
        };
        // Two products in each of two layers, in the backward pass all but the first.
        assert_eq!(fetched(EntryKind::Evaluate), 4);
        let both = fetched(EntryKind::FirstMicroStep);
        assert!((7..=8).contains(&both) && fetched(EntryKind::NextMicroStep) == both, "{form:?}: {both}");
    }
}

/// Matrices of experts that files keep one by one lie one after another: those of a product are made by one launch, and
/// come from the host by one transfer.
#[test]
fn values_of_all_experts_are_made_at_once() {
    let model = graph::from_json(include_str!("../../../train/tests/ir/olmoe.json")).unwrap();
    let both = |(turn, form)| in_turn(&[(form, false), (form, true)], turn);
    for (form, offloaded) in FORMS.into_iter().enumerate().flat_map(both) {
        let own = AdapterOptions { targets: vec!["q_proj".into()], form: model.adapters.clone(), ..adapter() };
        let mut options = CompileOptions { adapter: Some(own), ..lora(DType::BF16, None) };
        let plain = compile(&model, &options, &Machine::h200()).unwrap();
        options.plan.offload.quants = Some(offloaded);
        let packed = compile(&model, &CompileOptions { quantised: Some(form), ..options }, &Machine::h200()).unwrap();
        let mut sessions = [&plain, &packed].map(|program| loaded(program, &packed, form));
        let [wanted, found] = sessions.each_mut().map(|session| results(session.as_mut()));
        assert!(wanted == found, "{form:?} {offloaded}");
        let entry = packed.entries.iter().find(|entry| entry.kind == EntryKind::Evaluate).unwrap();
        let made = entry.steps.iter().filter_map(|step| match &step.instruction {
            Instruction::Launch(launch) if launch.op == "dequantise" => launch.attrs.optional_int("members").unwrap(),
            _ => None,
        });
        // Each of the two layers: q, k and v, gate and up of all experts, down of all experts.
        let experts =
            packed.layout.parameters.iter().filter(|slot| slot.name.contains("layers.0.mlp.experts.")).count();
        let experts = experts as i64 / 3;
        assert_eq!(made.collect::<Vec<_>>(), [3, 2 * experts, experts, 3, 2 * experts, experts], "{form:?}");
        let fetched =
            entry.steps.iter().filter(|step| matches!(&step.instruction, Instruction::Transfer { .. })).count();
        assert_eq!(fetched, if offloaded { 8 } else { 0 }, "with o_proj, four of each layer");
    }
}

/// Left open, codes stay on the device as long as anything else makes the run fit, and no smaller memory is needed then.
#[test]
fn codes_move_to_the_host_where_nothing_else_makes_the_run_fit() {
    use program::{ArenaKind, PlanDecision, Reason, Subject};
    let form = FORMS[0];
    let with = |quants: Option<bool>, memory: Option<usize>| {
        let mut options = CompileOptions { quantised: Some(form), ..lora(DType::BF16, None) };
        // Nothing else moves.
        let [optimizer, master, gradients] = [Some(false); 3];
        options.plan.offload = OffloadOptions { optimizer, master, gradients, quants, ..options.plan.offload };
        options.plan.memory_limit = memory;
        compile(&model(), &options, &Machine::h200())
    };
    let needed = |quants: bool| match with(Some(quants), Some(1)) {
        Err(CompileError::DoesNotFit { needed, .. }) => needed,
        other => panic!("nothing fits in a byte: {other:?}"),
    };
    let (stays, moves) = (needed(false), needed(true));
    assert!(moves < stays, "{moves} {stays}");
    let of_codes = |program: &Program| -> Vec<PlanDecision> {
        program.plan.iter().filter(|line| line.subject == Subject::FrozenCodes).cloned().collect()
    };
    let on_host =
        |program: &Program| program.arenas.iter().any(|arena| arena.kind == ArenaKind::Quants && arena.bytes > 0);
    let roomy = with(None, Some(stays)).unwrap();
    assert!(!on_host(&roomy) && of_codes(&roomy).is_empty());
    let tight = with(None, Some(moves)).unwrap();
    assert!(on_host(&tight));
    let [line] = &of_codes(&tight)[..] else { panic!("{:?}", tight.plan) };
    assert!(line.reason == Reason::NeededToFit && line.bytes > 0 && line.seconds > 0.0, "{line:?}");
    assert!(with(Some(false), Some(moves)).is_err(), "what is written is not changed");
}

#[test]
fn what_is_trained_is_not_packed() {
    let options = CompileOptions { quantised: Some(FORMS[0]), ..options() };
    let error = compile(&model(), &options, &Machine::cpu(1 << 30, 2)).unwrap_err();
    assert!(error.to_string().contains("quantised weights are frozen"), "{error}");
}

/// Weights that files hold in codes are kept so by name, each in its own form; others keep their type.
#[test]
fn weights_are_kept_in_the_forms_of_their_files() {
    let forms = [
        ("layers.0.gate_proj.weight", nf4(32)),
        ("layers.0.up_proj.weight", Packing { block: Block::Tile(7, 5), ..fp8_tiles(8) }),
        ("layers.1.down_proj.weight", nf4_nested(64)),
        ("embed.weight", nf4(64)),
    ];
    let stored: BTreeMap<String, Packing> = forms.map(|(name, packing)| (name.to_owned(), packing)).into();
    let program = |options: CompileOptions| compile(&model(), &options, &Machine::cpu(1 << 30, 2)).unwrap();
    let packed = program(CompileOptions { stored: stored.clone(), ..lora(DType::F32, None) });
    for slot in &packed.layout.parameters {
        // The embedding is looked up, and is the head.
        let expected = stored.get(&slot.name).filter(|_| slot.name != "embed.weight");
        assert_eq!(slot.packed.as_ref().map(|of| &of.packing), expected, "{}", slot.name);
        assert!(slot.packed.as_ref().is_none_or(|of| of.made.is_none()), "the file has the codes");
    }
    let of_no_layer = BTreeMap::from([("embed.weight".to_owned(), nf4(64))]);
    let plain = program(CompileOptions { stored: of_no_layer, ..lora(DType::F32, None) });
    assert_eq!(plain.layout, program(lora(DType::F32, None)).layout);
}
