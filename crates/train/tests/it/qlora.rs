//! Adapters on quantised weights: a run has the bits of one on the weights that the codes stand for, whatever else is
//! decided; its results are that function; and the recorded numbers hold.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::sha256;
use data::Batch;
use data::safetensors::Weights;
use serde_json::{Value, json};
use tensor::packed::{Quantisation, Target, nested, nvfp4_within};
use tensor::small::amax;
use tensor::storage::NVFP4_TILES;
use tensor::{DType, HostTensor};
use train::config::{Config, Task};
use train::{Device, DeviceRequest, Model, ModelSource, Trainer, merge};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/train lies in the repository").to_owned()
}

fn stories() -> PathBuf {
    root().join("examples/stories/model")
}

fn device() -> Arc<Device> {
    let cpu = options::Setting::Value(train::config::Device::Cpu);
    Arc::new(Device::open(&DeviceRequest { device: cpu, ..DeviceRequest::default() }).unwrap())
}

fn trainer(model: &Path, changed: &[&Value]) -> Trainer {
    try_trainer(model, changed).unwrap()
}

fn try_trainer(model: &Path, changed: &[&Value]) -> train::Result<Trainer> {
    begin(model, include_str!("../ir/stories.json"), changed)
}

/// A recorded model, whose linears all have features that are multiples of 16.
fn llama(changed: &[&Value]) -> Trainer {
    begin(&golden().join("llama"), include_str!("../ir/llama.json"), changed).unwrap()
}

fn begin(model: &Path, ir: &str, changed: &[&Value]) -> train::Result<Trainer> {
    let mut options = json!({
        "model": model, "sequence_len": 64, "optimizer": "adamw", "gradient_accumulation_steps": 2, "lora_rank": 8,
        "device": "cpu",
    });
    for (key, value) in changed.iter().flat_map(|changed| changed.as_object().unwrap()) {
        options[key] = value.clone();
    }
    let config = Config::load_json(&options.to_string(), Task::Sft, &[]).unwrap();
    let source = Arc::new(ModelSource::open(model, ir).unwrap());
    let device = Arc::new(Device::open(&DeviceRequest::of(&config, Vec::new())).unwrap());
    Trainer::begin(Arc::new(config), source, device)
}

/// Two micro-batches whose rows hold two documents each.
fn rows(step: usize) -> [Batch; 2] {
    [0, 1].map(|part| {
        let ids: Vec<i32> = (0..64).map(|i| ((i * 37 + step * 11 + part * 5) % 250 + 3) as i32).collect();
        let positions = (0..64).map(|i| i % 32 % 20).collect();
        Batch::from_labels(2, 32, ids.clone(), &ids, Some(positions), None).unwrap()
    })
}

fn train(trainer: &mut Trainer) -> Vec<(u64, u64)> {
    let bits = |step| {
        let metrics = trainer.step(&rows(step), Some(1e-2)).unwrap();
        (metrics.loss.to_bits(), metrics.grad_norm.to_bits())
    };
    (0..4).map(bits).collect()
}

fn weights(folder: &Path) -> Vec<u8> {
    let name = ["adapter_model.safetensors", "model.safetensors"].into_iter().find(|name| folder.join(name).exists());
    std::fs::read(folder.join(name.unwrap())).unwrap()
}

/// The tensors of a folder by name, as bytes.
fn tensors(folder: &Path) -> Vec<(String, HostTensor)> {
    let files = Weights::open(folder).unwrap();
    let read = |name: &&str| ((*name).to_owned(), files.get(name).unwrap().to_host().unwrap());
    files.names().iter().map(read).collect()
}

fn four_bits() -> Value {
    json!({"torch_dtype": "bfloat16", "recipe": "nvfp4", "fp4_backend": "emulate"})
}

