//! Number formats of a run: types of weights, master weights and gradients, decided from options and model.
//!
//! Knows options and the model's own type; nothing of programs.

use compiler::{CompileOptions, Fp8Hybrid, GradientFormat, Nvfp4, Recipe};
use data::safetensors::TensorView;
use graph::Item;
use options::Setting;
use program::{Arch, Machine};
use serde_json::json;
use tensor::DType;

use crate::config::reason;
use crate::config::{self, Config, Dtype, Init, MatmulDtype, Problem, Reasons};
use crate::error::{Result, TrainError};
use crate::model::quantized_checkpoint;
use crate::model::source::ModelSource;
use crate::plan::exact_sampling::nodes;

/// The loss scale of the first step.
pub(crate) const LOSS_SCALE: f32 = 65536.0;

/// The element type of the options.
pub fn dtype_of(dtype: Dtype) -> DType {
    match dtype {
        Dtype::Float32 => DType::F32,
        Dtype::BFloat16 => DType::BF16,
        Dtype::Float16 => DType::F16,
    }
}

fn word(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::Float32,
        DType::BF16 => Dtype::BFloat16,
        DType::F16 => Dtype::Float16,
        other => panic!("nothing is trained in {other}"),
    }
}

/// The element type of weights in training. Weights saved in f16 become bf16, with a note.
pub fn weights(config: &Config, source: &ModelSource, reasons: &mut Reasons, notes: &mut Vec<String>) -> Result<DType> {
    if let Setting::Value(dtype) = config.model.torch_dtype {
        return Ok(dtype_of(dtype));
    }
    let (found, because) = match source.dtype() {
        Some(dtype) => (dtype, "the model's configuration"),
        None if config.model.init == Init::Random => (DType::BF16, "the model's configuration names none"),
        None if !quantized_checkpoint::has_weights(&source.folder) => {
            notes.push(
                "neither the model's configuration nor weights say of which type these are: planned as bfloat16"
                    .to_owned(),
            );
            (DType::BF16, "neither configuration nor weights say it")
        }
        None => (stored(source)?, "the model's weights"),
    };
    let (dtype, because) = match found {
        DType::F32 if on_units(config) && adds_biases(source) => {
            let recipe = config.precision.recipe;
            notes.push(format!(
                "the model was saved in f32; with `recipe: {recipe}` it is trained in bf16, in which a GPU adds biases \
                 (`torch_dtype` sets another type)"
            ));
            (DType::BF16, format!("{because} says f32, and `recipe: {recipe}` adds biases in bf16"))
        }
        DType::F32 | DType::BF16 => (found, because.to_owned()),
        other => {
            notes.push(format!(
                "the model was saved in {other}; it is loaded and trained in bf16, which has fewer digits \
                 (`torch_dtype: float32` keeps all of them)"
            ));
            (DType::BF16, format!("{because} says {other}, which is trained in bf16"))
        }
    };
    reasons.insert("torch_dtype".into(), reason(json!(word(dtype).to_string()), &because));
    Ok(dtype)
}

/// Says whether a recipe with codes may run on a GPU.
fn on_units(config: &Config) -> bool {
    config.precision.recipe.quantises_weights() && config.hardware.device != Setting::Value(config::Device::Cpu)
}

/// Says whether layers add biases to products.
fn adds_biases(source: &ModelSource) -> bool {
    let blocks = source.model.body.iter().flat_map(|item| match item {
        Item::Repeat(repeat) => repeat.blocks.as_slice(),
        Item::Node(_) => &[],
    });
    blocks.flat_map(|block| &block.parameters).any(|of| of.name.ends_with("bias") && !of.buffer)
}

/// The type of the weights' files, where `config.json` names none.
fn stored(source: &ModelSource) -> Result<DType> {
    let weights = quantized_checkpoint::weights(&source.folder)?;
    let views = weights.names().into_iter().map(|name| weights.get(name));
    let mut plain = views.filter(|view| !view.as_ref().is_ok_and(TensorView::is_dequantised));
    plain.next().map_or(Ok(DType::BF16), |view| view.map(|view| view.dtype)).map_err(TrainError::model_file)
}

