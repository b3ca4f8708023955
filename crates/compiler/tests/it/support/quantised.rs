//! Programs of recipes that quantise: loaded, prepared and run entry by entry, and how far their numbers are apart.

use compiler::{AdapterOptions, CompileOptions, Recipe, compile};
use graph::Model;
use ops::evaluate::Array;
use program::{Documents, EntryKind, Instruction, Launch, Machine, Phase, Program, Session, Variant, scalar};

use super::{VARIANT, adapter, fill, loaded, model, numbers, write};

/// Rows that are no multiple of 16: what is transposed or rotated is filled up.
pub const ODD: Variant = Variant { batch: 3, seq_len: 7, documents: Documents::Rows, patches: 0, logits: 0 };

/// A program in the reference's memory with contents for everything that it reads; its codes are made.
pub fn prepared(options: &CompileOptions, machine: &Machine) -> Box<dyn Session> {
    prepared_of(&model(), options, machine)
}

/// The same of a model.
pub fn prepared_of(model: &Model, options: &CompileOptions, machine: &Machine) -> Box<dyn Session> {
    let mut session = loaded(compile(model, options, machine).unwrap());
    let program = session.program().clone();
    fill(session.as_mut(), 0);
    for (name, value) in
        [(scalar::LEARNING_RATE, 0.01), (scalar::BIAS_CORRECTION_1, 0.1), (scalar::BIAS_CORRECTION_2, 0.001)]
    {
        session.write(program.scalar(name).unwrap(), &f32::to_le_bytes(value)).unwrap();
    }
    session
}

pub fn run(session: &mut dyn Session, kind: EntryKind) {
    let variant = (kind != EntryKind::Update).then_some(ODD);
    let entry = session.program().entry(kind, variant).unwrap();
    session.run(entry).unwrap();
}

pub fn value(session: &mut dyn Session, name: &str) -> f32 {
    let at = session.program().scalar(name).unwrap().clone();
    numbers(session, &at)[0]
}

/// Norm of the difference by the norm of what is expected.
pub fn relative(found: &[f32], expected: &[f32]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut found.iter().zip(expected).map(|(a, b)| f64::from(a - b)));
    difference / norm(&mut expected.iter().map(|x| f64::from(*x))).max(1e-9)
}

/// The recorded OLMoE graph, a mixture of experts.
pub fn mixture() -> Model {
    graph::from_json(include_str!("../../../../train/tests/ir/olmoe.json")).unwrap()
}

/// Adapters on attention, and on the matrices of experts, too.
pub fn of_experts(model: &Model) -> AdapterOptions {
    let parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"].map(String::from).to_vec();
    AdapterOptions { targets: vec!["q_proj".into()], parameters, form: model.adapters.clone(), ..adapter() }
}

/// The launches of `op` in one phase of the first micro-step.
pub fn launches(program: &Program, op: &str, phase: Phase) -> Vec<Launch> {
    let entry = &program.entries[program.entry(EntryKind::FirstMicroStep, Some(VARIANT)).unwrap()];
    let of = |step: &program::Step| match &step.instruction {
        Instruction::Launch(launch) if launch.op.as_str() == op && step.provenance.phase == phase => {
            Some(launch.clone())
        }
        _ => None,
    };
    entry.steps.iter().filter_map(of).collect()
}

/// The relative error of the experts' gradients against the run without a recipe: the median over the matrices.
pub fn error_of_experts(options: &CompileOptions) -> f64 {
    let (model, machine) = (mixture(), Machine::cpu(1 << 30, 2));
    let mut sessions = [Recipe::Uniform, options.recipe].map(|recipe| {
        let mut session = prepared_of(&model, &CompileOptions { recipe, ..options.clone() }, &machine);
        let program = session.program().clone();
        // Layers that add little to their input, and routers that weigh experts nearly alike: else their scores, which are
        // large, carry the rounding of what they read into the gradients.
        let small = |name: &str| ["_proj.weight", "gate.weight"].iter().any(|end| name.ends_with(end));
        for slot in program.layout.parameters.iter().filter(|slot| small(&slot.name)) {
            let small = numbers(session.as_mut(), &slot.weight).into_iter().map(|x| 0.1 * x).collect();
            write(session.as_mut(), &slot.weight, &Array::Real(small));
        }
        if let Some(entry) = program.entry(EntryKind::Prepare, None) {
            session.run(entry).unwrap();
        }
        run(session.as_mut(), EntryKind::FirstMicroStep);
        session
    });
    let program = sessions[0].program().clone();
    let of_experts = program.layout.parameters.iter().filter(|slot| slot.name.contains(".experts."));
    let mut errors = Vec::new();
    for slot in of_experts {
        let [expected, found] = [0, 1].map(|of| {
            let at = sessions[of].program().parameter(&slot.name).unwrap().gradient.clone().unwrap();
            numbers(sessions[of].as_mut(), &at)
        });
        if expected.iter().any(|x| *x != 0.0) {
            errors.push(relative(&found, &expected));
        }
    }
    errors.sort_by(f64::total_cmp);
    assert!(errors.len() > 20, "{errors:?}");
    // A choice that is nearly even may fall otherwise; of most experts none does.
    errors[errors.len() / 2]
}