#[test]
fn a_run_has_the_bits_of_one_on_the_values_of_its_codes() {
    let plain = json!({"torch_dtype": "bfloat16"});
    let forms = [
        (json!({"qlora_bnb": true}), plain.clone()),
        (json!({"qlora_bnb": true, "qlora_bnb_block_size": 128, "qlora_bnb_double_quant": false}), plain.clone()),
        (json!({"qlora_fp8": true, "qlora_block_size": 64}), json!({"torch_dtype": "float32"})),
        (json!({"qlora_fp4": true}), plain.clone()),
        (
            json!({"qlora_fp4": true, "qlora_four_over_six": false}),
            json!({"recompute_block": true, "lora_dropout": 0.0}),
        ),
        (json!({"qlora_bnb": true}), json!({"torch_dtype": "bfloat16", "recipe": "fp8_hybrid"})),
        (json!({"qlora_fp4": true}), four_bits()),
        (json!({"qlora_fp4": true}), json!({"torch_dtype": "float32", "recipe": "nvfp4", "fp4_backend": "emulate"})),
        (json!({"qlora_bnb": true}), four_bits()),
    ];
    for (form, others) in forms {
        let place = tempfile::tempdir().unwrap();
        let [base, adapter, merged, same, same_merged] =
            ["base", "adapter", "merged", "same", "same_merged"].map(|name| place.path().join(name));
        let mut quantised = trainer(&stories(), &[&form, &others]);
        // B is zero before the first step: what is merged are the values of the codes.
        quantised.export_merged(&base).unwrap();
        let mut plain = trainer(&base, &[&others]);
        assert_eq!(train(&mut quantised), train(&mut plain), "{form}");
        quantised.export(&adapter).unwrap();
        plain.export(&same).unwrap();
        assert!(tensors(&adapter) == tensors(&same), "{form}: the adapters differ");
        quantised.export_merged(&merged).unwrap();
        plain.export_merged(&same_merged).unwrap();
        assert!(weights(&merged) == weights(&same_merged), "{form}: the merged models differ");
        // From the files: the quantised weights are made again; or the adapter is added to the weights as they are.
        let [offline, as_is] = ["offline", "as_is"].map(|name| place.path().join(name));
        let done = merge(&stories(), &adapter, &offline, &Default::default(), false, &|| false).unwrap();
        assert!(done.quantised.is_some());
        let (live, offline) = (tensors(&merged), tensors(&offline));
        // Without the adapter's run, weights that were not quantised keep their file's type.
        let alike: Vec<_> =
            live.iter().zip(&offline).filter(|(live, offline)| live.1.dtype == offline.1.dtype).collect();
        assert!(alike.len() >= 30 && alike.iter().all(|(live, offline)| live == offline), "{form}");
        let done = merge(&stories(), &adapter, &as_is, &Default::default(), true, &|| false).unwrap();
        assert!(done.quantised.is_none() && tensors(&as_is) != offline);
        let config = std::fs::read_to_string(merged.join("config.json")).unwrap();
        assert!(!config.contains("quantization_config"));
        let named = std::fs::read_to_string(adapter.join("adapter_config.json")).unwrap();
        assert!(named.contains("examples/stories/model"), "{named}");
        // And it is another function than on the weights themselves, unless the recipe makes these codes of them anyway.
        if form["qlora_fp4"] == true && others["recipe"] == "nvfp4" {
            continue;
        }
        let mut unquantised = trainer(&stories(), &[&others]);
        assert_ne!(train(&mut unquantised)[0], train(&mut trainer(&stories(), &[&form, &others]))[0], "{form}");
    }
}

/// Under the recipe of four bits weights are rounded once: a run on its codes has the bits of one on the weights.
#[test]
fn tiles_of_the_recipe_are_rounded_once() {
    for (others, passes) in [
        (json!({}), None),
        // Products of their own share the magnitudes, too.
        (json!({}), Some(0)),
        (json!({"recompute_block": true, "lora_dropout": 0.1, "fp4_stochastic_rounding": false}), None),
        (json!({"init": "random"}), None),
        // Each of two ranks has its piece of the codes, or all.
        (json!({"gpus": 2, "gradient_accumulation_steps": 1, "zero_level": 3}), None),
        (json!({"gpus": 2, "gradient_accumulation_steps": 1, "shard_weights": true}), None),
        (json!({"gpus": 2, "gradient_accumulation_steps": 1}), None),
    ] {
        let run = |form: Value| {
            let place = tempfile::tempdir().unwrap();
            let mut trainer = llama(&[&four_bits(), &others, &form]);
            trainer.plan.compile.plan.passes = passes;
            let bits = train(&mut trainer);
            trainer.export(place.path()).unwrap();
            (bits, tensors(place.path()))
        };
        let (codes, weights) = (run(json!({"qlora_fp4": true})), run(json!({})));
        assert_eq!(codes.0, weights.0, "{others} {passes:?}");
        assert!(codes.1 == weights.1, "{others} {passes:?}: the adapters differ");
    }
}

