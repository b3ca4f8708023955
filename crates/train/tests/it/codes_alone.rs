//! Weights of which codes alone stay, because a recipe multiplies these: whatever reads such a weight later finds what was
//! loaded. Merges are of the files' weights, never of codes; recompiling with another layout changes nothing.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::stories::{self, Lines, events, losses, root, source, source_at};
use compiler::{CompileError, CompileOptions, Recipe};
use data::Batch;
use data::safetensors::{NamedTensor, Weights, write};
use program::{ArenaKind, Documents, Machine, Program, Variant};
use serde_json::{Value, json};
use tensor::{DType, HostTensor};
use train::config::{Config, Task};
use train::{Device, Model, Outcome, Trainer, merge};

fn model() -> PathBuf {
    root().join("examples/stories/model")
}

fn merged_options(parts: &[&Value]) -> Value {
    Value::Object(parts.iter().flat_map(|part| part.as_object().unwrap().clone()).collect())
}

fn fp8() -> Value {
    json!({"recipe": "fp8_hybrid", "fp8_amax_history": 2})
}

fn fp4() -> Value {
    json!({"recipe": "nvfp4", "fp4_backend": "emulate"})
}

/// The program of a GPU on the CPU.
fn of_gpu() -> Arc<Device> {
    let backend = Box::new(cpu::CpuBackend::new(Some(2)).unwrap());
    let (because, arithmetic, machine) = ("requested".into(), "a CPU".into(), Machine::h200());
    Arc::new(Device {
        backend,
        machine,
        because,
        gpus: 1,
        card: Default::default(),
        arithmetic,
        nodes: None,
        python: None,
    })
}

fn trainer_at(folder: &Path, device: Arc<Device>, parts: &[&Value]) -> Trainer {
    let base = json!({
        "model": folder, "sequence_len": 64, "optimizer": "adamw", "gradient_accumulation_steps": 2, "lora_rank": 8,
        "torch_dtype": "bfloat16",
    });
    let options = merged_options(&[&[&base], parts].concat());
    let config = Config::load_json(&options.to_string(), Task::Sft, &[]).unwrap();
    Trainer::new(Arc::new(config), source_at(folder), device).unwrap()
}

fn trainer(parts: &[&Value]) -> Trainer {
    trainer_at(&model(), stories::device(), parts)
}

fn rows(step: usize, length: usize) -> [Batch; 2] {
    [0, 1].map(|part| {
        let ids: Vec<i32> = (0..2 * length).map(|i| ((i * 37 + step * 11 + part * 5) % 400 + 3) as i32).collect();
        let positions = (0..2 * length).map(|i| (i % length % 20) as i32).collect();
        Batch::from_labels(2, length, ids.clone(), &ids, Some(positions), None).unwrap()
    })
}

fn take(trainer: &mut Trainer, lengths: &[usize]) -> Vec<[u64; 2]> {
    let step = |(step, length): (usize, &usize)| {
        let metrics = trainer.step(&rows(step, *length), Some(1e-2)).unwrap();
        [metrics.loss.to_bits(), metrics.grad_norm.to_bits()]
    };
    lengths.iter().enumerate().map(step).collect()
}

fn tensors(folder: &Path) -> BTreeMap<String, HostTensor> {
    let files = Weights::open(folder).unwrap();
    let read = |name: &str| (name.to_owned(), files.get(name).unwrap().to_host().unwrap());
    files.names().into_iter().map(read).collect()
}

/// Compiles a trainer's options, with a change, for rows of one length.
fn compiled(trainer: &Trainer, length: usize, change: impl Fn(&mut CompileOptions)) -> Result<Program, CompileError> {
    let variants = vec![Variant { batch: 2, seq_len: length, documents: Documents::Packed, patches: 0, logits: 0 }];
    let mut options = CompileOptions { variants, ..trainer.plan.compile.clone() };
    change(&mut options);
    compiler::compile(&source().model, &options, &trainer.device.machine)
}

