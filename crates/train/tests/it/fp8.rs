//! `recipe: fp8_hybrid` against recorded numbers: one step from an empty state in f32, where no code may differ, and
//! curves, in which the histories take over. The full set next to the checkout, or the repository's trimmed one.

use crate::recorded::{Golden, check, golden};
use compiler::{Fp8Hybrid, GradientFormat, Recipe};
use train::Trainer;

fn default() -> Fp8Hybrid {
    Fp8Hybrid { gradient: GradientFormat::E5M2, amax_history: 1024, skip_first: 0, skip_last: 0 }
}

fn check_model(name: &str) {
    let golden = golden(name);
    let batch = golden.batch("fp8");
    check(&mut golden.model(false, Recipe::Fp8Hybrid(default())), &batch, &golden.open("fp8.safetensors"), "", 1e-4);
    let of_adapter = golden.batch("fp8_lora");
    check(
        &mut golden.model(true, Recipe::Fp8Hybrid(default())),
        &of_adapter,
        &golden.open("fp8_lora.safetensors"),
        "",
        1e-4,
    );
    let variants = golden.open("fp8_variants.safetensors");
    for (prefix, recipe, limit) in [
        ("grad_e4m3.", Fp8Hybrid { gradient: GradientFormat::E4M3, ..default() }, 5e-2),
        ("grad_none.", Fp8Hybrid { gradient: GradientFormat::Unquantised, ..default() }, 1e-4),
        ("skip_1_0.", Fp8Hybrid { skip_first: 1, ..default() }, 1e-4),
        ("skip_0_1.", Fp8Hybrid { skip_last: 1, ..default() }, 1e-4),
    ] {
        check(&mut golden.model(false, Recipe::Fp8Hybrid(recipe)), &batch, &variants, prefix, limit);
    }
}

#[test]
fn llama_has_the_recorded_codes() {
    check_model("llama");
}

#[test]
fn qwen3_has_the_recorded_codes() {
    check_model("qwen3");
}

/// A trainer with the recipe.
fn trainer(golden: &Golden, adapter: bool, more: serde_json::Value) -> Trainer {
    let mut options = serde_json::json!({ "recipe": "fp8_hybrid" });
    options.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    golden.trainer(adapter, options)
}

/// After a few steps two honest runs differ as two draws of the quantisation's noise do; the first steps do not.
fn check_curve(name: &str, which: &str, window: usize) {
    let golden = golden(name);
    let text = std::fs::read_to_string(golden.recorded.join("curves.json")).unwrap();
    let curves: serde_json::Value = serde_json::from_str(&text).unwrap();
    let curve = &curves[which];
    assert_eq!(curve["window"], window);
    let number = |at: &serde_json::Value| at.as_f64().unwrap();
    let first = number(&curve["first_batch"]) as usize;
    let mut trainer = trainer(&golden, which == "lora", serde_json::json!({ "fp8_amax_history": window }));
    let batches = golden.curve_batches();
    let (mut sum, mut expected) = (0.0, 0.0);
    let steps = curve["steps"].as_array().unwrap();
    for (step, recorded) in steps.iter().enumerate() {
        let metrics = trainer.step(&batches[first + step], Some(number(&recorded["lr"]))).unwrap();
        let (loss, norm) = (number(&recorded["loss"]), number(&recorded["grad_norm"]));
        // Where orders of sums leave the codes alone they leave the loss alone; later any two runs differ alike.
        let quiet = step == 0 || number(&curve["loss_noise_by_step"][step]) < 1e-5;
        let limit = if quiet { 1e-4 } else { 4.0 * number(&curve["noise_f32_orders"]["loss_rel"]) };
        let error = (metrics.loss - loss).abs() / loss;
        assert!(error <= limit, "{name} {which} step {step}: loss {} of {loss}, {error:e}", metrics.loss);
        let limit = 4.0 * number(&curve["noise_f32_orders"]["grad_norm_rel"]);
        let error = (metrics.grad_norm - norm).abs() / norm;
        assert!(error <= limit, "{name} {which} step {step}: norm {} of {norm}, {error:e}", metrics.grad_norm);
        assert_eq!(metrics.fp8_clipped, Some(recorded["clipped"].as_array().unwrap().len() as f64), "step {step}");
        (sum, expected) = (sum + metrics.loss, expected + loss);
    }
    let limit = 4.0 * number(&curve["noise_f32_orders"]["mean_loss_rel"]);
    assert!((sum - expected).abs() <= limit * expected, "{name} {which}: mean loss {sum} of {expected}");
    check_histories(&mut trainer, steps, window, which == "lora");
    // The loss before the update of one more step, by the last histories.
    let after = trainer.step(&batches[first], Some(0.0)).unwrap().loss;
    let recorded = number(&curve["loss_of_first_batch_after"]);
    let limit = 4.0 * number(&curve["noise_f32_orders"]["final_loss_rel"]);
    assert!((after - recorded).abs() <= limit * recorded, "{name} {which}: {after} of {recorded} at the end");
}

