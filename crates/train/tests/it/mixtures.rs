//! Mixtures of experts under recipes that quantise: experts learn, plans change no bit, and a run goes on where it
//! stopped.

use std::path::Path;
use std::sync::Arc;

use crate::stories::in_turn;
use data::Batch;
use serde_json::{Value, json};
use train::config::{Config, Task};
use train::{Device, DeviceRequest, ModelSource, Trainer};

fn recipes() -> [Value; 2] {
    [json!({"recipe": "nvfp4", "fp4_backend": "emulate"}), json!({"recipe": "fp8_hybrid"})]
}

/// Writes a mixture of experts with random weights to a folder.
fn model(folder: &Path) {
    let fields = json!({
        "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "vocab_size": 256, "hidden_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48,
        "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128, "torch_dtype": "bfloat16",
    });
    std::fs::write(folder.join("config.json"), fields.to_string()).unwrap();
}

fn trainer(folder: &Path, parts: &[&Value]) -> Trainer {
    let mut options = json!({
        "model": folder, "init": "random", "sequence_len": 64, "optimizer": "adamw", "gradient_accumulation_steps": 2,
        "torch_dtype": "bfloat16", "device": "cpu", "lora": false,
    });
    for part in parts {
        options.as_object_mut().unwrap().extend(part.as_object().unwrap().clone());
    }
    let config = Config::load_json(&options.to_string(), Task::Sft, &[]).unwrap();
    let source = Arc::new(ModelSource::open(folder, include_str!("../ir/olmoe.json")).unwrap());
    let device = Arc::new(Device::open(&DeviceRequest::of(&config, Vec::new())).unwrap());
    Trainer::begin(Arc::new(config), source, device).unwrap()
}

/// Adapters on experts, whose matrices are frozen.
fn adapters() -> Value {
    let experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"];
    json!({
        "lora": true, "lora_rank": 8, "lora_dropout": 0.0, "lora_target_modules": ["q_proj"],
        "lora_target_parameters": experts,
    })
}

/// Two micro-batches of rows with two documents each: the same in every step.
fn rows() -> [Batch; 2] {
    [0, 1].map(|part| {
        let ids: Vec<i32> = (0..64).map(|i| (i * 37 + part * 5) % 250 + 3).collect();
        let positions = (0..64).map(|i| i % 32 % 20).collect();
        Batch::from_labels(2, 32, ids.clone(), &ids, Some(positions), None).unwrap()
    })
}

fn take(trainer: &mut Trainer, steps: usize) -> Vec<[f64; 2]> {
    let step = |_| {
        let metrics = trainer.step(&rows(), Some(1e-2)).unwrap();
        [metrics.loss, metrics.grad_norm]
    };
    (0..steps).map(step).collect()
}

#[test]
fn experts_learn_in_codes() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path());
    let both = |(turn, recipe)| in_turn(&[(recipe, adapters()), (recipe, json!({}))], turn);
    for (recipe, own) in recipes().iter().enumerate().flat_map(both) {
        let run = |more: Value| take(&mut trainer(folder.path(), &[recipe, &own, &more]), 6);
        let expected = run(json!({"recompute_block": false}));
        let [first, last] = [0, 5].map(|step: usize| expected[step][0]);
        assert!(last < first - 0.1, "{recipe} {own}: {expected:?}");
        assert_eq!(run(json!({"recompute_block": true})), expected, "{recipe} {own}");
        let plain = run(json!({"recipe": "bf16", "fp4_backend": "cutlass"}));
        assert!(plain != expected && (plain[5][0] - last).abs() < 0.3 * (first - last), "{recipe} {own}: {plain:?}");
    }
}

#[test]
fn a_resumed_run_has_the_bits_of_one_that_went_on() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path());
    let both = |(turn, recipe)| in_turn(&[(recipe, json!({})), (recipe, adapters())], turn);
    for (recipe, own) in recipes().iter().enumerate().flat_map(both) {
        let (begin, place) = (|| trainer(folder.path(), &[recipe, &own]), tempfile::tempdir().unwrap());
        let (mut first, mut second) = (begin(), begin());
        let expected = take(&mut first, 4);
        let mut stopped = begin();
        take(&mut stopped, 2);
        let checkpoint = place.path().join("checkpoint");
        stopped.save(&checkpoint).unwrap();
        second.resume(&checkpoint).unwrap();
        assert_eq!(take(&mut second, 2), expected[2..], "{recipe} {own}");
    }
}

/// Units of four bits have no products with a matrix for each expert, and the run says so.
#[test]
fn what_multiplies_experts_is_said() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path());
    for (backend, reported) in [("cutlass", true), ("emulate", false)] {
        let own = trainer(folder.path(), &[&json!({"recipe": "nvfp4", "fp4_backend": backend})]);
        let notes = own.plan.notes.iter().filter(|note| note.contains("matrices of experts as `emulate` does"));
        assert_eq!(notes.count(), usize::from(reported), "{:?}", own.plan.notes);
        let left = own.plan.notes.iter().find(|note| note.contains("leaves the products with"));
        assert!(left.is_some_and(|note| note.contains("mlp.gate") && !note.contains("experts")), "{left:?}");
    }
}
