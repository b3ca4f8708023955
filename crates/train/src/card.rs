//! The model card of a result, `README.md`: what it was made from, with which data and options, and what came of it. It is
//! meant to be published, so it names no folders of this machine.
//!
//! Collects; decides nothing. The form is that of Hugging Face: a block of YAML, then Markdown.

use std::fmt::Write;
use std::path::Path;

use options::{Reader, Tree};
use serde_json::Value;

use crate::compress::{Compared, CompressRequest, Compressed};
use crate::config::{Criterion, Task, rows};
use crate::error::{Result, TrainError};
use crate::model_folder::leads_out;
use crate::prune::Pruned;
use crate::staged::write_synced;
use crate::trainer::Trainer;
use crate::words::count;

/// The name of the file.
const FILE: &str = "README.md";

/// Bytes of a model's card that are read.
const MOST: usize = 1 << 20;

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

/// Characters of a model's licence, its name or its address.
const MOST_OF_LICENCE: usize = 300;

/// The kind of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Adapter,
    Merged,
    Model,
}

impl Form {
    fn library(self) -> &'static str {
        if self == Form::Adapter { "peft" } else { "transformers" }
    }

    fn sentence(self) -> &'static str {
        match self {
            Form::Adapter => "A LoRA adapter, made",
            Form::Merged => "A model with a LoRA adapter merged into its weights, made",
            Form::Model => "A model, made",
        }
    }
}

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

/// Writes the card of a model in a number format into its folder. `name`: the model that it was made from, as the user calls
/// it, in `from`.
pub fn write_compressed(
    from: &Path,
    name: &str,
    request: &CompressRequest,
    of: &Compressed,
    folder: &Path,
) -> Result<()> {
    let scheme = &request.scheme;
    let mut text = String::from("---\n");
    if let Some(name) = hub_name(name) {
        let _ = writeln!(text, "base_model: {name}\nbase_model_relation: quantized");
    }
    let _ = writeln!(text, "library_name: transformers\npipeline_tag: text-generation");
    text += &licence(from);
    let _ = writeln!(text, "tags:\n- surogate\n- compressed-tensors\n- {scheme}\n---");
    let (base, version) = (public_name(name), env!("CARGO_PKG_VERSION"));
    let _ = writeln!(text, "\n# {base}, {scheme}\n\n{base} in {scheme}, made with Surogate {version}.");
    let _ = writeln!(text, "\n| | |\n|---|--:|\n| scheme | `{scheme}` |\n| matrices in codes | {} |", of.matrices);
    if of.group_size > 0 {
        let _ = writeln!(text, "| elements of a group | {} |", of.group_size);
    }
    let _ = writeln!(text, "| bytes of weights, before | {} |\n| bytes of weights | {} |", of.bytes.0, of.bytes.1);
    let _ = writeln!(text, "| method | `{}` |", request.method.name());
    if of.measured > 0 {
        let _ = writeln!(text, "| tokens that activations were measured on | {} |", of.measured);
    }
    if let Some(of) = of.compared {
        let rows = if of.are_held_out { "the validation data" } else { "further rows of the data" };
        let _ = writeln!(
            text,
            "\n## Loss\n\n| {} of {rows} | before | after |\n|---|--:|--:|",
            count(of.tokens as u64, "token")
        );
        let _ = writeln!(text, "| perplexity | {:.4} | {:.4} |", of.before.exp(), of.after.exp());
        let _ = writeln!(text, "| KL divergence from the model before, nats | | {:.5} |", of.divergence);
    }
    for note in &of.notes {
        let _ = writeln!(text, "\nNote: {note}.");
    }
    write_synced(&folder.join(FILE), text.as_bytes())
}

