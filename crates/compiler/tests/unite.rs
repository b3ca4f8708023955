//! Entries for several batch shapes come together over one layout: compiled at once or one after the other, the program
//! is the same.

mod support;

use compiler::{CompileOptions, compile};
use program::{Arena, ArenaKind, Documents, Machine, MemorySpace, Program, Variant, unite};
use support::{VARIANT, adapter, model, options};

fn shapes() -> [Variant; 3] {
    let shape = |batch, seq_len, documents| Variant { batch, seq_len, documents };
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
            // The update is behind the first shape's entries here, behind all of them there.
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
