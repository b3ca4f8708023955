//! Programs of `fp8_hybrid`: one for a GPU, whose products read both factors along the sum, has the numbers of the
//! reference; codes of weights follow the weights; magnitudes that are not finite stop the update.

use crate::support::quantised::{
    ODD, error_of_experts, launches, mixture, of_experts, prepared, prepared_of, relative, run, value,
};
use crate::support::{self, VARIANT, adapter, in_turn, model, numbers, options, write};
use compiler::{CompileOptions, Fp8Hybrid, GradientFormat, Nvfp4, Recipe, compile};
use graph::Model;
use ops::evaluate::Array;
use program::{Arithmetic, EntryKind, Instruction, Launch, Machine, Phase, Program, Realisation, Session, scalar};
use tensor::DType;

fn fp8(gradient: GradientFormat) -> Recipe {
    Recipe::Fp8Hybrid(Fp8Hybrid { gradient, amax_history: 3, skip_first: 0, skip_last: 0 })
}

fn quantised(gradient: GradientFormat, adapted: bool) -> CompileOptions {
    let adapter = adapted.then(adapter);
    CompileOptions { recipe: fp8(gradient), adapter, variants: vec![ODD], ..options() }
}

#[test]
fn a_program_for_a_gpu_has_the_numbers_of_the_reference() {
    let cases = [
        (GradientFormat::E5M2, false),
        (GradientFormat::E5M2, true),
        (GradientFormat::E4M3, false),
        (GradientFormat::Unquantised, false),
        (GradientFormat::Unquantised, true),
    ];
    for (gradient, adapted) in cases {
        same_numbers(&model(), &quantised(gradient, adapted), &[Machine::h200()], 1e-4);
    }
}

/// Three steps on machines have the numbers of the reference.
fn same_numbers(model: &Model, options: &CompileOptions, machines: &[Machine], limit: f64) {
    let what = format!("{:?}, adapters {}", options.recipe, options.adapter.is_some());
    let mut here = prepared_of(model, options, &Machine::cpu(1 << 30, 2));
    let mut others: Vec<_> = machines.iter().map(|machine| prepared_of(model, options, machine)).collect();
    let reference = here.program().clone();
    for step in 0..3 {
        for session in others.iter_mut().chain([&mut here]) {
            run(session.as_mut(), EntryKind::FirstMicroStep);
            run(session.as_mut(), EntryKind::NextMicroStep);
        }
        for there in &mut others {
            for slot in reference.layout.parameters.iter().filter(|slot| slot.trainable) {
                let other = there.program().parameter(&slot.name).unwrap().gradient.clone().unwrap();
                let expected = numbers(here.as_mut(), slot.gradient.as_ref().unwrap());
                let error = relative(&numbers(there.as_mut(), &other), &expected);
                assert!(error < limit, "{what}, step {step} {}: {error:e}", slot.name);
            }
        }
        for session in others.iter_mut().chain([&mut here]) {
            run(session.as_mut(), EntryKind::Update);
        }
        for there in &mut others {
            for name in [scalar::LOSS_SUM, scalar::GRADIENT_NORM] {
                let [a, b] = [&mut here, &mut *there].map(|session| value(session.as_mut(), name));
                assert!((a - b).abs() <= 1e-4 * a.abs(), "{what}, step {step}: {name} {a} and {b}");
            }
            let [a, b] = [&mut here, &mut *there].map(|session| {
                let scaling = session.program().layout.scaling.clone().unwrap();
                (numbers(session.as_mut(), &scaling.factors), numbers(session.as_mut(), &scaling.steps))
            });
            assert_eq!(a, b, "{what}, step {step}: factors, steps");
            assert!(a.1 == [step as f32 + 1.0] && a.0.iter().any(|factor| *factor > 1.0));
        }
    }
}

