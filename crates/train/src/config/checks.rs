//! Contradictions between options. Each check speaks only of values that the user wrote and that could be read.
//!
//! What one option may be by itself is in its row. What depends on the machine or on the number of steps is checked
//! in a second stage, by [`Config::check_machine`] and [`Config::check_steps`].

use ::data::template::families;
use ::data::{AgentForm, Purpose};
use options::{Reader, Setting, Table};

use super::logging::is_address;
use super::sample_prompt::SamplePrompt;
use super::{
    self as config, Config, Dataset, DatasetType, Device, Fp4Backend, GradientCompression, Init, MatmulDtype,
    PreferenceSplit, Problem, Recipe, Reporter, Resume, RopeScaling, Schedule, ShardScope, Strategy, SystemPromptType,
    Truncation, TruncationMode,
};
use super::{pipeline, prompts};

/// All contradictions inside one configuration.
pub(super) fn check_options(config: &Config, reader: &mut Reader) {
    super::combinations::check(config, reader);
    super::preference_checks::check_preferences(config, reader);
    super::reinforcement_checks::check_reinforcement(config, reader);
    super::distillation_checks::check_distillation(config, reader);
    check_recompute(config, reader);
    check_quantisation(config, reader);
    check_recipe_options(config, reader);
    super::quantize_aware::check_quantize_aware(config, reader);
    check_sharding(config, reader);
    check_nodes(config, reader);
    check_ranks(config, reader);
    check_adapter(config, reader);
    super::rates::check_rates(config, reader);
    super::rates::check_shares(config, reader);
    super::streaming::check_streaming(config, reader);
    check_lengths(config, reader);
    check_device(config, reader);
    check_conversations(config, reader);
    check_cadence(config, reader);
    check_samples(config, reader);
    check_preferences(config, config.task.purpose(), reader);
    if let Some(requested @ [_, _, ..]) = config.logging.report_to.as_deref()
        && requested.contains(&Reporter::None)
    {
        let hint = Some("remove `none`, or the others".to_string());
        reader.report("report_to", "`report_to` has `none` next to trackers", hint);
    }
    if config.run.output_dir.is_empty() {
        let hint = Some("such as `output`; `.` is the working directory".to_owned());
        reader.report("output_dir", "`output_dir` is empty, expected a folder", hint);
    }
    check_rows(config, reader);
    check_hidden(config, reader);
    if !config.logging.has_valid_metrics_address() {
        let hint =
            Some("such as `9400`, `127.0.0.1:9400`, or `0.0.0.0:9400` for every network of the machine".to_owned());
        let address = config.logging.metrics_address.as_deref().unwrap_or_default();
        let message = format!("`metrics_address` is `{address}`, expected `host:port` or a port");
        reader.report("metrics_address", message, hint);
    }
    if config.training.max_steps == 0 && !reader.is_faulty("max_steps") {
        let hint = Some("-1 takes the number from `num_epochs` and the data".to_string());
        reader.report("max_steps", "`max_steps: 0` would train nothing", hint);
    }
    for (list, datasets) in
        [("datasets", &config.data.datasets), ("validation_datasets", &config.data.validation_datasets)]
    {
        if let Some([]) = datasets.as_deref() {
            reader.report(list, format!("`{list}` is empty"), Some(format!("add a dataset, or remove `{list}`")));
        }
        for (index, dataset) in datasets.iter().flatten().enumerate() {
            check_dataset(dataset, &format!("{list}[{index}]"), reader);
            prompts::check(config, dataset, &format!("{list}[{index}]"), reader);
        }
    }
    if let Some(total) = config.training.fixed_steps()
        && !["max_steps", "warmup_steps", "warmup_ratio", "cooldown_steps", "compression_warmup_steps"]
            .iter()
            .any(|path| reader.is_faulty(path))
        && let Some((path, message, hint)) = steps_problem(config, total)
        && total > 0
    {
        reader.report(path, message, Some(hint));
    }
}

/// Reports addresses whose passwords were hidden when a run wrote its options down.
fn check_hidden(config: &Config, reader: &mut Reader) {
    let values = config.to_json();
    for (name, value) in values.as_object().into_iter().flatten() {
        let text = value.to_string();
        if options::hides(&text) && !reader.is_faulty(name) {
            let message = format!("`{name}` has `***` for a password, which no file of a run keeps");
            reader.report(name, message, Some("write the address again, with its password".to_owned()));
        }
    }
}

