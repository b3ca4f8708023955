//! LoRA adapters in PEFT format: reads and writes `adapter_config.json`. Unsupported variants are rejected by name.

use std::path::{Path, PathBuf};

use compiler::{AdapterExceptions, AdapterOf, AdapterOptions, AdapterRules};
use data::safetensors::Weights;
use graph::{AdapterForm, AdapterPlace};
use program::{ParameterSlot, Program};
use serde_json::{Map, Value, json};
use tensor::DType;

use crate::error::{Result, TrainError};

/// The prefix that PEFT puts before every module's name.
pub const PREFIX: &str = "base_model.model.";

/// PEFT's name of the copy of a tied embedding that the head reads. It loads no adapter without it.
pub const TIED_HEAD: &str = "base_model.model.lm_head.weight";

/// The end of the name of a module's magnitudes.
pub const MAGNITUDE: &str = ".lora_magnitude_vector";

/// The file of an adapter's weights, and the one that PEFT wrote earlier.
const WEIGHTS: &str = "adapter_model.safetensors";
const PICKLED: &str = "adapter_model.bin";

/// Keys that are read, that say where an adapter comes from, or that only steer how its training began.
const UNDERSTOOD: &[&str] = &[
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "target_parameters",
    "task_type",
    "use_dora",
    "use_rslora",
];

/// First values of an adapter that leave the base weights alone. The others subtract from them what the
/// adapter starts with, and do so again when PEFT loads it.
const PLAIN_STARTS: &[&str] = &["true", "false", "null", "\"gaussian\"", "\"orthogonal\"", "\"eva\""];

/// The largest rank: no model has wider layers.
const MOST_RANKS: u64 = 1 << 18;

/// The largest alpha: with a larger one the smallest change of an adapter is all that a model computes.
const MOST_ALPHA: f64 = 16_777_216.0;

/// True for the values by which PEFT says that a variant is not in use.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text == "none",
        Value::Array(items) => items.is_empty(),
        Value::Object(entries) => entries.is_empty(),
        _ => false,
    }
}

/// Reads the options of an adapter folder. Dropout is that of training; evaluation leaves it out. `form` is what the model
/// says of its weights.
pub fn read_options(folder: &Path, dtype: DType, form: &AdapterForm) -> Result<AdapterOptions> {
    let (path, config) = read_config(folder)?;
    let wrong = |what: String| TrainError::Usage(format!("{}: {what}", path.display()));
    if config["peft_type"] != "LORA" {
        return Err(wrong(format!("`peft_type` is {}, only \"LORA\" is supported", config["peft_type"])));
    }
    for (key, value) in config.as_object().into_iter().flatten() {
        let start = key == "init_lora_weights" && !PLAIN_STARTS.contains(&value.to_string().as_str());
        if start || (!UNDERSTOOD.contains(&key.as_str()) && !is_off(value)) {
            return Err(wrong(format!("`{key}: {value}` is not supported")));
        }
    }
    let rank = config["r"].as_u64().filter(|r| (1..=MOST_RANKS).contains(r));
    let expected = format!("expected a whole number from 1 to {MOST_RANKS}");
    let rank = rank.ok_or_else(|| wrong(format!("the rank `r` is {}, {expected}", config["r"])))?;
    let alpha = config["lora_alpha"].as_f64().ok_or_else(|| wrong("there is no `lora_alpha`".into()))?;
    if !(0.0..=MOST_ALPHA).contains(&alpha) {
        return Err(wrong(format!("`lora_alpha` is {alpha}, expected a number from 0 to {MOST_ALPHA}")));
    }
    let targets = names(&config, "target_modules").map_err(&wrong)?;
    let parameters = match &config["target_parameters"] {
        Value::Null => Vec::new(),
        Value::Array(names) => names.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        other => return Err(wrong(format!("`target_parameters` is {other}, expected names of parameters"))),
    };
    if targets.is_empty() && parameters.is_empty() {
        return Err(wrong("there are no `target_modules` and no `target_parameters`".into()));
    }
    let dropout = config["lora_dropout"].as_f64().unwrap_or(0.0);
    if !(0.0..=1.0).contains(&dropout) {
        return Err(wrong(format!("`lora_dropout` is {dropout}, expected a number from 0 to 1")));
    }
    let rank_stabilised = config["use_rslora"] == true;
    let exceptions = exceptions(&config).map_err(&wrong)?;
    let saved = match &config["modules_to_save"] {
        Value::Null => Vec::new(),
        // PEFT adds the usual names of heads to those of a classifier.
        Value::Array(_) if config["task_type"] == "SEQ_CLS" => vec!["score".to_owned()],
        Value::Array(names) => names.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        other => return Err(wrong(format!("`modules_to_save` is {other}, expected names of modules"))),
    };
    let magnitudes = config["use_dora"] == true;
    let rank = rank as usize;
    Ok(AdapterOptions {
        rank,
        alpha,
        rank_stabilised,
        magnitudes,
        dropout,
        dtype,
        targets,
        parameters,
        saved,
        exceptions,
        slots: None,
        form: form.clone(),
    })
}