/// True if f32 copies of trained parameters are kept next to them. With f16 they always are: its gradients may be
/// skipped and its updates would vanish.
pub fn keeps_master(
    config: &Config,
    weights: DType,
    trained: DType,
    reasons: &mut Reasons,
    problems: &mut Vec<Problem>,
) -> bool {
    if [weights, trained].contains(&DType::F16) && trained != DType::F32 {
        return forced_master(config, reasons, problems);
    }
    let own = word(trained);
    if config.precision.master_dtype == Setting::Value(Dtype::Float16) {
        let message = "`master_dtype: float16`: master weights are kept in float32, or not at all".to_owned();
        let hint = "set `master_dtype: float32`, or remove it".to_owned();
        problems.push(config.mistake("master_dtype", message, Some(hint)));
        return false;
    }
    let keeps = matches!(config.precision.master_dtype, Setting::Value(requested) if dtype_of(requested).size() > trained.size());
    if config.offload.offload_master == Setting::Value(true) && !keeps {
        let message = format!("`offload_master: true`, but parameters trained in {own} have no master copy");
        let hint = match trained {
            DType::F32 => "remove `offload_master`".to_owned(),
            _ => "set `master_dtype: float32`, or remove `offload_master`".to_owned(),
        };
        problems.push(config.mistake("offload_master", message, Some(hint)));
    }
    match config.precision.master_dtype {
        Setting::Auto => {
            let because = "the type of what is trained: no further copy is kept";
            reasons.insert("master_dtype".into(), reason(json!(own.to_string()), because));
            false
        }
        Setting::Value(requested) if dtype_of(requested).size() < trained.size() => {
            let message = format!(
                "`master_dtype: {requested}`, but trained parameters are stored in {own}, which is more precise"
            );
            let option = if config.lora.lora { "lora_dtype" } else { "torch_dtype" };
            let hint = format!("remove `master_dtype`, or set `{option}: {requested}`");
            problems.push(config.mistake("master_dtype", message, Some(hint)));
            false
        }
        Setting::Value(requested) => dtype_of(requested) != trained,
    }
}

/// f32 copies that are no choice; another wish is an error.
fn forced_master(config: &Config, reasons: &mut Reasons, problems: &mut Vec<Problem>) -> bool {
    match config.precision.master_dtype {
        Setting::Value(Dtype::Float32) => {}
        Setting::Auto => {
            let because = "float16 is trained with master weights in float32";
            reasons.insert("master_dtype".into(), reason(json!(Dtype::Float32.to_string()), because));
        }
        Setting::Value(requested) => {
            let message = format!("`master_dtype: {requested}`, but float16 is trained with master weights in float32");
            problems.push(config.mistake("master_dtype", message, Some("remove `master_dtype`".to_owned())));
        }
    }
    true
}

/// A note on training in f16; None for other types.
pub fn note_on_loss_scale(weights: DType, master: bool) -> Option<String> {
    let masters = if master { "master weights are kept in float32, and " } else { "" };
    let text = format!(
        "`torch_dtype: float16`: {masters}the loss is scaled, by {} at first; a step whose gradients are not finite is \
         skipped and halves the scale",
        LOSS_SCALE as u64
    );
    (weights == DType::F16).then_some(text)
}

/// The recipe of matrix products.
pub fn recipe(config: &Config) -> Recipe {
    let of = &config.precision;
    match of.recipe {
        config::Recipe::Bf16 => Recipe::Uniform,
        config::Recipe::Nvfp4 => Recipe::Nvfp4(Nvfp4 {
            emulate: of.fp4_backend == config::Fp4Backend::Emulate,
            stochastic: of.fp4_stochastic_rounding,
            skip_first: of.skip_quant_first_layers as usize,
            skip_last: of.skip_quant_last_layers as usize,
        }),
        config::Recipe::Fp8Hybrid => Recipe::Fp8Hybrid(Fp8Hybrid {
            gradient: match of.gradient_dtype {
                None | Some(MatmulDtype::Float8E5M2) => GradientFormat::E5M2,
                Some(MatmulDtype::Float8E4M3) => GradientFormat::E4M3,
                Some(MatmulDtype::BFloat16) => GradientFormat::Unquantised,
            },
            amax_history: of.fp8_amax_history as usize,
            skip_first: of.skip_quant_first_layers as usize,
            skip_last: of.skip_quant_last_layers as usize,
        }),
    }
}