/// Writes the card of a smaller model into its folder. `name`: the model that it was made from, as the user calls it, in `from`.
pub fn write_pruned(from: &Path, name: &str, of: &Pruned, folder: &Path) -> Result<()> {
    let mut text = String::from("---\n");
    if let Some(name) = hub_name(name) {
        let _ = writeln!(text, "base_model: {name}\nbase_model_relation: finetune");
    }
    let _ = writeln!(text, "library_name: transformers\npipeline_tag: text-generation");
    text += &licence(from);
    let _ = writeln!(text, "tags:\n- surogate\n- pruned\n---");
    let (base, version) = (public_name(name), env!("CARGO_PKG_VERSION"));
    let _ = writeln!(text, "\n# {base}, pruned\n\nA part of {base}, made with Surogate {version}.");
    let _ = writeln!(text, "\n| | before | after |\n|---|--:|--:|");
    let _ = writeln!(text, "| parameters | {} | {} |", of.parameters.0, of.parameters.1);
    if let Some((request, before, after)) = &of.latency {
        let (prompt, answer, machine) = (request.prompt, request.answer, &request.machine.name);
        let _ = write!(text, "| planned ms for {prompt} + {answer} tokens on {machine} ");
        let _ = writeln!(text, "| {:.3} | {:.3} |", 1e3 * before, 1e3 * after);
    }
    for (name, before, after) in &of.sizes {
        let _ = writeln!(text, "| `{name}` | {before} | {after} |");
    }
    let Compared { before, after, divergence, tokens, are_held_out, .. } = of.compared;
    let _ = writeln!(text, "| perplexity | {:.4} | {:.4} |", before.exp(), after.exp());
    let _ = writeln!(text, "| KL divergence from the model before, nats | | {divergence:.5} |");
    let rows = if are_held_out { "the validation data" } else { "further rows of the data" };
    let measured = count(of.measured as u64, "token");
    let compared = count(tokens as u64, "token");
    let _ = writeln!(text, "\nActivations were measured on {measured}; perplexities are of {compared} of {rows}.");
    write_synced(&folder.join(FILE), text.as_bytes())
}

/// Copies the card of an adapter to the model that it was merged into. Without a card there is nothing to copy.
pub fn hand_on(from: &Path, form: Form, to: &Path) -> Result<()> {
    let Some(text) = read(from)? else { return Ok(()) };
    let library = |form: Form| format!("library_name: {}\n", form.library());
    let text = text.replacen(&library(Form::Adapter), &library(form), 1);
    let text = text.replacen(Form::Adapter.sentence(), form.sentence(), 1);
    let text = text.replacen("base_model_relation: adapter\n", "base_model_relation: finetune\n", 1);
    write_synced(&to.join(FILE), text.as_bytes())
}

/// The card of a folder. A link that leads out of it is not followed.
fn read(folder: &Path) -> Result<Option<String>> {
    let path = folder.join(FILE);
    if !path.is_file() || leads_out(folder, &path) {
        return Ok(None);
    }
    let bytes = data::small_file::read(&path).map_err(|e| TrainError::io("read", &path, e))?;
    Ok(Some(String::from_utf8_lossy(&bytes[..bytes.len().min(MOST)]).into_owned()))
}

/// The model of a run as an adapter names it: a path of the Hub's cache becomes the name that it was fetched by, another
/// folder's the absolute one, by which every later command finds it.
pub fn base_name(path: &str) -> String {
    name_in_cache(path).unwrap_or_else(|| match std::path::absolute(path) {
        Ok(whole) if whole.is_dir() => whole.to_string_lossy().into_owned(),
        _ => path.to_owned(),
    })
}

/// The name of the repository whose snapshot in the Hub's cache a path is.
fn name_in_cache(path: &str) -> Option<String> {
    let (before, rest) = path.split_once("/snapshots/")?;
    let is_whole = rest.trim_end_matches('/').split('/').count() == 1;
    let repository = before.rsplit('/').next()?.strip_prefix("models--")?;
    is_whole.then(|| repository.replacen("--", "/", 1))
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

/// A name on the Hub as it is; of any other path only the end.
pub fn public_name(path: &str) -> String {
    let end = || path.trim_end_matches('/').rsplit('/').next().unwrap_or(path).to_owned();
    hub_name(path).unwrap_or_else(end)
}

/// The name on the Hub that a path is, without its revision.
fn hub_name(path: &str) -> Option<String> {
    if let Some(name) = name_in_cache(path) {
        return Some(name);
    }
    let name = path.split('@').next().unwrap_or(path);
    let is_name = name.matches('/').count() == 1
        && !name.starts_with(['.', '/', '~'])
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c))
        && !Path::new(path).exists();
    is_name.then(|| name.to_owned())
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

