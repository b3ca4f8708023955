//! Frozen weights that products read codes of: they have no memory of their own, and are prepared group by group where
//! activations lie otherwise. What is trained, or read as it is, stays.

use std::collections::{BTreeMap, BTreeSet};

use crate::support::{self, TASK, adapter, model, options};
use compiler::{CompileOptions, EntryOptions, Fp8Hybrid, GradientFormat, Nvfp4, Recipe, Sharding, compile};
use program::{ArenaKind, EntryKind, Machine, MemoryClass, ParameterSlot, Program};
use tensor::DType;
use tensor::packed::Quantisation;

const FP8: Fp8Hybrid = Fp8Hybrid { gradient: GradientFormat::E5M2, amax_history: 3, skip_first: 0, skip_last: 0 };
const FP4: Nvfp4 = Nvfp4 { emulate: true, stochastic: true, skip_first: 0, skip_last: 0 };

fn with(recipe: Recipe, adapted: bool) -> CompileOptions {
    CompileOptions {
        recipe,
        weights: DType::BF16,
        compute: DType::BF16,
        adapter: adapted.then(adapter),
        entries: vec![EntryOptions::train(TASK), EntryOptions::evaluate(TASK)],
        ..options()
    }
}

fn recipes() -> [Recipe; 4] {
    let unquantised = Fp8Hybrid { gradient: GradientFormat::Unquantised, ..FP8 };
    let units = Nvfp4 { emulate: false, ..FP4 };
    [Recipe::Fp8Hybrid(FP8), Recipe::Fp8Hybrid(unquantised), Recipe::Nvfp4(FP4), Recipe::Nvfp4(units)]
}

fn bytes(program: &Program, kind: ArenaKind) -> usize {
    program.arenas.iter().filter(|arena| arena.kind == kind).map(|arena| arena.bytes).sum()
}

fn machine(recipe: Recipe) -> Machine {
    let units = matches!(recipe, Recipe::Nvfp4(of) if !of.emulate);
    if units { Machine::named("b200").unwrap() } else { Machine::h200() }
}

/// Names of the parameters that do not stay, by their groups.
fn groups(program: &Program) -> BTreeMap<u32, Vec<&str>> {
    let mut groups: BTreeMap<u32, Vec<&str>> = BTreeMap::new();
    for slot in &program.layout.parameters {
        slot.load_group.iter().for_each(|group| groups.entry(*group).or_default().push(&slot.name));
    }
    groups
}

/// Sizes, places and who reads them.
#[track_caller]
fn check(program: &Program, what: &str) {
    let (loaded, stay): (Vec<&ParameterSlot>, Vec<_>) =
        program.layout.parameters.iter().partition(|slot| slot.load_group.is_some());
    let aligned = |slot: &ParameterSlot| slot.weight.len().next_multiple_of(256) * slot.weight.dtype.size();
    let base = stay.iter().filter(|slot| !slot.adapter).map(|slot| aligned(slot)).sum::<usize>();
    if program.arenas.iter().all(|arena| arena.kind != ArenaKind::Weights || arena.shards.is_empty()) {
        assert_eq!(bytes(program, ArenaKind::Weights), base, "{what}: nothing but what stays");
    }
    assert_eq!(bytes(program, ArenaKind::Quants), 0, "{what}");
    let mut ends: BTreeMap<u32, usize> = BTreeMap::new();
    for slot in &loaded {
        assert!(!slot.trainable && !slot.adapter && slot.gradient.is_none() && slot.states.is_empty(), "{what}");
        assert_eq!(ArenaKind::at(slot.weight.arena), ArenaKind::Activations, "{what}: {}", slot.name);
        *ends.entry(slot.load_group.unwrap()).or_default() += aligned(slot);
    }
    for slot in &loaded {
        assert!(slot.weight.offset + slot.weight.bytes() <= ends[&slot.load_group.unwrap()], "{what}: from 0 on");
    }
    // Each group has a preparation, which reads all of it, keeps to itself what it needs meanwhile, and writes states.
    for (group, end) in &ends {
        let entry = &program.entries[program.preparation(Some(*group)).unwrap()];
        let reads: Vec<_> = entry.steps.iter().flat_map(|step| step.instruction.reads()).collect();
        for slot in loaded.iter().filter(|slot| slot.load_group == Some(*group)) {
            assert!(reads.iter().any(|at| at.overlaps(&slot.weight)), "{what}: {} is prepared", slot.name);
        }
        for at in entry.steps.iter().flat_map(|step| step.instruction.writes()) {
            let kind = ArenaKind::at(at.arena);
            assert!(kind == ArenaKind::States || kind == ArenaKind::Activations && at.offset >= *end, "{what}: {at}");
        }
        assert!(entry.outputs.is_empty() && entry.inputs.is_empty() && entry.variant.is_none());
    }
    let prepared = program.entries.iter().filter(|of| of.kind == EntryKind::Prepare && !of.name.is_empty()).count();
    assert_eq!(prepared, ends.len(), "{what}");
    assert!(bytes(program, ArenaKind::Activations) >= ends.values().copied().max().unwrap_or(0), "{what}");
    // The plan is what is allocated.
    for arena in program.arenas.iter().filter(|arena| !arena.is_on_host()) {
        let line = program.memory.iter().find(|line| line.class == MemoryClass::Arena(arena.kind));
        assert_eq!(line.map(|line| line.bytes), Some(arena.bytes), "{what}: {}", arena.kind.name());
    }
    let activations: usize = program.activations.iter().map(|line| line.bytes).sum();
    assert_eq!(activations, bytes(program, ArenaKind::Activations), "{what}");
}

