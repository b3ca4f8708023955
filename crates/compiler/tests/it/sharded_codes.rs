//! Recipes over weights that are cut over the ranks: the bits of weights that are whole on each, with codes that a layer has
//! while it reads them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use crate::support::{self, TASK, VARIANT, adapter, fill_parameters, options, read, run, training};
use compiler::{
    AdapterOptions, CompileError, CompileOptions, EntryOptions, Fp8Hybrid, GradientFormat, Nvfp4, Observer, Pass,
    Passes, PlanOptions, QuantizeAware, Recipe, RecomputeOptions, Sharding, compile, compile_observed,
};
use graph::{Model, Node, Origin, Phase, ValueId};
use program::{
    ArenaKind, Backend, Choice, Documents, EntryKind, Instruction, Machine, Program, StreamId, Subject, Variant, scalar,
};
use serde_json::Value;
use tensor::compressed::{Codes, Extent, Form};
use tensor::packed::Quantisation;
use tensor::{DType, HostTensor};

const FP8: Fp8Hybrid = Fp8Hybrid { gradient: GradientFormat::E5M2, amax_history: 2, skip_first: 0, skip_last: 0 };
const FP4: Nvfp4 = Nvfp4 { emulate: true, stochastic: true, skip_first: 0, skip_last: 0 };

/// Gradients and weights: levels 1, 2, 3, and weights alone.
const CUTS: [(bool, bool); 4] = [(false, false), (true, false), (true, true), (false, true)];

fn machines() -> [Machine; 2] {
    [Machine::cpu(64 << 30, 2), Machine::h200()]
}

/// The small model with `layers` layers.
fn model(layers: usize) -> Model {
    scaled(layers, 1)
}

/// The same with a multiple of its features.
fn scaled(layers: usize, times: usize) -> Model {
    let mut json: Value = serde_json::from_str(include_str!("../fixtures/gated.json")).unwrap();
    widen(&mut json, times);
    let stack = json["body"].as_array_mut().unwrap().iter_mut().find(|item| item.get("repeat").is_some()).unwrap();
    stack["repeat"] = layers.into();
    graph::from_json(&json.to_string()).unwrap()
}

/// Multiplies extents that are features.
fn widen(json: &mut Value, times: usize) {
    match json {
        Value::Array(items) => items.iter_mut().for_each(|item| match item.as_u64().map(|extent| extent as usize) {
            Some(extent @ (support::HIDDEN | support::INNER)) => *item = (extent * times).into(),
            _ => widen(item, times),
        }),
        Value::Object(fields) => fields.values_mut().for_each(|value| widen(value, times)),
        _ => {}
    }
}

/// Buckets so small that the matrices of a layer are in several groups.
fn cut((gradients, weights): (bool, bool), options: &CompileOptions) -> CompileOptions {
    let sharding = Sharding { ranks: 2, bucket_bytes: Some(8 << 10), gradients, weights, ..Sharding::default() };
    CompileOptions { sharding, ..options.clone() }
}

fn with(recipe: Recipe, adapted: bool, recompute: Option<bool>) -> CompileOptions {
    let recompute = RecomputeOptions { block: recompute, ..Default::default() };
    CompileOptions {
        recipe,
        weights: DType::BF16,
        compute: DType::BF16,
        adapter: adapted.then(adapter),
        plan: PlanOptions { recompute, ..options().plan },
        entries: vec![EntryOptions::train(TASK), EntryOptions::evaluate(TASK)],
        ..options()
    }
}

fn recipes() -> Vec<Recipe> {
    let fp8 = [GradientFormat::E5M2, GradientFormat::Unquantised].map(|gradient| Fp8Hybrid { gradient, ..FP8 });
    let fp8 = fp8.into_iter().chain([Fp8Hybrid { skip_first: 1, ..FP8 }]);
    fp8.map(Recipe::Fp8Hybrid).chain([Recipe::Nvfp4(FP4)]).collect()
}

/// A format that is trained for, whose scales are those of several matrices together, and activations' of one micro-batch.
const AWARE: QuantizeAware = {
    let form = Form { codes: Codes::Nvfp4, extent: Extent::Group(16) };
    let fused: &[&[&str]] = &[&["q_proj", "k_proj", "v_proj"], &["gate_proj", "up_proj"]];
    QuantizeAware { weights: form, scales: DType::BF16, activations: Some(form), fused }
};