/// The lines on the licence in the card of the model that a run starts from; none where it says nothing.
fn licence(folder: &Path) -> String {
    let card = read(folder).ok().flatten().unwrap_or_default();
    let Some((front, _)) = card.strip_prefix("---\n").and_then(|rest| rest.split_once("\n---")) else {
        return String::new();
    };
    let root = Reader::new(&[]).read_yaml(FILE, front);
    let Some(Tree::Map(entries)) = root.map(|root| root.tree) else { return String::new() };
    let mut lines = String::new();
    for wanted in ["license", "license_name", "license_link"] {
        let found = entries.iter().find(|(key, _)| key.name == wanted).map(|(_, value)| &value.tree);
        let Some(Tree::Scalar { text, .. }) = found else { continue };
        let is_plain = text.chars().count() <= MOST_OF_LICENCE && options::visible(text) == *text;
        if is_plain && !text.contains(['\n', '\t']) {
            // A text of JSON is one of YAML.
            let _ = writeln!(lines, "{wanted}: {}", Value::from(text.as_str()));
        }
    }
    lines
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
    for of in &feed.encoded.summary.datasets {
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
    fn no_folder_of_this_machine_is_named() {
        assert_eq!(public_name("/srv/me/secret/model/"), "model");
        assert_eq!(public_name("s3://bucket/x/data.jsonl"), "data.jsonl");
        assert_eq!(public_name("Qwen/Qwen3-0.6B"), "Qwen/Qwen3-0.6B");
        assert_eq!(public_name("owner/set@main"), "owner/set");
        let cached = "/users/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/0123abc/";
        assert_eq!((public_name(cached), base_name(cached)), ("Qwen/Qwen3-0.6B".into(), "Qwen/Qwen3-0.6B".into()));
        assert_eq!(base_name("/srv/me/model"), "/srv/me/model");
        assert_eq!(base_name("owner/name"), "owner/name");
        // Tests run in the folder of their crate.
        assert_eq!(base_name("src"), std::env::current_dir().unwrap().join("src").to_string_lossy());
        assert_eq!(published(&"/srv/me/a.jinja".into()), "a.jinja");
        assert_eq!(published(&"```\n# x".into()), "\"` ` `\\n# x\"");
        assert!(PUBLISHED.iter().all(|name| rows().any(|row| row.name == *name)), "each is an option");
    }

    #[test]
    fn the_licence_is_that_of_the_model_and_a_card_follows_a_merge() {
        let place = tempfile::tempdir().unwrap();
        assert_eq!(licence(place.path()), "");
        let text = "---\nlicense: apache-2.0\ntags:\n- x\n---\nlicense: no\n";
        std::fs::write(place.path().join(FILE), text).unwrap();
        assert_eq!(licence(place.path()), "license: \"apache-2.0\"\n");
        for (front, expected) in [
            ("license: mit\rbase_model: evil/model\rtags:\r- injected", "license: \"mit\"\n"),
            ("license: [\nlicense_link: 'x\u{1b}[2J'", ""),
            (
                "license: other\nlicense_link: \"x\\e[2J\"\nlicense_name: 'a: \"b\"'",
                concat!("license: \"other\"\n", "license_name: \"a: \\\"b\\\"\"\n"),
            ),
            ("license: |\n  a\n  ---\n  b", ""),
            ("license: [mit]\nlicense_name: {a: b}", ""),
            ("license: &a mit\nlicense_name: *a", "license: \"mit\"\nlicense_name: \"mit\"\n"),
        ] {
            std::fs::write(place.path().join(FILE), format!("---\n{front}\n---\n")).unwrap();
            assert_eq!(licence(place.path()), expected, "{front:?}");
        }
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        hand_on(from.path(), Form::Merged, to.path()).unwrap();
        assert!(!to.path().join(FILE).exists());
        let text = format!("---\nlibrary_name: peft\n---\n{} by", Form::Adapter.sentence());
        std::fs::write(from.path().join(FILE), text).unwrap();
        hand_on(from.path(), Form::Merged, to.path()).unwrap();
        let merged = std::fs::read_to_string(to.path().join(FILE)).unwrap();
        assert_eq!(merged, format!("---\nlibrary_name: transformers\n---\n{} by", Form::Merged.sentence()));
    }
}