#[test]
fn experts_have_the_numbers_of_the_reference() {
    let model = mixture();
    // Codes of transposes on Hopper, which reads along the sum; others multiply numbers.
    let machines = [Machine::h200(), Machine::named("rtx4090").unwrap()];
    let cases = [(GradientFormat::E5M2, false), (GradientFormat::E4M3, true), (GradientFormat::Unquantised, false)];
    for (turn, (gradient, adapted)) in cases.into_iter().enumerate() {
        let options = CompileOptions { adapter: adapted.then(|| of_experts(&model)), ..quantised(gradient, false) };
        same_numbers(&model, &options, &in_turn(&machines, turn), 1e-4);
    }
}

/// Gradients of experts differ from those without the recipe by its rounding, and not at all by a factor or a wrong operand.
#[test]
fn experts_have_nearly_the_gradients_of_numbers() {
    let median = error_of_experts(&quantised(GradientFormat::E4M3, false));
    assert!((0.02..0.15).contains(&median), "{median}");
}

#[test]
fn experts_are_multiplied_in_codes() {
    let model = mixture();
    for (adapted, gradient) in
        [(false, GradientFormat::E5M2), (true, GradientFormat::E5M2), (false, GradientFormat::Unquantised)]
    {
        let options = CompileOptions {
            weights: DType::BF16,
            compute: DType::BF16,
            variants: vec![VARIANT],
            adapter: adapted.then(|| of_experts(&model)),
            ..quantised(gradient, false)
        };
        let program = compile(&model, &options, &Machine::h200()).unwrap();
        // Two layers, of which each has a product for gate and up, and one for down.
        let forward = launches(&program, "grouped_codes", Phase::Forward);
        assert_eq!(forward.len(), 4, "{gradient:?}");
        let backward = launches(&program, "grouped_codes", Phase::Backward);
        assert_eq!(backward.len(), if gradient == GradientFormat::Unquantised { 0 } else { 4 });
        for launch in forward.iter().chain(&backward) {
            assert!(!launch.attrs.flag("transposed").unwrap(), "Hopper reads along the sum");
            assert_eq!(launch.inputs.len(), if adapted { 7 } else { 5 }, "adapters ride on the products");
            assert_eq!(launch.inputs[4].shape, launch.inputs[2].shape.iter().map(|n| n - 1).collect::<Vec<_>>());
            let by = Arithmetic::Grouped { gradient: false, by: Realisation::Hopper };
            assert_eq!(launch.arithmetic, by);
        }
        let fast = |launch: &Launch| launch.attrs.flag("fast_sum").unwrap();
        assert!(forward.iter().all(fast) && !backward.iter().any(fast));
        let numbers = launches(&program, "grouped_linear", Phase::Backward);
        assert_eq!(numbers.is_empty(), !adapted && gradient != GradientFormat::Unquantised);
    }
}

/// The matrix of an expert has a power of its own: the largest with which its largest magnitude is a code.
#[test]
fn every_expert_has_a_scale() {
    let (model, options) = (mixture(), quantised(GradientFormat::E5M2, false));
    let mut session = prepared_of(&model, &options, &Machine::cpu(1 << 30, 2));
    let program = session.program().clone();
    let entry = program.entry(EntryKind::Prepare, None).unwrap();
    let quantise = program.entries[entry].steps.iter().find_map(|step| match &step.instruction {
        Instruction::Launch(launch) if launch.attrs.get("groups").is_some() && launch.op.as_str() == "quantise" => {
            Some(launch.clone())
        }
        _ => None,
    });
    let quantise = quantise.expect("matrices of experts are quantised");
    // Other magnitudes for every second expert.
    let weights = quantise.inputs[0].clone();
    let (mut values, count) = (numbers(session.as_mut(), &weights), quantise.outputs[1].len());
    let each = values.len() / count;
    for (expert, values) in values.chunks_mut(each).enumerate().filter(|(expert, _)| expert % 2 == 1) {
        values.iter_mut().for_each(|value| *value *= 3.0 * expert as f32);
    }
    write(session.as_mut(), &weights, &Array::Real(values.clone()));
    session.run(entry).unwrap();
    let scales = numbers(session.as_mut(), &quantise.outputs[1]);
    let expected: Vec<f32> = values
        .chunks(each)
        .map(|values| {
            let amax = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let up_to = |k: &i32| f64::from(amax) * 2f64.powi(*k) <= 448.0;
            2f32.powi(-(-126..=126).rev().find(up_to).unwrap())
        })
        .collect();
    assert_eq!(scales, expected);
    assert!(scales.windows(2).any(|pair| pair[0] != pair[1]), "{scales:?}");
}

