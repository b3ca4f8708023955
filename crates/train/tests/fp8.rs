//! `recipe: fp8_hybrid` against recorded numbers: one step from an empty state in f32, where no code may differ, and
//! curves, in which the histories take over. The full set next to the checkout, or the repository's trimmed one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use compiler::{Fp8Hybrid, GradientFormat, Recipe};
use data::Batch;
use data::safetensors::Weights;
use tensor::{DType, HostTensor};
use train::config::{Config, Task};
use train::{Device, DeviceRequest, Model, ModelSource, Trainer};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/train lies in the repository").to_owned()
}

/// A recorded model, the folder of its recordings, and its graph.
struct Golden {
    model: PathBuf,
    recorded: PathBuf,
    source: Arc<ModelSource>,
}

fn golden(name: &str) -> Golden {
    let (full, trimmed) = (root().join("../shared/golden"), root().join("tests/golden"));
    let folder = if full.is_dir() { full } else { trimmed };
    let (model, recorded) = (folder.join(name), folder.join("precision").join(name));
    let ir = std::fs::read_to_string(root().join(format!("crates/train/tests/ir/{name}.json"))).unwrap();
    let source = Arc::new(ModelSource::open(&model, &ir).unwrap());
    Golden { model, recorded, source }
}

impl Golden {
    fn open(&self, file: &str) -> Weights {
        Weights::open(&self.recorded.join(file)).unwrap()
    }

    fn model(&self, adapter: bool, recipe: Fp8Hybrid) -> Model {
        let adapter = adapter.then(|| self.model.join("lora"));
        let model = Model::load(device(), self.source.clone(), adapter.as_deref(), DType::F32).unwrap();
        model.with_recipe(Recipe::Fp8Hybrid(recipe))
    }

    fn batch(&self, case: &str) -> Batch {
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

fn default() -> Fp8Hybrid {
    Fp8Hybrid { gradient: GradientFormat::E5M2, amax_history: 1024, skip_first: 0, skip_last: 0 }
}

fn relative(found: &HostTensor, reference: &HostTensor) -> f64 {
    assert_eq!(found.shape, reference.shape);
    let (found, reference) = (found.to_f64(), reference.to_f64());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    let error = norm(&mut found.iter().zip(&reference).map(|(f, r)| f - r));
    error / norm(&mut reference.iter().copied())
}

fn recorded(files: &Weights, name: &str) -> HostTensor {
    files.get(name).unwrap().to_host().unwrap()
}

/// Logits, loss and every recorded gradient. A code that falls on the other side of a boundary moves logits by 3e-5 and
/// gradients by 1e-2: none does.
fn check(model: &mut Model, batch: &Batch, files: &Weights, prefix: &str, of_gradients: f64) {
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

fn check_model(name: &str) {
    let golden = golden(name);
    let batch = golden.batch("fp8");
    check(&mut golden.model(false, default()), &batch, &golden.open("fp8.safetensors"), "", 1e-4);
    let of_adapter = golden.batch("fp8_lora");
    check(&mut golden.model(true, default()), &of_adapter, &golden.open("fp8_lora.safetensors"), "", 1e-4);
    let variants = golden.open("fp8_variants.safetensors");
    for (prefix, recipe, limit) in [
        ("grad_e4m3.", Fp8Hybrid { gradient: GradientFormat::E4M3, ..default() }, 5e-2),
        ("grad_none.", Fp8Hybrid { gradient: GradientFormat::Unquantised, ..default() }, 1e-4),
        ("skip_1_0.", Fp8Hybrid { skip_first: 1, ..default() }, 1e-4),
        ("skip_0_1.", Fp8Hybrid { skip_last: 1, ..default() }, 1e-4),
    ] {
        check(&mut golden.model(false, recipe), &batch, &variants, prefix, limit);
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

impl Golden {
    /// Two micro-batches of every recorded step.
    fn curve_batches(&self) -> Vec<Vec<Batch>> {
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
            "max_grad_norm": 1.0, "lora": adapter, "recipe": "fp8_hybrid", "gradient_accumulation_steps": 2,
        });
        if adapter {
            options["adapter"] = serde_json::json!(self.model.join("lora"));
        }
        options.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        options
    }

    fn trainer(&self, adapter: bool, more: serde_json::Value) -> Trainer {
        let config = Config::load_json(&self.options(adapter, more).to_string(), Task::Sft, &[]).unwrap();
        Trainer::new(Arc::new(config), self.source.clone(), device()).unwrap()
    }
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
    let mut trainer = golden.trainer(which == "lora", serde_json::json!({ "fp8_amax_history": window }));
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
        let mut whole = golden.trainer(adapter, more.clone());
        let expected = take(&mut whole, 0..10);
        for at in [1, 3] {
            let folder = tempfile::tempdir().unwrap();
            let checkpoint = folder.path().join("checkpoint");
            let mut first = golden.trainer(adapter, more.clone());
            take(&mut first, 0..at);
            first.save(&checkpoint).unwrap();
            let mut second = golden.trainer(adapter, more.clone());
            second.resume(&checkpoint).unwrap();
            assert_eq!(take(&mut second, at..5), expected[at..5], "{more} at {at}");
        }
        // A power of two matters only to what saturates or vanishes: other histories may give the same bits for long.
        assert!(!seen.contains(&expected) || more.get("fp8_amax_history").is_some(), "{more} changes nothing");
        seen.push(expected);
    }
}

/// What is recomputed has the codes of the first time, in every plan.
#[test]
fn plans_do_not_change_bits() {
    let golden = golden("qwen3");
    let batches = golden.curve_batches();
    for adapter in [false, true] {
        let run = |more: serde_json::Value| -> Vec<u64> {
            let mut trainer = golden.trainer(adapter, more);
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
        let mut trainer = golden.trainer(false, more);
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
    let mut plain = golden.trainer(false, serde_json::json!({ "recipe": "bf16" }));
    (0..3).for_each(|at| step(&mut plain, at));
    let (path, none) = save(&mut plain, "plain");
    assert_eq!(none, None);
    let mut quantised = golden.trainer(false, serde_json::json!({ "fp8_amax_history": 3 }));
    quantised.resume(&path).unwrap();
    (3..7).for_each(|at| step(&mut quantised, at));
    let (path, three) = save(&mut quantised, "quantised");
    let mut narrow = golden.trainer(false, serde_json::json!({ "fp8_amax_history": 2 }));
    narrow.resume(&path).unwrap();
    let (_, two) = save(&mut narrow, "narrow");
    assert_eq!(two.unwrap(), three.unwrap()[1..]);
}