/// The histories in a checkpoint: names and the magnitudes of the first step as recorded, the newest last.
fn check_histories(trainer: &mut Trainer, steps: &[serde_json::Value], window: usize, adapter: bool) {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = folder.path().join("checkpoint");
    trainer.save(&checkpoint).unwrap();
    let files = data::safetensors::SafeTensors::open(&checkpoint.join("fp8_state.safetensors")).unwrap();
    assert_eq!(files.metadata()["steps"], steps.len().to_string());
    let names: Vec<String> = serde_json::from_str(&files.metadata()["names"]).unwrap();
    let history = files.get("amax_history").unwrap().to_host().unwrap();
    assert_eq!(history.shape, [names.len(), window]);
    let recorded = steps[0]["amax"].as_object().unwrap();
    let mut sorted: Vec<&str> = names.iter().map(String::as_str).collect();
    sorted.sort_unstable();
    let mut expected: Vec<&str> = recorded.keys().map(String::as_str).collect();
    expected.sort_unstable();
    assert_eq!(sorted, expected, "the quantisers' names");
    for (quantiser, row) in names.iter().zip(history.to_f32().chunks(window)) {
        if window >= steps.len() {
            let first = recorded[quantiser].as_f64().unwrap();
            // In the recorded adapter's first backward pass the order of sums decides some codes.
            let limit = if adapter && quantiser.ends_with(".dy") { 3e-2 } else { 1e-4 };
            assert!((f64::from(row[0]) - first).abs() <= limit * first, "{quantiser}: {} of {first}", row[0]);
            assert!(row[steps.len()..].iter().all(|entry| *entry == -1.0), "unused entries");
        }
        assert!(row[..window.min(steps.len())].iter().all(|entry| *entry > 0.0), "{quantiser}: {row:?}");
    }
}

#[test]
fn curves_are_those_that_were_recorded() {
    for name in ["llama", "qwen3"] {
        check_curve(name, "full", 1024);
        check_curve(name, "full_window_2", 2);
        check_curve(name, "lora", 1024);
    }
}

/// A run that was interrupted at any step goes on with the same bits, and every option has an effect of its own.
#[test]
fn a_resumed_run_has_the_bits_of_one_that_went_on() {
    let golden = golden("llama");
    let batches = golden.curve_batches();
    let mut seen = Vec::new();
    for (adapter, more) in [
        (false, serde_json::json!({})),
        (true, serde_json::json!({ "recompute_block": true })),
        (false, serde_json::json!({ "fp8_amax_history": 1 })),
        (false, serde_json::json!({ "fp8_amax_history": 0 })),
        (false, serde_json::json!({ "gradient_dtype": "float8_e4m3" })),
        (false, serde_json::json!({ "gradient_dtype": "bfloat16" })),
        (false, serde_json::json!({ "skip_quant_first_layers": 1 })),
        (false, serde_json::json!({ "skip_quant_last_layers": 1 })),
        (false, serde_json::json!({ "recipe": "bf16" })),
    ] {
        let take = |trainer: &mut Trainer, steps: std::ops::Range<usize>| -> Vec<[u64; 2]> {
            let of = |step: usize| {
                let metrics = trainer.step(&batches[step], Some(1e-3)).unwrap();
                [metrics.loss.to_bits(), metrics.grad_norm.to_bits()]
            };
            steps.map(of).collect()
        };
        let mut whole = trainer(&golden, adapter, more.clone());
        let expected = take(&mut whole, 0..10);
        for at in [1, 3] {
            let folder = tempfile::tempdir().unwrap();
            let checkpoint = folder.path().join("checkpoint");
            let mut first = trainer(&golden, adapter, more.clone());
            take(&mut first, 0..at);
            first.save(&checkpoint).unwrap();
            let mut second = trainer(&golden, adapter, more.clone());
            second.resume(&checkpoint).unwrap();
            assert_eq!(take(&mut second, at..5), expected[at..5], "{more} at {at}");
        }
        // A power of two matters only to what saturates or vanishes: other histories may give the same bits for long.
        assert!(!seen.contains(&expected) || more.get("fp8_amax_history").is_some(), "{more} changes nothing");
        seen.push(expected);
    }
}