/// Reports that option `path` needs `needed: value`. The problem is at `path`.
fn report_need(reader: &mut Reader, path: &str, needed: &str, value: &str) {
    let message = format!("`{path}: true` needs `{needed}: {value}`");
    reader.report(path, message, Some(format!("set `{needed}: {value}`, or remove `{path}`")));
}

fn check_recompute(config: &Config, reader: &mut Reader) {
    let of = &config.recompute;
    // From the inside out, so that a part is reported against the nearest whole.
    let parts = [
        ("recompute_swiglu", of.recompute_swiglu, "recompute_ffn", of.recompute_ffn),
        ("recompute_qkv", of.recompute_qkv, "recompute_att", of.recompute_att),
        ("recompute_ffn", of.recompute_ffn, "recompute_block", of.recompute_block),
        ("recompute_att", of.recompute_att, "recompute_block", of.recompute_block),
        ("recompute_rmsnorm", of.recompute_rmsnorm, "recompute_block", of.recompute_block),
    ];
    // Over a whole that is left open a part is reported against the layer.
    let inner = [
        ("recompute_swiglu", of.recompute_swiglu, of.recompute_ffn),
        ("recompute_qkv", of.recompute_qkv, of.recompute_att),
    ];
    let open = inner.into_iter().filter(|(_, _, whole)| whole.is_auto());
    let over_open = open.map(|(part, value, _)| (part, value, "recompute_block", of.recompute_block));
    for (part, part_value, whole, whole_value) in parts.into_iter().chain(over_open) {
        if (part_value, whole_value) == (Setting::Value(false), Setting::Value(true)) {
            let message = format!("`{part}: false` contradicts `{whole}: true`, which includes it");
            reader.report(part, message, Some(format!("remove one of `{part}` and `{whole}`")));
        }
    }
    let memory_limit = config.offload.memory_limit.map(|limit| limit.0);
    if memory_limit == Some(0) && !reader.is_faulty("memory_limit") {
        let hint = Some("leave it out to use all memory".to_string());
        reader.report("memory_limit", "`memory_limit: 0` leaves no room for anything", hint);
    }
    if (of.recompute_lora, of.recompute_block) == (Setting::Value(true), Setting::Value(false)) {
        report_need(reader, "recompute_lora", "recompute_block", "true");
    }
}

fn check_quantisation(config: &Config, reader: &mut Reader) {
    let of = &config.qlora;
    let formats = [("qlora_fp4", of.qlora_fp4), ("qlora_fp8", of.qlora_fp8), ("qlora_bnb", of.qlora_bnb)];
    let chosen: Vec<&str> = formats.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
    for second in chosen.iter().skip(1) {
        let message = format!("`{second}` and `{}` are two formats for the same weights", chosen[0]);
        reader.report(second, message, Some("keep one of them".into()));
    }
    if let (Some(format), false) = (chosen.first(), config.lora.lora) {
        report_need(reader, format, "lora", "true");
    }
    let takes_four = config.precision.recipe != Recipe::Nvfp4 || reader.is_faulty("recipe");
    if of.qlora_fp4 && of.qlora_four_over_six == Setting::Value(true) && !takes_four {
        let message = "`qlora_four_over_six: true` contradicts `recipe: nvfp4`, which would round its blocks again: tiles \
                       of the recipe have 6 as their largest value";
        let hint = "remove `qlora_four_over_six`, or set it to `false`";
        reader.report("qlora_four_over_six", message, Some(hint.into()));
    }
    // What was resolved is written with its defaults.
    let changed = [
        ("qlora_block_size", of.qlora_block_size != 128, "qlora_fp8"),
        ("qlora_bnb_block_size", of.qlora_bnb_block_size != 64, "qlora_bnb"),
        ("qlora_bnb_double_quant", !of.qlora_bnb_double_quant, "qlora_bnb"),
        ("qlora_four_over_six", of.qlora_four_over_six != Setting::Auto, "qlora_fp4"),
    ];
    let Some(first) = chosen.first() else { return };
    for (detail, _, format) in changed.into_iter().filter(|(_, changed, format)| *changed && !chosen.contains(format)) {
        if !reader.is_faulty(detail) {
            let message = format!("`{detail}` has no effect on `{first}`");
            reader.report(detail, message, Some(format!("remove `{detail}`, or set `{format}: true` instead")));
        }
    }
}

