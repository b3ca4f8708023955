//! Options that the user wrote and that have no effect next to others, a sentence each. Those that change what is trained
//! on are errors of `checks.rs` and `prompts.rs` instead; these may stand in a file that is used for several runs.

use data::Writing;
use options::{Setting, Table};

use super::{Config, Distributed, LossScale, OptimizerKind, Reporter, Strategy, rows};

/// Options that one condition switches off: what they are, and the condition in words, where it holds.
type Group = (&'static [&'static str], Option<String>);

/// Returns a sentence for each condition that leaves options of the user without effect.
pub fn notes(config: &Config) -> Vec<String> {
    let (training, data) = (&config.training, &config.data);
    let reports = |to: Reporter| config.logging.report_to.iter().flatten().any(|of| *of == to);
    let when = |holds: bool, words: &str| holds.then(|| words.to_owned());
    let held_out = data.validation_datasets.is_some() || data.validation_split_ratio > 0.0;
    let of = &config.qlora;
    let groups: [Group; 12] = [
        (
            &["lora_rank", "lora_alpha", "lora_dropout", "lora_dtype", "lora_target_modules", "recompute_lora"],
            when(!config.lora.lora, "with `lora: false`"),
        ),
        (
            &["normuon_momentum", "normuon_beta2", "normuon_cautious_wd"],
            when(config.optimizer.optimizer != OptimizerKind::NorMuon, "without `optimizer: normuon`"),
        ),
        (&["warmup_ratio"], when(!config.optimizer.warmup_steps.is_auto(), "next to `warmup_steps`")),
        (&["num_epochs"], when(training.fixed_steps().is_some(), "next to `max_steps`")),
        (&["validation_split_ratio"], when(data.validation_datasets.is_some(), "next to `validation_datasets`")),
        (
            &["eval_steps", "eval_strategy", "eval_seed"],
            when(!held_out, "without validation data (`validation_datasets` or `validation_split_ratio`)"),
        ),
        (&["eval_seed"], when(held_out && training.eval_strategy == Strategy::No, "with `eval_strategy: no`")),
        (
            &["qlora_block_size", "qlora_bnb_block_size", "qlora_bnb_double_quant", "qlora_four_over_six"],
            when(
                !(of.qlora_bnb || of.qlora_fp8 || of.qlora_fp4),
                "without `qlora_bnb: true`, `qlora_fp8: true` or `qlora_fp4: true`",
            ),
        ),
        (
            &["node_rank", "rendezvous", "timeout", "min_nodes", "worker_output_dir"],
            when(config.multi_node.distributed.most_nodes() == 1, "with `distributed.num_nodes: 1`"),
        ),
        (&["sample_tokens"], when(config.logging.sample_prompts.is_empty(), "without `sample_prompts`")),
        (&["wandb_project", "wandb_name"], when(!reports(Reporter::Wandb), "without `wandb` in `report_to`")),
        (&["aim_experiment", "aim_repo", "aim_name"], when(!reports(Reporter::Aim), "without `aim` in `report_to`")),
    ];
    let mut notes: Vec<String> =
        groups.into_iter().filter_map(|(names, why)| note(config, names, &why?)).chain(lengths(config)).collect();
    let alone = config.ranks() <= 1 && config.hardware.gpus != 0;
    let shared = ["zero_level", "shard_weights", "shard_gradients", "shard_scope", "gradient_compression"];
    notes.extend(alone.then(|| note(config, &shared, "on one device")).flatten());
    notes
}

/// Returns sentences on options of the chat template and of conversations where no set has any, by how the sets are written.
pub fn notes_on_template(config: &Config, writings: &[Writing]) -> Vec<String> {
    let mut notes = Vec::new();
    const OF_TEMPLATE: [&str; 5] = ["template", "system", "clock", "response_prefix", "agent_template"];
    if !writings.is_empty() && writings.iter().all(|of| *of == Writing::Column) {
        notes.extend(note(config, &["truncation_strategy"], "because texts are always split"));
    }
    if writings.is_empty() || writings.contains(&Writing::Template) {
        return notes;
    }
    let mut names = OF_TEMPLATE.to_vec();
    if config.template.loss_scale != LossScale::Default {
        names.push("loss_scale");
    }
    notes.extend(note(config, &names, "because no dataset is written with the chat template"));
    notes
}

/// A sentence on those of some options that the user changed.
fn note(config: &Config, names: &[&str], why: &str) -> Option<String> {
    let changed: Vec<String> =
        names.iter().filter(|name| is_changed(config, name)).map(|name| format!("`{name}`")).collect();
    let has = if changed.len() == 1 { "has" } else { "have" };
    (!changed.is_empty()).then(|| format!("{} {has} no effect {why}", changed.join(", ")))
}