/// The weights of an adapter folder. Errors: one without a file that is read.
pub fn weights(folder: &Path) -> Result<Weights> {
    if folder.is_dir() && !folder.join(WEIGHTS).is_file() {
        let found = if folder.join(PICKLED).is_file() { "there is adapter_model.bin" } else { "there is none" };
        return Err(TrainError::Usage(format!(
            "{}: the weights of an adapter are read from {WEIGHTS}, and {found}\n  hint: a `.bin` is a pickle, which may run \
             code when it is opened; PEFT writes the other form: `PeftModel.from_pretrained(model, folder)\
             .save_pretrained(new_folder, safe_serialization=True)`",
            folder.display()
        )));
    }
    Weights::open(folder).map_err(TrainError::model_file)
}

/// The base model that an adapter's configuration names.
pub fn base_of(folder: &Path) -> Result<Option<String>> {
    let (_, config) = read_config(folder)?;
    Ok(config["base_model_name_or_path"].as_str().map(str::to_owned))
}

/// True if an adapter's configuration says that the adapted weights are kept as [in, out].
pub fn says_transposed(folder: &Path) -> Result<bool> {
    let (_, config) = read_config(folder)?;
    Ok(config["fan_in_fan_out"] == true)
}

/// `adapter_config.json` of a folder, and its path.
fn read_config(folder: &Path) -> Result<(PathBuf, Value)> {
    let path = folder.join("adapter_config.json");
    let text = data::small_file::read_text(&path).map_err(|e| TrainError::io("read", &path, e))?;
    let config = serde_json::from_str(&text)
        .map_err(|e| TrainError::Usage(format!("{}: this is not valid JSON: {e}", path.display())))?;
    Ok((path, config))
}

/// A list of modules. A single text is a pattern for the whole name, even if it looks like a name.
fn names(config: &Value, key: &str) -> std::result::Result<Vec<String>, String> {
    match &config[key] {
        Value::Null => Ok(Vec::new()),
        Value::String(all) if all == "all-linear" => Ok(vec![all.clone()]),
        Value::String(pattern) => Ok(vec![format!("(?:{pattern})")]),
        Value::Array(names) => Ok(names.iter().filter_map(Value::as_str).map(str::to_owned).collect()),
        other => Err(format!("`{key}` is {other}, expected names or a pattern")),
    }
}

fn exceptions(config: &Value) -> std::result::Result<AdapterExceptions, String> {
    let pattern = |key: &str| {
        let entries = config[key].as_object().into_iter().flatten();
        let number = |(pattern, value): (&String, &Value)| match value.as_f64().filter(|x| *x > 0.0) {
            Some(number) => Ok((pattern.clone(), number)),
            None => Err(format!("`{key}` has {value} for `{pattern}`, expected a number above 0")),
        };
        entries.map(number).collect::<std::result::Result<Vec<_>, _>>()
    };
    let layers = match &config["layers_to_transform"] {
        Value::Number(only) => Some(vec![only.as_u64().unwrap_or(u64::MAX) as usize]),
        Value::Array(layers) if !layers.is_empty() => {
            Some(layers.iter().filter_map(Value::as_u64).map(|n| n as usize).collect())
        }
        _ => None,
    };
    let layers_pattern = match &config["layers_pattern"] {
        Value::String(name) if !name.is_empty() => vec![name.clone()],
        Value::Array(names) => names.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => Vec::new(),
    };
    let (ranks, alphas) = (pattern("rank_pattern")?, pattern("alpha_pattern")?);
    if let Some((name, alpha)) = alphas.iter().find(|(_, alpha)| *alpha > MOST_ALPHA) {
        return Err(format!("`alpha_pattern` has {alpha} for `{name}`, expected a number up to {MOST_ALPHA}"));
    }
    if let Some((name, rank)) = ranks.iter().find(|(_, rank)| !(1.0..=MOST_RANKS as f64).contains(rank)) {
        return Err(format!("`rank_pattern` has {rank} for `{name}`, expected a whole number from 1 to {MOST_RANKS}"));
    }
    Ok(AdapterExceptions {
        rank_pattern: ranks.into_iter().map(|(name, rank)| (name, rank as usize)).collect(),
        alpha_pattern: alphas,
        excluded: names(config, "exclude_modules")?,
        layers,
        layers_pattern,
    })
}

