//! Writes `rope_scaling` of the options into a model's configuration, in its spelling, and computes the number of
//! positions that a scaling gives. Does not know what a scaling computes.

use serde_json::{Map, Value, json};

use crate::config::{Config, RopeScaling};
use crate::error::{Result, TrainError};

const THETA: &str = "rope_theta";

/// Where transformers 4 and 5 keep the scaling.
const OLD: &str = "rope_scaling";
const NEW: &str = "rope_parameters";

/// The model's configuration as the options change it.
pub fn apply(config: &Config, fields: &Value) -> Result<Value> {
    let scaling = match &config.model.rope_scaling {
        None => return Ok(fields.clone()),
        Some(RopeScaling::Fields(given)) => given.clone(),
        Some(RopeScaling::Method(method)) => by_name(config, fields, &method.to_string())?,
    };
    let mut changed = fields.clone();
    if fields.get(NEW).is_some_and(Value::is_object) {
        let mut parameters = scaling;
        if let Some(theta) = fields[NEW].get(THETA) {
            parameters.entry(THETA).or_insert(theta.clone());
        }
        changed[NEW] = Value::Object(parameters);
        changed.as_object_mut().and_then(|fields| fields.remove(OLD));
    } else {
        changed[OLD] = Value::Object(scaling);
    }
    Ok(changed)
}

/// The scaling by which the model's positions become `max_model_len`.
fn by_name(config: &Config, fields: &Value, method: &str) -> Result<Map<String, Value>> {
    let wrong = |message: String, hint: &str| {
        Err(TrainError::Config(vec![config.mistake("rope_scaling", message, Some(hint.to_owned()))]))
    };
    let wanted = config.model.max_model_len.value().copied().expect("required when options are loaded");
    let Some(own) = fields.get("max_position_embeddings").and_then(Value::as_u64) else {
        let message =
            format!("`rope_scaling: {method}` needs the model's own length, and its configuration names none");
        return wrong(message, "give `rope_scaling` as a mapping with its factor");
    };
    if u64::from(wanted) <= own {
        let message = format!("`rope_scaling: {method}` would stretch {own} positions to `max_model_len: {wanted}`");
        return wrong(message, &format!("set `max_model_len` above {own}, or remove `rope_scaling`"));
    }
    let mut scaling = Map::new();
    scaling.insert("rope_type".into(), json!(method));
    scaling.insert("factor".into(), json!(f64::from(wanted) / own as f64));
    if method == "yarn" {
        scaling.insert("original_max_position_embeddings".into(), json!(own));
    }
    Ok(scaling)
}

/// The longest row that a configuration allows: its positions, or those to which it stretches them.
pub fn stretched_positions(fields: &Value) -> Option<usize> {
    let own = fields.get("max_position_embeddings").and_then(Value::as_u64)? as f64;
    let scaling = fields.get(NEW).filter(|v| v.is_object()).or_else(|| fields.get(OLD));
    let number = |name: &str| scaling.and_then(|s| s.get(name)).and_then(Value::as_f64);
    let kind = scaling.and_then(|s| s.get("rope_type").or_else(|| s.get("type"))).and_then(Value::as_str);
    let factor = number("factor").unwrap_or(1.0);
    let stretched = match kind {
        Some("linear" | "dynamic") => own * factor,
        Some("yarn" | "llama3" | "longrope") => number("original_max_position_embeddings").unwrap_or(own) * factor,
        _ => own,
    };
    Some(stretched.max(own).floor() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Task;

    fn config(text: &str) -> Config {
        Config::load(&format!("model: m\n{text}"), "run.yaml", Task::Sft, &[]).expect("a valid configuration")
    }

    #[test]
    fn a_method_by_name_stretches_the_model_to_max_model_len() {
        let old = json!({"max_position_embeddings": 2048, "rope_theta": 5e5, "rope_scaling": null});
        let changed = apply(&config("rope_scaling: yarn\nmax_model_len: 8192"), &old).unwrap();
        let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048});
        assert_eq!((&changed["rope_scaling"], &changed["rope_theta"]), (&yarn, &json!(5e5)));
        assert_eq!(stretched_positions(&changed), Some(8192));
        let new =
            json!({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}});
        let changed = apply(&config("rope_scaling: dynamic\nmax_model_len: 3072"), &new).unwrap();
        assert_eq!(changed["rope_parameters"], json!({"rope_type": "dynamic", "factor": 1.5, "rope_theta": 5e5}));
        assert_eq!(stretched_positions(&changed), Some(3072));
        let short = apply(&config("rope_scaling: linear\nmax_model_len: 2048"), &new).unwrap_err().to_string();
        assert!(short.contains("would stretch 2048 positions") && short.contains("above 2048"), "{short}");
    }

    #[test]
    fn a_mapping_replaces_what_the_model_has() {
        let model = json!({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 2.0}});
        assert_eq!(stretched_positions(&model), Some(128));
        let given = config("rope_scaling: '{\"factor\": 3.0, \"type\": \"yarn\"}'");
        let changed = apply(&given, &model).unwrap();
        assert_eq!(changed["rope_scaling"], json!({"factor": 3.0, "type": "yarn"}));
        assert_eq!(apply(&config(""), &model).unwrap(), model);
    }
}