/// Options that say how a recipe quantises, next to one that does not take them.
fn check_recipe_options(config: &Config, reader: &mut Reader) {
    const FP8: &[Recipe] = &[Recipe::Fp8Hybrid];
    const FP4: &[Recipe] = &[Recipe::Nvfp4];
    const BOTH: &[Recipe] = &[Recipe::Fp8Hybrid, Recipe::Nvfp4];
    let of = &config.precision;
    if reader.is_faulty("recipe") {
        return;
    }
    // FP4 has one format for gradients.
    let gradients = match of.gradient_dtype {
        Some(MatmulDtype::Float8E4M3 | MatmulDtype::Float8E5M2) => true,
        Some(MatmulDtype::BFloat16) => of.recipe == Recipe::Nvfp4,
        None => false,
    };
    // What was resolved is written with its defaults.
    let changed = [
        ("fp8_amax_history", of.fp8_amax_history != 1024, FP8),
        ("gradient_dtype", gradients, FP8),
        ("fp4_backend", of.fp4_backend != Fp4Backend::Cutlass, FP4),
        ("fp4_stochastic_rounding", !of.fp4_stochastic_rounding, FP4),
        ("skip_quant_first_layers", of.skip_quant_first_layers != 0, BOTH),
        ("skip_quant_last_layers", of.skip_quant_last_layers != 0, BOTH),
    ];
    for (path, _, takers) in changed.into_iter().filter(|(_, changed, takers)| *changed && !takers.contains(&of.recipe))
    {
        if !reader.is_faulty(path) {
            let takers: Vec<String> = takers.iter().map(|recipe| format!("`recipe: {recipe}`")).collect();
            let takers = takers.join(" or ");
            let message = format!("`{path}` says how {takers} quantises, but the recipe is `{}`", of.recipe);
            reader.report(path, message, Some(format!("set {takers}, or remove `{path}`")));
        }
    }
}

fn check_sharding(config: &Config, reader: &mut Reader) {
    let sharding = &config.sharding;
    let implied = [("shard_weights", sharding.shard_weights, 3), ("shard_gradients", sharding.shard_gradients, 2)];
    for (name, on, level) in implied {
        let (Setting::Value(on), Setting::Value(written)) = (on, sharding.zero_level) else { continue };
        if on != (written >= level) && !reader.is_faulty("zero_level") {
            let message = format!("`{name}: {on}` contradicts `zero_level: {written}`");
            let hint = format!("remove `{name}`, or remove `zero_level`");
            reader.report(name, message, Some(hint));
        }
    }
    let shared = match (sharding.zero_level, sharding.shard_gradients, sharding.shard_weights) {
        (Setting::Value(level), ..) if level > 1 => Some(format!("zero_level: {level}")),
        (_, Setting::Value(true), _) => Some("shard_gradients: true".to_owned()),
        (_, _, Setting::Value(true)) => Some("shard_weights: true".to_owned()),
        _ => None,
    };
    let compression = sharding.gradient_compression;
    let path = "compression_warmup_steps";
    if let Setting::Value(steps) = sharding.compression_warmup_steps
        && compression != GradientCompression::OneBit
        && !["gradient_compression", path].iter().any(|path| reader.is_faulty(path))
    {
        let message = format!("`{path}: {steps}` has no effect with `gradient_compression: {}`", compression.name());
        let hint = format!("remove `{path}`, or set `gradient_compression: onebit`");
        reader.report(path, message, Some(hint));
    }
    let alone = config.nodes() > 1 && config.local_ranks() == 1;
    if let Some(shared) = shared.filter(|_| alone && sharding.shard_scope == Setting::Value(ShardScope::Node)) {
        let message =
            format!("`shard_scope: node` with `{shared}`, but each node has one rank, which would share nothing");
        reader.report("shard_scope", message, Some("set `shard_scope: world`, or remove it".into()));
    }
}