/// The `adapter_config.json` of a trained adapter, as PEFT 0.21 reads it. `base` is where the base
/// model came from; `partial`: the program is one of several parts of it, whose modules may have the same names; `others`:
/// adapted modules of such parts; `embedding`: the table of tokens, where the head is the same.
pub fn config(
    adapter: &AdapterOptions,
    program: &Program,
    base: &str,
    (partial, others): (bool, Vec<String>),
    embedding: Option<&str>,
) -> Result<Value> {
    let (rules, adapter) = (AdapterRules::new(adapter)?, &compiler::converted(adapter)?);
    // PEFT knows whole numbers as such.
    let number = |x: f64| if x.fract() == 0.0 { json!(x as u64) } else { json!(x) };
    let of = &adapter.exceptions;
    let alphas: Map<String, Value> = of.alpha_pattern.iter().map(|(name, x)| (name.clone(), number(*x))).collect();
    let ranks: Map<String, Value> = of.rank_pattern.iter().map(|(name, rank)| (name.clone(), json!(rank))).collect();
    // What is trained of a tied embedding is the head's, too.
    let ties = embedding.is_some_and(|table| adapter.saves(table).is_some());
    let parameters = (!adapter.parameters.is_empty()).then_some(&adapter.parameters);
    let targets = [target_modules(program, &rules, &adapter.form, partial)?, others].concat();
    Ok(json!({
        "alpha_pattern": alphas,
        "auto_mapping": null,
        "base_model_name_or_path": base,
        "bias": "none",
        "ensure_weight_tying": ties,
        "fan_in_fan_out": is_transposed(program, &rules)?,
        "inference_mode": true,
        "init_lora_weights": true,
        "layers_pattern": null,
        "layers_to_transform": null,
        "lora_alpha": number(adapter.alpha),
        "lora_bias": false,
        "lora_dropout": adapter.dropout,
        "modules_to_save": saved_modules(adapter, ties),
        "peft_type": "LORA",
        "r": adapter.rank,
        "rank_pattern": ranks,
        "revision": null,
        "target_modules": targets,
        "target_parameters": parameters,
        "task_type": if adapter.saved.iter().any(|name| name == "score") { "SEQ_CLS" } else { "CAUSAL_LM" },
        "use_dora": adapter.magnitudes,
        "use_rslora": adapter.rank_stabilised,
    }))
}

/// The modules that are trained in full, as PEFT names them: a tied head goes with its embedding.
fn saved_modules(adapter: &AdapterOptions, ties: bool) -> Option<Vec<&str>> {
    let names = adapter.saved.iter().map(String::as_str).filter(|name| !ties || *name != "lm_head");
    (!adapter.saved.is_empty()).then(|| names.collect())
}

/// The matrices A and B of an adapter.
pub fn matrices_of<'a>(program: &'a Program, of: &AdapterOf) -> [&'a ParameterSlot; 2] {
    ["lora_A", "lora_B"].map(|which| matrix(program, of, which).expect("an adapted weight has both"))
}

fn matrix<'a>(program: &'a Program, of: &AdapterOf, which: &str) -> Option<&'a ParameterSlot> {
    program.layout.parameter(&format!("{PREFIX}{}.{which}.weight", of.module))
}

/// The adapter of a base weight of a program. Tables have none, whatever the targets: they are no linears.
pub fn adapter_of(program: &Program, rules: &AdapterRules, slot: &ParameterSlot) -> Result<Option<AdapterOf>> {
    if slot.adapter || slot.saved || slot.shape().len() < 2 {
        return Ok(None);
    }
    Ok(rules.of(&slot.name)?.filter(|of| matrix(program, of, "lora_A").is_some()))
}

