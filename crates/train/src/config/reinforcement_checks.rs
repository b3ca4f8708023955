//! Checks of the options of sampled answers and rewards, and what follows from them.

use options::{OptionValue, Reader, Section, Table};

use super::reinforcement::Reinforcement;
use super::{CAUSAL_LM, Config, PreferenceLoss, Task};

/// The losses that an option is for; none if it is for all.
fn losses_of(option: &str) -> &'static [PreferenceLoss] {
    use PreferenceLoss as L;
    match option {
        "epsilon" => &[L::Grpo, L::Bnpo, L::DrGrpo, L::Dapo, L::Luspo],
        "epsilon_high" => &[L::Grpo, L::Bnpo, L::DrGrpo, L::Dapo, L::Luspo, L::Cispo],
        "delta" => &[L::Grpo, L::Bnpo, L::DrGrpo, L::Dapo, L::Luspo],
        "sapo_temperature_pos" | "sapo_temperature_neg" => &[L::Sapo],
        "vespo_k_pos" | "vespo_k_neg" | "vespo_lambda_pos" | "vespo_lambda_neg" => &[L::Vespo],
        _ => &[],
    }
}

/// Options of samples that distillation on the student's own answers has, too.
const OF_SAMPLES: [&str; 4] = ["max_completion_length", "top_p", "top_k", "min_p"];

/// Reports mixtures of datasets by share: prompts are taken as they are in the files.
fn check_mixture(config: &Config, reader: &mut Reader) {
    let task = config.task;
    let lists = [("datasets", &config.data.datasets), ("validation_datasets", &config.data.validation_datasets)];
    for (list, datasets) in lists {
        for (index, dataset) in datasets.iter().flatten().enumerate() {
            let path = format!("{list}[{index}].repeats");
            if dataset.repeats != 1.0 && !reader.is_faulty(&path) {
                let message = format!("`{path}: {}` is not available yet with `task: {task}`", dataset.repeats);
                let hint = "remove it; `samples` takes fewer prompts of a dataset";
                reader.report(&path, message, Some(hint.to_owned()));
            }
        }
    }
}

/// Contradictions between the options of sampled answers, and what other tasks do not take.
pub(super) fn check_reinforcement(config: &Config, reader: &mut Reader) {
    let of = &config.reinforcement;
    let usual = Reinforcement::placeholder().values();
    let rows = Section::of::<Reinforcement>().rows.iter();
    let is_grpo = config.task == Task::Grpo;
    for (row, (value, default)) in rows.zip(of.values().into_iter().zip(usual)) {
        if value == default || reader.is_faulty(row.name) {
            continue;
        }
        if config.task == Task::Distil && row.name == "temperature" {
            continue;
        }
        if config.task == Task::Distil && OF_SAMPLES.contains(&row.name) {
            if config.distillation.lmbda == 0.0 {
                let message = format!("`{}` has no effect on `task: distil` without `lmbda`", row.name);
                reader.report(row.name, message, Some("set `lmbda: 0.5`, or remove it".into()));
            }
            continue;
        }
        if !is_grpo {
            let message = format!("`{}` has no effect on `task: {}`", row.name, config.task);
            reader.report(row.name, message, Some("set `task: grpo`, or remove it".into()));
            continue;
        }
        let losses = losses_of(row.name);
        if !losses.is_empty() && !config.preferences.loss_type.iter().any(|loss| losses.contains(loss)) {
            let loss = config.preferences.loss_type.first().map(|of| of.name()).unwrap_or_default();
            let message = format!("`{}` has no effect on `loss_type: {loss}`", row.name);
            reader.report(row.name, message, Some(format!("remove it, or take `loss_type: {}`", losses[0])));
        }
    }
    if !is_grpo {
        return;
    }
    check_mixture(config, reader);
    check_rewards(of, reader);
    check_environment(of, reader);
    let mut report = |path: &str, message: String, hint: &str| {
        if !reader.is_faulty(path) {
            reader.report(path, message, Some(hint.into()));
        }
    };
    if (of.temperature as f32) < f32::MIN_POSITIVE {
        let message = format!("`temperature: {:e}` is smaller than f32 holds", of.temperature);
        report("temperature", message, "0.01 is as good as greedy");
    }
    let held_out = config.data.validation_datasets.is_some() || config.data.validation_split_ratio > 0.0;
    if of.num_generations_eval.is_some() && !held_out {
        let message = "`num_generations_eval` has no effect without validation data".to_owned();
        report("num_generations_eval", message, "set `validation_datasets` or `validation_split_ratio`, or remove it");
    }
    let bounds = (of.vllm_importance_sampling_clip_min.unwrap_or(0.0), of.vllm_importance_sampling_clip_max);
    if bounds.0 > bounds.1 {
        let message =
            format!("`vllm_importance_sampling_clip_min: {}` is above the upper bound {}", bounds.0, bounds.1);
        report("vllm_importance_sampling_clip_min", message, "exchange both bounds");
    }
}