/// Checks the options of several nodes: requirements, and combinations that are not supported.
fn check_nodes(config: &Config, reader: &mut Reader) {
    let of = &config.multi_node.distributed;
    let (gpus, of_node) = (config.hardware.gpus, of.gpus_per_node);
    if of_node != 0 && reader.is_written("gpus") && of_node != gpus && !reader.is_faulty("gpus") {
        let message = format!("`distributed.gpus_per_node: {of_node}` contradicts `gpus: {gpus}`");
        reader.report("distributed.gpus_per_node", message, Some("remove one of them".into()));
    }
    let nodes = of.num_nodes;
    if let Some(least) = of.min_nodes.filter(|least| *least > nodes) {
        let message = format!("`distributed.min_nodes: {least}` is more than `distributed.num_nodes: {nodes}`");
        reader.report("distributed.min_nodes", message, Some("lower it".into()));
    }
    super::launcher::check_max_nodes(config, reader);
    if of.max_restarts > 0 && matches!(config.run.resume_from_checkpoint, Resume::From(_)) {
        let message =
            "`distributed.max_restarts` does not go with a `resume_from_checkpoint` that names a folder".to_owned();
        let hint = "set `resume_from_checkpoint: true`: it takes the newest checkpoint of `output_dir`";
        reader.report("distributed.max_restarts", message, Some(hint.into()));
    }
    let address = &of.ray_address;
    let known = ["auto", "local"].contains(&address.as_str()) || address.strip_prefix("ray://").is_some_and(is_address);
    if !known {
        let message = format!("`distributed.ray_address: {address}`, expected `auto`, `local` or `ray://host:port`");
        reader.report("distributed.ray_address", message, None);
    }
    if of.most_nodes() > 1 && config.hardware.device != Setting::Value(Device::Cpu) && !reader.is_faulty("device") {
        check_nodes_of_gpus(config, reader);
    }
}

/// Checks the options of nodes with GPUs.
fn check_nodes_of_gpus(config: &Config, reader: &mut Reader) {
    if config.hardware.gpus == 0 && config.multi_node.distributed.gpus_per_node == 0 && !reader.is_faulty("gpus") {
        let message = "`gpus: 0` is every visible GPU, but all nodes have as many".to_owned();
        reader.report("gpus", message, Some("name the number of GPUs of a node".into()));
    }
    let of = &config.sharding;
    for (path, copies) in [("memcpy_all_gather", of.memcpy_all_gather), ("memcpy_send_recv", of.memcpy_send_recv)] {
        if copies == Setting::Value(true) && !reader.is_faulty(path) {
            let message = format!("`{path}: true` copies inside one process, but there are several nodes");
            reader.report(path, message, Some(format!("remove `{path}`: nodes use NCCL")));
        }
    }
}

/// Ranks on one CPU at most: each has memory and threads of its own.
const MOST_RANKS: u32 = 64;

/// Checks the options of several ranks: requirements, and combinations that are not supported.
fn check_ranks(config: &Config, reader: &mut Reader) {
    let gpus = config.devices() as u32;
    // `gpus: 0` is the number that will be found.
    let several = config.sequence() > 1 || config.stages() > 1;
    let open = config.ranks() <= 1 && (config.hardware.gpus == 0 || !several);
    if open || reader.is_faulty("gpus") || reader.is_faulty("device") {
        return;
    }
    if gpus > MOST_RANKS && config.hardware.device == Setting::Value(Device::Cpu) {
        let message = format!("`gpus: {gpus}`, but `device: cpu` runs at most {MOST_RANKS} ranks");
        reader.report("gpus", message, Some(format!("set `gpus` to at most {MOST_RANKS}")));
    }
    for (path, message, hint) in refused_with_ranks(config) {
        if !reader.is_faulty(path) {
            reader.report(path, message, Some(hint));
        }
    }
}

/// Options that do not go with several ranks yet: each with a message and a hint.
pub(super) fn refused_with_ranks(config: &Config) -> Vec<(&'static str, String, String)> {
    let gpus = config.devices();
    let mut refused = Vec::new();
    let sequence = config.sequence();
    if !gpus.is_multiple_of(sequence) {
        let message = format!("`sequence_parallel_size: {sequence}` does not divide `gpus: {gpus}`");
        let hint =
            format!("set `gpus` to a multiple of {sequence}, or `sequence_parallel_size` to a divisor of {gpus}");
        refused.push(("sequence_parallel_size", message, hint));
    }
    refused.extend(gradients_of_nodes(config));
    refused.extend(pipeline::refused(config));
    refused
}

/// The refusal of gradients on the host if each node has all shards: the update sums over nodes on the device.
fn gradients_of_nodes(config: &Config) -> Option<(&'static str, String, String)> {
    let (nodes, of) = (config.nodes(), &config.sharding);
    let with = match of.gradient_compression {
        compression if compression.is_between_nodes() => format!("gradient_compression: {}", compression.name()),
        _ if of.shard_scope == Setting::Value(ShardScope::Node) => "shard_scope: node".to_owned(),
        _ => return None,
    };
    (nodes > 1 && config.offload.offload_grads == Setting::Value(true)).then(|| {
        let message = format!("`offload_grads: true` is not available yet with `{with}` and {nodes} nodes");
        ("offload_grads", message, "remove `offload_grads`, or set `shard_scope: world`".to_owned())
    })
}

