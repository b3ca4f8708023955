//! Models as others publish them: recorded values of every form, to the bit, and what is done with such a model.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::sha256;
use data::Batch;
use data::safetensors::{NamedTensor, Weights, write};
use serde_json::{Value, json};
use tensor::packed::Stored;
use tensor::{DType, HostTensor};
use train::config::{Config, Task};
use train::{Device, DeviceRequest, Model, ModelSource, Result, Trainer, merge};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/train lies in the repository").to_owned()
}

const IR: &str = include_str!("../ir/llama.json");

fn source(folder: &Path) -> Arc<ModelSource> {
    Arc::new(ModelSource::open(folder, IR).unwrap())
}

fn device() -> Arc<Device> {
    let cpu = options::Setting::Value(train::config::Device::Cpu);
    Arc::new(Device::open(&DeviceRequest { device: cpu, threads: Some(2), ..DeviceRequest::default() }).unwrap())
}

/// The recorded forms: the full set next to the checkout, or the repository's trimmed one.
fn recorded() -> Vec<(String, PathBuf)> {
    let full = root().join("../shared/golden");
    let place = if full.is_dir() { full } else { root().join("tests/golden") }.join("precision/prequantised");
    let folders = fs::read_dir(&place).unwrap_or_else(|e| panic!("{}: {e}", place.display()));
    let mut found: Vec<(String, PathBuf)> =
        folders.map(|entry| entry.unwrap()).map(|e| (e.file_name().into_string().unwrap(), e.path())).collect();
    found.sort();
    found
}

fn ints(files: &Weights, name: &str) -> Vec<i32> {
    files.get(name).unwrap().to_host().unwrap().to_f64().into_iter().map(|x| x as i32).collect()
}

fn batch() -> Batch {
    let files = Weights::open(&root().join("tests/golden/llama/inputs.safetensors")).unwrap();
    let shape = files.get("input_ids").unwrap().shape.to_vec();
    let (ids, labels) = (ints(&files, "input_ids"), ints(&files, "labels"));
    Batch::from_labels(shape[0], shape[1], ids, &labels, Some(ints(&files, "position_ids")), None).unwrap()
}

fn distance(found: &HostTensor, reference: &HostTensor) -> f64 {
    assert_eq!(found.shape, reference.shape);
    let (found, reference) = (found.to_f64(), reference.to_f64());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut found.iter().zip(&reference).map(|(f, r)| f - r)) / norm(&mut reference.iter().copied())
}

#[test]
fn values_are_the_recorded_ones_to_the_bit() {
    let forms = recorded();
    for (form, folder) in &forms {
        let text = fs::read_to_string(folder.join("../../meta.json")).unwrap();
        let meta: Value = serde_json::from_str(&text).unwrap();
        let wanted = meta["prequantised"][form].as_object().unwrap();
        let weights = source(folder).weights(folder).unwrap();
        assert_eq!((wanted.len(), weights.quantised().0), (21, 21), "{form}");
        for (name, digest) in wanted {
            let view = weights.get(name).unwrap();
            assert!(view.is_dequantised() && view.dtype == DType::F32, "{form} {name}");
            let bytes = view.bytes().unwrap();
            assert_eq!(sha256::hex(&bytes), digest.as_str().unwrap(), "{form} {name}");
            // In parts that begin and end inside of blocks: the same.
            let mut parts = vec![0; bytes.len()];
            let mut begin = 0;
            for length in [4, 12, 4 * 77, 4 * 1023, 4 * 3000].into_iter().cycle() {
                let end = (begin + length).min(parts.len());
                view.read(begin, &mut parts[begin..end]).unwrap();
                begin = end;
                if begin == parts.len() {
                    break;
                }
            }
            assert!(parts == bytes, "{form} {name} in parts");
            // Kept in codes: the same. What is divided by a number is not.
            assert_eq!(view.packing().is_none(), form == "compressed_tensors_nvfp4", "{form}");
            if let Some(packing) = view.packing() {
                let planes = view.planes().unwrap();
                let mut values = vec![0.0; bytes.len() / 4];
                Stored::new(packing, view.shape, &planes).values(0, &mut values);
                let kept: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                assert!(kept == bytes, "{form} {name} as {packing}");
            }
        }
        let reference = Weights::open(&folder.join("reference.safetensors")).unwrap();
        let mut model = Model::load(device(), source(folder), None, DType::F32).unwrap();
        let logits = model.forward(&batch(), false).unwrap().logits;
        let error = distance(&logits, &reference.get("logits").unwrap().to_host().unwrap());
        assert!(error < 2e-5, "{form}: logits {error:e} apart");
    }
}