/// Recomputed values have the codes of the first computation, in every plan.
#[test]
fn plans_do_not_change_bits() {
    let golden = golden("qwen3");
    let batches = golden.curve_batches();
    for adapter in [false, true] {
        let run = |more: serde_json::Value| -> Vec<u64> {
            let mut trainer = trainer(&golden, adapter, more);
            (0..4).map(|step| trainer.step(&batches[step], Some(1e-3)).unwrap().loss.to_bits()).collect()
        };
        let expected = run(serde_json::json!({}));
        for option in ["recompute_block", "recompute_ffn", "recompute_att", "recompute_swiglu", "recompute_rmsnorm"] {
            assert_eq!(run(serde_json::json!({ option: true })), expected, "{option}");
        }
    }
}

/// Linears that are not merged share the powers of those that read the same value.
#[test]
fn groups_do_not_depend_on_merging() {
    let golden = golden("qwen3");
    let batches = golden.curve_batches();
    let run = |passes: Option<usize>, more: serde_json::Value| {
        let mut trainer = trainer(&golden, false, more);
        trainer.plan.compile.plan.passes = passes;
        let metrics = trainer.step(&batches[0], Some(1e-3)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        trainer.save(&folder.path().join("checkpoint")).unwrap();
        let file = folder.path().join("checkpoint/fp8_state.safetensors");
        let files = data::safetensors::SafeTensors::open(&file).unwrap();
        (metrics.loss, metrics.grad_norm, files.metadata()["names"].clone())
    };
    for gradient in ["float8_e5m2", "bfloat16"] {
        let more = serde_json::json!({ "gradient_dtype": gradient });
        let ((loss, norm, names), apart) = (run(None, more.clone()), run(Some(0), more));
        assert!(
            (apart.0 - loss).abs() <= 1e-6 * loss && (apart.1 - norm).abs() <= 1e-4 * norm,
            "{apart:?} {loss} {norm}"
        );
        assert_eq!(apart.2, names);
    }
}

/// Another recipe or another window is another run of the same model: magnitudes that fit stay.
#[test]
fn another_recipe_begins_without_history_and_another_window_keeps_the_newest() {
    let golden = golden("llama");
    let batches = golden.curve_batches();
    let folder = tempfile::tempdir().unwrap();
    let save = |trainer: &mut Trainer, name: &str| {
        let path = folder.path().join(name);
        trainer.save(&path).unwrap();
        let file = path.join("fp8_state.safetensors");
        let row = file.is_file().then(|| {
            let files = data::safetensors::SafeTensors::open(&file).unwrap();
            let history = files.get("amax_history").unwrap().to_host().unwrap();
            history.to_f32()[..history.shape[1]].to_vec()
        });
        (path, row)
    };
    let step = |trainer: &mut Trainer, step: usize| _ = trainer.step(&batches[step], Some(1e-3)).unwrap();
    let mut plain = trainer(&golden, false, serde_json::json!({ "recipe": "bf16" }));
    (0..3).for_each(|at| step(&mut plain, at));
    let (path, none) = save(&mut plain, "plain");
    assert_eq!(none, None);
    let mut quantised = trainer(&golden, false, serde_json::json!({ "fp8_amax_history": 3 }));
    quantised.resume(&path).unwrap();
    (3..7).for_each(|at| step(&mut quantised, at));
    let (path, three) = save(&mut quantised, "quantised");
    let mut narrow = trainer(&golden, false, serde_json::json!({ "fp8_amax_history": 2 }));
    narrow.resume(&path).unwrap();
    let (_, two) = save(&mut narrow, "narrow");
    assert_eq!(two.unwrap(), three.unwrap()[1..]);
}
