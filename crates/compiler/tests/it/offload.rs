//! Offloading to host memory changes no bit, whichever way tensors move. The backend of these tests delays transfers
//! until a step waits for them; that the events also allow them early is checked when the program is made.

use crate::support::training::{assert_same, bits, cases, model};
use crate::support::{in_turn, options};
use compiler::{CompileOptions, OffloadOptions, PlanOptions, RecomputeOptions, compile};
use program::{ArenaKind, EntryKind, Instruction, Machine, Program, StreamId};

fn with(options: &CompileOptions, offload: OffloadOptions) -> CompileOptions {
    CompileOptions { plan: PlanOptions { offload, ..options.plan.clone() }, ..options.clone() }
}

fn transfers(program: &Program, kind: EntryKind, stream: StreamId) -> usize {
    let entry = program.entries.iter().find(|entry| entry.kind == kind).unwrap();
    let is_it = |instruction: &Instruction| {
        matches!(instruction, Instruction::Transfer { .. }) && instruction.stream() == stream
    };
    entry.steps.iter().filter(|step| is_it(&step.instruction)).count()
}

fn bytes(program: &Program, kind: ArenaKind) -> (usize, usize) {
    let arenas = program.arenas.iter().filter(|arena| arena.kind == kind);
    arenas.fold((0, 0), |(device, host), arena| match arena.is_on_host() {
        true => (device, host + arena.bytes),
        false => (device + arena.bytes, host),
    })
}

/// States and copies, through slices or where they are.
#[test]
fn states_and_copies_on_the_host_change_no_bit() {
    let on = Some(true);
    let slice_bytes = Some(40_000);
    let choices = [
        ("states", OffloadOptions { optimizer: on, slice_bytes, ..Default::default() }),
        ("copies", OffloadOptions { master: on, slice_bytes, ..Default::default() }),
        ("both", OffloadOptions { optimizer: on, master: on, slice_bytes, ..Default::default() }),
        ("both in one slice", OffloadOptions { optimizer: on, master: on, ..Default::default() }),
        ("both in place", OffloadOptions { optimizer: on, master: on, zero_copy: true, ..Default::default() }),
    ];
    for machine in [Machine::cpu(1 << 30, 2), Machine::h200()] {
        for (turn, (case, options)) in cases().into_iter().enumerate() {
            let plain = compile(&model(), &options, &machine).unwrap();
            let on_device = [ArenaKind::Optimizer, ArenaKind::Masters].map(|kind| bytes(&plain, kind).0);
            let expected = bits(plain);
            for (choice, offload) in in_turn(&choices, turn) {
                let program = compile(&model(), &with(&options, offload), &machine).unwrap();
                let what = format!("{case}, {choice}, {}", machine.name);
                let moved = [offload.optimizer, offload.master].map(|asked| asked == on);
                for (kind, (moved, before)) in
                    [ArenaKind::Optimizer, ArenaKind::Masters].into_iter().zip(moved.into_iter().zip(on_device))
                {
                    let wanted = if moved { (0, before) } else { (before, 0) };
                    assert_eq!(bytes(&program, kind), wanted, "{what}");
                }
                let counts =
                    [StreamId::ToDevice, StreamId::ToHost].map(|stream| transfers(&program, EntryKind::Update, stream));
                let some = !offload.zero_copy && (moved[0] || on_device[1] > 0);
                assert!(counts[0] == counts[1] && (counts[0] > 0) == some, "{what}: {counts:?}");
                assert!(counts[0] >= 10 || !some || offload.slice_bytes.is_none(), "{what}: {counts:?}");
                assert_same(bits(program), &expected, &what);
            }
        }
    }
}