fn bytes(program: &Program) -> usize {
    program.memory.iter().map(|line| line.bytes).sum()
}

/// The forms of weights under adapters: plain or in codes, from files or drawn.
fn forms() -> [Value; 5] {
    [
        json!({}),
        json!({"qlora_bnb": true}),
        json!({"qlora_fp8": true, "qlora_block_size": 64}),
        json!({"qlora_fp4": true}),
        json!({"init": "random"}),
    ]
}

#[test]
fn merged_models_are_of_the_weights_that_were_loaded() {
    for (recipe, form) in [fp8(), fp4()].iter().flat_map(|recipe| forms().map(|form| (recipe.clone(), form))) {
        // Tiles of `nvfp4` have other values than rows without it: `qlora.rs` looks at their merges.
        if recipe == fp4() && form.get("qlora_fp4").is_some() {
            continue;
        }
        let place = tempfile::tempdir().unwrap();
        let [adapter, merged, expected] = ["adapter", "merged", "expected"].map(|name| place.path().join(name));
        let mut live = trainer(&[&recipe, &form]);
        let program = compiled(&live, 32, |_| ()).unwrap();
        let leaves = program.layout.parameters.iter().filter(|slot| slot.load_group.is_some());
        // Those of the feed-forward blocks have 172 features, no multiple of 16.
        assert_eq!(leaves.count(), 5 * 4, "{recipe} {form}");
        take(&mut live, &[32, 32, 48]);
        live.export(&adapter).unwrap();
        live.export_merged(&merged).unwrap();
        // Without a recipe all weights are in memory.
        let mut plain = trainer(&[&form, &json!({"adapter": adapter})]);
        plain.export_merged(&expected).unwrap();
        assert!(tensors(&merged) == tensors(&expected), "{recipe} {form}");
    }
}

/// bf16(W + s·B·A) of the file's W, to the last bit but where the order of the sum decides.
#[test]
fn a_merge_is_the_file_and_the_product_rounded_once() {
    let place = tempfile::tempdir().unwrap();
    let [adapter, merged, offline] = ["adapter", "merged", "offline"].map(|name| place.path().join(name));
    let mut live = trainer(&[&fp8(), &json!({"lora_alpha": 12})]);
    take(&mut live, &[32, 32]);
    live.export(&adapter).unwrap();
    live.export_merged(&merged).unwrap();
    let (base, pairs, found) = (tensors(&model()), tensors(&adapter), tensors(&merged));
    let mut compared = 0;
    for (name, weight) in &base {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let matrix = |which: &str| pairs.get(&format!("base_model.model.{module}.{which}.weight"));
        let (Some(a), Some(b)) = (matrix("lora_A"), matrix("lora_B")) else { continue };
        let ([rows, columns], rank) = ([weight.shape[0], weight.shape[1]], a.shape[0]);
        let (w, a, b) = (weight.cast(DType::BF16).to_f64(), a.to_f64(), b.to_f64());
        let sum = |i: usize| {
            let (row, column) = (i / columns, i % columns);
            let product: f64 = (0..rank).map(|k| b[row * rank + k] * a[k * columns + column]).sum();
            (w[i] + 12.0 / rank as f64 * product) as f32
        };
        let values: Vec<f32> = (0..rows * columns).map(sum).collect();
        let expected = HostTensor::from_f32([rows, columns], &values).cast(DType::BF16);
        let other = expected.bytes.chunks(2).zip(found[name].bytes.chunks(2)).filter(|(a, b)| a != b).count();
        // A product that lies between two numbers of bfloat16 may be rounded to either.
        assert!(other <= 1 + values.len() / 10_000, "{name}: {other} of {}", values.len());
        compared += 1;
    }
    assert_eq!(compared, 5 * 7);
    merge(&model(), &adapter, &offline, &Default::default(), false, &|| false).unwrap();
    let offline = tensors(&offline);
    let alike = found.iter().filter(|(name, of)| offline[*name].dtype == of.dtype && offline[*name] == **of).count();
    let other = found.iter().filter(|(name, of)| offline[*name].dtype == of.dtype).count() - alike;
    assert_eq!(other, 0, "as from the files alone");
}