/// Checks that prompts are only given together with evaluations, which answer them.
fn check_samples(config: &Config, reader: &mut Reader) {
    let of = &config.logging;
    if of.sample_prompts.is_empty() || reader.is_faulty("sample_prompts") {
        return;
    }
    if let Some(index) = of.sample_prompts.iter().position(SamplePrompt::is_empty) {
        let hint = Some("write a text there, or remove it".to_owned());
        reader.report("sample_prompts", format!("`sample_prompts[{index}]` is empty"), hint);
    }
    if config.training.eval_strategy == Strategy::No && !reader.is_faulty("eval_strategy") {
        let message = "`sample_prompts` are answered at every evaluation, but `eval_strategy: no` has none".to_owned();
        let hint = "set `eval_strategy: steps`, or remove `sample_prompts`".to_owned();
        reader.report("sample_prompts", message, Some(hint));
    }
}

fn check_adapter(config: &Config, reader: &mut Reader) {
    let of = &config.lora;
    if of.adapter.is_some() && !of.lora && !reader.is_faulty("lora") {
        let hint = Some("set `lora: true`, or remove `adapter`".to_string());
        reader.report("adapter", "`adapter` names an adapter to continue, but `lora` is false", hint);
    }
    let has_targets = !of.lora_target_modules.is_empty() || !of.lora_target_parameters.is_empty();
    if of.lora && of.adapter.is_none() && !has_targets && !reader.is_faulty("lora_target_modules") {
        let hint = Some("`[all-linear]` takes every linear but the head".to_string());
        reader.report("lora_target_modules", "`lora_target_modules: []` would train nothing", hint);
    }
    if of.lora_dora && !of.lora && !reader.is_faulty("lora") {
        report_need(reader, "lora_dora", "lora", "true");
    }
    for (option, given) in
        [("lora_target_parameters", !of.lora_target_parameters.is_empty()), ("train_router", of.train_router)]
    {
        if given && !of.lora && !reader.is_faulty("lora") {
            report_need(reader, option, "lora", "true");
        }
    }
    if !of.modules_to_save.is_empty() && !of.lora && !reader.is_faulty("lora") {
        report_need(reader, "modules_to_save", "lora", "true");
    }
    if of.modules_to_save.iter().any(String::is_empty) && !reader.is_faulty("modules_to_save") {
        let hint = Some("write the end of a module's name, such as `lm_head`".to_string());
        reader.report(
            "modules_to_save",
            "`modules_to_save` has an empty name, which every module's name ends with",
            hint,
        );
    }
    if !config.model.new_tokens.is_empty() && of.lora && of.modules_to_save.is_empty() && of.adapter.is_none() {
        let message = "with `lora: true` the rows of `new_tokens` are not trained";
        let hint = "add `modules_to_save: [embed_tokens, lm_head]`, or set `lora: false`";
        reader.report("new_tokens", message, Some(hint.into()));
    }
    if of.merge_adapter && !of.lora && !reader.is_faulty("lora") {
        report_need(reader, "merge_adapter", "lora", "true");
    }
}

fn check_lengths(config: &Config, reader: &mut Reader) {
    let of = &config.model;
    if let (Setting::Value(length), Setting::Value(most)) = (of.sequence_len, of.max_model_len)
        && length > most
    {
        let hint = Some(format!("set `sequence_len` to {most} or less, or raise `max_model_len`"));
        let message = format!("`sequence_len: {length}` is longer than `max_model_len: {most}`");
        reader.report("sequence_len", message, hint);
    }
    let by_name = matches!(of.rope_scaling, Some(RopeScaling::Method(_)));
    if by_name && of.max_model_len.is_auto() && !reader.is_faulty("max_model_len") && !reader.is_faulty("rope_scaling")
    {
        let hint = Some("add `max_model_len`, or give `rope_scaling` as a mapping with its factor".to_string());
        reader.report(
            "rope_scaling",
            "`rope_scaling` by name needs `max_model_len`, from which its factor follows",
            hint,
        );
    }
    if of.init_projections_to_zero && of.init != Init::Random && !reader.is_faulty("init") {
        report_need(reader, "init_projections_to_zero", "init", "random");
    }
}