#[test]
fn mxfp4_is_read_as_recorded() {
    let place = root().join("tests/golden/quant/fp4.safetensors");
    let files = Weights::open(&place).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let [blocks, scales, wanted] =
        ["mxfp4.blocks", "mxfp4.scales", "mxfp4.dequant"].map(|name| files.get(name).unwrap().to_host().unwrap());
    let (stored, count) = (blocks.shape.clone(), blocks.shape[blocks.shape.len() - 2]);
    let tensors =
        [("model.x_blocks", &blocks), ("model.x_scales", &scales)].map(|(name, of)| NamedTensor::new(name, of));
    write(&folder.path().join("model.safetensors"), &tensors, &Default::default()).unwrap();
    fs::write(folder.path().join("config.json"), json!({"quantization_config": {"quant_method": "mxfp4"}}).to_string())
        .unwrap();
    let weights = source(folder.path()).weights(folder.path()).unwrap();
    let found = weights.get("model.x").unwrap().to_host().unwrap();
    // The rows of the file are the columns of the matrices.
    assert_eq!((weights.names(), &found.shape), (vec!["model.x"], &vec![stored[0], count * 32, stored[1]]));
    assert_eq!((found.to_f64(), found.shape), (wanted.to_f64(), wanted.shape));
}

fn options(folder: &Path, more: Value) -> Arc<Config> {
    let mut options = json!({"model": folder, "optimizer": "adamw", "lora_dropout": 0, "learning_rate": 1e-2});
    more.as_object().into_iter().flatten().for_each(|(key, value)| options[key] = value.clone());
    Arc::new(Config::load_json(&options.to_string(), Task::Sft, &[]).unwrap())
}

fn trainer(folder: &Path, more: Value) -> Result<Trainer> {
    Trainer::new(options(folder, more), source(folder), device())
}