/// Returns what is said of a model that drops weights of attention in training, for which there is no kernel.
pub(crate) fn note_on_attention_dropout(source: &ModelSource) -> Option<String> {
    let rate = |node: &graph::NodeSpec| node.attrs.optional_float("dropout").ok().flatten();
    let most = nodes(source).filter_map(rate).fold(0.0, f64::max);
    (most > 0.0).then(|| {
        format!(
            "the model's dropout of attention weights (`attn_pdrop` or `attention_dropout` in config.json, {most}) is not \
             applied in training: there is no kernel for it"
        )
    })
}

/// Notes on a recipe and a machine: units that it lacks, and layers that are better left alone.
pub fn notes_on_recipe(config: &Config, machine: &Machine) -> Vec<String> {
    let of = &config.precision;
    let mut notes = Vec::new();
    if of.recipe == config::Recipe::Fp8Hybrid && machine.arch == Arch::Cpu {
        let text = "`recipe: fp8_hybrid` on a CPU gives the codes of a GPU and multiplies the numbers that they stand for: \
                    a reference, no faster than bf16";
        notes.push(text.to_owned());
    }
    if of.recipe == config::Recipe::Nvfp4 {
        notes.push(note_on_four_bits(of.fp4_backend, machine));
    }
    let skips = of.skip_quant_first_layers > 0 || of.skip_quant_last_layers > 0;
    if of.recipe == config::Recipe::Nvfp4 && !config.lora.lora && !skips {
        let text = "full training in four bits is recommended with the last 15 % of the layers in bf16 \
                    (`skip_quant_last_layers`)";
        notes.push(text.to_owned());
    }
    notes
}

fn note_on_four_bits(backend: config::Fp4Backend, machine: &Machine) -> String {
    let emulated =
        "multiplies the numbers that codes of four bits stand for: the accuracy of `nvfp4`, slower than bf16";
    match (backend, machine.arch) {
        (config::Fp4Backend::Emulate, _) => format!("`fp4_backend: emulate` {emulated}"),
        (_, Arch::Cpu) => format!("`fp4_backend: {backend}` on a CPU is `emulate`: it {emulated}"),
        _ => format!(
            "`fp4_backend: {backend}` multiplies codes of four bits with cuBLASLt's block-scaled products, which were never run on \
             a Blackwell GPU before: the run compares them with the CPU first, and stops where they differ"
        ),
    }
}

/// A note on the products of the layers that a recipe leaves unquantized.
pub fn note_on_products(config: &Config, source: &ModelSource, options: &CompileOptions) -> Result<Option<String>> {
    let names = compiler::unquantised(&source.model, options)?;
    let listed: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    let text = format!(
        "`recipe: {}` leaves the products with {} in {}: routers and sizes that are no multiples of 16 are not quantised",
        config.precision.recipe,
        listed.join(", "),
        word(options.compute)
    );
    Ok((!names.is_empty()).then_some(text))
}

/// A note on products that units of four bits do not multiply, though the options ask for them.
pub fn note_on_experts(config: &Config, source: &ModelSource, options: &CompileOptions) -> Result<Option<String>> {
    let (of, backend) = (&config.precision, config.precision.fp4_backend);
    if of.recipe != config::Recipe::Nvfp4 || backend == config::Fp4Backend::Emulate {
        return Ok(None);
    }
    let text = format!(
        "`fp4_backend: {backend}` multiplies matrices of experts as `emulate` does: the numbers that codes of four bits stand \
         for, slower than bf16"
    );
    Ok(compiler::has_experts(&source.model, options)?.then_some(text))
}

/// Gradients of activations are kept in the type of the weights: another one is rejected, but where it says that a recipe
/// leaves them as they are.
pub fn check_gradients(config: &Config, weights: DType, problems: &mut Vec<Problem>) {
    let uniform = config.precision.recipe == config::Recipe::Bf16;
    if uniform && config.precision.gradient_dtype == Some(MatmulDtype::BFloat16) && weights != DType::BF16 {
        let own = word(weights);
        let message = format!("`gradient_dtype: bfloat16`, but the gradients of {own} weights are kept in {own}");
        let hint = "remove `gradient_dtype`, or set `torch_dtype: bfloat16`".to_owned();
        problems.push(config.mistake("gradient_dtype", message, Some(hint)));
    }
}

/// A note on the permission to give other bits in every run: nothing makes use of it.
pub fn note_on_determinism(config: &Config) -> Option<String> {
    let text = "`deterministic: false` changes nothing: every kernel in use gives the same bits each time, and none that \
                does not is there to be faster";
    (config.hardware.deterministic == Setting::Value(false)).then(|| text.to_owned())
}