/// A limit of conversations above that of rows.
fn lengths(config: &Config) -> Option<String> {
    let (most, row) = (config.template.max_length?, config.model.sequence_len);
    match row {
        Setting::Value(row) if most > row => {
            Some(format!("`max_length: {most}` has no effect above `sequence_len: {row}`, which all rows have at most"))
        }
        _ => None,
    }
}

/// True if an option is written and has another value than its default, as a resolved file has all options.
fn is_changed(config: &Config, name: &str) -> bool {
    let default = rows().find(|row| row.name == name).map(|row| row.default_json());
    if let Some(row) = Distributed::ROWS.iter().find(|row| row.name == name) {
        let value = &config.to_json()["distributed"][name];
        return config.is_written(&format!("distributed.{name}")) && row.default_json() != *value;
    }
    config.is_written(name) && default.as_ref() != config.to_json().get(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Task;

    fn load(text: &str) -> Config {
        Config::load(&format!("model: m\n{text}"), "run.yaml", Task::Sft, &[]).unwrap()
    }

    #[test]
    fn options_without_effect_are_told_with_the_option_that_changes_it() {
        for (text, note) in [
            (
                "lora: false\nlora_rank: 8\nlora_alpha: 3\n",
                "`lora_rank`, `lora_alpha` have no effect with `lora: false`",
            ),
            ("normuon_beta2: 0.5\n", "`normuon_beta2` has no effect without `optimizer: normuon`"),
            ("warmup_ratio: 0.1\nwarmup_steps: 3\n", "`warmup_ratio` has no effect next to `warmup_steps`"),
            ("num_epochs: 2\nmax_steps: 9\n", "`num_epochs` has no effect next to `max_steps`"),
            ("wandb_project: p\n", "`wandb_project` has no effect without `wandb` in `report_to`"),
            ("aim_repo: r\nreport_to: wandb\n", "`aim_repo` has no effect without `aim` in `report_to`"),
            ("sample_tokens: 9\n", "`sample_tokens` has no effect without `sample_prompts`"),
            (
                "qlora_bnb_block_size: 128\n",
                "`qlora_bnb_block_size` has no effect without `qlora_bnb: true`, `qlora_fp8: true` or `qlora_fp4: true`",
            ),
            ("distributed: {timeout: 30}\n", "`timeout` has no effect with `distributed.num_nodes: 1`"),
            ("zero_level: 2\n", "`zero_level` has no effect on one device"),
            (
                "max_length: 64\nsequence_len: 32\n",
                "`max_length: 64` has no effect above `sequence_len: 32`, which all rows have at most",
            ),
            (
                "validation_split_ratio: 0\neval_strategy: epoch\n",
                "`eval_strategy` has no effect without validation data (`validation_datasets` or `validation_split_ratio`)",
            ),
        ] {
            assert_eq!(notes(&load(text)), [note], "{text}");
        }
    }

    #[test]
    fn options_with_an_effect_or_their_default_are_not_told() {
        for text in [
            "lora_rank: 8\n",
            "lora: false\nlora_rank: 16\n",
            "optimizer: normuon\nnormuon_beta2: 0.5\n",
            "warmup_ratio: 0.1\n",
            "max_steps: 9\n",
            "report_to: [wandb]\nwandb_project: p\n",
            "gpus: 2\nzero_level: 2\n",
            "max_length: 16\nsequence_len: 32\n",
        ] {
            assert_eq!(notes(&load(text)), Vec::<String>::new(), "{text}");
        }
    }

    #[test]
    fn options_of_the_template_need_a_set_that_is_written_with_it() {
        let config = load("system: Be brief.\nloss_scale: all\n");
        let found = notes_on_template(&config, &[Writing::Column, Writing::Tokens]);
        assert!(found[0].starts_with("`system`, `loss_scale` have no effect because no dataset"), "{found:?}");
        let cut = load("truncation_strategy: right\n");
        let found = notes_on_template(&cut, &[Writing::Column]);
        assert_eq!(found, ["`truncation_strategy` has no effect because texts are always split"]);
        for (config, writings) in [
            (&config, [Writing::Column, Writing::Template]),
            (&cut, [Writing::Column, Writing::Tokens]),
            (&load(""), [Writing::Column; 2]),
        ] {
            assert_eq!(notes_on_template(config, &writings), Vec::<String>::new());
        }
    }
}