/// Rows that are longer than expected want memory that optimizer states have: these move, and the codes are made again.
#[test]
fn a_run_goes_on_where_its_states_move() {
    let whole = json!({"recompute_block": false, "recompute_rmsnorm": false, "recompute_swiglu": false,
        "recompute_ffn": false, "recompute_qkv": false, "recompute_att": false, "lmhead_chunks": 1, "attn_bwd_chunks": 1,
        "offload_residual": false, "offload_grads": false, "lora_rank": 64, "device": "auto"});
    let [plain, nf4, _, _, drawn] = forms();
    for (recipe, form) in [(fp8(), plain.clone()), (fp8(), nf4), (fp8(), drawn), (fp4(), plain)] {
        let of = || trainer_at(&model(), of_gpu(), &[&whole, &recipe, &form]);
        let lengths = [64, 64, 72, 72, 64];
        let (mut free, mut tight) = (of(), of());
        let place = |length: usize, offload: Option<bool>, limit: Option<usize>| {
            compiled(&free, length, |options| {
                (options.plan.offload.optimizer, options.plan.memory_limit) = (offload, limit);
            })
        };
        let limit = bytes(&place(64, Some(false), None).unwrap()) + 4096;
        let moved = place(72, None, Some(limit)).unwrap();
        assert!(matches!(place(72, Some(false), Some(limit)), Err(CompileError::DoesNotFit { .. })), "{recipe} {form}");
        assert!(moved.arenas.iter().any(|arena| arena.kind == ArenaKind::Optimizer && arena.is_on_host()));
        tight.plan.compile.plan.memory_limit = Some(limit);
        assert_eq!(take(&mut tight, &lengths), take(&mut free, &lengths), "{recipe} {form}");
        let place = tempfile::tempdir().unwrap();
        let [one, other] = ["tight", "free"].map(|name| place.path().join(name));
        tight.export_merged(&one).unwrap();
        free.export_merged(&other).unwrap();
        assert!(tensors(&one) == tensors(&other), "{recipe} {form}");
    }
}

/// A model of which gradients from logits are requested is compiled again, with weights that it had forgotten.
#[test]
fn a_model_may_be_asked_for_gradients_later() {
    let place = tempfile::tempdir().unwrap();
    let adapter = place.path().join("adapter");
    let mut trained = trainer(&[&fp8()]);
    take(&mut trained, &[32]);
    trained.export(&adapter).unwrap();
    for recipe in [trainer(&[&fp8()]).plan.compile.recipe, trainer(&[&fp4()]).plan.compile.recipe] {
        assert!(recipe != Recipe::Uniform);
        for adapter in [None, Some(adapter.as_path())] {
            let of = || Model::load(stories::device(), source(), adapter, DType::F32).unwrap().with_recipe(recipe);
            let batch = &rows(3, 32)[0];
            let (mut early, mut late) = (of(), of());
            let logits = late.forward(batch, false).unwrap().logits;
            let (found, wanted) = (late.loss_and_gradients(batch).unwrap(), early.loss_and_gradients(batch).unwrap());
            assert!(found.loss == wanted.loss && found.gradients == wanted.gradients, "{recipe:?}");
            let again = late.forward(&rows(3, 48)[0], false).unwrap().logits;
            assert_eq!(again, early.forward(&rows(3, 48)[0], false).unwrap().logits);
            assert_eq!(late.forward(batch, false).unwrap().logits, logits);
        }
    }
}