/// Quantized tiles of experts are rounded once: gate and up of an expert are one matrix to the recipe.
#[test]
fn tiles_of_experts_are_rounded_once() {
    let place = tempfile::tempdir().unwrap();
    let model = place.path().join("model");
    std::fs::create_dir(&model).unwrap();
    let fields = json!({
        "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "vocab_size": 256, "hidden_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48,
        "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128, "torch_dtype": "bfloat16",
    });
    std::fs::write(model.join("config.json"), fields.to_string()).unwrap();
    let own = json!({"init": "random", "lora_target_modules": ["q_proj"], "lora_dropout": 0.0});
    let experts = json!({"lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]});
    for others in [json!({"recompute_block": true}), json!({"recompute_block": false}), experts] {
        let run = |form: Value| {
            let changed = [&four_bits(), &own, &others, &form];
            train(&mut begin(&model, include_str!("../ir/olmoe.json"), &changed).unwrap())
        };
        let expected = run(json!({}));
        assert_eq!(run(json!({"qlora_fp4": true})), expected, "{others}");
        assert_ne!(run(json!({"recipe": "bf16", "fp4_backend": "cutlass"})), expected, "{others}");
    }
}

/// Weights that the recipe scales together are scaled by the largest magnitude of them all, the others by their own.
#[test]
fn weights_in_tiles_are_scaled_with_those_of_their_group() {
    let form = json!({"qlora_fp4": true});
    let attention = [&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"][..], &["self_attn.o_proj"]];
    let together = [&["mlp.gate_proj", "mlp.up_proj"][..], &["mlp.down_proj"]];
    // Features that are no multiples of 16: the recipe leaves these linears as they are.
    let apart = [&["mlp.gate_proj"][..], &["mlp.up_proj"]];
    for (mut trainer, mlp, shared) in
        [(llama(&[&four_bits(), &form]), together, 3), (trainer(&stories(), &[&four_bits(), &form]), apart, 2)]
    {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("values");
        trainer.export_merged(&folder).unwrap();
        let [weights, values] = [&trainer.source.folder, &folder].map(|folder| Weights::open(folder).unwrap());
        let numbers = |files: &Weights, name: &str| {
            let tensor = files.get(name).unwrap().to_host().unwrap().cast(DType::BF16);
            (tensor.shape.clone(), tensor.to_f32())
        };
        let layers = trainer.source.config.0["num_hidden_layers"].as_u64().unwrap();
        let mut smaller = 0;
        for (layer, group) in (0..layers).flat_map(|layer| attention.iter().chain(&mlp).map(move |of| (layer, of))) {
            let name = |module: &&str| format!("model.layers.{layer}.{module}.weight");
            let own = |module: &&str| amax(&numbers(&weights, &name(module)).1);
            let largest = group.iter().map(own).fold(0.0, f32::max);
            for module in *group {
                let (shape, x) = numbers(&weights, &name(module));
                let of = nvfp4_within(NVFP4_TILES, &x, &shape, largest, Target::Six).values();
                let expected = HostTensor::from_f32(shape, &of).cast(DType::BF16).to_f32();
                assert!(numbers(&values, &name(module)).1 == expected, "{}", name(module));
                smaller += usize::from(own(module) < largest);
            }
        }
        assert_eq!(smaller, layers as usize * shared, "in a group all but one have magnitudes that are not theirs");
    }
}

/// The recipe decides the blocks of FP4; with a checkpoint, they stay as they were.
#[test]
fn the_recipe_decides_how_fp4_is_stored() {
    let form = json!({"qlora_fp4": true});
    let chosen = |others: &Value| {
        let plan = trainer(&stories(), &[&form, others]).plan;
        (plan.compile.quantised.unwrap(), plan.reasons["qlora_four_over_six"].clone())
    };
    let (rows, reason) = chosen(&json!({}));
    assert_eq!((rows, reason.value), (Quantisation::Fp4 { target: Target::FourOrSix }, json!(true)));
    let (tiles, reason) = chosen(&four_bits());
    assert_eq!((tiles, reason.value), (Quantisation::Fp4Tiles, json!(false)));
    assert!(reason.because.contains("`recipe: nvfp4`"), "{}", reason.because);

    let place = tempfile::tempdir().unwrap();
    let checkpoint = place.path().join("checkpoint");
    trainer(&stories(), &[&form, &four_bits()]).save(&checkpoint).unwrap();
    let resumed = json!({"resume_from_checkpoint": checkpoint});
    try_trainer(&stories(), &[&form, &four_bits(), &resumed]).unwrap();
    let other = json!({"torch_dtype": "bfloat16"});
    let error = try_trainer(&stories(), &[&form, &other, &resumed]).err().unwrap().to_string();
    let expected = "frozen weights would be quantised as `e2m1 row:16 e4m3 four-over-six`, but the checkpoint's are \
                    `e2m1 tile:16x16 e4m3`";
    assert!(error.contains(expected), "{error}");
}

fn golden() -> PathBuf {
    let full = root().join("../shared/golden");
    if full.is_dir() { full } else { root().join("tests/golden") }
}

fn relative(found: &HostTensor, reference: &HostTensor) -> f64 {
    assert_eq!(found.shape, reference.shape);
    let (found, reference) = (found.to_f64(), reference.to_f64());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut found.iter().zip(&reference).map(|(f, r)| f - r)) / norm(&mut reference.iter().copied())
}

const CASES: [(&str, Quantisation); 7] = [
    ("nf4_64_nested", Quantisation::Nf4 { block: 64, nested: true }),
    ("nf4_128", Quantisation::Nf4 { block: 128, nested: false }),
    ("nf4_512_nested", Quantisation::Nf4 { block: 512, nested: true }),
    ("fp8_64", Quantisation::Fp8 { extent: 64 }),
    ("fp8_128", Quantisation::Fp8 { extent: 128 }),
    ("nvfp4", Quantisation::Fp4 { target: Target::Six }),
    ("nvfp4_46", Quantisation::Fp4 { target: Target::FourOrSix }),
];

#[test]
fn the_recorded_numbers_hold() {
    let mut checked = 0;
    for name in ["llama", "qwen3"] {
        let (folder, recorded) = (golden().join(name), golden().join("precision").join(name).join("qlora.safetensors"));
        if !recorded.is_file() {
            println!("skipped: there are no recordings of {name} next to the checkout");
            continue;
        }
        let ir = std::fs::read_to_string(root().join(format!("crates/train/tests/ir/{name}.json"))).unwrap();
        let source = Arc::new(ModelSource::open(&folder, &ir).unwrap());
        let (inputs, recorded) =
            (Weights::open(&folder.join("inputs.safetensors")).unwrap(), Weights::open(&recorded).unwrap());
        let host = |files: &Weights, name: &str| files.get(name).unwrap().to_host().unwrap();
        let ints = |name: &str| host(&inputs, name).to_f64().into_iter().map(|x| x as i32).collect::<Vec<_>>();
        let shape = inputs.get("input_ids").unwrap().shape.to_vec();
        let (ids, labels, positions) = (ints("input_ids"), ints("labels"), ints("position_ids"));
        let batch = Batch::from_labels(shape[0], shape[1], ids, &labels, Some(positions), None).unwrap();
        for (case, form) in CASES.iter().filter(|(case, _)| recorded.contains(&format!("{case}.logits"))) {
            let adapter = folder.join("lora");
            let model = Model::load(device(), source.clone(), Some(&adapter), DType::F32).unwrap();
            let mut model = model.quantised(Some(*form));
            let error =
                relative(&model.forward(&batch, false).unwrap().logits, &host(&recorded, &format!("{case}.logits")));
            assert!(error < 2e-5, "{name} {case}: {error:e}");
            let found = model.loss_and_gradients(&batch).unwrap();
            let loss = host(&recorded, &format!("{case}.loss")).to_f64()[0];
            assert!((f64::from(found.loss) - loss).abs() < 2e-5, "{name} {case}: {} {loss}", found.loss);
            for (tensor, gradient) in &found.gradients {
                let reference = format!("{case}.grad.{tensor}");
                if recorded.contains(&reference) {
                    let reference = host(&recorded, &reference);
                    let error = relative(gradient, &reference);
                    assert!(error < 1e-4 || reference.to_f64().iter().all(|x| x.abs() < 1e-6), "{tensor}: {error:e}");
                }
            }
            checked += 1;
        }
    }
    assert!(checked >= 3, "{checked} cases");
}

/// In bf16 what is quantised is the weight in bf16: as a checkpoint in that type would be.
#[test]
fn values_in_bf16_are_the_recorded_ones() {
    let text = std::fs::read_to_string(golden().join("precision/meta.json")).unwrap();
    let recorded = &serde_json::from_str::<Value>(&text).unwrap()["llama"]["qlora"];
    let ir = std::fs::read_to_string(root().join("crates/train/tests/ir/llama.json")).unwrap();
    for (case, form) in [
        ("nf4_64_nested", json!({"qlora_bnb": true})),
        ("fp8_64", json!({"qlora_fp8": true, "qlora_block_size": 64})),
        ("nvfp4_46", json!({"qlora_fp4": true})),
    ] {
        let (place, model) = (tempfile::tempdir().unwrap(), golden().join("llama"));
        let mut options = json!({
            "model": model, "sequence_len": 32, "torch_dtype": "bfloat16", "lora_target_modules": ["o_proj"],
        });
        form.as_object().unwrap().iter().for_each(|(key, value)| options[key] = value.clone());
        let config = Config::load_json(&options.to_string(), Task::Sft, &[]).unwrap();
        let source = Arc::new(ModelSource::open(&model, &ir).unwrap());
        let merged = place.path().join("merged");
        Trainer::new(Arc::new(config), source, device()).unwrap().export_merged(&merged).unwrap();
        let files = Weights::open(&merged).unwrap();
        let digests = recorded[case]["sha256_f32_bf16"].as_object().unwrap();
        // Adding an adapter of zeros makes positive zeros of negative ones: its module is left out.
        let plain = digests.iter().filter(|(name, _)| !name.contains("o_proj"));
        let checked = plain.map(|(name, digest)| {
            let bytes = files.get(name).unwrap().bytes().unwrap();
            assert_eq!(sha256::hex(&bytes), digest[1].as_str().unwrap(), "{case} {name}");
        });
        assert!(checked.count() >= 18, "{case}");
    }
}

/// The recorded merge adds an adapter in bf16 to values in f32. Ours adds the file's adapter to the values that products
/// read, those in bf16: what differs is what is added, not how.
#[test]
fn the_recorded_merge_is_of_values_in_f32_and_an_adapter_in_bf16() {
    use ops::optimizer::dynamic_map;
    let (folder, recorded) = (golden().join("llama"), golden().join("precision/llama/qlora.safetensors"));
    let [model, adapter, recorded] =
        [folder.clone(), folder.join("lora"), recorded].map(|path| Weights::open(&path).unwrap());
    let narrow = |files: &Weights, name: &str| files.get(name).unwrap().to_host().unwrap().cast(DType::BF16).to_f32();
    let prefix = "nf4_64_nested.merged_bf16.";
    let names = recorded.names().into_iter().filter_map(|name| name.strip_prefix(prefix));
    let mut compared = 0;
    for name in names {
        let expected = recorded.get(&format!("{prefix}{name}")).unwrap().to_host().unwrap();
        let [rows, columns] = expected.shape[..] else { panic!("a matrix") };
        let values = nested(&narrow(&model, name), &expected.shape, 64, &dynamic_map(true)).values();
        let module = name.strip_suffix(".weight").unwrap();
        let matrix = |which: &str| narrow(&adapter, &format!("base_model.model.{module}.{which}.weight"));
        let (a, b) = (matrix("lora_A"), matrix("lora_B"));
        let rank = a.len() / columns;
        let sum = |index: usize| {
            let (row, column) = (index / columns, index % columns);
            let product = (0..rank).map(|r| f64::from(b[row * rank + r]) * f64::from(a[r * columns + column]));
            (f64::from(values[index]) + 2.0 * product.sum::<f64>()) as f32
        };
        let sums: Vec<f32> = (0..rows * columns).map(sum).collect();
        let merged = HostTensor::from_f32(expected.shape.clone(), &sums).cast(DType::BF16).to_f32();
        assert!(merged == expected.to_f32(), "{name}");
        compared += 1;
    }
    assert!(compared > 0);
}
