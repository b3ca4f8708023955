//! Adapters as files: merged into weights, gone on with, read in every variant that is computed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use data::Batch;
use data::safetensors::Weights;
use serde_json::{Value, json};
use tensor::{DType, HostTensor};
use train::config::{Config, Task};
use train::{Device, DeviceRequest, Merged, Model, ModelSource, TrainError, Trainer, merge};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/train lies in the repository").to_owned()
}

fn stories() -> PathBuf {
    root().join("examples/stories/model")
}

fn source(folder: &Path) -> Arc<ModelSource> {
    Arc::new(ModelSource::open(folder, include_str!("../ir/stories.json")).unwrap())
}

fn device() -> Arc<Device> {
    let cpu = options::Setting::Value(train::config::Device::Cpu);
    Arc::new(Device::open(&DeviceRequest { device: cpu, ..DeviceRequest::default() }).unwrap())
}

fn trainer(changed: Value) -> Trainer {
    let mut options = json!({
        "model": stories(), "sequence_len": 64, "optimizer": "adamw", "lora_dropout": 0.0, "gradient_accumulation_steps": 1, "torch_dtype": "float32",
    });
    for (key, value) in changed.as_object().unwrap() {
        options[key] = value.clone();
    }
    let config = Config::load_json(&options.to_string(), Task::Sft, &[]).unwrap();
    Trainer::new(Arc::new(config), source(&stories()), device()).unwrap()
}

/// Rows that differ from step to step.
fn rows(step: usize) -> Batch {
    let ids: Vec<i32> = (0..32).map(|i| ((i * 37 + step * 11) % 400 + 3) as i32).collect();
    Batch::from_labels(2, 16, ids.clone(), &ids, None, None).unwrap()
}

fn train(trainer: &mut Trainer, steps: std::ops::Range<usize>) -> Vec<f64> {
    steps.map(|step| trainer.step(&[rows(step)], Some(1e-2)).unwrap().loss).collect()
}

fn logits(folder: &Path, adapter: Option<&Path>) -> HostTensor {
    Model::load(device(), source(folder), adapter, DType::F32).unwrap().forward(&rows(99), false).unwrap().logits
}

fn relative(found: &HostTensor, expected: &HostTensor) -> f64 {
    let (found, expected) = (found.to_f64(), expected.to_f64());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut found.iter().zip(&expected).map(|(f, e)| f - e)) / norm(&mut expected.iter().copied())
}

fn files_equal(one: &Path, other: &Path) -> bool {
    std::fs::read(one).unwrap() == std::fs::read(other).unwrap()
}

#[test]
fn a_merged_model_gives_the_adapter_s_logits_and_both_ways_the_same_bytes() {
    let place = tempfile::tempdir().unwrap();
    let [adapter, live, merged] = ["adapter", "live", "merged"].map(|name| place.path().join(name));
    let mut trainer = trainer(json!({}));
    train(&mut trainer, 0..4);
    trainer.export(&adapter).unwrap();
    trainer.export_merged(&live).unwrap();
    // Asked to stop before a tensor in the middle, it leaves nothing.
    let asked = std::cell::Cell::new(0);
    let stop = || asked.replace(asked.get() + 1) == 7;
    assert!(matches!(
        merge(&stories(), &adapter, &merged, &Default::default(), false, &stop),
        Err(TrainError::Stopped)
    ));
    assert_eq!((asked.get(), std::fs::read_dir(place.path()).unwrap().count()), (8, 2), "but adapter and live");
    let done = merge(&stories(), &adapter, &merged, &Default::default(), false, &|| false).unwrap();
    let base = Weights::open(&stories()).unwrap();
    assert_eq!((done.adapted, done.tensors), (7 * 5, base.names().len()));
    assert!(files_equal(&live.join("model.safetensors"), &merged.join("model.safetensors")));
    assert!(
        files_equal(&live.join("config.json"), &merged.join("config.json")) && merged.join("tokenizer.json").exists()
    );
    let (with, without) = (logits(&stories(), Some(&adapter)), logits(&stories(), None));
    assert!(relative(&logits(&merged, None), &with) < 2e-6 && relative(&without, &with) > 1e-2);
    let error = merge(&stories(), &adapter, &merged, &Default::default(), false, &|| false).unwrap_err().to_string();
    assert!(error.contains("nothing is overwritten"), "{error}");
}

