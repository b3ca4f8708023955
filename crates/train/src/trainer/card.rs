//! The model card of a run's result: what it was made from, with which data and options, and what came of it.
//!
//! Collects; decides nothing.

use std::fmt::Write;
use std::path::Path;

use serde_json::Value;

use crate::artifacts::card::{FILE, Form, hub_name, licence, public_name};
use crate::config::{Criterion, Task, rows};
use crate::error::Result;
use crate::files::staged::write_synced;
use crate::trainer::Trainer;
use crate::words::count;

/// Options that decide what a result is and hold no texts, addresses or paths of the user's: these are published. Of
/// `template` only the name is.
const PUBLISHED: &[&str] = &[
    "num_epochs",
    "load_best_model_at_end",
    "model_type",
    "sequence_len",
    "max_model_len",
    "rope_scaling",
    "router_aux_loss_coef",
    "torch_dtype",
    "init",
    "init_projections_to_zero",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "neftune_noise_alpha",
    "eval_strategy",
    "eval_steps",
    "early_stopping_patience",
    "early_stopping_threshold",
    "optimizer",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_ratio",
    "warmup_steps",
    "cooldown_steps",
    "final_lr_fraction",
    "weight_decay",
    "max_grad_norm",
    "router_bias_update_rate",
    "adamw_beta1",
    "adamw_beta2",
    "adamw_epsilon",
    "normuon_momentum",
    "normuon_beta2",
    "normuon_cautious_wd",
    "validation_split_ratio",
    "train_seed",
    "eval_seed",
    "sample_packing",
    "shuffle",
    "use_chat_template",
    "template",
    "max_length",
    "truncation_strategy",
    "padding_side",
    "padding_free",
    "lora",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_dtype",
    "lora_target_modules",
    "lora_target_parameters",
    "train_router",
    "train_vision",
    "train_projector",
    "lora_dora",
    "modules_to_save",
    "merge_adapter",
    "qlora_fp4",
    "qlora_fp8",
    "qlora_bnb",
    "qlora_block_size",
    "qlora_bnb_block_size",
    "qlora_bnb_double_quant",
    "qlora_four_over_six",
    "recipe",
    "quantize_aware",
    "quantize_aware_group_size",
    "quantize_aware_asymmetric",
    "gradient_dtype",
    "master_dtype",
    "grad_accumulation_dtype",
    "fp8_amax_history",
    "fp4_stochastic_rounding",
    "skip_quant_first_layers",
    "skip_quant_last_layers",
    "gpus",
    "sequence_parallel_size",
    "pipeline_parallel_size",
    "zero_level",
    "gradient_compression",
    "compression_warmup_steps",
];

/// Writes the card of a run's result into its folder.
pub fn write(trainer: &Trainer, form: Form, folder: &Path) -> Result<()> {
    let base = public_name(&trainer.config.model.model);
    let made = match trainer.config.task {
        Task::Pt => "by pretraining",
        Task::Sft => "by fine-tuning",
        Task::Dpo => "by direct preference optimization",
        Task::Grpo => "by group relative policy optimization",
        Task::Distil => "by distillation of a teacher into",
        Task::Kto => "by Kahneman-Tversky optimization",
        Task::Orpo => "by odds ratio preference optimization",
        Task::Cpo => "by contrastive preference optimization",
        Task::Reward => "by training a head of scores on",
    };
    let mut text = front_matter(trainer, form);
    let version = env!("CARGO_PKG_VERSION");
    let _ = writeln!(text, "\n# {}\n\n{} {made} {base} with Surogate {version}.", trainer.name, form.sentence());
    for section in [new_rows(trainer, form), results(trainer), data(trainer), given_options(trainer)] {
        text += &section;
    }
    write_synced(&folder.join(FILE), text.as_bytes())
}

/// The steps that other programs need before they load an adapter whose tables are longer than its base's.
fn new_rows(trainer: &Trainer, form: Form) -> String {
    let tokens = &trainer.config.model.new_tokens;
    let rows = trainer.source.vocab_size().unwrap_or_default();
    if form != Form::Adapter || tokens.is_empty() {
        return String::new();
    }
    let tokens = count(tokens.len() as u64, "token");
    format!(
        "\nIts tokenizer has {tokens} that the base does not have. Their rows are part of the adapter; with PEFT call \
         `model.resize_token_embeddings({rows})` on the base before the adapter is loaded.\n"
    )
}

