//! Training in f16: the loss is scaled where gradients are stored in f16, the update divides by the scale, and decides
//! the next one on the device.

use crate::support::{LOSS_SCALE, adapter, loaded, model, options, read, run};
use compiler::{CompileOptions, PlanOptions, compile};
use program::{Documents, EntryKind, Machine, Program, Session, Variant, scalar};
use tensor::DType;

fn machine() -> Machine {
    Machine::cpu(1 << 30, 2)
}

/// Weights in f16 with f32 copies of what is trained, as every run has them.
fn half() -> CompileOptions {
    let mut options = CompileOptions { weights: DType::F16, compute: DType::F16, ..options() };
    options.training.as_mut().unwrap().optimizer.as_mut().unwrap().master = true;
    options
}

fn session(options: &CompileOptions) -> Box<dyn Session> {
    loaded(compile(&model(), options, &machine()).unwrap())
}

fn get(session: &mut dyn Session, name: &str) -> f32 {
    let at = session.program().scalar(name).unwrap().clone();
    f32::from_le_bytes(read(session, &at).try_into().unwrap())
}

fn count(session: &mut dyn Session) -> i32 {
    let at = session.program().scalar(scalar::LOSS_SCALE_COUNT).unwrap().clone();
    i32::from_le_bytes(read(session, &at).try_into().unwrap())
}

fn set(session: &mut dyn Session, name: &str, value: f32) {
    let at = session.program().scalar(name).unwrap().clone();
    session.write(&at, &value.to_le_bytes()).unwrap();
}

/// A micro-step and its update; weights, copies and states afterwards.
fn step(session: &mut dyn Session) -> Vec<(String, Vec<u8>)> {
    let program = session.program().clone();
    let entry = |kind| program.entries.iter().position(|entry| entry.kind == kind).unwrap();
    run(session, entry(EntryKind::FirstMicroStep));
    for (name, value) in [("learning_rate", 1e-2), ("bias_correction_1", 0.1), ("bias_correction_2", 1e-3)] {
        set(session, name, value);
    }
    run(session, entry(EntryKind::Update));
    kept(session, &program)
}

fn kept(session: &mut dyn Session, program: &Program) -> Vec<(String, Vec<u8>)> {
    let weights = program.layout.parameters.iter().map(|slot| (slot.name.clone(), &slot.weight));
    let states = program.layout.states().filter(|(name, _)| !name.starts_with(scalar::LOSS_SCALE));
    weights.chain(states).map(|(name, at)| (name, read(session, at))).collect()
}

#[test]
fn gradients_are_scaled_and_the_loss_and_the_norm_are_not() {
    let [mut plain, mut scaled] = [session(&half()), session(&half())];
    set(plain.as_mut(), scalar::LOSS_SCALE, 1.0);
    let program = scaled.program().clone();
    let after = step(plain.as_mut());
    let first: Vec<f32> = gradient(plain.as_mut());
    assert_eq!(step(scaled.as_mut()).len(), after.len());
    let second = gradient(scaled.as_mut());
    let norm = |x: &[f32]| x.iter().map(|v| f64::from(v * v)).sum::<f64>().sqrt();
    let apart: Vec<f32> = first.iter().zip(&second).map(|(a, b)| a - b / LOSS_SCALE).collect();
    // Without the scale small gradients vanish: what is left of the difference.
    assert!(norm(&apart) < 1e-2 * norm(&first), "{} of {}", norm(&apart), norm(&first));
    for name in [scalar::LOSS_SUM, scalar::WEIGHT_SUM] {
        assert_eq!(get(plain.as_mut(), name).to_bits(), get(scaled.as_mut(), name).to_bits());
    }
    let norms = [plain.as_mut(), scaled.as_mut()].map(|session| get(session, scalar::GRADIENT_NORM));
    assert!((norms[0] / norms[1] - 1.0).abs() < 1e-2, "{norms:?}");
    assert_eq!(get(scaled.as_mut(), scalar::LOSS_SCALE_USED), LOSS_SCALE);
    assert!(program.entries.iter().all(|entry| entry.inputs.iter().all(|(name, _)| name != scalar::LOSS_SCALE)));
}

fn gradient(session: &mut dyn Session) -> Vec<f32> {
    let at = session.program().parameter("layers.0.gate_proj.weight").unwrap().gradient.clone().unwrap();
    read(session, &at).chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

#[test]
fn a_step_that_overflows_changes_nothing_but_the_scale() {
    let with_adapter = CompileOptions { adapter: Some(adapter()), ..half() };
    for options in [half(), with_adapter] {
        let mut session = session(&options);
        let program = session.program().clone();
        step(session.as_mut());
        let before = kept(session.as_mut(), &program);
        assert_eq!((get(session.as_mut(), scalar::LOSS_SCALE), count(session.as_mut())), (LOSS_SCALE, 1));
        set(session.as_mut(), scalar::LOSS_SCALE, 2f32.powi(40));
        assert!(step(session.as_mut()) == before, "an update that overflows is skipped");
        assert_eq!(get(session.as_mut(), scalar::UPDATE_APPLIED), 0.0);
        assert!(!get(session.as_mut(), scalar::GRADIENT_NORM).is_finite());
        assert_eq!((get(session.as_mut(), scalar::LOSS_SCALE), count(session.as_mut())), (2f32.powi(39), 0));
        set(session.as_mut(), scalar::LOSS_SCALE, LOSS_SCALE);
        assert!(step(session.as_mut()) != before, "the next one is applied");
        assert_eq!(count(session.as_mut()), 1);
    }
}

#[test]
fn only_training_in_f16_keeps_a_scale() {
    for compute in [DType::F32, DType::BF16] {
        let program =
            compile(&model(), &CompileOptions { weights: compute, compute, ..options() }, &machine()).unwrap();
        assert!(program.layout.extra.is_empty(), "{compute}");
        assert!(!program.to_string().contains("loss_scale["), "{compute}");
    }
    let program = compile(&model(), &half(), &machine()).unwrap();
    let names: Vec<&str> = program.layout.extra.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, [scalar::LOSS_SCALE, scalar::LOSS_SCALE_COUNT]);
}

/// The loss and its gradient stay one operation, and the head may be done in parts: the same bits.
#[test]
fn the_head_is_planned_as_without_a_scale() {
    let ops = |options: &CompileOptions, machine: &Machine| {
        let program = compile(&model(), options, machine).unwrap();
        let entry = program.entries.iter().find(|entry| entry.kind == EntryKind::FirstMicroStep).unwrap();
        entry.steps.iter().map(|step| step.provenance.op.clone()).collect::<Vec<_>>()
    };
    assert!(ops(&half(), &machine()).iter().any(|op| op == "cross_entropy_with_gradient"));
    let parts = |parts: usize| CompileOptions {
        plan: PlanOptions { head_chunks: Some(parts), ..options().plan },
        variants: vec![Variant { batch: 2, seq_len: 8, documents: Documents::Rows, patches: 0, logits: 0 }],
        adapter: Some(adapter()),
        ..half()
    };
    let heads = |n: usize| ops(&parts(n), &machine()).iter().filter(|op| **op == "cross_entropy_with_gradient").count();
    assert_eq!((heads(1), heads(4)), (1, 4));
    let [mut whole, mut divided] = [session(&parts(1)), session(&parts(4))];
    assert!(step(whole.as_mut()) == step(divided.as_mut()));
}