/// Losses, norms and weights of two steps of two micro-steps, and the loss of an evaluation.
fn bits(program: Program) -> Vec<(String, Vec<u8>)> {
    let program = Arc::new(program);
    let mut session = cpu::CpuBackend::new(Some(2)).unwrap().load(program.clone()).unwrap();
    let session = session.as_mut();
    fill_parameters(session, |session, index, slot| match slot.packed {
        Some(_) => session.write(&slot.weight, &vec![0x31; slot.weight.bytes()]).unwrap(),
        None => training::write(session, &slot.weight, training::numbers(index)),
    });
    let mut results = Vec::new();
    for _ in 0..2 {
        run(session, program.micro_step(true, false, Some(VARIANT)).unwrap());
        run(session, program.micro_step(false, true, Some(VARIANT)).unwrap());
        let scalars =
            [(scalar::LEARNING_RATE, 1e-2), (scalar::BIAS_CORRECTION_1, 0.1), (scalar::BIAS_CORRECTION_2, 1e-3)];
        for (name, value) in scalars {
            session.write(program.scalar(name).unwrap(), &f32::to_le_bytes(value)).unwrap();
        }
        session.run(program.entry(EntryKind::Update, None).unwrap()).unwrap();
        for name in [scalar::LOSS_SUM, scalar::GRADIENT_NORM] {
            results.push((name.to_owned(), read(session, program.scalar(name).unwrap())));
        }
    }
    let nothing = HostTensor::from_f32([1], &[0.0]).bytes;
    session.write(program.scalar(scalar::LOSS_SUM).unwrap(), &nothing).unwrap();
    run(session, program.entry(EntryKind::Evaluate, Some(VARIANT)).unwrap());
    results.push(("evaluation".to_owned(), read(session, program.scalar(scalar::LOSS_SUM).unwrap())));
    for slot in program.layout.parameters.iter().filter(|slot| slot.trainable) {
        results.push((slot.name.clone(), read(session, &slot.weight)));
    }
    if let Some(scaling) = &program.layout.scaling {
        results.push(("factors".to_owned(), read(session, &scaling.factors)));
    }
    results
}

#[test]
fn bits_are_those_of_whole_weights() {
    let cases = recipes().into_iter().flat_map(|recipe| [(recipe, false), (recipe, true)]);
    for (recipe, adapted) in cases.chain([(Recipe::QuantizeAware(AWARE), false)]) {
        for (machine, recompute) in machines().iter().flat_map(|of| [(of, Some(false)), (of, Some(true))]) {
            let options = with(recipe, adapted, recompute);
            let found = CUTS.map(|of| bits(compile(&model(2), &cut(of, &options), machine).unwrap()));
            let what = format!("{recipe:?}, adapters {adapted}, {}, recompute {recompute:?}", machine.name);
            training::assert_same(found[2].clone(), &found[1], &format!("{what}: levels 2 and 3"));
            training::assert_same(found[3].clone(), &found[0], &format!("{what}: weights alone"));
            let in_numbers = CompileOptions { recipe: Recipe::Uniform, ..options };
            let others = bits(compile(&model(2), &cut(CUTS[2], &in_numbers), machine).unwrap());
            assert!(others[..4] != found[2][..4], "{what}: nothing was quantised");
        }
    }
}

#[test]
fn experts_have_the_bits_of_whole_weights() {
    let model = graph::from_json(include_str!("../../../train/tests/ir/olmoe.json")).unwrap();
    for (machine, adapted) in machines().iter().flat_map(|of| [(of, false), (of, true)]) {
        let own = AdapterOptions { targets: vec!["q_proj".into()], form: model.adapters.clone(), ..adapter() };
        for recipe in [Recipe::Fp8Hybrid(FP8), Recipe::Nvfp4(FP4)] {
            let options = CompileOptions { adapter: adapted.then(|| own.clone()), ..with(recipe, false, Some(true)) };
            let found = [CUTS[1], CUTS[2]].map(|of| bits(compile(&model, &cut(of, &options), machine).unwrap()));
            let what = format!("{recipe:?}, adapters {adapted}, {}: levels 2 and 3", machine.name);
            training::assert_same(found[1].clone(), &found[0], &what);
        }
    }
}