/// Promises that only a GPU can keep, of those that the user made: (option, why).
pub(super) fn gpu_promises(config: &Config) -> Vec<(&'static str, &'static str)> {
    let (offload, sharding) = (&config.offload, &config.sharding);
    let on = |setting: Setting<bool>| setting == Setting::Value(true);
    let moved = "moves tensors from GPU to host memory";
    let copied = "copies between GPUs";
    let promises = [
        ("offload_residual", on(offload.offload_residual), moved),
        ("offload_master", on(offload.offload_master), moved),
        ("offload_quants", on(offload.offload_quants), moved),
        ("offload_optimizer", on(offload.offload_optimizer), moved),
        ("offload_grads", on(offload.offload_grads), moved),
        ("use_zero_copy", offload.use_zero_copy, "lets a GPU read host memory"),
        ("memcpy_all_gather", on(sharding.memcpy_all_gather), copied),
        ("memcpy_send_recv", on(sharding.memcpy_send_recv), copied),
    ];
    promises.into_iter().filter(|(_, made, _)| *made).map(|(name, _, why)| (name, why)).collect()
}

fn check_device(config: &Config, reader: &mut Reader) {
    if config.hardware.device == Setting::Value(Device::Cpu) {
        for (path, why) in gpu_promises(config) {
            let hint = Some(format!("remove `{path}`, or `device: cpu`"));
            reader.report(path, format!("`{path}` {why}, but `device` is cpu"), hint);
        }
    }
}

fn check_conversations(config: &Config, reader: &mut Reader) {
    let of = &config.template;
    if let Err((name, problem)) = super::loss_rule(&of.loss_scale) {
        let hint = Some("weights are numbers from 0, by role or regular expression".to_string());
        reader.report("loss_scale", format!("`loss_scale`: `{name}`: {problem}"), hint);
    }
    if let Some(name) = of.agent_template.as_deref().filter(|name| AgentForm::named(name).is_none()) {
        let hint = Some(format!("known are {}", AgentForm::NAMES.join(", ")));
        reader.report("agent_template", format!("there is no agent template `{name}`"), hint);
    }
    let packed =
        config.data.sample_packing && (reader.is_written("sample_packing") || !config.run.apply_recommended_values);
    if of.padding_free && packed && !reader.is_faulty("sample_packing") {
        let hint = Some(
            "packed rows have no padding between documents: remove `padding_free`, or set `sample_packing: false`"
                .to_string(),
        );
        reader.report("padding_free", "`padding_free` has no effect on packed rows", hint);
    }
    check_template(config, reader);
}

fn check_template(config: &Config, reader: &mut Reader) {
    let Setting::Value(name) = &config.template.template else { return };
    if config::is_template_file(name) || families::named(name).is_some() || reader.is_faulty("template") {
        return;
    }
    let names = families::NAMES.iter().map(|known| known.name);
    let hint = match options::nearest(name, names.clone()) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("known are {}, and files `*.jinja`", names.collect::<Vec<_>>().join(", ")),
    };
    reader.report("template", format!("there is no template `{name}`"), Some(hint));
}