fn front_matter(trainer: &Trainer, form: Form) -> String {
    let mut text = String::from("---\n");
    if let Some(name) = hub_name(&trainer.config.model.model) {
        let relation = if form == Form::Adapter { "adapter" } else { "finetune" };
        let _ = writeln!(text, "base_model: {name}\nbase_model_relation: {relation}");
    }
    let kind = if trainer.config.task == Task::Reward { "text-classification" } else { "text-generation" };
    let _ = writeln!(text, "library_name: {}\npipeline_tag: {kind}", form.library());
    text += &licence(&trainer.source.folder);
    let sets = trainer.config.data.datasets.as_deref().unwrap_or_default();
    let names: Vec<String> = sets.iter().filter_map(|set| hub_name(&set.path)).collect();
    if !names.is_empty() {
        text += "datasets:\n";
        names.iter().for_each(|name| text += &format!("- {name}\n"));
    }
    let _ = writeln!(text, "tags:\n- surogate\n- {}", trainer.config.task.name());
    if trainer.plan.compile.adapter.is_some() {
        text += "- lora\n";
    }
    text + "---\n"
}

fn results(trainer: &Trainer) -> String {
    let progress = &trainer.progress;
    let tracker = &progress.best_tracker;
    let mut lines = vec![("steps", progress.step.to_string())];
    lines.extend(trainer.feed.as_ref().map(|feed| {
        let epochs = feed.epochs(&trainer.config, progress.step);
        ("epochs", format!("{epochs:.2}"))
    }));
    lines.extend(progress.loss.map(|loss| ("training loss, last step", format!("{loss:.4}"))));
    let (last, best) = match trainer.config.task.criterion() {
        Criterion::Loss => ("evaluation loss, last", "evaluation loss, best"),
        Criterion::Reward => ("evaluation reward, last", "evaluation reward, best"),
    };
    lines.extend(tracker.last.map(|value| (last, format!("{value:.4}"))));
    lines.extend(tracker.best.map(|of| (best, format!("{:.4} after {}", of.value, count(of.step, "step")))));
    if trainer.config.run.load_best_model_at_end && tracker.best.is_some() {
        lines.push(("weights", "of the best evaluation".to_owned()));
    }
    let mut rows: String = lines.into_iter().map(|(name, value)| format!("| {name} | {value} |\n")).collect();
    for (name, value) in &trainer.evaluated {
        let _ = writeln!(rows, "| `{name}`, last evaluation | {value:.4} |");
    }
    format!("\n## Results\n\n| | |\n|---|--:|\n{rows}")
}

fn data(trainer: &Trainer) -> String {
    let Some(feed) = &trainer.feed else { return String::new() };
    let mut text = "\n## Data\n\n| dataset | documents | tokens | trained tokens |\n|---|--:|--:|--:|\n".to_owned();
    for of in &feed.summary().datasets {
        let name = public_name(&of.name).replace('|', "\\|");
        let _ = writeln!(text, "| {name} | {} | {} | {} |", of.documents, of.tokens, of.trained_tokens);
    }
    text
}

/// The options that the user wrote, without those that concern only this machine.
fn given_options(trainer: &Trainer) -> String {
    let values = trainer.config.recorded_json();
    let given = rows().map(|row| row.name).filter(|name| trainer.config.is_written(name));
    let shown = given.filter(|name| PUBLISHED.contains(name));
    let lines: String = shown.map(|name| format!("{name}: {}\n", published(&values[name]))).collect();
    if lines.is_empty() { lines } else { format!("\n## Options\n\n```yaml\n{lines}```\n") }
}

/// A value as YAML that stays inside its block; of the path of a template only the end.
fn published(value: &Value) -> String {
    match value.as_str() {
        Some(text) if text.ends_with(".jinja") => public_name(text),
        Some(text) if !text.contains(['\n', '#', ':', '`']) => text.to_owned(),
        _ => value.to_string().replace("```", "` ` `"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_options_name_no_folder() {
        assert_eq!(published(&"/srv/me/a.jinja".into()), "a.jinja");
        assert_eq!(published(&"```\n# x".into()), "\"` ` `\\n# x\"");
        assert!(PUBLISHED.iter().all(|name| rows().any(|row| row.name == *name)), "each is an option");
    }
}