/// Units of four bits read two forms of a weight.
#[test]
fn units_of_four_bits_read_both_forms() {
    let recipe = Recipe::Nvfp4(Nvfp4 { emulate: false, ..FP4 });
    let machine = Machine::named("b200").unwrap();
    for recompute in [Some(false), Some(true)] {
        let options = with(recipe, false, recompute);
        let [two, three] = [CUTS[1], CUTS[2]].map(|of| bits(compile(&model(2), &cut(of, &options), &machine).unwrap()));
        training::assert_same(three, &two, &format!("recompute {recompute:?}"));
    }
}

/// A frozen base in codes of its files is cut in codes: its values are made of what was gathered, a recipe's codes of these.
#[test]
fn weights_in_codes_are_quantised_in_layers() {
    let forms = [Quantisation::Nf4 { block: 64, nested: false }, Quantisation::Fp8 { extent: 64 }];
    for (recipe, form) in recipes().into_iter().flat_map(|recipe| forms.map(|form| (recipe, form))) {
        for (machine, recompute) in machines().iter().flat_map(|of| [(of, Some(false)), (of, Some(true))]) {
            let options = CompileOptions { quantised: Some(form), ..with(recipe, true, recompute) };
            let [two, three] =
                [CUTS[1], CUTS[2]].map(|of| bits(compile(&model(2), &cut(of, &options), machine).unwrap()));
            training::assert_same(three, &two, &format!("{recipe:?}, {form:?}, {}", machine.name));
        }
    }
}

fn bytes(program: &Program, kind: ArenaKind) -> usize {
    program.arenas.iter().filter(|arena| arena.kind == kind).map(|arena| arena.bytes).sum()
}

/// Quantisers of weights: those that read neither results nor gradients of the computation, which have as many rows as there
/// are tokens.
fn quantised(program: &Program, kind: EntryKind, forward: bool) -> usize {
    let entry = program.entries.iter().find(|entry| entry.kind == kind).unwrap();
    let steps = entry.steps.iter().filter(|step| (step.provenance.phase == program::Phase::Forward) == forward);
    let of_weights = steps.filter(|step| match &step.instruction {
        Instruction::Launch(launch) if ["quantise", "quantise_blocks"].contains(&launch.op.as_str()) => {
            launch.attrs.flag("tiles").unwrap_or(false) || launch.attrs.int("top") == Ok(8)
        }
        _ => false,
    });
    of_weights.count()
}

/// Codes are made once for each direction, and what is made for one direction of a layer is read there alone.
#[test]
fn codes_are_whole_in_one_layer_at_a_time() {
    const LAYERS: [usize; 2] = [4, 16];
    const TIMES: usize = 64;
    const LARGE: Variant = Variant { batch: 4, seq_len: 4096, documents: Documents::Rows, patches: 0, logits: 0 };
    /// Elements of a layer's matrices.
    const ELEMENTS: usize = 3 * support::HIDDEN * support::INNER * TIMES * TIMES;
    for (recipe, machine) in [Recipe::Fp8Hybrid(FP8), Recipe::Nvfp4(FP4)]
        .into_iter()
        .flat_map(|recipe| machines().map(|machine| (recipe, machine)))
    {
        for recompute in [false, true] {
            let options = with(recipe, false, Some(recompute));
            let at = |of: (bool, bool)| {
                // Products take as long as what is gathered for them.
                let mut options = CompileOptions { variants: vec![LARGE], ..cut(of, &options) };
                options.sharding.bucket_bytes = None;
                LAYERS.map(|layers| compile(&scaled(layers, TIMES), &options, &machine).unwrap())
            };
            let what = format!("{recipe:?}, {}, recompute {recompute}", machine.name);
            let ([few, many], [few_whole, many_whole]) = (at(CUTS[2]), at(CUTS[1]));
            // At level 2 each layer adds its codes.
            let grows = |few: &Program, many: &Program| bytes(many, ArenaKind::States) - bytes(few, ArenaKind::States);
            let codes = grows(&few_whole, &many_whole);
            assert!(codes > 12 * ELEMENTS / 2, "{what}: {codes} bytes of codes");
            assert!(grows(&few, &many) * 16 < codes, "{what}: {} of {codes} bytes", grows(&few, &many));
            let used = |of: &Program| bytes(of, ArenaKind::States) + bytes(of, ArenaKind::Activations);
            let (here, there) = (used(&many), used(&many_whole));
            assert!(here + codes / 2 < there, "{what}: {here} bytes next to {there} with {codes} of codes");
            // Two groups in each layer; gate and up are one matrix.
            assert!(many.entry(EntryKind::Prepare, None).is_none());
            let made = 2 * LAYERS[1];
            assert_eq!(quantised(&many, EntryKind::Evaluate, true), made, "{what}");
            assert_eq!(quantised(&many, EntryKind::FirstMicroStep, true), made, "{what}");
            assert_eq!(quantised(&many, EntryKind::FirstMicroStep, false), made, "{what}");
            assert_eq!(quantised(&many_whole, EntryKind::FirstMicroStep, true), 0, "{what}");
            outlive_no_layer(&cut(CUTS[2], &options), &machine, &what);
        }
    }
}