/// Options that say when and how, next to one that says never.
fn check_cadence(config: &Config, reader: &mut Reader) {
    let (training, run, optimizer) = (&config.training, &config.run, &config.optimizer);
    // What was resolved is written with its defaults.
    let inert = [
        ("eval_steps", training.eval_steps != 100, training.eval_strategy != Strategy::Steps, "eval_strategy: steps"),
        ("save_steps", run.save_steps != 50, run.save_strategy != Strategy::Steps, "save_strategy: steps"),
        (
            "early_stopping_threshold",
            training.early_stopping_threshold != 0.0,
            training.early_stopping_patience.is_none(),
            "early_stopping_patience: 3",
        ),
        (
            "final_lr_fraction",
            optimizer.final_lr_fraction != 0.0,
            optimizer.lr_scheduler_type == Schedule::Constant && optimizer.cooldown_steps.unwrap_or_else(|| 0) == 0,
            "cooldown_steps: 100",
        ),
    ];
    for (path, is_changed, is_off, needed) in inert {
        if is_changed && is_off && !reader.is_faulty(path) {
            let hint = format!("set `{needed}`, or remove `{path}`");
            let (option, _) = needed.split_once(':').expect("an option and its value");
            reader.report(path, format!("`{path}` has no effect with `{option}` as it is"), Some(hint));
        }
    }
    if reader.is_written("hub_private_repo") && run.push_to_hub.is_none() && !run.hub_private_repo {
        let hint = Some("set `push_to_hub: owner/name`, or remove `hub_private_repo`".to_owned());
        reader.report("hub_private_repo", "`hub_private_repo` has no effect without `push_to_hub`", hint);
    }
    if let Some(name) = run.push_to_hub.as_deref().filter(|name| name.matches('/').count() != 1) {
        let message = format!("`push_to_hub: {name}` is not the name of a repository");
        reader.report("push_to_hub", message, Some("names on the Hub have the form `owner/name`".to_owned()));
    }
    let on_evaluations = [
        ("early_stopping_patience", training.early_stopping_patience.is_some()),
        ("load_best_model_at_end", run.load_best_model_at_end),
    ];
    let held_out = config.data.validation_datasets.is_some() || config.data.validation_split_ratio > 0.0;
    let lacks = match (training.eval_strategy, held_out) {
        (Strategy::No, _) => Some(("`eval_strategy: no`", "set `eval_strategy: steps` or `epoch`")),
        (_, false) => Some(("no validation data", "set `validation_split_ratio` or `validation_datasets`")),
        _ => None,
    };
    for (path, on) in on_evaluations {
        if let Some((found, hint)) = lacks.filter(|_| on && !reader.is_faulty("validation_split_ratio")) {
            let message = format!("`{path}` needs evaluations, but there is {found}");
            reader.report(path, message, Some(format!("{hint}, or remove `{path}`")));
        }
    }
}

/// Places that data cannot be read from, and what can be done.
const UNREADABLE: &[(&str, &str)] = &[
    ("hdfs://", "copy it to a local folder, or to a bucket"),
    ("az://", "copy it to a local folder, or to a bucket of S3 or GCS"),
    ("gcs://", "write it as `gs://bucket/path`"),
    ("http://", "fetch it, and give the file"),
    ("https://", "fetch it, and give the file; a set on the hub is written `owner/name`"),
];

fn check_dataset(dataset: &Dataset, path: &str, reader: &mut Reader) {
    let at = |name: &str| format!("{path}.{name}");
    let of = dataset.path.as_str();
    if let Some((start, hint)) = UNREADABLE.iter().find(|(start, _)| of.starts_with(start)) {
        let message = format!("`{}: {of}`: data cannot be read from `{start}`", at("path"));
        reader.report(&at("path"), message, Some((*hint).to_owned()));
    }
    if reader.is_faulty(&at("type")) {
        return;
    }
    if dataset.r#type == DatasetType::Instruction {
        for (name, given) in
            [("instruction_field", &dataset.instruction_field), ("output_field", &dataset.output_field)]
        {
            if given.is_none() && !reader.is_faulty(&at(name)) {
                let message = format!("`{}` is required for type `instruction`", at(name));
                reader.report(&at("type"), message, Some(format!("add `{name}: ...`, the name of a column")));
            }
        }
    }
    let kind = dataset.r#type;
    for (row, value) in Dataset::ROWS.iter().zip(dataset.values()) {
        if let Some(owner) = row.owner
            && !row.is_of(kind.name())
            && kind != DatasetType::Auto
            && value != row.default_json()
            && !reader.is_faulty(&at(row.name))
        {
            let message = format!("`{}` belongs to type `{owner}`, but the type is `{kind}`", at(row.name));
            let first = row.owners().next().unwrap_or(owner);
            reader.report(&at(row.name), message, Some(format!("remove `{}`, or set `type: {first}`", row.name)));
        }
    }
    if path.starts_with("validation") && dataset.repeats != 1.0 && !reader.is_faulty(&at("repeats")) {
        let message = format!("`{}` has no effect: an evaluation takes every document once", at("repeats"));
        reader.report(&at("repeats"), message, Some("remove it, or set `samples`".to_owned()));
    }
    let source = dataset.system_prompt_type;
    let prompts = [
        (SystemPromptType::Field, "system_prompt_field", dataset.system_prompt_field.is_some()),
        (SystemPromptType::Fixed, "system_prompt", dataset.system_prompt.is_some()),
    ];
    for (of, name, given) in prompts {
        if source == Some(of) && !given && !reader.is_faulty(&at(name)) {
            let message = format!("`system_prompt_type: {of}` needs `{name}`");
            reader.report(&at("system_prompt_type"), message, Some(format!("add `{name}: ...`")));
        }
        if source != Some(of) && given && !reader.is_faulty(&at("system_prompt_type")) {
            let message = format!("`{}` has no effect without `system_prompt_type: {of}`", at(name));
            reader.report(&at(name), message, Some(format!("add `system_prompt_type: {of}`, or remove `{name}`")));
        }
    }
}