/// The DoRA magnitudes of an adapted weight's outputs, by the weight's name.
pub fn magnitude_of<'a>(program: &'a Program, weight: &str) -> Option<&'a ParameterSlot> {
    program.layout.parameter(&format!("{PREFIX}{}{MAGNITUDE}", weight.strip_suffix(".weight")?))
}

/// True if adapted weights of modules are kept as [in, out].
fn is_transposed(program: &Program, rules: &AdapterRules) -> Result<bool> {
    for slot in program.layout.parameters.iter().filter(|slot| slot.transposed) {
        if adapter_of(program, rules, slot)?.is_some_and(|of| !of.by_parameter) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Names that select exactly the adapted modules: last components where that is enough, whole names
/// otherwise.
fn target_modules(program: &Program, rules: &AdapterRules, form: &AdapterForm, partial: bool) -> Result<Vec<String>> {
    let (mut adapted, mut modules) = (Vec::new(), Vec::new());
    for slot in program.layout.parameters.iter().filter(|slot| !slot.adapter && slot.shape().len() == 2) {
        let Some(AdapterPlace::Matrix { module }) = form.place(&slot.name) else { continue };
        adapted.extend(adapter_of(program, rules, slot)?.filter(|of| !of.by_parameter).map(|of| of.module));
        modules.extend(form.is_linear(&module).then_some(module));
    }
    let last = |module: &str| module.rsplit('.').next().unwrap_or(module).to_owned();
    let mut short: Vec<String> = adapted.iter().map(|module| last(module)).collect();
    short.sort_unstable();
    short.dedup();
    let selected = modules.iter().filter(|module| short.contains(&last(module)));
    Ok(if !partial && selected.count() == adapted.len() { short } else { adapted })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> std::result::Result<AdapterOptions, String> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("adapter_config.json"), text).unwrap();
        read_options(folder.path(), DType::F32, &AdapterForm::default()).map_err(|e| e.to_string())
    }

    #[test]
    fn options_are_read_and_variants_refused_by_name() {
        let base = r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none""#;
        let options = read(&format!("{base}}}")).unwrap();
        assert_eq!((options.rank, options.alpha, options.targets), (4, 8.0, vec!["q_proj".to_owned()]));
        let more = r#", "use_rslora": true, "rank_pattern": {"v_proj": 2}, "layers_to_transform": 1, "exclude_modules": "a.*"}"#;
        let options = read(&format!("{base}{more}")).unwrap();
        assert_eq!((options.rank_stabilised, options.exceptions.layers), (true, Some(vec![1])));
        assert_eq!(options.exceptions.rank_pattern, [("v_proj".to_owned(), 2)]);
        assert_eq!(options.exceptions.excluded, ["(?:a.*)"]);
        let options =
            read(&format!(r#"{base}, "modules_to_save": ["lm_head"], "ensure_weight_tying": true}}"#)).unwrap();
        assert_eq!(options.saved, ["lm_head"]);
        assert!(read(&format!(r#"{base}, "use_dora": true}}"#)).unwrap().magnitudes && !options.magnitudes);
        let wrong = read(&format!(r#"{base}, "modules_to_save": "lm_head"}}"#)).unwrap_err();
        assert!(wrong.contains("`modules_to_save` is \"lm_head\", expected names"), "{wrong}");
        for (more, word) in [
            (r#", "lora_bias": true}"#, "lora_bias"),
            (r#", "trainable_token_indices": [1]}"#, "trainable_token_indices"),
            (r#", "layer_replication": [[0, 1]]}"#, "layer_replication"),
            (r#", "bias": "all"}"#, "bias"),
            (r#", "init_lora_weights": "pissa"}"#, "init_lora_weights"),
            (r#", "arrow_config": {"top_k": 3}}"#, "arrow_config"),
            (r#", "of_a_later_peft": 1}"#, "of_a_later_peft"),
        ] {
            let message = read(&format!("{base}{more}")).unwrap_err();
            assert!(message.contains(word) && message.contains("not supported"), "{message}");
        }
        let zero = read(&format!(r#"{base}, "rank_pattern": {{"q_proj": 0}}}}"#)).unwrap_err();
        assert!(zero.contains("`rank_pattern` has 0 for `q_proj`"), "{zero}");
        assert!(read(r#"{"peft_type": "IA3"}"#).unwrap_err().contains("IA3"));
    }
}
