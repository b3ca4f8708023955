//! Names that other trainers have for options, and what they are called here: for hints, and for `surogate init --from`. None
//! of them is read in a run.

use Help::{ByValue, Name, Remove, Say};
use options::{Node, Reader, Tree};

/// A word on data that are not kept on the disk.
const STREAMING: &str = "`streaming` is an option of the run, for all of `datasets`";

/// Other names, and the option or the sentence that helps.
const FOREIGN: &[(&[&str], Help)] = &[
    (&["lr"], Name("learning_rate")),
    (&["base_model", "model_name_or_path", "pretrained_model_name_or_path", "model_path", "model_id"], Name("model")),
    (&["per_device_batch_size"], Name("per_device_train_batch_size")),
    (&["train_batch_size", "global_batch_size"], Name("batch_size")),
    (&["gradient_accumulation", "accumulation_steps"], Name("gradient_accumulation_steps")),
    (&["packing", "pack", "neat_packing"], Name("sample_packing")),
    (&["load_in_4bit"], Say("`qlora_bnb: true` keeps the frozen weights in 4 bits, `qlora_fp4: true` in FP4")),
    (&["load_in_8bit"], Say("`qlora_fp8: true` keeps the frozen weights in 8 bits")),
    (
        &["quantization_bit"],
        ByValue(
            &[("4", "`qlora_bnb: true`"), ("8", "`qlora_fp8: true`")],
            "`qlora_bnb: true` keeps the frozen weights in 4 bits, `qlora_fp8: true` in 8",
        ),
    ),
    (&["quantization_method", "bnb_4bit_quant_type", "double_quantization"], Remove("`qlora_bnb: true` is NF4")),
    (&["val_set_size", "val_size", "test_size", "eval_split"], Name("validation_split_ratio")),
    (
        &["gradient_checkpointing", "activation_checkpointing", "use_gradient_checkpointing"],
        Say("the plan recomputes what it must; `recompute_block: true` recomputes every layer"),
    ),
    (&["gradient_checkpointing_kwargs"], Remove("the plan recomputes what it must")),
    (&["seed", "random_seed", "data_seed", "random_state"], Say("`train_seed` and `eval_seed`")),
    (&["chat_template", "prompt_template", "chat_template_path"], Name("template")),
    (&["default_system"], Name("system")),
    (&["num_train_epochs", "epochs", "max_epochs"], Name("num_epochs")),
    (&["max_seq_length", "max_seq_len", "cutoff_len", "context_length", "block_size", "seq_len"], Name("sequence_len")),
    (&["lora_r", "r", "peft_lora_r", "lora_dim"], Name("lora_rank")),
    (
        &["lora_target"],
        ByValue(&[("all", "`lora_target_modules: [all-linear]`")], "it is `lora_target_modules` here, a list"),
    ),
    (&["lora_target_linear"], Say("`lora_target_modules: [all-linear]`, which is the default")),
    (&["target_modules", "lora_modules"], Name("lora_target_modules")),
    (&["target_parameters"], Name("lora_target_parameters")),
    (&["lora_modules_to_save", "additional_target"], Name("modules_to_save")),
    (&["lora_model_dir", "adapter_name_or_path"], Name("adapter")),
    (&["use_dora", "peft_use_dora", "dora"], Name("lora_dora")),
    (&["use_rslora", "peft_use_rslora", "rslora"], Name("lora_rslora")),
    (&["loraplus_ratio"], Name("loraplus_lr_ratio")),
    (&["lora_fan_in_fan_out", "fan_in_fan_out"], Remove("the model's architecture says it")),
    (
        &["unfrozen_parameters", "freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules"],
        Say("`frozen_parameters` lists what is not trained, by patterns: everything else is"),
    ),
    (&["pref_beta", "dpo_beta", "rl_beta"], Name("beta")),
    (&["pref_loss"], Name("loss_type")),
    (&["ref_model", "ref_model_name_or_path"], Name("reference")),
    (&["excess_length_strategy"], Name("truncation_strategy")),
    (&["shuffle_merged_datasets"], Name("shuffle")),
    (&["mask_history", "train_on_last_turn_only"], Say("`loss_scale: last_round`")),
    (&["default_system"], Say("a system message in the rows, or the column that `system_field` names")),
    (&["image_max_pixels"], Name("max_pixels")),
    (&["image_min_pixels"], Name("min_pixels")),
    (
        &["freeze_vision_tower", "freeze_multi_modal_projector", "freeze_mm_modules", "upcast_layernorm"],
        Remove("the plan says what is trained, and in which type: `surogate show config`"),
    ),
    (
        &["disable_gradient_checkpointing"],
        Say("`recompute_block: false`, where the memory suffices; the plan recomputes only what it must"),
    ),
    (&["use_lora", "use_peft"], Name("lora")),
    (
        &["finetuning_type"],
        ByValue(
            &[("lora", "`lora: true`"), ("full", "`lora: false`")],
            "`lora: true` trains adapters, `lora: false` all weights",
        ),
    ),
    (
        &["stage"],
        ByValue(
            &[
                ("sft", "remove it: `surogate sft run.yaml` says it"),
                ("pt", "remove it: `surogate pt run.yaml` says it"),
                ("dpo", "remove it: `surogate dpo run.yaml` says it"),
                ("kto", "remove it: `surogate kto run.yaml` says it"),
                ("rm", "remove it: `surogate reward run.yaml` says it"),
            ],
            "the task is that of the command, such as `surogate sft`, `surogate dpo` or `surogate reward`",
        ),
    ),
    (&["teacher_model", "teacher_model_name_or_path", "teacher_name_or_path"], Name("teacher")),
    (&["do_train"], Remove("`surogate sft` and `surogate pt` train")),
    (&["do_eval", "do_predict"], Say("`eval_strategy` says when the validation data are evaluated")),
    (&["lr_scheduler", "scheduler"], Name("lr_scheduler_type")),
    (&["lr_scheduler_kwargs"], Say("`final_lr_fraction`, `warmup_steps` and `cooldown_steps`")),
    (&["optim"], Name("optimizer")),
    (&["adam_beta1"], Name("adamw_beta1")),
    (&["adam_beta2"], Name("adamw_beta2")),
    (&["adam_epsilon"], Name("adamw_epsilon")),
    (&["gradient_clipping", "max_norm", "grad_clip"], Name("max_grad_norm")),
    (&["bf16", "pure_bf16"], Say("`torch_dtype: bfloat16`, which most models have by themselves")),
    (&["tf32"], Remove("products have the type of the weights, `torch_dtype`")),
    (&["fp16", "half"], Say("`torch_dtype: float16`")),
    (&["dtype"], Name("torch_dtype")),
    (&["evaluation_strategy"], Name("eval_strategy")),
    (&["saves_per_epoch"], Say("`save_strategy: epoch`, or `save_steps`")),
    (&["evals_per_epoch"], Say("`eval_strategy: epoch`, or `eval_steps`")),
    (&["save_interval"], Name("save_steps")),
    (&["eval_interval"], Name("eval_steps")),
    (&["log_interval", "log_every_n_steps"], Name("logging_steps")),
    (&["output", "out_dir", "save_dir"], Name("output_dir")),
    (&["train_file", "train_data", "data_path", "dataset_name", "data"], Name("datasets")),
    (&["pretraining_dataset"], Say("`datasets`, with `surogate pt`")),
    (&["dataset_dir"], Say("`datasets` names files and folders by their paths")),
    (&["eval_dataset", "validation_file", "val_data", "test_datasets"], Name("validation_datasets")),
    (&["dataset_streaming"], Name("streaming")),
    (&["buffer_size", "shuffle_buffer", "streaming_multipack_buffer_size"], Name("shuffle_buffer_size")),
    (&["max_samples"], Say("`samples` of each item of `datasets`")),
    (&["mix_strategy"], Say("`interleave_probs`, or `repeats` of each item of `datasets`")),
    (&["train_on_inputs", "train_on_prompt"], Say("`loss_scale: all` trains prompts, too")),
    (
        &["assistant_only_loss", "completion_only_loss", "roles_to_train"],
        Say("answers alone are trained unless `loss_scale` says otherwise"),
    ),
    (&["neftune_alpha", "noisy_embedding_alpha", "neft_alpha"], Name("neftune_noise_alpha")),
    (
        &["special_tokens"],
        Say("the model's tokenizer has them; `new_tokens` adds others, and a chat template comes with `template`"),
    ),
    (
        &[
            "add_tokens",
            "added_tokens",
            "tokens",
            "new_special_tokens",
            "add_special_tokens",
            "additional_special_tokens",
        ],
        Name("new_tokens"),
    ),
    (&["resize_vocab", "resize_token_embeddings_to_32x"], Remove("`new_tokens` makes the tables larger where it must")),
    (&["early_stopping"], Name("early_stopping_patience")),
    (
        &[
            "attn_implementation",
            "flash_attention",
            "use_flash_attention",
            "flash_attn",
            "sdp_attention",
            "xformers_attention",
        ],
        Remove("the plan chooses the attention kernels"),
    ),
    (
        &[
            "torch_compile",
            "use_unsloth",
            "use_liger",
            "use_liger_kernel",
            "enable_liger_kernel",
            "plugins",
            "cut_cross_entropy",
            "liger_rope",
            "liger_rms_norm",
            "liger_glu_activation",
            "liger_layer_norm",
            "liger_fused_linear_cross_entropy",
            "lora_mlp_kernel",
            "lora_qkv_kernel",
            "lora_o_kernel",
        ],
        Remove("every run is compiled"),
    ),
    (&["hub_model_id", "hub_repo"], Name("push_to_hub")),
    (&["wandb_run_name", "wandb_run"], Name("wandb_name")),
    (&["use_wandb"], Say("`report_to: wandb`")),
    (&["warmup"], Name("warmup_steps")),
    (
        &["preprocessing_num_workers", "dataset_num_proc", "dataset_processes", "num_workers"],
        Name("dataloader_num_workers"),
    ),
    (&["dataset_prepared_path"], Name("data_cache")),
    (
        &["overwrite_cache", "overwrite_output_dir", "trust_remote_code", "plot_loss", "save_only_model", "strict"],
        Remove("nothing here needs it"),
    ),
    (
        &[
            "pad_to_sequence_len",
            "group_by_length",
            "train_on_eos",
            "debug",
            "remove_unused_columns",
            "ddp_timeout",
            "local_rank",
        ],
        Remove("nothing here needs it"),
    ),
    (&["per_device_eval_batch_size", "eval_batch_size", "eval_sample_packing"], Remove("as in training")),
    (
        &["deepspeed", "fsdp", "fsdp_config", "accelerator_config"],
        Say("`gpus` trains on several GPUs; `zero_level` says what they share"),
    ),
    (&["auto_resume_from_checkpoints"], Name("resume_from_checkpoint")),
    (&["model_revision"], Say("download the revision, and give `model` its folder")),
    (&["tokenizer_type", "tokenizer_use_fast"], Remove("the model's folder says it")),
];