/// gate and up share what they read, so they share a scale, in both layers.
const ALL: [&[&str]; 4] = [
    &["layers.0.gate_proj.weight", "layers.0.up_proj.weight"],
    &["layers.0.down_proj.weight"],
    &["layers.1.gate_proj.weight", "layers.1.up_proj.weight"],
    &["layers.1.down_proj.weight"],
];

#[test]
fn frozen_linears_have_no_memory_of_their_own() {
    for recipe in recipes() {
        for quantised in [None, Some(Quantisation::Nf4 { block: 64, nested: true })] {
            let what = format!("{recipe:?} {quantised:?}");
            let of = CompileOptions { quantised, ..with(recipe, true) };
            let program = compile(&model(), &of, &machine(recipe)).unwrap();
            check(&program, &what);
            let found: Vec<Vec<&str>> = groups(&program).into_values().collect();
            assert_eq!(found, ALL, "{what}");
            assert!(program.preparation(None).is_none(), "{what}: nothing else is prepared");
            // Without training all weights are frozen.
            let alone =
                CompileOptions { training: None, entries: vec![EntryOptions::evaluate(TASK)], adapter: None, ..of };
            let program = compile(&model(), &alone, &machine(recipe)).unwrap();
            check(&program, &what);
            assert_eq!(groups(&program).len(), ALL.len(), "{what}");
        }
    }
}

#[test]
fn what_is_trained_or_read_as_it_is_stays() {
    for recipe in [Recipe::Fp8Hybrid(FP8), Recipe::Nvfp4(FP4)] {
        let names = |options: &CompileOptions| -> Vec<String> {
            let program = compile(&model(), options, &Machine::h200()).unwrap();
            check(&program, &format!("{recipe:?}"));
            groups(&program).into_values().flatten().map(str::to_owned).collect()
        };
        assert!(names(&with(recipe, false)).is_empty(), "full training: codes are made again after each update");
        assert!(names(&with(Recipe::Uniform, true)).is_empty());
        let skipped = match recipe {
            Recipe::Nvfp4(of) => Recipe::Nvfp4(Nvfp4 { skip_last: 1, ..of }),
            _ => Recipe::Fp8Hybrid(Fp8Hybrid { skip_last: 1, ..FP8 }),
        };
        assert_eq!(names(&with(skipped, true)), [ALL[0], ALL[1]].concat());
        // A scale follows from all weights of a group: one that is trained keeps the others.
        let mut saved = with(recipe, true);
        let of = saved.adapter.as_mut().unwrap();
        (of.saved, of.targets) = (vec!["gate_proj".into()], vec!["down_proj".into()]);
        assert_eq!(names(&saved), [ALL[1], ALL[3]].concat());
        let program = compile(&model(), &saved, &Machine::h200()).unwrap();
        let update = &program.entries[program.update(false).unwrap()];
        let remade: BTreeSet<&str> = update.steps.iter().map(|step| step.provenance.op.as_str()).collect();
        assert!(remade.contains("own_amax") && program.preparation(None).is_some(), "{remade:?}");
        // Where weights are cut over ranks, layers make codes of them.
        let at = |gradients: bool, weights: bool| {
            let sharding = Sharding { ranks: 2, gradients, weights, ..Sharding::default() };
            names(&CompileOptions { sharding, ..with(recipe, true) })
        };
        assert_eq!((at(false, false).len(), at(true, false).len(), at(true, true).len()), (6, 6, 0));
    }
}

/// The largest group alone may be what the activation arena is for.
#[test]
fn the_arena_holds_the_largest_group() {
    let alone = CompileOptions {
        training: None,
        entries: vec![EntryOptions::evaluate(TASK)],
        variants: vec![program::Variant { batch: 1, seq_len: 1, ..support::VARIANT }],
        ..with(Recipe::Fp8Hybrid(FP8), false)
    };
    let program = compile(&model(), &alone, &Machine::h200()).unwrap();
    check(&program, "one token");
    let largest = 2 * 2 * support::HIDDEN * support::INNER;
    let line = program.activations.iter().find(|line| line.class == "loaded").map(|line| line.bytes);
    assert_eq!(line, Some(largest), "{:?}", program.activations);
    let phase = program.phases.iter().find(|line| line.class == "prepare").map(|line| line.bytes);
    assert!(phase >= line, "{:?}", program.phases);
}