/// Options of rows that the task does not have.
fn check_preferences(config: &Config, purpose: Purpose, reader: &mut Reader) {
    let (of_text, task) = (purpose == Purpose::Documents, config.task.name());
    let hint = if of_text { "`task: dpo` and others compare answers" } else { "`truncation_mode` says what is kept" };
    let never_cut = matches!(purpose, Purpose::Documents | Purpose::Scores);
    for (option, has_no_effect) in [
        ("preference_split", of_text && config.data.preference_split != PreferenceSplit::Spans),
        ("truncation_mode", never_cut && config.template.truncation_mode != TruncationMode::KeepStart),
        ("truncation_strategy", !of_text && config.template.truncation_strategy != Truncation::Delete),
    ] {
        if has_no_effect && !reader.is_faulty(option) {
            let message = format!("`{option}` has no effect on the rows of `{task}`");
            reader.report(option, message, Some(format!("remove `{option}`: {hint}")));
        }
    }
}

/// The contradiction between the parts of the schedule and the number of steps, if there is one:
/// (option, message, hint).
fn steps_problem(config: &Config, total: u64) -> Option<(&'static str, String, String)> {
    let (warmup, cooldown) = (config.optimizer.warmup(total), config.optimizer.cooldown(total));
    let compressed_from = config.sharding.compression_warmup(total, warmup).filter(|first| *first >= total);
    if warmup.saturating_add(cooldown) <= total {
        let first = compressed_from?;
        let message = format!("nothing is compressed in {total} steps: the warm-up of `onebit` has {first}");
        let hint = "shorten it, or train for more steps".to_owned();
        return Some(("compression_warmup_steps", message, hint));
    }
    let path = match (config.optimizer.warmup_steps, config.optimizer.cooldown_steps) {
        (Setting::Value(_), _) => "warmup_steps",
        (_, Setting::Value(_)) => "cooldown_steps",
        _ => "warmup_ratio",
    };
    let message = format!("{warmup} steps of warm-up and {cooldown} of cool-down do not fit into {total} steps");
    Some((path, message, "shorten them, or train for more steps".into()))
}

impl Config {
    /// The schedule against the number of steps, for runs whose length follows from their data.
    pub fn check_steps(&self, total: u64) -> Vec<Problem> {
        let found = steps_problem(self, total);
        found.into_iter().map(|(path, message, hint)| self.mistake(path, message, Some(hint))).collect()
    }

    /// The problem that there is nothing to train on, for runs that are not handed their batches.
    pub fn check_datasets(&self) -> Vec<Problem> {
        let hint = Some("add a list of datasets, each with `path` and `type`".to_string());
        match self.data.datasets {
            Some(_) => Vec::new(),
            None => vec![self.mistake("datasets", "`datasets` is required: there is nothing to train on", hint)],
        }
    }
}

/// Numbers of rows that say the same twice, or that have another meaning in other trainers.
fn check_rows(config: &Config, reader: &mut Reader) {
    const PAIR: [&str; 2] = ["per_device_train_batch_size", "gradient_accumulation_steps"];
    let of = &config.training;
    if let (Some(rows), Some(other)) = (of.batch_size, PAIR.iter().find(|name| reader.is_written(name))) {
        let message = format!("`batch_size: {rows}` next to `{other}`: both say how many rows a step has");
        let hint = "`batch_size` counts the rows of all devices; remove one of them";
        reader.report("batch_size", message, Some(hint.to_owned()));
    }
    if let Setting::Value(rows) = of.micro_batch_size
        && of.batch_size.is_none()
        && !reader.is_written(PAIR[0])
    {
        let message = format!(
            "`micro_batch_size: {rows}` alone may mean the rows of a micro-step, as here, or a factor of the rows of a step, as in \
             Axolotl"
        );
        let hint = format!(
            "for the latter write `{}: {rows}`; for the former say also how many rows a step has, with `batch_size` or \
             `{}`",
            PAIR[0], PAIR[0]
        );
        reader.report("micro_batch_size", message, Some(hint));
    } else if of.batch_size.is_none()
        && let Some((path, message, hint)) = config.wrong_micro_batch()
    {
        reader.report(path, message, Some(hint));
    }
}
