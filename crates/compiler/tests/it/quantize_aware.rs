//! Training for a number format: losses and gradients are those of a program without it whose weights have the values of their
//! codes, and go to the weights as they are; experts, transposes and programs for GPUs compute the same.

use crate::support::quantised::{mixture, prepared_of, run};
use crate::support::{VARIANT, model, numbers, options, write};
use compiler::{CompileOptions, QuantizeAware, Recipe, compile};
use graph::Model;
use ops::evaluate::Array;
use program::{EntryKind, Instruction, Machine, Phase, Program, Session, scalar};
use tensor::DType;
use tensor::compressed::{Codes, Extent, Form, Range, global_scale};

const FUSED: &[&[&str]] = &[&["q_proj", "k_proj", "v_proj"], &["gate_proj", "up_proj"]];

const INT4: Codes = Codes::Int { bits: 4, symmetric: true };

fn aware(codes: Codes, extent: Extent) -> QuantizeAware {
    QuantizeAware { weights: Form { codes, extent }, scales: DType::F32, activations: None, fused: FUSED }
}

fn formats() -> Vec<QuantizeAware> {
    let zeros = Codes::Int { bits: 4, symmetric: false };
    vec![
        aware(INT4, Extent::Group(16)),
        aware(zeros, Extent::Group(8)),
        aware(Codes::Int { bits: 8, symmetric: true }, Extent::Row),
        aware(Codes::Fp8, Extent::Tensor),
        aware(Codes::Fp8, Extent::Tile(24, 16)),
        aware(Codes::Nvfp4, Extent::Group(16)),
    ]
}

fn of(recipe: QuantizeAware) -> CompileOptions {
    CompileOptions {
        recipe: Recipe::QuantizeAware(recipe),
        variants: vec![crate::support::quantised::ODD],
        ..options()
    }
}

/// The matrices of layers, by name.
fn is_matrix(name: &str) -> bool {
    name.ends_with("_proj.weight")
}

/// The values of the codes of all matrices of a session, by the format's own rules.
fn values(session: &mut dyn Session, recipe: &QuantizeAware) -> Vec<(String, Vec<f32>)> {
    let slots = session.program().layout.parameters.clone();
    let read: Vec<(String, Vec<usize>, Vec<f32>)> = slots
        .iter()
        .filter(|slot| is_matrix(&slot.name))
        .map(|slot| (slot.name.clone(), slot.weight.shape.clone(), numbers(session, &slot.weight)))
        .collect();
    let shared = |name: &str| {
        let module = name.strip_suffix(".weight").unwrap();
        let (parent, last) = module.rsplit_once('.').unwrap();
        let list = FUSED.iter().position(|names| names.contains(&last));
        (parent.to_owned(), list.map_or(last.to_owned(), |list| list.to_string()))
    };
    let of = |(name, shape, x): &(String, Vec<usize>, Vec<f32>)| {
        let together =
            read.iter().filter(|(other, ..)| recipe.weights.codes == Codes::Nvfp4 && shared(other) == shared(name));
        let whole = together.map(|(.., x)| Range::of(x)).fold(Range::of(x), Range::with);
        let (form, columns) = (recipe.weights, shape[1]);
        let scales = form.scales(x, columns, DType::F32, whole);
        let codes = form.encode(x, columns, &scales);
        (name.clone(), form.values(&codes, columns, &scales, global_scale(whole.magnitude(), DType::F32)))
    };
    read.iter().map(of).collect()
}

/// The loss and all gradients of a micro-step.
fn results(session: &mut dyn Session) -> Vec<(String, Vec<f32>)> {
    run(session, EntryKind::FirstMicroStep);
    let program = session.program().clone();
    let loss = program.scalar(scalar::LOSS_SUM).unwrap().clone();
    let mut found = vec![("loss".to_owned(), numbers(session, &loss))];
    for slot in program.layout.parameters.iter().filter(|slot| slot.trainable) {
        found.push((slot.name.clone(), numbers(session, slot.gradient.as_ref().unwrap())));
    }
    found
}

