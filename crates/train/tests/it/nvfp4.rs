//! `recipe: nvfp4` against recorded numbers: one step in f32, where no code may differ, gradients rounded to nearest and
//! stochastically. The full set next to the checkout, or the repository's trimmed one.

use crate::recorded::{self, check, golden};
use compiler::{Nvfp4, Recipe};
use serde_json::json;
use train::Trainer;

fn recipe(stochastic: bool) -> Recipe {
    Recipe::Nvfp4(Nvfp4 { emulate: true, stochastic, skip_first: 0, skip_last: 0 })
}

fn check_model(name: &str) {
    let golden = golden(name);
    let cases =
        [("nvfp4", false, recipe(false)), ("nvfp4_lora", true, recipe(false)), ("nvfp4_sr", false, recipe(true))];
    for (case, adapter, recipe) in cases {
        let mut model = golden.model(adapter, recipe).with_seed(0x5EED_0000_BEEF);
        check(&mut model, &golden.batch(case), &golden.open(&format!("{case}.safetensors")), "", 1e-4);
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

/// Loss and norm of each step.
fn take(trainer: &mut Trainer, batches: &[Vec<data::Batch>], steps: std::ops::Range<usize>) -> Vec<[u64; 2]> {
    let of = |step: usize| {
        let metrics = trainer.step(&batches[step], Some(1e-3)).unwrap();
        [metrics.loss.to_bits(), metrics.grad_norm.to_bits()]
    };
    steps.map(of).collect()
}

fn trainer(golden: &recorded::Golden, adapter: bool, more: serde_json::Value) -> Trainer {
    let mut options = json!({ "recipe": "nvfp4", "fp4_backend": "emulate" });
    options.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    golden.trainer(adapter, options)
}

/// A run that was interrupted at any step goes on with the same bits, and every option has an effect of its own.
#[test]
fn a_resumed_run_has_the_bits_of_one_that_went_on() {
    let golden = golden("llama");
    let batches = golden.curve_batches();
    let mut seen = Vec::new();
    for (adapter, more) in [
        (false, json!({})),
        (true, json!({})),
        (false, json!({ "torch_dtype": "bfloat16" })),
        (false, json!({ "fp4_stochastic_rounding": false })),
        (false, json!({ "train_seed": 7 })),
        (false, json!({ "skip_quant_first_layers": 1 })),
        (false, json!({ "skip_quant_last_layers": 1 })),
        (false, json!({ "recipe": "bf16", "fp4_backend": "cutlass" })),
        (false, json!({ "recipe": "fp8_hybrid", "fp4_backend": "cutlass" })),
    ] {
        let mut whole = trainer(&golden, adapter, more.clone());
        let expected = take(&mut whole, &batches, 0..5);
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = folder.path().join("checkpoint");
        let mut first = trainer(&golden, adapter, more.clone());
        take(&mut first, &batches, 0..2);
        first.save(&checkpoint).unwrap();
        let mut second = trainer(&golden, adapter, more.clone());
        second.resume(&checkpoint).unwrap();
        assert_eq!(take(&mut second, &batches, 2..5), expected[2..], "{more}");
        assert!(!seen.contains(&expected), "{more} changes nothing");
        seen.push(expected);
    }
}

/// Recomputed values have the codes of the first computation, in every plan.
#[test]
fn plans_do_not_change_bits() {
    let golden = golden("qwen3");
    let batches = golden.curve_batches();
    for adapter in [false, true] {
        let run = |more: serde_json::Value| take(&mut trainer(&golden, adapter, more), &batches, 0..3);
        let expected = run(json!({}));
        for option in ["recompute_block", "recompute_ffn", "recompute_att", "recompute_swiglu", "recompute_rmsnorm"] {
            assert_eq!(run(json!({ option: true })), expected, "{option}");
        }
    }
}

/// The unit that multiplies codes is a choice for GPUs only: a CPU computes the numbers of `emulate` for every value.
#[test]
fn the_word_changes_nothing_on_a_cpu() {
    let golden = golden("llama");
    let batches = golden.curve_batches();
    let run = |backend: &str| take(&mut trainer(&golden, false, json!({ "fp4_backend": backend })), &batches, 0..2);
    assert_eq!([run("cutlass"), run("cudnn")], [run("emulate"), run("emulate")]);
}

/// Linears that are not merged share the factors and the random numbers of those that read the same value.
#[test]
fn groups_do_not_depend_on_merging() {
    let golden = golden("qwen3");
    let batches = golden.curve_batches();
    for more in [json!({}), json!({ "fp4_stochastic_rounding": false })] {
        let run = |passes: Option<usize>| {
            let mut trainer = trainer(&golden, false, more.clone());
            trainer.plan.compile.plan.passes = passes;
            let metrics = trainer.step(&batches[0], Some(1e-3)).unwrap();
            (metrics.loss, metrics.grad_norm)
        };
        let ((loss, norm), apart) = (run(None), run(Some(0)));
        assert!(
            (apart.0 - loss).abs() <= 1e-6 * loss && (apart.1 - norm).abs() <= 1e-4 * norm,
            "{apart:?} {loss} {norm}"
        );
    }
}