/// Says whether a text names something in a Python module or file.
fn is_name(text: &str) -> bool {
    text.split_once(':').is_some_and(|(module, name)| !module.is_empty() && !name.is_empty())
}

/// Contradictions of the options of environments.
fn check_environment(of: &Reinforcement, reader: &mut Reader) {
    let given = [("max_turns", of.max_turns != 8), ("max_turn_length", of.max_turn_length.is_some())];
    for (name, _) in given.iter().filter(|(_, is_given)| *is_given && of.environment.is_none()) {
        let message = format!("`{name}` has no effect without `environment`");
        reader.report(name, message, Some("set `environment`, or remove it".to_owned()));
    }
    if let Some(name) = of.environment.as_ref().filter(|name| !is_name(name)) {
        let message = format!("`environment` is `{name}`, expected `module:name`");
        reader.report(
            "environment",
            message,
            Some("name a class of a Python module, such as `my_game:Game`".to_owned()),
        );
    }
}

/// Contradictions within the list of reward functions.
fn check_rewards(of: &Reinforcement, reader: &mut Reader) {
    let mut report = |path: &str, message: String, hint: &str| {
        if !reader.is_faulty(path) {
            reader.report(path, message, Some(hint.into()));
        }
    };
    for (index, reward) in of.rewards.iter().flatten().enumerate() {
        let place = |name: &str| format!("rewards[{index}].{name}");
        let function = reward.function.as_str();
        let known = ["number", "regex", "json", "length", "environment"];
        let is_own = is_name(function);
        if function == "environment" && of.environment.is_none() {
            let message =
                format!("`rewards[{index}].function: environment` is the reward of an environment, and there is none");
            report(&place("function"), message, "set `environment`, or take another function");
        }
        if !is_own && !known.contains(&function) {
            let message = format!(
                "`rewards[{index}].function` is `{function}`, expected `module:name` or one of {}",
                known.join(", ")
            );
            report(&place("function"), message, "name a function of a Python module, such as `my_rewards:is_right`");
        }
        for (option, is_given, owner) in [
            ("field", reward.field.is_some(), "number"),
            ("pattern", reward.pattern.is_some(), "regex"),
            ("tokens", reward.tokens.is_some(), "length"),
        ] {
            if is_given && function != owner {
                let message = format!("`rewards[{index}].{option}` has no effect on `function: {function}`");
                report(&place(option), message, &format!("remove it; `{owner}` reads it"));
            }
            if !is_given && function == owner && owner != "number" {
                let message = format!("`rewards[{index}]`: `function: {owner}` needs `{option}`");
                report(&place("function"), message, &format!("add `{option}`"));
            }
        }
    }
}

/// The task that gives log-probabilities at the temperature of samples.
const TEMPERED_LM: &str = "tempered_lm";

impl Config {
    /// Returns the recorded task whose losses are the log-probabilities of a reference.
    pub(crate) fn scoring(&self) -> &'static str {
        let is_plain = self.task != Task::Grpo || self.reinforcement.temperature == 1.0;
        if is_plain { CAUSAL_LM } else { TEMPERED_LM }
    }
}
