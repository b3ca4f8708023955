//! Recorded numbers of recipes: a model, one step from an empty state, batches of curves. The full set next to the
//! checkout, or the repository's trimmed one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use compiler::Recipe;
use data::Batch;
use data::safetensors::Weights;
use tensor::{DType, HostTensor};
use train::config::{Config, Task};
use train::{Device, DeviceRequest, Model, ModelSource, Trainer};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/train lies in the repository").to_owned()
}

/// A recorded model, the folder of its recordings, and its graph.
pub struct Golden {
    pub model: PathBuf,
    pub recorded: PathBuf,
    pub source: Arc<ModelSource>,
}

pub fn golden(name: &str) -> Golden {
    let (full, trimmed) = (root().join("../shared/golden"), root().join("tests/golden"));
    let folder = if full.is_dir() { full } else { trimmed };
    let (model, recorded) = (folder.join(name), folder.join("precision").join(name));
    let ir = std::fs::read_to_string(root().join(format!("crates/train/tests/ir/{name}.json"))).unwrap();
    let source = Arc::new(ModelSource::open(&model, &ir).unwrap());
    Golden { model, recorded, source }
}

impl Golden {
    pub fn open(&self, file: &str) -> Weights {
        Weights::open(&self.recorded.join(file)).unwrap()
    }

    pub fn model(&self, adapter: bool, recipe: Recipe) -> Model {
        let adapter = adapter.then(|| self.model.join("lora"));
        let model = Model::load(device(), self.source.clone(), adapter.as_deref(), DType::F32).unwrap();
        model.with_recipe(recipe)
    }

    pub fn batch(&self, case: &str) -> Batch {
        let files = self.open("inputs.safetensors");
        let ints = |part: &str| {
            let tensor = files.get(&format!("{case}.{part}")).unwrap().to_host().unwrap();
            tensor.to_f64().into_iter().map(|x| x as i32).collect::<Vec<i32>>()
        };
        let shape = files.get(&format!("{case}.input_ids")).unwrap().shape.to_vec();
        let (ids, labels, positions) = (ints("input_ids"), ints("labels"), ints("position_ids"));
        Batch::from_labels(shape[0], shape[1], ids, &labels, Some(positions), None).unwrap()
    }
}

fn device() -> Arc<Device> {
    let request = DeviceRequest {
        device: options::Setting::Value(train::config::Device::Cpu),
        threads: Some(2),
        ..DeviceRequest::default()
    };
    Arc::new(Device::open(&request).unwrap())
}

pub fn relative(found: &HostTensor, reference: &HostTensor) -> f64 {
    assert_eq!(found.shape, reference.shape);
    let (found, reference) = (found.to_f64(), reference.to_f64());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    let error = norm(&mut found.iter().zip(&reference).map(|(f, r)| f - r));
    error / norm(&mut reference.iter().copied())
}

pub fn recorded(files: &Weights, name: &str) -> HostTensor {
    files.get(name).unwrap().to_host().unwrap()
}

/// Logits, loss and every recorded gradient. A code that falls on the other side of a boundary moves logits by 3e-5 and
/// gradients by 1e-2: none does.
pub fn check(model: &mut Model, batch: &Batch, files: &Weights, prefix: &str, of_gradients: f64) {
    let name = |part: &str| format!("{prefix}{part}");
    if files.contains(&name("logits")) {
        let error = relative(&model.forward(batch, false).unwrap().logits, &recorded(files, &name("logits")));
        assert!(error < 1e-5, "{prefix}logits: {error:e}");
    }
    let found = model.loss_and_gradients(batch).unwrap();
    if files.contains(&name("loss")) {
        let loss = recorded(files, &name("loss")).to_f64()[0];
        assert!((f64::from(found.loss) - loss).abs() < 1e-5, "{prefix}loss: {} {loss}", found.loss);
    }
    let wanted = name("grad.");
    let mut checked = 0;
    for (name, gradient) in &found.gradients {
        let recorded_name = format!("{wanted}{name}");
        if files.contains(&recorded_name) {
            let error = relative(gradient, &recorded(files, &recorded_name));
            assert!(error < of_gradients, "{recorded_name}: {error:e}");
            checked += 1;
        }
    }
    let all = files.names().iter().filter(|name| name.starts_with(&wanted)).count();
    assert!(checked == all && all > 0, "every recorded gradient is compared");
}

impl Golden {
    /// Two micro-batches of every recorded step.
    pub fn curve_batches(&self) -> Vec<Vec<Batch>> {
        let files = Weights::open(&self.model.join("train_inputs.safetensors")).unwrap();
        let ints = |name: &str| {
            let tensor = files.get(name).unwrap().to_host().unwrap();
            tensor.to_f64().into_iter().map(|x| x as i32).collect::<Vec<i32>>()
        };
        let shape = files.get("input_ids").unwrap().shape.to_vec();
        let [steps, accumulation, rows, length] = shape[..] else { panic!("[steps, micro-batches, B, T]") };
        let (ids, labels) = (ints("input_ids"), ints("labels"));
        let size = rows * length;
        let batch = |index: usize| {
            let range = index * size..(index + 1) * size;
            Batch::from_labels(rows, length, ids[range.clone()].to_vec(), &labels[range], None, None).unwrap()
        };
        (0..steps).map(|step| (0..accumulation).map(|micro| batch(step * accumulation + micro)).collect()).collect()
    }

    fn options(&self, adapter: bool, more: serde_json::Value) -> serde_json::Value {
        let mut options = serde_json::json!({
            "model": self.model, "torch_dtype": "float32", "optimizer": "adamw", "weight_decay": 0.1,
            "max_grad_norm": 1.0, "lora": adapter, "gradient_accumulation_steps": 2,
        });
        if adapter {
            options["adapter"] = serde_json::json!(self.model.join("lora"));
        }
        options.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        options
    }

    pub fn trainer(&self, adapter: bool, more: serde_json::Value) -> Trainer {
        let config = Config::load_json(&self.options(adapter, more).to_string(), Task::Sft, &[]).unwrap();
        Trainer::new(Arc::new(config), self.source.clone(), device()).unwrap()
    }
}
