//! LoRA adapters in PEFT's form: `adapter_config.json` read and written. Variants that the engine
//! does not compute are refused by name.

use std::path::Path;

use compiler::AdapterOptions;
use program::Program;
use serde_json::{Value, json};
use tensor::DType;

use crate::error::{Result, TrainError};

/// What PEFT puts in front of every module's name.
pub const PREFIX: &str = "base_model.model.";

/// Keys that are read, that say where an adapter comes from, or that only steer how its training began.
const UNDERSTOOD: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "inference_mode",
    "init_lora_weights",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
];

/// First values of an adapter that leave the base weights alone. The others subtract from them what the
/// adapter starts with, and do so again when PEFT loads it.
const PLAIN_STARTS: &[&str] = &["true", "false", "null", "\"gaussian\"", "\"orthogonal\"", "\"eva\""];

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

/// Reads the options of an adapter folder. Dropout is that of training; evaluation leaves it out.
pub fn read_options(folder: &Path, dtype: DType) -> Result<AdapterOptions> {
    let path = folder.join("adapter_config.json");
    let text = std::fs::read_to_string(&path).map_err(|e| TrainError::io("read", &path, e))?;
    let wrong = |what: String| TrainError::Usage(format!("{}: {what}", path.display()));
    let config: Value = serde_json::from_str(&text).map_err(|e| wrong(format!("this is no JSON: {e}")))?;
    if config["peft_type"] != "LORA" {
        return Err(wrong(format!("`peft_type` is {}, only \"LORA\" is supported", config["peft_type"])));
    }
    for (key, value) in config.as_object().into_iter().flatten() {
        let start = key == "init_lora_weights" && !PLAIN_STARTS.contains(&value.to_string().as_str());
        if start || (!UNDERSTOOD.contains(&key.as_str()) && !is_off(value)) {
            return Err(wrong(format!("`{key}: {value}` is not supported")));
        }
    }
    let rank = config["r"].as_u64().filter(|r| *r > 0).ok_or_else(|| wrong("there is no rank `r`".into()))?;
    let alpha = config["lora_alpha"].as_f64().ok_or_else(|| wrong("there is no `lora_alpha`".into()))?;
    let targets = match &config["target_modules"] {
        Value::String(all) if all == "all-linear" => vec![all.clone()],
        // A single text is a pattern for the whole name, even if it looks like a name.
        Value::String(pattern) => vec![format!("(?:{pattern})")],
        Value::Array(names) => names.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        other => return Err(wrong(format!("`target_modules` is {other}, expected names or a pattern"))),
    };
    let dropout = config["lora_dropout"].as_f64().unwrap_or(0.0);
    Ok(AdapterOptions { rank: rank as usize, alpha, dropout, dtype, targets })
}

/// The `adapter_config.json` of a trained adapter, as PEFT 0.21 reads it. `base` is where the base
/// model came from.
pub fn config(adapter: &AdapterOptions, program: &Program, base: &str) -> Value {
    // PEFT knows whole numbers as such.
    let alpha = if adapter.alpha.fract() == 0.0 { json!(adapter.alpha as u64) } else { json!(adapter.alpha) };
    json!({
        "alpha_pattern": {},
        "auto_mapping": null,
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "layers_pattern": null,
        "layers_to_transform": null,
        "lora_alpha": alpha,
        "lora_bias": false,
        "lora_dropout": adapter.dropout,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": adapter.rank,
        "rank_pattern": {},
        "revision": null,
        "target_modules": target_modules(program),
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": false,
    })
}

/// Names that select exactly the adapted modules: last components where that is enough, whole names
/// otherwise.
fn target_modules(program: &Program) -> Vec<String> {
    let adapted: Vec<&str> = program
        .parameters
        .iter()
        .filter(|slot| slot.adapter)
        .filter_map(|slot| slot.name.strip_prefix(PREFIX)?.strip_suffix(".lora_A.weight"))
        .collect();
    let last = |module: &str| module.rsplit('.').next().unwrap_or(module).to_owned();
    let mut short: Vec<String> = adapted.iter().map(|module| last(module)).collect();
    short.sort_unstable();
    short.dedup();
    let matrices = program.parameters.iter().filter(|slot| !slot.adapter && slot.weight.shape.len() == 2);
    let selected = matrices.filter_map(|slot| slot.name.strip_suffix(".weight")).filter(|m| short.contains(&last(m)));
    if selected.count() == adapted.len() {
        return short;
    }
    adapted.into_iter().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> std::result::Result<AdapterOptions, String> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("adapter_config.json"), text).unwrap();
        read_options(folder.path(), DType::F32).map_err(|e| e.to_string())
    }

    #[test]
    fn options_are_read_and_variants_refused_by_name() {
        let base = r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none""#;
        let options = read(&format!("{base}}}")).unwrap();
        assert_eq!((options.rank, options.scale(), options.targets), (4, 2.0, vec!["q_proj".to_owned()]));
        for (more, word) in [
            (r#", "use_rslora": true}"#, "use_rslora"),
            (r#", "use_dora": true}"#, "use_dora"),
            (r#", "modules_to_save": ["lm_head"]}"#, "modules_to_save"),
            (r#", "rank_pattern": {"q_proj": 8}}"#, "rank_pattern"),
            (r#", "bias": "all"}"#, "bias"),
            (r#", "init_lora_weights": "pissa"}"#, "init_lora_weights"),
            (r#", "arrow_config": {"top_k": 3}}"#, "arrow_config"),
            (r#", "of_a_later_peft": 1}"#, "of_a_later_peft"),
        ] {
            let message = read(&format!("{base}{more}")).unwrap_err();
            assert!(message.contains(word) && message.contains("not supported"), "{message}");
        }
        assert!(read(r#"{"peft_type": "IA3"}"#).unwrap_err().contains("IA3"));
    }
}
