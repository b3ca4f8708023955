//! Modules that are trained in full alongside adapters: what is trained, what files hold, and what becomes of it.

use std::path::Path;
use std::sync::Arc;

use crate::stories::{config, device, root, source};
use data::Batch;
use data::safetensors::Weights;
use serde_json::{Value, json};
use tensor::{DType, HostTensor};
use train::{Model, ModelSource, TrainError, Trainer, merge};

const PREFIX: &str = "base_model.model.";

fn try_trainer(more: &Value) -> train::Result<Trainer> {
    let mut options = json!({"torch_dtype": "float32", "lora_dropout": 0.0, "weight_decay": 0.0});
    for (name, value) in more.as_object().unwrap() {
        options[name] = value.clone();
    }
    Trainer::begin(config(&std::env::temp_dir(), &options), source(), device())
}

fn trainer(more: &Value) -> Trainer {
    try_trainer(more).unwrap()
}

/// Two rows of two documents each.
fn rows(step: usize) -> Batch {
    let ids: Vec<i32> = (0..32).map(|i| ((i * 37 + step * 11) % 400 + 3) as i32).collect();
    let positions = (0..32).map(|i| if i % 16 < 6 { i % 16 } else { i % 16 - 6 }).collect();
    Batch::from_labels(2, 16, ids.clone(), &ids, Some(positions), None).unwrap()
}

fn train(trainer: &mut Trainer, steps: std::ops::Range<usize>) -> Vec<(f64, f64)> {
    let step = |step| trainer.step(&[rows(step)], Some(1e-2)).unwrap();
    steps.map(step).map(|metrics| (metrics.loss, metrics.grad_norm)).collect()
}

fn logits(folder: &Path, adapter: Option<&Path>) -> HostTensor {
    let source = Arc::new(ModelSource { folder: folder.to_owned(), ..(*source()).clone() });
    Model::load(device(), source, adapter, DType::F32).unwrap().forward(&rows(99), false).unwrap().logits
}

fn relative(found: &HostTensor, expected: &HostTensor) -> f64 {
    let (found, expected) = (found.to_f64(), expected.to_f64());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut found.iter().zip(&expected).map(|(f, e)| f - e)) / norm(&mut expected.iter().copied())
}

fn stories_model() -> std::path::PathBuf {
    root().join("examples/stories/model")
}

#[test]
fn what_is_named_is_trained_saved_loaded_and_merged() {
    let place = tempfile::tempdir().unwrap();
    for (number, more) in [
        json!({"modules_to_save": ["embed_tokens", "lm_head"]}),
        json!({"modules_to_save": ["embed_tokens", "norm"], "qlora_bnb": true}),
        json!({"modules_to_save": ["layers.1.mlp"], "recompute_block": true}),
    ]
    .into_iter()
    .enumerate()
    {
        let path = |name: &str| place.path().join(format!("{name}-{number}"));
        let mut plain = trainer(&json!({"qlora_bnb": more["qlora_bnb"] == true}));
        let mut run = trainer(&more);
        let (first, base) = (train(&mut run, 0..1), train(&mut plain, 0..1));
        // Without an adapter's contribution yet the losses are one, but more is trained.
        assert!((first[0].0 / base[0].0 - 1.0).abs() < 1e-6 && first[0].1 > base[0].1 * 1.01, "{first:?} {base:?}");
        train(&mut run, 1..4);
        run.export(&path("adapter")).unwrap();
        let files = Weights::open(&path("adapter")).unwrap();
        let own = Weights::open(&stories_model()).unwrap();
        let wholes: Vec<&str> = files.names().into_iter().filter(|name| !name.contains("lora_")).collect();
        let expected: Vec<&str> = match number {
            0 => vec!["lm_head.weight", "model.embed_tokens.weight"],
            1 => {
                let named = |name: &&str| name.contains("norm") || name.contains("embed");
                ["lm_head.weight"].into_iter().chain(own.names().into_iter().filter(named)).collect()
            }
            _ => own.names().into_iter().filter(|name| name.contains("layers.1.mlp")).collect(),
        };
        let mut named: Vec<&str> = wholes.iter().map(|name| name.strip_prefix(PREFIX).unwrap()).collect();
        named.sort_unstable();
        assert_eq!(named.len(), expected.len(), "{named:?} {expected:?}");
        for name in named {
            let there = if name == "lm_head.weight" { "model.embed_tokens.weight" } else { name };
            let (found, before) = (files.get(&format!("{PREFIX}{name}")).unwrap(), own.get(there).unwrap());
            let (found, before) = (found.to_host().unwrap(), before.to_host().unwrap());
            assert!(relative(&found, &before) > 1e-4, "{name} was trained");
        }
        let text = std::fs::read_to_string(path("adapter").join("adapter_config.json")).unwrap();
        let config: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(config["ensure_weight_tying"], number < 2, "the head of this model is its embedding");
        // Gone on with, it is as it was.
        trainer(&json!({"adapter": path("adapter")})).export(&path("again")).unwrap();
        let bytes = |folder: &str| std::fs::read(path(folder).join("adapter_model.safetensors")).unwrap();
        if more["qlora_bnb"] != true {
            assert!(bytes("adapter") == bytes("again"));
            let with = logits(&stories_model(), Some(&path("adapter")));
            merge(&stories_model(), &path("adapter"), &path("merged"), &Default::default(), false, &|| false).unwrap();
            assert!(relative(&logits(&path("merged"), None), &with) < 2e-6);
            assert!(relative(&logits(&stories_model(), None), &with) > 1e-2);
        }
        run.export_merged(&path("live")).unwrap();
    }
}

#[test]
fn what_cannot_be_is_said_at_its_option() {
    let reported = |more: Value| match try_trainer(&more) {
        Err(TrainError::Config(problems)) => problems[0].to_string(),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("{more} is accepted"),
    };
    let unknown = reported(json!({"modules_to_save": ["embed_tokens", "wte"]}));
    assert!(
        unknown.contains("`wte` matches no module of the model; its modules are: down_proj, embed_tokens"),
        "{unknown}"
    );
    let tied = reported(json!({"modules_to_save": ["lm_head"]}));
    assert!(tied.contains("the head may be the embedding: name that"), "{tied}");
    let place = tempfile::tempdir().unwrap();
    trainer(&json!({"modules_to_save": ["norm"]})).export(&place.path().join("adapter")).unwrap();
    let other = json!({"adapter": place.path().join("adapter"), "modules_to_save": ["embed_tokens"]});
    let other = reported(other);
    assert!(other.contains("`modules_to_save` is embed_tokens, but the adapter"), "{other}");
}