fn same_as_values(model: &Model, recipe: QuantizeAware, tolerance: f32) {
    let machine = Machine::cpu(1 << 30, 2);
    let mut plain = prepared_of(model, &CompileOptions { recipe: Recipe::Uniform, ..of(recipe) }, &machine);
    let unquantized = results(plain.as_mut());
    for (name, values) in values(plain.as_mut(), &recipe) {
        let at = plain.program().parameter(&name).unwrap().weight.clone();
        write(plain.as_mut(), &at, &Array::Real(values));
    }
    let expected = results(plain.as_mut());
    let mut session = prepared_of(model, &of(recipe), &machine);
    let found = results(session.as_mut());
    assert_ne!(unquantized[0], found[0], "{recipe:?}: nothing was quantized");
    for ((name, found), (_, expected)) in found.iter().zip(&expected) {
        let largest = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for (a, b) in found.iter().zip(expected) {
            assert!((a - b).abs() <= tolerance * largest, "{recipe:?}, {name}: {a}, expected {b}");
        }
    }
}

#[test]
fn gradients_are_those_at_the_values_of_codes() {
    for recipe in formats() {
        // Matrices with scales of their own are not joined, and products of joined ones sum in another order.
        let joined = matches!(recipe.weights.extent, Extent::Row | Extent::Group(_));
        same_as_values(&model(), recipe, if joined { 0.0 } else { 1e-6 });
    }
}

#[test]
fn matrices_of_experts_are_rounded_each_by_itself() {
    for recipe in [aware(INT4, Extent::Group(16)), aware(Codes::Nvfp4, Extent::Group(16))] {
        same_as_values(&mixture(), recipe, 1e-6);
    }
}

#[test]
fn a_program_for_a_gpu_computes_the_same() {
    let activations = Some(Form { codes: Codes::Int { bits: 8, symmetric: true }, extent: Extent::Row });
    let more = QuantizeAware { activations, ..aware(Codes::Int { bits: 8, symmetric: true }, Extent::Row) };
    for recipe in formats().into_iter().chain([more]) {
        let [cpu, gpu] = [Machine::cpu(1 << 30, 2), Machine::h200()].map(|machine| {
            let mut session = prepared_of(&model(), &of(recipe), &machine);
            results(session.as_mut())
        });
        for ((name, a), (_, b)) in cpu.iter().zip(&gpu) {
            let largest = a.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let differs = a.iter().zip(b).any(|(a, b)| (a - b).abs() > 1e-5 * largest);
            assert!(!differs, "{recipe:?}, {name}");
        }
    }
}

/// Nodes of the training step that round values of activations.
fn rounded(program: &Program) -> usize {
    let entry = &program.entries[program.entry(EntryKind::FirstMicroStep, Some(VARIANT)).unwrap()];
    let is_one = |step: &&program::Step| match &step.instruction {
        Instruction::Launch(launch) => launch.op.as_str() == "fake_quantise" && step.provenance.phase == Phase::Forward,
        _ => false,
    };
    entry.steps.iter().filter(is_one).count()
}

#[test]
fn activations_are_rounded_once_for_all_products_that_read_them() {
    let per_token = Form { codes: Codes::Fp8, extent: Extent::Row };
    let recipe = QuantizeAware { activations: Some(per_token), ..aware(Codes::Fp8, Extent::Row) };
    let machine = Machine::cpu(1 << 30, 2);
    let program = compile(&model(), &CompileOptions { variants: vec![VARIANT], ..of(recipe) }, &machine).unwrap();
    // In each of two layers: what gate and up read, and down.
    assert_eq!(rounded(&program), 4);
    let recipe = QuantizeAware { activations: None, ..recipe };
    let program = compile(&model(), &CompileOptions { variants: vec![VARIANT], ..of(recipe) }, &machine).unwrap();
    assert_eq!(rounded(&program), 0, "values of weights are made when these were written");
}

#[test]
fn what_has_no_whole_groups_stays() {
    // 48 columns of the down projection are no whole groups of 32.
    let recipe = Recipe::QuantizeAware(aware(INT4, Extent::Group(32)));
    let names = compiler::quantize_aware(&model(), &CompileOptions { recipe, ..options() }).unwrap();
    assert!(
        names.iter().all(|name| !name.contains("down_proj")) && names.iter().any(|name| name.contains("up_proj")),
        "{names:?}"
    );
    let recipe = Recipe::QuantizeAware(aware(INT4, Extent::Group(128)));
    let error =
        compile(&model(), &CompileOptions { recipe, ..options() }, &Machine::cpu(1 << 30, 2)).unwrap_err().to_string();
    assert!(error.contains("the format has codes for no matrix"), "{error}");
}