#[test]
fn weights_in_bf16_take_the_adapter_with_one_rounding() {
    let place = tempfile::tempdir().unwrap();
    let [adapter, live] = ["adapter", "live"].map(|name| place.path().join(name));
    let mut trainer = trainer(json!({"torch_dtype": "bfloat16"}));
    train(&mut trainer, 0..4);
    trainer.export(&adapter).unwrap();
    trainer.export_merged(&live).unwrap();
    let (merged, base) = (Weights::open(&live).unwrap(), Weights::open(&stories()).unwrap());
    let matrices = Weights::open(&adapter).unwrap();
    let name = "model.layers.0.mlp.down_proj";
    let get = |files: &Weights, name: &str| files.get(name).unwrap().to_host().unwrap();
    let a = get(&matrices, &format!("base_model.model.{name}.lora_A.weight"));
    let b = get(&matrices, &format!("base_model.model.{name}.lora_B.weight"));
    let w = get(&base, &format!("{name}.weight")).cast(DType::BF16).to_f64();
    let found = get(&merged, &format!("{name}.weight"));
    assert_eq!(found.dtype, DType::BF16);
    let (columns, found, a, b) = (a.shape[1], found.to_f64(), a.to_f64(), b.to_f64());
    for (index, found) in found.iter().enumerate() {
        let (row, column) = (index / columns, index % columns);
        let delta: f64 = (0..16).map(|k| b[row * 16 + k] * a[k * columns + column]).sum();
        let exact = w[index] + 2.0 * delta;
        assert!((found - exact).abs() <= exact.abs() * 2f64.powi(-8) * 1.001 + 1e-9, "{index}: {found} {exact}");
    }
}

#[test]
fn an_adapter_is_gone_on_with_from_where_it_was() {
    let place = tempfile::tempdir().unwrap();
    let [first, second, third] = ["first", "second", "third"].map(|name| place.path().join(name));
    let mut whole = trainer(json!({}));
    train(&mut whole, 0..6);
    whole.export(&first).unwrap();
    let mut again = trainer(json!({"adapter": first, "lora_rank": 16}));
    again.export(&second).unwrap();
    let file = "adapter_model.safetensors";
    assert!(files_equal(&first.join(file), &second.join(file)), "nothing changes before the first step");
    let (went_on, fresh) = (train(&mut again, 6..9), train(&mut trainer(json!({})), 6..9));
    let straight = train(&mut whole, 6..9);
    // The weights are the same, the optimizer's moments are not.
    assert_eq!(went_on[0], straight[0]);
    assert!(went_on[2] != straight[2] && fresh[0] > went_on[0] + 0.1, "{went_on:?} {straight:?} {fresh:?}");
    again.export(&third).unwrap();
    assert!(!files_equal(&first.join(file), &third.join(file)));
}

/// The stories adapter with `changed` fields, its matrices drawn; `rank` by module.
fn variant(place: &Path, changed: &Value, rank: impl Fn(&str) -> usize) -> PathBuf {
    let folder = place.join(format!("variant-{}", changed.to_string().len()));
    std::fs::create_dir(&folder).unwrap();
    let mut config = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]});
    for (key, value) in changed.as_object().unwrap() {
        config[key] = value.clone();
    }
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    let base = Weights::open(&stories()).unwrap();
    let mut tensors = Vec::new();
    for name in base.names().into_iter().filter(|n| n.contains("q_proj") || n.contains("down_proj")) {
        let (module, shape) = (name.strip_suffix(".weight").unwrap(), base.get(name).unwrap().shape);
        if rank(module) == 0 {
            continue;
        }
        for (which, shape) in [("lora_A", [rank(module), shape[1]]), ("lora_B", [shape[0], rank(module)])] {
            let values: Vec<f32> = (0..shape[0] * shape[1]).map(|i| ((i * 7919 % 101) as f32 - 50.0) / 500.0).collect();
            tensors.push((format!("base_model.model.{module}.{which}.weight"), HostTensor::from_f32(shape, &values)));
        }
    }
    let named: Vec<_> = tensors.iter().map(|(name, t)| data::safetensors::NamedTensor::new(name.clone(), t)).collect();
    data::safetensors::write(&folder.join("adapter_model.safetensors"), &named, &Default::default()).unwrap();
    folder
}