/// Gradients, alone and with everything else, written by one micro-step and added to by others.
#[test]
fn gradients_on_the_host_change_no_bit() {
    let on = Some(true);
    let alone = OffloadOptions { gradients: on, slice_bytes: Some(40_000), ..Default::default() };
    let all = OffloadOptions { optimizer: on, master: on, residual: on, ..alone };
    let choices = [("alone", alone), ("all", all), ("in place", OffloadOptions { zero_copy: true, ..all })];
    let head_in_parts = PlanOptions { head_chunks: Some(4), ..options().plan };
    // The slower the link, the more of a pass a gradient's place is kept.
    for machine in [Machine::cpu(1 << 30, 2), Machine::h200(), Machine::named("rtx4090").unwrap()] {
        for (turn, (case, mut options)) in cases().into_iter().enumerate() {
            for plan in in_turn(&[options.plan.clone(), head_in_parts.clone()], turn) {
                options.plan = plan;
                let off = OffloadOptions { residual: Some(false), ..Default::default() };
                let plain = compile(&model(), &with(&options, off), &machine).unwrap();
                let on_device = bytes(&plain, ArenaKind::Gradients).0;
                let expected = bits(plain);
                for (choice, offload) in in_turn(&choices, turn / 2) {
                    let program = compile(&model(), &with(&options, offload), &machine).unwrap();
                    let what = format!("{case}, {choice}, {}", machine.name);
                    assert_eq!(bytes(&program, ArenaKind::Gradients), (0, on_device), "{what}");
                    let count = |kind, stream| transfers(&program, kind, stream);
                    let fetched = [EntryKind::FirstMicroStep, EntryKind::NextMicroStep]
                        .map(|kind| count(kind, StreamId::ToDevice));
                    let stored = count(EntryKind::FirstMicroStep, StreamId::ToHost);
                    assert!(stored >= 8 && fetched[1] >= fetched[0] + 8, "{what}: {stored}, {fetched:?}");
                    assert_same(bits(program), &expected, &what);
                }
            }
        }
    }
}

/// Layer inputs offloaded for the backward pass, alone and with everything else recomputed, change no bit.
#[test]
fn the_residual_stream_on_the_host_changes_no_bit() {
    let block = RecomputeOptions { block: Some(true), ..Default::default() };
    for machine in [Machine::cpu(1 << 30, 2), Machine::h200()] {
        for recompute in [RecomputeOptions::default(), block] {
            for (case, mut options) in cases() {
                options.plan.recompute = recompute;
                options.adapter.iter_mut().for_each(|adapter| adapter.targets = vec!["q_proj".into(), "o_proj".into()]);
                let off = OffloadOptions { residual: Some(false), ..Default::default() };
                let plain = compile(&model(), &with(&options, off), &machine).unwrap();
                let on_device = bytes(&plain, ArenaKind::Activations).0;
                assert_eq!(bytes(&plain, ArenaKind::Waiting), (0, 0));
                let expected = bits(plain);
                let on = OffloadOptions { residual: Some(true), ..Default::default() };
                let program = compile(&model(), &with(&options, on), &machine).unwrap();
                let what = format!("{case}, block {:?}, {}", recompute.block, machine.name);
                for kind in [EntryKind::FirstMicroStep, EntryKind::NextMicroStep] {
                    let counts = [StreamId::ToHost, StreamId::ToDevice].map(|stream| transfers(&program, kind, stream));
                    assert!(counts[0] == counts[1] && counts[0] >= 3, "{what}: {counts:?}");
                }
                assert!(bytes(&program, ArenaKind::Waiting).1 > 0, "{what}");
                let left = bytes(&program, ArenaKind::Activations).0;
                // Of this small a model the update of matrices or of 8-bit states needs more than the backward pass.
                let update = case.starts_with("NorMuon") || case.starts_with("AdamW8bit");
                assert!(left < on_device || recompute.block.is_none() || update, "{what}: {left} of {on_device}");
                assert_same(bits(program), &expected, &what);
            }
        }
    }
}

/// Layers may hand on more than the residual stream: keys and values that later ones read, which wait too, and loads of
/// experts, whose sums are fused.
#[test]
fn what_layers_hand_on_waits_and_changes_no_bit() {
    let on = Some(true);
    let recompute = RecomputeOptions { block: on, ..Default::default() };
    for text in
        [include_str!("../../../train/tests/ir/gemma4.json"), include_str!("../../../train/tests/ir/olmoe.json")]
    {
        let model = graph::from_json(text).unwrap();
        for (case, mut options) in cases().into_iter().take(3) {
            options.plan.recompute = recompute;
            options.adapter.iter_mut().for_each(|adapter| adapter.targets = vec!["q_proj".into(), "o_proj".into()]);
            let plain = compile(&model, &options, &Machine::h200()).unwrap();
            let offload = OffloadOptions { residual: on, ..Default::default() };
            let program = compile(&model, &with(&options, offload), &Machine::h200()).unwrap();
            let what = format!("{}, {case}", program.name);
            assert!(transfers(&program, EntryKind::FirstMicroStep, StreamId::ToHost) > 0, "{what}");
            assert_same(bits(program), &bits(plain), &what);
        }
    }
}
