//! Adapters with magnitudes (DoRA): PEFT's numbers, and what becomes of them elsewhere.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::stories::{config, device, root, source};
use data::Batch;
use data::safetensors::Weights;
use serde_json::{Value, json};
use tensor::{DType, HostTensor};
use train::{Model, ModelSource, TrainError, Trainer, merge};

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

fn relative(found: &HostTensor, expected: &HostTensor) -> f64 {
    assert_eq!(found.shape, expected.shape);
    let (found, expected) = (found.to_f64(), expected.to_f64());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut found.iter().zip(&expected).map(|(f, e)| f - e)) / norm(&mut expected.iter().copied())
}

fn stories_model() -> PathBuf {
    root().join("examples/stories/model")
}

fn logits(folder: &Path, adapter: Option<&Path>) -> HostTensor {
    let source = Arc::new(ModelSource { folder: folder.to_owned(), ..(*source()).clone() });
    Model::load(device(), source, adapter, DType::F32).unwrap().forward(&rows(99), false).unwrap().logits
}

/// The first row of the recorded batch.
fn recorded_row(golden: &Path) -> Batch {
    let inputs = Weights::open(&golden.join("inputs.safetensors")).unwrap();
    let ints = |name: &str| -> Vec<i32> {
        inputs.get(name).unwrap().to_host().unwrap().to_f64().iter().map(|x| *x as i32).collect()
    };
    let length = inputs.get("input_ids").unwrap().shape[1];
    let (ids, labels) = (ints("input_ids")[..length].to_vec(), ints("labels")[..length].to_vec());
    Batch::from_labels(1, length, ids, &labels, None, None).unwrap()
}

/// Logits, loss, every gradient and the merged model of an adapter with magnitudes and whole modules.
#[test]
fn numbers_are_those_of_peft() {
    let (golden, adapter) = (root().join("tests/golden/llama"), root().join("crates/train/tests/it/recorded/dora"));
    let reference = Weights::open(&adapter.join("reference.safetensors")).unwrap();
    let get = |name: &str| reference.get(name).unwrap().to_host().unwrap();
    // Only the adapter: the folder of the numbers has both.
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("adapter");
    std::fs::create_dir(&folder).unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(adapter.join(name), folder.join(name)).unwrap();
    }
    let source = |folder: &Path| Arc::new(ModelSource::open(folder, include_str!("../ir/llama.json")).unwrap());
    let batch = recorded_row(&golden);
    let mut model = Model::load(device(), source(&golden), Some(&folder), DType::F32).unwrap();
    let error = relative(&model.forward(&batch, false).unwrap().logits, &get("logits"));
    assert!(error < 2e-5, "{error:e}");
    let found = model.loss_and_gradients(&batch).unwrap();
    assert!((f64::from(found.loss) - get("loss").to_f64()[0]).abs() < 2e-5, "{}", found.loss);
    assert_eq!(found.gradients.len(), reference.names().iter().filter(|name| name.starts_with("grad.")).count());
    for (name, gradient) in &found.gradients {
        let error = relative(gradient, &get(&format!("grad.{name}")));
        assert!(error < 1e-4, "{name}: {error:e}");
    }
    let merged = place.path().join("merged");
    merge(&golden, &folder, &merged, &Default::default(), false, &|| false).unwrap();
    let found = Model::load(device(), source(&merged), None, DType::F32).unwrap().forward(&batch, false).unwrap();
    let error = relative(&found.logits, &get("merged_logits"));
    assert!(error < 2e-5, "{error:e}");
}

#[test]
fn an_adapter_begins_as_the_base_model_and_trains_its_magnitudes() {
    let place = tempfile::tempdir().unwrap();
    for (number, more) in [
        json!({}),
        json!({"lora_dropout": 1e-6}),
        json!({"qlora_bnb": true, "recompute_block": true}),
        json!({"torch_dtype": "bfloat16", "lora_dtype": "bfloat16"}),
    ]
    .into_iter()
    .enumerate()
    {
        let with = |magnitudes: bool| {
            let mut more = more.clone();
            more["lora_dora"] = json!(magnitudes);
            trainer(&more)
        };
        let (mut plain, mut run) = (with(false), with(true));
        let (first, base) = (train(&mut run, 0..1)[0], train(&mut plain, 0..1)[0]);
        match number {
            // One more product of every linear is rounded.
            1 => assert!((first.0 / base.0 - 1.0).abs() < 1e-5, "{first:?} {base:?}"),
            _ => assert_eq!(first.0, base.0, "the magnitudes are the norms"),
        }
        assert!(first.1 > base.1, "magnitudes have gradients: {first:?} {base:?}");
        train(&mut run, 1..4);
        let path = |name: &str| place.path().join(format!("{name}-{number}"));
        run.export(&path("adapter")).unwrap();
        let files = Weights::open(&path("adapter")).unwrap();
        let magnitudes: Vec<&str> =
            files.names().into_iter().filter(|name| name.ends_with(".lora_magnitude_vector")).collect();
        assert_eq!(magnitudes.len(), 7 * 5);
        assert!(magnitudes.iter().all(|name| files.get(name).unwrap().dtype == DType::F32));
        run.export_merged(&path("live")).unwrap();
        if number != 0 {
            continue;
        }
        merge(&stories_model(), &path("adapter"), &path("merged"), &Default::default(), false, &|| false).unwrap();
        let bytes = |folder: &str, file: &str| std::fs::read(path(folder).join(file)).unwrap();
        assert!(bytes("live", "model.safetensors") == bytes("merged", "model.safetensors"));
        let adapted = logits(&stories_model(), Some(&path("adapter")));
        assert!(relative(&logits(&path("merged"), None), &adapted) < 5e-6);
        assert!(relative(&logits(&stories_model(), None), &adapted) > 1e-2);
        trainer(&json!({"adapter": path("adapter")})).export(&path("again")).unwrap();
        let file = "adapter_model.safetensors";
        assert!(bytes("adapter", file) == bytes("again", file), "its magnitudes are read");
    }
}

#[test]
fn dropout_keeps_the_base_model_at_the_beginning() {
    // Nothing of the adapter is in the sum yet, so dropping its inputs changes no loss; the magnitudes' gradients see it.
    let of = |dropout: f64| train(&mut trainer(&json!({"lora_dora": true, "lora_dropout": dropout})), 0..1)[0];
    let (without, with) = (of(0.0), of(0.5));
    assert!((without.0 / with.0 - 1.0).abs() < 1e-5 && (without.1 / with.1 - 1.0).abs() > 1e-3, "{without:?} {with:?}");
}

#[test]
fn recipes_of_codes_are_refused() {
    let options = json!({"lora_dora": true, "recipe": "fp8_hybrid", "model": stories_model()}).to_string();
    let problems = train::config::Config::load_json(&options, train::config::Task::Sft, &[]).unwrap_err();
    assert!(problems[0].to_string().contains("`lora_dora: true` is not available yet with `recipe: fp8_hybrid`"));
    let place = tempfile::tempdir().unwrap();
    trainer(&json!({"lora_dora": true})).export(&place.path().join("adapter")).unwrap();
    let more = json!({"adapter": place.path().join("adapter"), "recipe": "fp8_hybrid", "torch_dtype": "bfloat16"});
    match try_trainer(&more) {
        Err(TrainError::Config(_) | TrainError::Usage(_)) => {}
        Err(other) => panic!("{other}"),
        Ok(mut trainer) => panic!("{:?}", trainer.step(&[rows(0)], Some(1e-2)).map(|metrics| metrics.loss)),
    }
}
