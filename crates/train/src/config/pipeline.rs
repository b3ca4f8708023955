//! Combinations with `pipeline_parallel_size` that are not supported, as far as the options alone show it. The compiler
//! rejects those that depend on the model.

use options::Setting;

use super::{Config, Dtype, GradientCompression, Recipe};

/// The options that do not go with stages: each with a message and a hint.
pub(super) fn refused(config: &Config) -> Vec<(&'static str, String, String)> {
    let (stages, gpus) = (config.stages(), config.devices());
    if stages == 1 {
        return Vec::new();
    }
    let written = format!("pipeline_parallel_size: {stages}");
    let mut refused: Vec<(&'static str, String, String)> = others(config)
        .into_iter()
        .filter(|(_, on, _)| *on)
        .map(|(path, _, given)| {
            let message = format!("`{given}` is not available yet with `{written}`");
            (path, message, format!("remove `{path}`, or set `pipeline_parallel_size: 1`"))
        })
        .collect();
    if gpus != stages && config.nodes() == 1 {
        let message = format!("`{written}` needs as many GPUs, one for each stage, but `gpus` is {gpus}");
        refused.push(("pipeline_parallel_size", message, format!("set `gpus: {stages}`")));
    }
    refused
}

/// Path, whether it is on, and how it is written.
fn others(config: &Config) -> Vec<(&'static str, bool, String)> {
    let (sharding, offload, qlora) = (&config.sharding, &config.offload, &config.qlora);
    let on = |setting: Setting<bool>| setting == Setting::Value(true);
    let off = |setting: Setting<bool>| setting == Setting::Value(false);
    let mut others: Vec<(&'static str, bool, String)> = [
        ("shard_gradients", on(sharding.shard_gradients)),
        ("shard_weights", on(sharding.shard_weights)),
        ("offload_residual", on(offload.offload_residual)),
        ("offload_master", on(offload.offload_master)),
        ("offload_optimizer", on(offload.offload_optimizer)),
        ("offload_grads", on(offload.offload_grads)),
        ("offload_quants", on(offload.offload_quants)),
        ("lora_dora", config.lora.lora_dora),
        ("qlora_bnb", qlora.qlora_bnb),
        ("qlora_fp8", qlora.qlora_fp8),
        ("qlora_fp4", qlora.qlora_fp4),
        ("apply_recommended_values", config.run.apply_recommended_values),
    ]
    .map(|(path, on)| (path, on, format!("{path}: true")))
    .into();
    others.extend(
        [
            // What crosses is copied from GPU to GPU.
            ("memcpy_all_gather", off(sharding.memcpy_all_gather)),
            ("memcpy_send_recv", off(sharding.memcpy_send_recv)),
        ]
        .map(|(path, on)| (path, on, format!("{path}: false"))),
    );
    let level = match sharding.zero_level {
        Setting::Value(level) => level,
        Setting::Auto => 1,
    };
    let (recipe, compression) = (config.precision.recipe, sharding.gradient_compression);
    let sequence = config.sequence();
    others.extend([
        ("zero_level", level > 1, format!("zero_level: {level}")),
        ("recipe", recipe != Recipe::Bf16, format!("recipe: {recipe}")),
        (
            "quantize_aware",
            config.precision.quantize_aware.is_some(),
            format!("quantize_aware: {}", config.precision.quantize_aware.map_or("", |of| of.name())),
        ),
        ("torch_dtype", config.model.torch_dtype == Setting::Value(Dtype::Float16), "torch_dtype: float16".to_owned()),
        ("sequence_parallel_size", sequence > 1, format!("sequence_parallel_size: {sequence}")),
        (
            "gradient_compression",
            compression != GradientCompression::None,
            format!("gradient_compression: {}", compression.name()),
        ),
        ("distributed.num_nodes", config.nodes() > 1, format!("distributed.num_nodes: {}", config.nodes())),
        ("sample_prompts", !config.logging.sample_prompts.is_empty(), "sample_prompts".to_owned()),
    ]);
    others
}