#[test]
fn variants_give_the_logits_of_the_merged_model() {
    let place = tempfile::tempdir().unwrap();
    let plain = variant(place.path(), &json!({}), |_| 4);
    let cases = [
        variant(place.path(), &json!({"use_rslora": true}), |_| 4),
        variant(place.path(), &json!({"alpha_pattern": {"q_proj": 32}, "rank_pattern": {".*\\.1\\..*": 8}}), |m| {
            if m.contains(".1.") { 8 } else { 4 }
        }),
        variant(place.path(), &json!({"layers_to_transform": [0, 2]}), |m| {
            if m.contains(".0.") || m.contains(".2.") { 4 } else { 0 }
        }),
        variant(place.path(), &json!({"exclude_modules": ["down_proj"]}), |m| 4 * usize::from(m.contains("q_proj"))),
    ];
    let unlike = logits(&stories(), Some(&plain));
    for (index, adapter) in cases.iter().enumerate() {
        let merged = place.path().join(format!("merged-{index}"));
        let Merged { adapted, .. } =
            merge(&stories(), adapter, &merged, &Default::default(), false, &|| false).unwrap();
        let live = logits(&stories(), Some(adapter));
        assert!(relative(&logits(&merged, None), &live) < 5e-6, "case {index} of {adapted} weights");
        assert!(relative(&unlike, &live) > 1e-2, "case {index} is another adapter");
        // Trained on and exported, a variant stays the same adapter.
        let exported = place.path().join(format!("exported-{index}"));
        trainer(json!({"adapter": adapter})).export(&exported).unwrap();
        assert_eq!(logits(&stories(), Some(&exported)), live);
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let place = tempfile::tempdir().unwrap();
    let adapter = variant(place.path(), &json!({}), |m| if m.contains(".3.self_attn") { 2 } else { 4 });
    let reported = |result: train::Result<Merged>| result.unwrap_err().to_string();
    // Ranks that differ are no matter of sizes, but they are of the scale: only a pattern says so.
    let error = Model::load(device(), source(&stories()), Some(&adapter), DType::F32)
        .and_then(|mut model| model.forward(&rows(0), false).map(|_| ()))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("model.layers.3.self_attn.q_proj.lora_A.weight` has shape [2, 64], the model needs [4, 64]"),
        "{error}"
    );
    let other = place.path().join("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("config.json"), "{}").unwrap();
    let tensor = HostTensor::zeros(DType::F32, [3, 5]);
    let named = [data::safetensors::NamedTensor::new("model.layers.0.self_attn.q_proj.weight", &tensor)];
    data::safetensors::write(&other.join("model.safetensors"), &named, &Default::default()).unwrap();
    let error = reported(merge(&other, &adapter, &place.path().join("out"), &Default::default(), false, &|| false));
    assert!(error.contains("`model.layers.0.self_attn.q_proj.weight` is [3, 5]; A [4, 64] and B [64, 4]"), "{error}");
    assert!(error.contains("the model has no `model.layers.4.mlp.down_proj.weight`"), "{error}");
    assert!(!place.path().join("out").exists());
}

#[test]
fn merged_weights_give_peft_s_logits() {
    let golden = root().join("tests/golden/llama");
    let place = tempfile::tempdir().unwrap();
    let out = place.path().join("merged");
    merge(&golden, &golden.join("lora"), &out, &Default::default(), false, &|| false).unwrap();
    let inputs = Weights::open(&golden.join("inputs.safetensors")).unwrap();
    let ints = |name: &str| -> Vec<i32> {
        inputs.get(name).unwrap().to_host().unwrap().to_f64().iter().map(|x| *x as i32).collect()
    };
    let shape = inputs.get("input_ids").unwrap().shape.to_vec();
    let batch = Batch::from_labels(shape[0], shape[1], ints("input_ids"), &ints("labels"), None, None).unwrap();
    let source = Arc::new(ModelSource::open(&out, include_str!("../ir/llama.json")).unwrap());
    let found = Model::load(device(), source, None, DType::F32).unwrap().forward(&batch, false).unwrap().logits;
    let reference = Weights::open(&golden.join("lora/reference.safetensors")).unwrap();
    let error = relative(&found, &reference.get("merged_logits").unwrap().to_host().unwrap());
    assert!(error < 2e-5, "{error:e}");
}
