//! The recorded numbers of transformers, peft and torch against this engine on the CPU, through
//! the same paths that Python uses: the full set next to the checkout, or the repository's trimmed one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use data::Batch;
use data::safetensors::Weights;
use tensor::{DType, HostTensor};
use train::config::{Config, Task};
use train::{Device, DeviceRequest, Model, ModelSource, Trainer};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/train lies in the repository").to_owned()
}

/// The folder of a recorded model and its graph.
fn golden(name: &str) -> (PathBuf, String) {
    let full = root().join("../shared/golden");
    let folder = if full.is_dir() { full } else { root().join("tests/golden") }.join(name);
    let ir = std::fs::read_to_string(root().join(format!("crates/train/tests/ir/{name}.json"))).unwrap();
    (folder, ir)
}

fn device(threads: usize) -> Arc<Device> {
    let request = DeviceRequest {
        device: options::Setting::Value(train::config::Device::Cpu),
        threads: Some(threads),
        ..DeviceRequest::default()
    };
    Arc::new(Device::open(&request).unwrap())
}

fn relative(found: &HostTensor, reference: &HostTensor) -> f64 {
    assert_eq!(found.shape, reference.shape);
    let (found, reference) = (found.to_f64(), reference.to_f64());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    let error = norm(&mut found.iter().zip(&reference).map(|(f, r)| f - r));
    error / norm(&mut reference.iter().copied())
}

fn ints(files: &Weights, name: &str) -> Vec<i32> {
    files.get(name).unwrap().to_host().unwrap().to_f64().into_iter().map(|x| x as i32).collect()
}

fn batch(files: &Weights, prefix: &str) -> Batch {
    let name = |part: &str| format!("{prefix}{part}");
    let shape = files.get(&name("input_ids")).unwrap().shape.to_vec();
    let labels = ints(files, &name("labels"));
    let positions = ints(files, &name("position_ids"));
    Batch::from_labels(shape[0], shape[1], ints(files, &name("input_ids")), &labels, Some(positions), None).unwrap()
}

fn open(path: &Path) -> Weights {
    Weights::open(path).unwrap()
}

fn check_loss(found: f32, reference: &Weights, prefix: &str) {
    let loss = reference.get(&format!("{prefix}loss")).unwrap().to_host().unwrap().to_f64()[0];
    assert!((found as f64 - loss).abs() < 2e-5, "{found} {loss}");
}

fn check_gradients(model: &mut Model, batch: &Batch, reference: &Weights, prefix: &str) {
    let found = model.loss_and_gradients(batch).unwrap();
    check_loss(found.loss, reference, prefix);
    let wanted = format!("{prefix}grad.");
    let names = reference.names().iter().filter(|name| name.starts_with(&wanted)).count();
    assert_eq!(found.gradients.len(), names);
    for (name, gradient) in &found.gradients {
        let reference = reference.get(&format!("{wanted}{name}")).unwrap().to_host().unwrap();
        let error = relative(gradient, &reference);
        let nothing = reference.to_f64().iter().all(|x| x.abs() < 1e-6);
        assert!(error < 1e-4 || nothing, "{prefix}{name}: {error:e}");
    }
}

fn check_model(name: &str) {
    let (folder, ir) = golden(name);
    let source = Arc::new(ModelSource::open(&folder, &ir).unwrap());
    let inputs = open(&folder.join("inputs.safetensors"));
    let reference = open(&folder.join("reference.safetensors"));
    let packed_reference = open(&folder.join("reference_packed.safetensors"));
    let (plain, packed) = (batch(&inputs, ""), batch(&inputs, "packed."));

    let mut model = Model::load(device(2), source.clone(), None, DType::F32).unwrap();
    let forward = model.forward(&plain, true).unwrap();
    assert!(relative(&forward.logits, &reference.get("logits").unwrap().to_host().unwrap()) < 2e-5);
    let layers = forward.hidden.len() - 1;
    let names = std::iter::once("hidden.embed".to_owned()).chain((0..layers).map(|i| format!("hidden.layer.{i}")));
    for (name, found) in names.zip(&forward.hidden) {
        let error = relative(found, &reference.get(&name).unwrap().to_host().unwrap());
        assert!(error < 2e-5, "{name}: {error:e}");
    }
    check_gradients(&mut model, &plain, &reference, "");
    // The trimmed set has no gradients of packed rows.
    match folder.starts_with(root().join("tests/golden")) {
        true => check_loss(model.loss_and_gradients(&packed).unwrap().loss, &packed_reference, ""),
        false => check_gradients(&mut model, &packed, &packed_reference, ""),
    }

    let lora = folder.join("lora");
    let reference = open(&lora.join("reference.safetensors"));
    let dropping = with_dropout(&lora);
    let mut model = Model::load(device(2), source, Some(dropping.path()), DType::F32).unwrap();
    let logits = model.forward(&plain, false).unwrap().logits;
    assert!(relative(&logits, &reference.get("logits").unwrap().to_host().unwrap()) < 2e-5);
    check_gradients(&mut model, &plain, &reference, "");
    check_gradients(&mut model, &packed, &reference, "packed.");
}