/// The products of a program whose factors are FP8, in the form that a GPU takes.
fn products(program: &Program) -> Vec<&program::Gemm> {
    let steps = program.entries.iter().flat_map(|entry| &entry.steps);
    let gemms = steps.filter_map(|step| match &step.instruction {
        Instruction::Gemm(gemm) => Some(gemm),
        _ => None,
    });
    gemms.filter(|gemm| gemm.scales.is_some()).collect()
}

#[test]
fn a_gpu_multiplies_along_the_sum_in_whole_sixteens() {
    for adapted in [false, true] {
        let options =
            CompileOptions { weights: DType::BF16, compute: DType::BF16, ..quantised(GradientFormat::E5M2, adapted) };
        let program = compile(&model(), &options, &Machine::h200()).unwrap();
        let products = products(&program);
        assert!(!products.is_empty());
        for gemm in &products {
            assert!(!gemm.transpose_a && gemm.transpose_b, "{gemm:?}");
            assert!(gemm.n.is_multiple_of(16) && gemm.k.is_multiple_of(16), "{gemm:?}");
            assert!([&gemm.a, &gemm.b].iter().all(|at| at.offset.is_multiple_of(16) && at.is_dense()), "{gemm:?}");
        }
        let adapters = products.iter().filter(|gemm| !gemm.low_rank.is_empty()).count();
        assert_eq!(adapters > 0, adapted, "adapters ride on the products");
        let wide = products.iter().filter(|gemm| gemm.d.dtype == DType::F32).count();
        assert_eq!(wide > 0, !adapted, "gradients of weights are f32");
    }
}

/// Names and details of the quantizing launches of the first micro-step, by phase.
fn quantising(program: &Program) -> Vec<(String, &'static str)> {
    let entry = &program.entries[program.entry(EntryKind::FirstMicroStep, Some(VARIANT)).unwrap()];
    let launches = entry.steps.iter().filter(|step| matches!(step.instruction, Instruction::Launch(_)));
    let of = launches.map(|step| (step.provenance.op.clone(), step.provenance.phase.name()));
    of.filter(|(op, _)| op.split('+').any(|name| name.contains("quantise") || name.contains("codes"))).collect()
}

/// Codes come from the kernels that give their tensors; passes of their own remain for what attention gives and for
/// gradients of heads. Where weights are trained, codes are transposed by themselves.
#[test]
fn codes_ride_in_the_kernels_of_their_tensors() {
    let model = graph::from_json(include_str!("../fixtures/qwen3.json")).unwrap();
    for adapted in [true, false] {
        let options = CompileOptions {
            weights: DType::BF16,
            compute: DType::BF16,
            variants: vec![VARIANT],
            ..quantised(GradientFormat::E5M2, adapted)
        };
        let program = compile(&model, &options, &Machine::h200()).unwrap();
        let found = quantising(&program);
        let count = |op: &str, phase: &str| found.iter().filter(|(of, at)| of == op && *at == phase).count();
        let joint = |phase: &str| found.iter().filter(|(of, at)| of.ends_with("+quantise") && *at == phase).count();
        // Two layers: of each what both norms and the gate give, and the gradients of the gate and of both sums. Apart
        // stand what attention gives, and the gradients of heads, which no operation reads in the first layer under adapters.
        assert_eq!((count("quantise", "forward"), joint("forward")), (2, 6), "{adapted}: {found:#?}");
        let of_heads = if adapted { 1 } else { 2 };
        assert_eq!((count("quantise", "backward"), joint("backward")), (of_heads, 6), "{adapted}: {found:#?}");
        let transposed = count("transpose_codes", "forward") + count("transpose_codes", "backward");
        assert_eq!(transposed, if adapted { 0 } else { 12 }, "{found:#?}");
        assert_eq!(count("quantise", "recompute") + joint("recompute"), 0, "{found:#?}");
    }
}