/// No result of an operation that reads weights alone is read in another layer or direction.
fn outlive_no_layer(options: &CompileOptions, machine: &Machine, what: &str) {
    let seen = Rc::new(RefCell::new(Vec::new()));
    let graphs = seen.clone();
    let observer: Observer<'_> = Box::new(move |of| {
        if of.pass == Pass::PrepareInLayers {
            graphs.borrow_mut().push(of.graph.clone());
        }
    });
    let mut passes = Passes::default().observed(observer);
    compile_observed(&model(3), options, machine, &mut passes).unwrap();
    let seen = seen.borrow();
    assert_eq!(seen.len(), 2);
    for graph in seen.iter() {
        let window = |node: &Node| (node.layer, node.phase == Phase::Forward);
        let mut of_weights: HashMap<ValueId, _> = HashMap::new();
        for node in &graph.nodes {
            for home in node.inputs.iter().filter_map(|id| of_weights.get(id)) {
                assert_eq!(window(node), *home, "{what}: {}", node.op);
            }
            let is_weight = |id: &ValueId| match graph.value(*id).origin {
                Origin::Parameter(_) => true,
                _ => of_weights.contains_key(id),
            };
            if node.layer.is_some() && node.inputs.iter().all(is_weight) {
                of_weights.extend(node.outputs.iter().map(|id| (*id, window(node))));
            }
        }
        assert!(of_weights.len() > 3 * 6, "{what}: {}", of_weights.len());
    }
}

/// The transpose, which products of the backward pass read along the sum, is made for that pass alone.
#[test]
fn the_forward_pass_has_no_codes_of_transposes() {
    let options = with(Recipe::Fp8Hybrid(FP8), false, Some(false));
    let program = compile(&model(2), &cut(CUTS[2], &options), &Machine::h200()).unwrap();
    let entry = &program.entries[0];
    let weights = entry.steps.iter().filter_map(|step| match &step.instruction {
        Instruction::Launch(launch) if launch.op == "quantise" && launch.attrs.int("top") == Ok(8) => {
            Some((step.provenance.phase == program::Phase::Forward, launch.outputs.len()))
        }
        _ => None,
    });
    let weights: Vec<_> = weights.collect();
    assert!(weights.iter().all(|(forward, results)| *results == if *forward { 2 } else { 3 }), "{weights:?}");
    assert_eq!(weights.len(), 8);
    assert!(entry.steps.iter().any(|step| step.instruction.stream() == StreamId::Exchange));
}

/// With a recipe and an open ZeRO level, level 3 is chosen if nothing else fits.
#[test]
fn the_level_is_open_with_a_recipe() {
    let mut options = with(Recipe::Fp8Hybrid(FP8), false, Some(true));
    let stays = Some(false);
    let offload = &mut options.plan.offload;
    (offload.optimizer, offload.master, offload.gradients, offload.residual) = (stays, stays, stays, stays);
    let compiled = |of: Option<(bool, bool)>, limit: usize| {
        let mut options = cut(of.unwrap_or_default(), &options);
        options.sharding.open = of.is_none();
        options.plan.memory_limit = Some(limit);
        compile(&model(12), &options, &Machine::h200())
    };
    let needed = |of: (bool, bool)| match compiled(Some(of), 1) {
        Err(CompileError::DoesNotFit { needed, .. }) => needed,
        other => panic!("one byte is too little: {:?}", other.map(|program| program.name)),
    };
    let [two, three] = [CUTS[1], CUTS[2]].map(needed);
    assert!(three < two, "{three} {two}");
    let program = compiled(None, three).unwrap();
    let line = program.plan.iter().find(|line| line.subject == Subject::Sharding).unwrap();
    assert_eq!(line.choice, Choice::Level(3));
}
