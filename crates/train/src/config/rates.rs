//! Contradictions between options about learning rates of single parameters, and about the shares of datasets.

use options::Reader;

use super::{Config, Schedule};

/// Checks what concerns the learning rates; whether patterns match is seen with the model.
pub(super) fn check_rates(config: &Config, reader: &mut Reader) {
    let (of, lora) = (&config.optimizer, &config.lora);
    if lora.loraplus_lr_ratio.is_some() && !lora.lora && !reader.is_faulty("lora") {
        needs(reader, "loraplus_lr_ratio", "lora", "true");
    }
    if lora.lora_rslora && !lora.lora && !reader.is_faulty("lora") {
        needs(reader, "lora_rslora", "lora", "true");
    }
    if !of.frozen_parameters.is_empty() && lora.lora && !reader.is_faulty("lora") {
        let message =
            "`frozen_parameters` needs `lora: false`: with adapters the weights of the model stay as they are";
        let hint = "choose where adapters are with `lora_target_modules`, or set `lora: false`";
        reader.report("frozen_parameters", message, Some(hint.into()));
    }
    for (pattern, rate) in of.learning_rates.iter().flatten().filter(|(_, rate)| **rate <= 0.0) {
        let message = format!("`learning_rates`: `{pattern}` has the rate {rate}, expected a number above 0");
        let hint = "what is not to be trained goes into `frozen_parameters`";
        reader.report("learning_rates", message, Some(hint.into()));
    }
    if of.learning_rates.iter().flatten().next().is_some()
        && of.learning_rate == 0.0
        && !reader.is_faulty("learning_rate")
    {
        let message = "`learning_rates` are relative to `learning_rate`, which is 0";
        reader.report("learning_rates", message, Some("set `learning_rate` above 0".into()));
    }
    let is_waved = of.lr_scheduler_type == Schedule::CosineWithRestarts;
    if is_changed(config, reader, "lr_cycles") && !is_waved && !reader.is_faulty("lr_scheduler_type") {
        needs(reader, "lr_cycles", "lr_scheduler_type", "cosine_with_restarts");
    }
}

/// True if an option is written and has another value than its default, as a resolved file has all options.
pub(super) fn is_changed(config: &Config, reader: &Reader, name: &str) -> bool {
    let default = super::rows().find(|row| row.name == name).map(|row| row.default_json());
    reader.is_written(name) && default.as_ref() != config.to_json().get(name)
}

/// Checks the shares of datasets.
pub(super) fn check_shares(config: &Config, reader: &mut Reader) {
    const OPTION: &str = "interleave_probs";
    let Some(shares) = &config.data.interleave_probs else {
        if is_changed(config, reader, "interleave_stopping") && !reader.is_faulty(OPTION) {
            needs(reader, "interleave_stopping", OPTION, "[…]");
        }
        return;
    };
    let datasets = config.data.datasets.as_deref().unwrap_or_default();
    let sum: f64 = shares.iter().sum();
    let hint = "write a number above 0 for each of `datasets`, 1 in all";
    let problem = match () {
        () if shares.len() != datasets.len() && !reader.is_faulty("datasets") => {
            Some(format!("`{OPTION}` has {} numbers for {} datasets", shares.len(), datasets.len()))
        }
        () if shares.iter().any(|share| *share <= 0.0) => Some(format!("`{OPTION}` has a number that is not above 0")),
        () if (sum - 1.0).abs() > 1e-6 => Some(format!("`{OPTION}` adds up to {sum}")),
        () => None,
    };
    if let Some(message) = problem {
        reader.report(OPTION, message, Some(hint.into()));
    }
    if !config.data.shuffle && !reader.is_faulty("shuffle") {
        needs(reader, OPTION, "shuffle", "true");
    }
    for index in (0..datasets.len()).filter(|index| datasets[*index].repeats != 1.0) {
        let path = format!("datasets[{index}].repeats");
        if !reader.is_faulty(&path) {
            let message = format!("`{path}` has no effect: `{OPTION}` says how often documents come");
            reader.report(&path, message, Some(format!("remove it, or `{OPTION}`")));
        }
    }
}

/// Reports that option `path` needs `needed: value`. The problem is at `path`.
fn needs(reader: &mut Reader, path: &str, needed: &str, value: &str) {
    reader.report(path, format!("`{path}` needs `{needed}: {value}`"), Some(format!("set it, or remove `{path}`")));
}