/// A recipe names the products of a mixture that it leaves unquantized.
#[test]
fn products_that_are_not_quantised_are_named() {
    let model = mixture();
    let of_recipe = |recipe: Recipe| compiler::unquantised(&model, &CompileOptions { recipe, ..options() }).unwrap();
    let fp4 = Recipe::Nvfp4(Nvfp4 { emulate: true, stochastic: true, skip_first: 0, skip_last: 0 });
    for recipe in [fp8(GradientFormat::E5M2), fp4] {
        assert_eq!(of_recipe(recipe), ["model.layers.*.mlp.gate.weight"]);
    }
    let options = CompileOptions { recipe: fp8(GradientFormat::E5M2), ..options() };
    assert!(compiler::unquantised(&model, &support::options()).unwrap().is_empty(), "nothing to say of bf16");
    assert!(
        compiler::unquantised(&support::model(), &options).unwrap().is_empty(),
        "all of a plain model is quantised"
    );
}

#[test]
fn a_recipe_that_finds_nothing_is_an_error() {
    let recipe = |skip_first: usize, skip_last: usize| {
        Recipe::Fp8Hybrid(Fp8Hybrid { gradient: GradientFormat::E5M2, amax_history: 3, skip_first, skip_last })
    };
    let compiled = |first: usize, last: usize| {
        let options = CompileOptions { recipe: recipe(first, last), ..options() };
        compile(&model(), &options, &Machine::cpu(1 << 30, 2)).map(|program| products(&program).len())
    };
    let (all, half) = (compiled(0, 0).unwrap(), compiled(1, 0).unwrap());
    assert!(half > 0 && half < all, "{half} of {all}");
    for (first, last) in [(2, 0), (1, 1), (9, 9)] {
        let message = compiled(first, last).unwrap_err().to_string();
        assert!(message.contains("leaves nothing to quantise"), "{message}");
        assert!(message.contains(&format!("`skip_quant_first_layers: {first}`")), "{message}");
    }
}

#[test]
fn codes_follow_the_weights_and_bad_magnitudes_stop_the_update() {
    let mut session = prepared(&quantised(GradientFormat::E5M2, false), &Machine::cpu(1 << 30, 2));
    let session = session.as_mut();
    let step = |session: &mut dyn Session| {
        run(session, EntryKind::FirstMicroStep);
        run(session, EntryKind::Update);
        (value(session, scalar::LOSS_SUM), value(session, scalar::UPDATE_APPLIED), value(session, scalar::FP8_CLIPPED))
    };
    let (first, applied, clipped) = step(session);
    assert!(applied == 1.0 && clipped == 0.0);
    let (second, _, _) = step(session);
    assert_ne!(first, second, "the next step multiplies with the codes of the updated weights");
    let scaling = session.program().layout.scaling.clone().unwrap();
    let before = numbers(session, &scaling.history);
    let program = session.program().clone();
    let norm = program.parameter("layers.0.norm.weight").unwrap();
    let good = numbers(session, &norm.weight);
    write(session, &norm.weight, &Array::Real(vec![f32::INFINITY; good.len()]));
    let (_, applied, clipped) = step(session);
    assert!(applied == 0.0 && clipped.is_nan(), "{applied} {clipped}");
    assert_eq!(numbers(session, &scaling.history), before, "nothing was entered");
    // Magnitudes that outgrow their factor saturate, are counted, and are known in the next step.
    write(session, &norm.weight, &Array::Real(good.iter().map(|x| x * 64.0).collect()));
    let (_, applied, clipped) = step(session);
    assert!(applied == 1.0 && clipped >= 1.0, "{applied} {clipped}");
    // With weights that stay, the gradients of saturated values and those of the values themselves are the last surprise.
    session.write(program.scalar(scalar::LEARNING_RATE).unwrap(), &0f32.to_le_bytes()).unwrap();
    let rest: Vec<f32> = (0..3).map(|_| step(session).2).collect();
    assert_eq!(rest[2], 0.0, "the history knows them: {rest:?}");
}