/// The same model with the values in place of the codes.
fn plain(folder: &Path, to: &Path) {
    let weights = source(folder).weights(folder).unwrap();
    let read: Vec<(&str, HostTensor)> =
        weights.names().into_iter().map(|name| (name, weights.get(name).unwrap().to_host().unwrap())).collect();
    let named: Vec<NamedTensor> = read.iter().map(|(name, of)| NamedTensor::new(*name, of)).collect();
    write(&to.join("model.safetensors"), &named, &Default::default()).unwrap();
    let mut config = source(folder).config.0.clone();
    config.as_object_mut().unwrap().remove("quantization_config");
    fs::write(to.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn training_begins_at_the_values_and_results_are_plain() {
    for (form, folder) in recorded() {
        let place = tempfile::tempdir().unwrap();
        let unquantised = place.path().join("plain");
        fs::create_dir(&unquantised).unwrap();
        plain(&folder, &unquantised);
        for lora in [true, false] {
            let steps = |folder: &Path| {
                let mut trainer = trainer(folder, json!({"lora": lora, "torch_dtype": "bfloat16"})).unwrap();
                let notes = trainer.plan.notes.join("\n");
                let losses: Vec<f64> = (0..3).map(|_| trainer.step(&[batch()], Some(1e-2)).unwrap().loss).collect();
                (trainer, notes, losses)
            };
            let ((mut trainer, notes, losses), (_, silent, expected)) = (steps(&folder), steps(&unquantised));
            assert_eq!(losses, expected, "{form}, lora: {lora}: the bits of training on the values");
            // What is divided by a number has no form in memory.
            let packed = trainer.plan.compile.stored.len();
            let kept = lora && form != "compressed_tensors_nvfp4";
            assert_eq!(packed, if kept { 21 } else { 0 }, "{form}, lora: {lora}");
            assert!(notes.contains("the model is already quantized ("), "{notes}");
            assert_eq!(
                (notes.contains("stay in their codes"), notes.contains("dequantised to bf16")),
                (kept, !kept),
                "{notes}"
            );
            assert!(!silent.contains("quantised"), "{silent}");
            let result = place.path().join(format!("result-{lora}"));
            trainer.export_merged(&result).unwrap();
            let config: Value = serde_json::from_str(&fs::read_to_string(result.join("config.json")).unwrap()).unwrap();
            assert!(config.get("quantization_config").is_none() && config["dtype"] == "bfloat16", "{config}");
            let weights = source(&result).weights(&result).unwrap();
            assert_eq!(weights.quantised().0, 0);
            assert!(weights.names().iter().all(|name| weights.get(name).unwrap().dtype == DType::BF16));
        }
    }
}

#[test]
fn a_recipe_quantises_the_values() {
    for (form, folder) in recorded() {
        for recipe in [json!({"recipe": "fp8_hybrid"}), json!({"recipe": "nvfp4", "fp4_backend": "emulate"})] {
            let mut options = json!({"torch_dtype": "bfloat16"});
            options.as_object_mut().unwrap().extend(recipe.as_object().unwrap().clone());
            let trained = |folder: &Path| {
                let mut trainer = trainer(folder, options.clone()).unwrap();
                let loss = trainer.step(&[batch()], Some(1e-2)).unwrap().loss;
                (loss, trainer.plan.compile.stored.len(), trainer.plan.notes.join("\n"))
            };
            let place = tempfile::tempdir().unwrap();
            plain(&folder, place.path());
            let ((loss, stored, notes), (expected, ..)) = (trained(&folder), trained(place.path()));
            // What is divided by a number has no form in memory.
            let kept = form != "compressed_tensors_nvfp4";
            assert_eq!((loss, stored), (expected, if kept { 21 } else { 0 }), "{form}");
            let note = if kept { "the recipe makes its own codes" } else { "dequantised to bf16" };
            assert!(notes.contains(note), "{notes}");
        }
    }
}

#[test]
fn what_is_quantised_is_not_quantised_again() {
    for (form, folder) in recorded() {
        for option in ["qlora_bnb", "qlora_fp8", "qlora_fp4"] {
            let error = trainer(&folder, json!({option: true, "torch_dtype": "bfloat16"})).map(|_| ()).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{form}");
            let wanted = format!("`{option}: true`, but the model is already quantized (");
            assert!(error.to_string().contains(&wanted), "{error}");
        }
    }
}

/// Files and configuration that contradict each other.
#[test]
fn what_is_said_not_to_be_quantised_is_not() {
    for (_, folder) in recorded() {
        let place = tempfile::tempdir().unwrap();
        fs::copy(folder.join("model.safetensors"), place.path().join("model.safetensors")).unwrap();
        let text = fs::read_to_string(folder.join("config.json")).unwrap();
        for (excluded, contradicts) in [("lm_head", false), ("v_proj", true)] {
            let mut config: Value = serde_json::from_str(&text).unwrap();
            config["quantization_config"]["modules_to_not_convert"] = json!([excluded]);
            fs::write(place.path().join("config.json"), config.to_string()).unwrap();
            let found = trainer(place.path(), json!({"torch_dtype": "bfloat16"})).map(|_| ());
            let expected = "`model.layers.0.self_attn.v_proj.weight` is quantised, but `modules_to_not_convert` says";
            match found {
                Ok(()) => assert!(!contradicts),
                Err(error) => assert!(contradicts && error.to_string().contains(expected), "{error}"),
            }
        }
    }
}

#[test]
fn an_adapter_is_merged_into_the_values() {
    for (form, folder) in recorded() {
        let place = tempfile::tempdir().unwrap();
        let unquantised = place.path().join("plain");
        fs::create_dir(&unquantised).unwrap();
        plain(&folder, &unquantised);
        let adapter = root().join("tests/golden/llama/lora");
        let merged = |folder: &Path, to: &str| {
            merge(folder, &adapter, &place.path().join(to), &Default::default(), false, &|| false).unwrap();
            fs::read(place.path().join(to).join("model.safetensors")).unwrap()
        };
        assert!(merged(&folder, "a") == merged(&unquantised, "b"), "{form}");
    }
}

#[test]
fn forms_that_are_not_read_are_refused_by_name() {
    let place = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(root().join("tests/golden/llama/config.json")).unwrap();
    for (quantised, what) in [
        (json!({"quant_method": "gptq", "bits": 4}), "the model is quantised by `gptq`, which is not read"),
        (json!({"quant_method": "bitsandbytes", "load_in_8bit": true}), "quantised to 8 bits by bitsandbytes"),
    ] {
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config["quantization_config"] = quantised;
        fs::write(place.path().join("config.json"), config.to_string()).unwrap();
        let error = trainer(place.path(), json!({"torch_dtype": "bfloat16"})).map(|_| ()).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        assert!(
            text.contains(what) && text.contains("hint: take the model's unquantised repository; with `qlora_bnb"),
            "{text}"
        );
        // Weights that are drawn have no form.
        trainer(place.path(), json!({"torch_dtype": "bfloat16", "init": "random", "lora": false})).unwrap();
    }
}

/// Files whose tensors do not fit one another: an error that names one, whatever is wrong.
#[test]
fn what_does_not_fit_is_named() {
    let forms: BTreeMap<String, PathBuf> = recorded().into_iter().collect();
    let base = |name: &str| forms[name].clone();
    for (form, ending, named) in [
        ("bnb_nf4", ".absmax", "q_proj.weight.absmax`"),
        ("bnb_nf4", ".quant_map", "q_proj.weight.quant_map`"),
        ("bnb_nf4_nested", ".nested_absmax", "q_proj.weight.nested_absmax`"),
        ("fp8_fine_grained", ".weight_scale_inv", "q_proj.weight_scale_inv`"),
        ("compressed_tensors_fp8", ".weight_scale", "q_proj.weight_scale`"),
        ("compressed_tensors_nvfp4", ".weight_global_scale", "q_proj.weight_global_scale`"),
        ("modelopt_nvfp4", ".weight_scale_2", "q_proj.weight_scale_2`"),
    ] {
        if !forms.contains_key(form) {
            // The trimmed set has four of the forms.
            continue;
        }
        let bytes = fs::read(base(form).join("model.safetensors")).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let broken = header
            .as_object()
            .unwrap()
            .keys()
            .find(|k| k.ends_with(&format!("q_proj{}{ending}", if form.starts_with("bnb") { ".weight" } else { "" })))
            .unwrap()
            .clone();
        for damage in ["gone", "short", "type"] {
            let mut header = header.clone();
            match damage {
                "gone" => drop(header.as_object_mut().unwrap().remove(&broken)),
                "short" => {
                    header[&broken]["shape"] = json!([0]);
                    let begin = header[&broken]["data_offsets"][0].clone();
                    header[&broken]["data_offsets"] = json!([begin, begin]);
                }
                _ => header[&broken]["dtype"] = json!("C64"),
            }
            let place = tempfile::tempdir().unwrap();
            let text = header.to_string();
            let file = [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &bytes[8 + length..]].concat();
            fs::write(place.path().join("model.safetensors"), file).unwrap();
            fs::copy(base(form).join("config.json"), place.path().join("config.json")).unwrap();
            let error = source(place.path()).weights(place.path()).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains(named), "{form}, {broken} {damage}: {error}");
        }
    }
}