/// The hint for a user who wrote another tool's name.
enum Help {
    /// It has this name here.
    Name(&'static str),
    /// A sentence on what has the effect here. Where it was switched off, there is nothing to do.
    Say(&'static str),
    /// Nothing has the effect here, and why none is needed.
    Remove(&'static str),
    /// A sentence for some values, and one for all others.
    ByValue(&'static [(&'static str, &'static str)], &'static str),
}

/// Types of datasets of other trainers: word, sentence.
const TYPES: &[(&[&str], &str)] = &[
    (
        &["alpaca", "alpaca_chat", "instruct"],
        "`type: auto` recognizes it; or `type: instruction` with `instruction_field`, `input_field` and `output_field`",
    ),
    (&["completion", "pretrain", "pretraining", "pt", "raw"], "`type: text`"),
    (
        &["chat_template", "chatml", "sharegpt", "messages", "conversational", "openai", "chat"],
        "`type: conversation`, or `type: auto`",
    ),
    (&["prompt_completion", "prompt-completion", "completion_only", "input_output"], "`type: auto`"),
];

/// Names inside an item of `datasets`, and the option there.
const OF_DATASETS: &[(&[&str], &str)] = &[
    (&["field", "dataset_text_field"], "text_field"),
    (&["field_messages"], "messages_field"),
    (&["field_system"], "system_field"),
    (&["field_tools"], "tools_field"),
    (&["field_instruction"], "instruction_field"),
    (&["field_output"], "output_field"),
    (&["field_input"], "input_field"),
    (&["format"], "prompt_format"),
    (&["no_input_format"], "prompt_format_no_input"),
    (&["name", "dataset_config"], "subset"),
    (&["data_files", "file_name", "hf_hub_url"], "path"),
    (&["num_samples", "max_samples"], "samples"),
    (&["weight"], "repeats"),
];

/// The hint for a name of another trainer, with the value that was given.
pub(super) fn hint(name: &str, value: &Node) -> Option<String> {
    let text = match &value.tree {
        Tree::Scalar { text, .. } => Some(text.as_str()),
        Tree::Null => Some("null"),
        Tree::List(_) | Tree::Map(_) => None,
    };
    hint_for(name, text)
}

/// Returns what to write in place of a name of another trainer; `value`: what it was given, where that is a single word or number.
pub fn hint_for(name: &str, value: Option<&str>) -> Option<String> {
    let value = value.map(str::to_ascii_lowercase);
    let is_off = matches!(value.as_deref(), Some("false" | "no" | "off" | "null" | "none" | "0" | ""));
    Some(match help(name)? {
        Name(option) => format!("it is `{option}` here"),
        Say(_) if is_off => "remove it: it is off here, too".to_owned(),
        Say(sentence) => (*sentence).to_owned(),
        Remove(why) => format!("remove it: {why}"),
        ByValue(values, other) => {
            let known = values.iter().find(|(known, _)| value.as_deref() == Some(*known));
            known.map_or(*other, |(_, sentence)| *sentence).to_owned()
        }
    })
}

/// The option of this name in another trainer, where it has the same values here.
pub fn name_for(name: &str) -> Option<&'static str> {
    match help(name)? {
        Name(option) => Some(option),
        Say(_) | Remove(_) | ByValue(..) => None,
    }
}

fn help(name: &str) -> Option<&'static Help> {
    let plain = name.to_ascii_lowercase();
    FOREIGN.iter().find(|(names, _)| names.contains(&plain.as_str())).map(|(_, help)| help)
}

/// Puts hints to what other trainers write in the items of a list of datasets.
pub(super) fn explain_datasets(root: &Node, reader: &mut Reader) {
    for list in ["datasets", "validation_datasets"] {
        let Some(Node { tree: Tree::List(items), .. }) = entry(root, list) else { continue };
        for (index, item) in items.iter().enumerate() {
            for (names, option) in OF_DATASETS {
                for name in names.iter().filter(|name| entry(item, name).is_some()) {
                    reader.replace_hint(&format!("{list}[{index}].{name}"), &format!("it is `{option}` here"));
                }
            }
            if entry(item, "streaming").is_some() {
                reader.replace_hint(&format!("{list}[{index}].streaming"), STREAMING);
            }
            // Options that belong to the run here may stand in an item.
            if let Tree::Map(fields) = &item.tree {
                let own = |name: &str| OF_DATASETS.iter().any(|(names, _)| names.contains(&name));
                for (key, value) in fields.iter().filter(|(key, _)| !own(&key.name)) {
                    if let Some(Say(_) | Remove(_)) = help(&key.name)
                        && let Some(hint) = hint(&key.name, value)
                    {
                        reader.replace_hint(&format!("{list}[{index}].{}", key.name), &hint);
                    }
                }
            }
            let Some(Node { tree: Tree::Scalar { text, .. }, .. }) = entry(item, "type") else { continue };
            // Axolotl writes what it does with a format after a point: `chat_template.default`.
            let word = text.split('.').next().unwrap_or_default();
            if let Some((_, hint)) = TYPES.iter().find(|(words, _)| words.contains(&word)) {
                reader.replace_hint(&format!("{list}[{index}].type"), hint);
            }
        }
    }
}

fn entry<'n>(node: &'n Node, name: &str) -> Option<&'n Node> {
    let Tree::Map(entries) = &node.tree else { return None };
    entries.iter().find(|(key, _)| key.name == name).map(|(_, node)| node)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Task, rows};
    use options::Table;

    #[test]
    fn each_hint_names_an_option_and_no_foreign_name_is_one() {
        let of_datasets = crate::config::Dataset::ROWS;
        let is_option = |name: &str| rows().chain(of_datasets).any(|row| row.name == name);
        for (names, help) in FOREIGN {
            for name in *names {
                assert!(!rows().any(|row| row.name == *name), "`{name}` is an option");
                let known: &[(&str, &str)] = if let ByValue(values, _) = help { values } else { &[] };
                for value in known.iter().map(|(value, _)| *value).chain(["true", "false", "7"]) {
                    let hint = hint_for(name, Some(value)).unwrap();
                    let quoted = hint.split('`').skip(1).step_by(2);
                    let mut options = quoted.filter(|word| !word.starts_with("surogate ")).map(|w| w.split(':').next());
                    assert!(options.all(|word| word.is_some_and(is_option)), "{hint}");
                }
            }
        }
        assert_eq!(hint_for("learning_rte", None), None);
    }

    #[test]
    fn values_decide_what_is_said() {
        let said = |name: &str, value: &str| hint_for(name, Some(value)).unwrap();
        assert_eq!(said("fp16", "true"), "`torch_dtype: float16`");
        for (name, value) in [("fp16", "false"), ("load_in_4bit", "False"), ("deepspeed", "null"), ("use_wandb", "no")]
        {
            assert_eq!(said(name, value), "remove it: it is off here, too", "{name}");
        }
        assert_eq!(said("lora_target", "all"), "`lora_target_modules: [all-linear]`");
        assert_eq!(said("lora_target", "q_proj,v_proj"), "it is `lora_target_modules` here, a list");
        assert_eq!(said("finetuning_type", "full"), "`lora: false`");
        assert!(said("stage", "dpo").contains("`surogate dpo run.yaml` says it"));
        assert!(said("stage", "ppo").contains("the task is that of the command"));
        assert!(said("unfrozen_parameters", "lm_head").starts_with("`frozen_parameters` lists what is not trained"));
        assert_eq!(said("streaming_multipack_buffer_size", "7"), "it is `shuffle_buffer_size` here");
        assert_eq!(name_for("cutoff_len"), Some("sequence_len"));
        assert_eq!(name_for("stage"), None);
    }

    #[test]
    fn datasets_of_others_have_hints() {
        let hint = |word: &str| {
            let text = format!("model: m\ndatasets: [{{path: x, type: {word}}}]\n");
            Config::load(&text, "run.yaml", Task::Sft, &[]).unwrap_err()[0].hint.clone().unwrap_or_default()
        };
        assert!(hint("alpaca").starts_with("`type: auto` recognizes it"));
        assert!(hint("chat_template.default").starts_with("`type: conversation`"));
        assert_eq!(hint("completion"), "`type: text`");
        assert_eq!(hint("conversaton"), "did you mean `conversation`?");
        assert!(hint("auto, roles_to_train: [assistant]").starts_with("answers alone are trained"));
        assert_eq!(hint("auto, train_on_eos: turn"), "remove it: nothing here needs it");
        assert!(hint("auto, streaming: true").starts_with("`streaming` is an option of the run"));
        let is_option = |name: &str| crate::config::Dataset::ROWS.iter().any(|row| row.name == name);
        for (names, option) in OF_DATASETS {
            assert!(is_option(option), "there is no `{option}`");
            for name in *names {
                assert!(!is_option(name), "`{name}` is an option");
                assert_eq!(hint(&format!("auto, {name}: x")), format!("it is `{option}` here"));
            }
        }
    }
}