/// A copy of an adapter that was trained with dropout, which evaluation must leave out.
fn with_dropout(adapter: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    let weights = "adapter_model.safetensors";
    std::fs::copy(adapter.join(weights), copy.path().join(weights)).unwrap();
    let text = std::fs::read_to_string(adapter.join("adapter_config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    config["lora_dropout"] = serde_json::json!(0.5);
    std::fs::write(copy.path().join("adapter_config.json"), config.to_string()).unwrap();
    copy
}

#[test]
fn llama_equals_transformers() {
    check_model("llama");
}

#[test]
fn qwen3_equals_transformers() {
    check_model("qwen3");
}

/// Two micro-batches of every recorded step.
fn curve_batches(files: &Weights) -> Vec<Vec<Batch>> {
    let shape = files.get("input_ids").unwrap().shape.to_vec();
    let [steps, accumulation, rows, length] = shape[..] else { panic!("[steps, micro-batches, B, T]") };
    let (ids, labels) = (ints(files, "input_ids"), ints(files, "labels"));
    let size = rows * length;
    let batch = |index: usize| {
        let range = index * size..(index + 1) * size;
        Batch::from_labels(rows, length, ids[range.clone()].to_vec(), &labels[range], None, None).unwrap()
    };
    (0..steps).map(|step| (0..accumulation).map(|micro| batch(step * accumulation + micro)).collect()).collect()
}

/// The recorded training of a model.
fn trainer(name: &str, which: &str, dtype: &str) -> (PathBuf, Trainer) {
    let (folder, ir) = golden(name);
    let source = Arc::new(ModelSource::open(&folder, &ir).unwrap());
    let mut options = serde_json::json!({
        "model": folder, "torch_dtype": dtype, "optimizer": "adamw",
        "weight_decay": 0.1, "max_grad_norm": 1.0, "lora": which == "lora",
    });
    if which == "lora" {
        options["adapter"] = serde_json::json!(folder.join("lora"));
    }
    let config = Config::load_json(&options.to_string(), Task::Sft, &[]).unwrap();
    (folder, Trainer::new(Arc::new(config), source, device(2)).unwrap())
}

fn check_curve(name: &str, which: &str) {
    let (folder, mut trainer) = trainer(name, which, "float32");
    let text = std::fs::read_to_string(folder.join("train_curve.json")).unwrap();
    let curve: serde_json::Value = serde_json::from_str(&text).unwrap();
    for (step, batches) in curve_batches(&open(&folder.join("train_inputs.safetensors"))).iter().enumerate() {
        let recorded = |key: &str| curve[which]["steps"][step][key].as_f64().unwrap();
        let (loss, norm) = (recorded("loss"), recorded("grad_norm"));
        let metrics = trainer.step(batches, Some(recorded("lr"))).unwrap();
        assert!((metrics.loss - loss).abs() <= 1e-4 * loss, "{name} {which} step {step}: {} {loss}", metrics.loss);
        assert!((metrics.grad_norm - norm).abs() <= 1e-3 * norm, "{name} {which} step {step}: {}", metrics.grad_norm);
    }
    let out = tempfile::tempdir().unwrap();
    trainer.export(&out.path().join("result")).unwrap();
    let reference = match which {
        "lora" => folder.join("lora/final_adapter.safetensors"),
        _ => folder.join("final_model.safetensors"),
    };
    if reference.is_file() {
        let (found, reference) = (open(&out.path().join("result")), open(&reference));
        for name in reference.names() {
            let pair = [&found, &reference].map(|files| files.get(name).unwrap().to_host().unwrap().to_f64());
            let far = pair[0].iter().zip(&pair[1]).filter(|(f, r)| (*f - *r).abs() > 5e-5).count();
            assert!(far * 1000 <= pair[0].len(), "{which} {name}: {far} of {} entries differ", pair[0].len());
        }
    }
}

#[test]
fn llama_trains_as_torch_does() {
    check_curve("llama", "full");
    check_curve("llama", "lora");
}

#[test]
fn qwen3_trains_as_torch_does() {
    check_curve("qwen3", "full");
    check_curve("qwen3", "lora");
}

/// The batch with another weight for all of its tokens: the same loss and the same step.
fn weighing(batch: &Batch, weight: f32) -> Batch {
    let weights = batch.weights.iter().map(|of| of * weight).collect();
    Batch { weights, ..batch.clone() }
}

/// In f16, with f32 copies of the weights and a scaled loss: the same curve but for the rounding of activations.
#[test]
fn f16_trains_as_torch_does_in_f32() {
    for (name, which) in [("llama", "full"), ("llama", "lora"), ("qwen3", "full"), ("qwen3", "lora")] {
        let (folder, mut trainer) = trainer(name, which, "float16");
        let text = std::fs::read_to_string(folder.join("train_curve.json")).unwrap();
        let curve: serde_json::Value = serde_json::from_str(&text).unwrap();
        for (step, batches) in curve_batches(&open(&folder.join("train_inputs.safetensors"))).iter().enumerate() {
            let recorded = |key: &str| curve[which]["steps"][step][key].as_f64().unwrap();
            let (loss, norm) = (recorded("loss"), recorded("grad_norm"));
            // The weight makes room for the first scale: a step that is skipped would shift the curve.
            let batches: Vec<Batch> = batches.iter().map(|batch| weighing(batch, 2f32.powi(-8))).collect();
            let found = trainer.step(&batches, Some(recorded("lr"))).unwrap();
            assert_eq!((found.applied, found.loss_scale), (true, Some(65536.0)), "{name} {which} step {step}");
            assert!((found.loss - loss).abs() <= 2e-3 * loss, "{name} {which} step {step}: {} {loss}", found.loss);
            assert!((found.grad_norm - norm).abs() <= 5e-3 * norm, "{name} {which} step {step}: {}", found.grad_norm);
        }
    }
}
