//! Entries for several batch shapes come together over one layout: compiled at once or one after the other, the program
//! is the same.

use crate::support::{VARIANT, adapter, model, options};
use compiler::{CompileOptions, compile};
use program::{Arena, ArenaKind, Documents, Machine, MemorySpace, Program, Variant, unite};

fn shapes() -> [Variant; 3] {
    let shape = |batch, seq_len, documents| Variant { batch, seq_len, documents, patches: 0, logits: 0 };
    let packed = Documents::Packed;
    [VARIANT, shape(1, 16, packed), shape(3, 4, Documents::Rows)]
}

fn compiled(machine: &Machine, lora: bool, variants: &[Variant]) -> Program {
    let options = CompileOptions { adapter: lora.then(adapter), variants: variants.to_vec(), ..options() };
    compile(&model(), &options, machine).unwrap()
}

#[test]
fn parts_give_what_compiling_all_shapes_gives() {
    for machine in [Machine::h200(), Machine::cpu(1 << 30, 2)] {
        for lora in [false, true] {
            let parts = shapes().map(|shape| compiled(&machine, lora, &[shape]));
            let mut united = unite(&parts.each_ref(), |_| true);
            let mut whole = compiled(&machine, lora, &shapes());
            // The update is after the first shape's entries here, after all of them there.
            for program in [&mut united, &mut whole] {
                program.entries.sort_by_key(|entry| entry.variant.is_none());
                program.kernels.clear();
                program.constants.clear();
                for launch in program.entries.iter_mut().flat_map(|e| &mut e.steps).filter_map(launch) {
                    launch.calls.clear();
                }
            }
            assert_eq!(united, whole, "{}, adapters: {lora}", machine.name);
        }
    }
}

fn launch(step: &mut program::Step) -> Option<&mut program::Launch> {
    match &mut step.instruction {
        program::Instruction::Launch(launch) => Some(launch),
        _ => None,
    }
}

#[test]
fn kernels_are_those_of_the_parts() {
    let machine = Machine::h200();
    let parts = shapes().map(|shape| compiled(&machine, true, &[shape]));
    let united = unite(&parts.each_ref(), |_| true);
    let texts = |program: &Program| -> Vec<(Option<Variant>, Vec<program::Kernel>)> {
        let of = |entry: &program::Entry| {
            let mut steps = entry.steps.clone();
            let launches = steps.iter_mut().filter_map(launch);
            let kernels =
                launches.flat_map(|l| l.calls.clone()).map(|call| program.kernels[call.kernel.0 as usize].clone());
            (entry.variant, kernels.collect())
        };
        program.entries.iter().map(of).collect()
    };
    let mut apart: Vec<_> = texts(&parts[0]);
    apart.extend(parts[1..].iter().flat_map(texts).filter(|(shape, _)| shape.is_some()));
    assert_eq!(texts(&united), apart);
}

#[test]
fn shapes_that_are_not_wanted_leave_nothing() {
    let machine = Machine::h200();
    let [first, second, third] = shapes();
    let parts = [first, second, third].map(|shape| compiled(&machine, false, &[shape]));
    let united = unite(&parts.each_ref(), |shape| *shape != second);
    let left = unite(&[&parts[0], &parts[2]], |_| true);
    assert_eq!((&united.entries, &united.kernels, &united.constants), (&left.entries, &left.kernels, &left.constants));
    assert!(united.entries.iter().any(|entry| entry.variant.is_none()), "the update stays");
}

/// A further shape, and one that goes, leave what a backend prepared of the others as it is.
#[test]
fn entries_of_shapes_that_stay_are_known() {
    for machine in [Machine::h200(), Machine::cpu(1 << 30, 2)] {
        let [first, second, third] = shapes().map(|shape| compiled(&machine, true, &[shape]));
        let before = unite(&[&first, &second], |_| true);
        for (after, new) in [(unite(&[&first, &second, &third], |_| true), 2), (unite(&[&first, &third], |_| true), 2)]
        {
            let known = after.entries_of(&before);
            for (entry, known) in after.entries.iter().zip(known) {
                let same = before.entries.iter().position(|of| of.kind == entry.kind && of.variant == entry.variant);
                let expected = if entry.variant == Some(shapes()[new]) { None } else { same };
                assert_eq!(known, expected, "{:?} of {}", entry.kind, machine.name);
            }
        }
        // The second shape again, after the third: its kernels have other numbers now.
        let after = unite(&[&first, &third, &second], |_| true);
        let known = after.entries_of(&before).iter().flatten().count();
        assert_eq!(known, before.entries.len(), "{}", machine.name);
        // A kernel with another text is another one.
        let mut changed = before.clone();
        changed.kernels.iter_mut().for_each(|kernel| kernel.source.push(' '));
        let launches = |entry: &program::Entry| entry.steps.clone().iter_mut().any(|step| launch(step).is_some());
        for (entry, known) in changed.entries.iter().zip(changed.entries_of(&before)) {
            assert_eq!(known.is_none(), launches(entry) && !before.kernels.is_empty(), "{:?}", entry.kind);
        }
    }
}

/// An entry is compiled again if the contents of its constants differ at the same place.
#[test]
fn entries_whose_constants_changed_are_not_known() {
    let program = compiled(&Machine::cpu(1 << 30, 2), true, &[VARIANT]);
    assert!(!program.constants.is_empty(), "the model has tables");
    let mut changed = program.clone();
    changed.constants.iter_mut().for_each(|of| of.value.bytes[0] ^= 1);
    let arena = program.arena(ArenaKind::Constants);
    let reads = |entry: &program::Entry| {
        entry.steps.iter().any(|step| step.instruction.reads().iter().any(|at| Some(at.arena) == arena))
    };
    assert!(program.entries.iter().any(reads) && !program.entries.iter().all(reads));
    for (entry, known) in changed.entries.iter().zip(changed.entries_of(&program)) {
        assert_eq!(known.is_none(), reads(entry), "{:?}", entry.kind);
    }
}

#[test]
fn layouts_are_distinguished() {
    let machine = Machine::h200();
    let (full, lora) = (compiled(&machine, false, &[VARIANT]), compiled(&machine, true, &[VARIANT]));
    assert!(full.has_layout_of(&compiled(&machine, false, &shapes()[1..])));
    assert!(!full.has_layout_of(&lora));
    let mut moved = full.clone();
    let optimizer = moved.arenas.iter_mut().find(|arena| arena.kind == ArenaKind::Optimizer).unwrap();
    *optimizer = Arena { place: MemorySpace::Host { write_combined: false }, ..optimizer.clone() };
    assert!(!full.has_layout_of(&moved), "states on the host are another layout");
}
