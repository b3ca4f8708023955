//! `rope_scaling` of the options: the scaling that they ask for, in a model's configuration. Does not know what a scaling
//! computes, nor how a configuration spells it.

use serde_json::{Map, Value};

use crate::config::{Config, RopeScaling};
use crate::error::{Result, TrainError};
use crate::model::hf_config::HfConfig;

/// The model's configuration as the options change it.
pub fn apply(config: &Config, fields: &Value) -> Result<Value> {
    let model = HfConfig(fields.clone());
    if config.model.rope_scaling.is_some() && model.rotates_by_kind() {
        let message = "`rope_scaling` is one for all layers, and the model has a rotation for each kind".to_owned();
        let hint = Some("change `rope_parameters` in the model's config.json".to_owned());
        return Err(TrainError::Config(vec![config.mistake("rope_scaling", message, hint)]));
    }
    let scaling = match &config.model.rope_scaling {
        None => return Ok(model.0),
        Some(RopeScaling::Fields(given)) => given.clone(),
        Some(RopeScaling::Method(method)) => by_name(config, &model, &method.to_string())?,
    };
    Ok(model.with_scaling(scaling).0)
}

/// The scaling by which the model's positions become `max_model_len`.
fn by_name(config: &Config, model: &HfConfig, method: &str) -> Result<Map<String, Value>> {
    let wrong = |message: String, hint: &str| {
        Err(TrainError::Config(vec![config.mistake("rope_scaling", message, Some(hint.to_owned()))]))
    };
    let wanted = config.model.max_model_len.value().copied().expect("required when options are loaded");
    let Some(own) = model.max_positions() else {
        let message =
            format!("`rope_scaling: {method}` needs the model's own length, and its configuration names none");
        return wrong(message, "give `rope_scaling` as a mapping with its factor");
    };
    if wanted as usize <= own {
        let message = format!("`rope_scaling: {method}` would stretch {own} positions to `max_model_len: {wanted}`");
        return wrong(message, &format!("set `max_model_len` above {own}, or remove `rope_scaling`"));
    }
    Ok(HfConfig::scaling(method, f64::from(wanted) / own as f64, own))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

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
        assert_eq!(HfConfig(changed).stretched_positions(), Some(8192));
        let new =
            json!({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}});
        let changed = apply(&config("rope_scaling: dynamic\nmax_model_len: 3072"), &new).unwrap();
        assert_eq!(changed["rope_parameters"], json!({"rope_type": "dynamic", "factor": 1.5, "rope_theta": 5e5}));
        assert_eq!(HfConfig(changed).stretched_positions(), Some(3072));
        let short = apply(&config("rope_scaling: linear\nmax_model_len: 2048"), &new).unwrap_err().to_string();
        assert!(short.contains("would stretch 2048 positions") && short.contains("above 2048"), "{short}");
    }

    #[test]
    fn a_rotation_for_each_kind_of_layer_is_not_replaced() {
        let model = json!({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}});
        let error = apply(&config("rope_scaling: '{\"factor\": 3.0, \"type\": \"linear\"}'"), &model).unwrap_err();
        assert!(error.to_string().contains("has a rotation for each kind"), "{error}");
        assert_eq!(apply(&config(""), &model).unwrap(), model);
    }

    #[test]
    fn a_mapping_replaces_what_the_model_has() {
        let model = json!({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 2.0}});
        assert_eq!(HfConfig(model.clone()).stretched_positions(), Some(128));
        let given = config("rope_scaling: '{\"factor\": 3.0, \"type\": \"yarn\"}'");
        let changed = apply(&given, &model).unwrap();
        assert_eq!(changed["rope_scaling"], json!({"factor": 3.0, "type": "yarn"}));
        assert_eq!(apply(&config(""), &model).unwrap(), model);
    }
}