/// A whole run: evaluations, answers to prompts, checkpoints, an interruption, and both results.
#[test]
fn an_interrupted_run_has_the_results_of_one_that_went_on() {
    for recipe in [fp8(), fp4()] {
        let place = tempfile::tempdir().unwrap();
        let options = json!({"torch_dtype": "bfloat16", "merge_adapter": true, "max_steps": 6, "eval_steps": 2,
            "save_steps": 2, "skip_quant_last_layers": 1, "lora_dropout": 0.1, "modules_to_save": ["norm"],
            "sample_prompts": ["ROMEO:"], "sample_tokens": 4});
        let run = |name: &str, more: Value, stop_after: Option<usize>| {
            let output = place.path().join(name);
            let config = stories::config(&output, &merged_options(&[&options, &recipe, &more]));
            let mut observer = Lines { stop_after, ..Lines::default() };
            let outcome = train::run(config, source(), stories::device(), &mut observer).unwrap();
            assert_eq!(matches!(outcome, Outcome::Interrupted(_)), stop_after.is_some());
            output
        };
        let straight = run("straight", json!({}), None);
        run("parts", json!({}), Some(3));
        let parts = run("parts", json!({"resume_from_checkpoint": true}), None);
        for kind in ["step", "evaluation"] {
            assert_eq!(losses(&events(&straight), kind), losses(&events(&parts), kind), "{recipe} {kind}");
        }
        let weights = |output: &Path| ["adapter", "merged"].map(|name| tensors(&output.join(name)));
        assert!(weights(&straight) == weights(&parts), "{recipe}");
    }
}

/// Files of adapters may hold copies of weights that are in memory no more.
#[test]
fn copies_of_weights_in_an_adapters_file_are_recognised() {
    let place = tempfile::tempdir().unwrap();
    let adapter = place.path().join("adapter");
    trainer(&[&fp8()]).export(&adapter).unwrap();
    let name = "model.layers.2.self_attn.o_proj.weight";
    let base = tensors(&model()).remove(name).unwrap();
    for exact in [true, false] {
        let mut held = tensors(&adapter);
        let mut copy = base.cast(DType::F32);
        copy.bytes[3] ^= if exact { 0 } else { 0x80 };
        held.insert("base_model.model.model.layers.2.self_attn.o_proj.base_layer.weight".into(), copy);
        let named: Vec<NamedTensor> = held.iter().map(|(name, of)| NamedTensor::new(name.clone(), of)).collect();
        let folder = place.path().join(exact.to_string());
        fs::create_dir(&folder).unwrap();
        fs::copy(adapter.join("adapter_config.json"), folder.join("adapter_config.json")).unwrap();
        write(&folder.join("adapter_model.safetensors"), &named, &Default::default()).unwrap();
        let mut trainer = trainer(&[&fp8(), &json!({"adapter": folder})]);
        let found = trainer.step(&rows(0, 32), Some(1e-2));
        match exact {
            true => assert!(found.is_ok()),
            false => assert!(found.unwrap_err().to_string().contains("does not belong to the model")),
        }
    }
}

/// A weight that is no number is found where it was loaded from.
#[test]
fn a_weight_that_is_no_number_is_named() {
    let place = tempfile::tempdir().unwrap();
    let mut held = tensors(&model());
    let name = "model.layers.3.self_attn.v_proj.weight";
    let weight = &held[name];
    let mut values = weight.to_f32();
    values[7] = f32::NAN;
    let damaged = HostTensor::from_f32(weight.shape.clone(), &values).cast(weight.dtype);
    held.insert(name.into(), damaged);
    for file in fs::read_dir(model()).unwrap().map(|entry| entry.unwrap()) {
        fs::copy(file.path(), place.path().join(file.file_name())).unwrap();
    }
    let named: Vec<NamedTensor> = held.iter().map(|(name, of)| NamedTensor::new(name.clone(), of)).collect();
    write(&place.path().join("model.safetensors"), &named, &Default::default()).unwrap();
    let options = merged_options(&[&fp8(), &json!({"model": place.path(), "torch_dtype": "bfloat16"})]);
    let config = stories::config(&place.path().join("run"), &options);
    let error = train::run(config, source_at(place.path()), stories::device(), &mut Lines::default());
    let error = error.err().unwrap().to_string();
    assert!(error.contains(&format!("the weights of `{name}` already hold NaN")), "{error}");
}
