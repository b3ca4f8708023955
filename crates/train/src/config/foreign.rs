//! Names that other trainers have for options, and what they are called here: only for hints, none of them is read.

/// Other names, and the option or the sentence that helps.
const FOREIGN: &[(&[&str], Help)] = &[
    (&["lr"], Help::Name("learning_rate")),
    (
        &["base_model", "model_name_or_path", "pretrained_model_name_or_path", "model_path", "model_id"],
        Help::Name("model"),
    ),
    (
        &["micro_batch_size", "batch_size", "train_batch_size", "per_device_batch_size"],
        Help::Name("per_device_train_batch_size"),
    ),
    (&["gradient_accumulation", "accumulation_steps"], Help::Name("gradient_accumulation_steps")),
    (&["packing", "pack"], Help::Name("sample_packing")),
    (
        &["load_in_4bit", "quantization_bit"],
        Help::Say("`qlora_bnb: true` keeps the frozen weights in 4 bits, `qlora_fp4: true` in FP4"),
    ),
    (&["load_in_8bit"], Help::Say("`qlora_fp8: true` keeps the frozen weights in 8 bits")),
    (&["val_set_size", "val_size", "test_size", "eval_split"], Help::Name("validation_split_ratio")),
    (
        &["gradient_checkpointing", "activation_checkpointing", "use_gradient_checkpointing"],
        Help::Say("the plan recomputes what it must; `recompute_block: true` recomputes every layer"),
    ),
    (&["seed", "random_seed", "data_seed", "random_state"], Help::Say("`train_seed` and `eval_seed`")),
    (&["chat_template", "prompt_template"], Help::Name("template")),
    (&["num_train_epochs", "epochs", "max_epochs"], Help::Name("num_epochs")),
    (
        &["max_seq_length", "max_seq_len", "cutoff_len", "context_length", "block_size", "seq_len"],
        Help::Name("sequence_len"),
    ),
    (&["lora_r", "r", "peft_lora_r", "lora_dim"], Help::Name("lora_rank")),
    (&["target_modules", "lora_target", "lora_modules"], Help::Name("lora_target_modules")),
    (&["target_parameters"], Help::Name("lora_target_parameters")),
    (&["use_dora", "peft_use_dora", "dora"], Help::Name("lora_dora")),
    (&["use_lora", "use_peft", "finetuning_type"], Help::Name("lora")),
    (&["lr_scheduler", "scheduler"], Help::Name("lr_scheduler_type")),
    (&["optim"], Help::Name("optimizer")),
    (&["adam_beta1"], Help::Name("adamw_beta1")),
    (&["adam_beta2"], Help::Name("adamw_beta2")),
    (&["adam_epsilon"], Help::Name("adamw_epsilon")),
    (&["gradient_clipping", "max_norm", "grad_clip"], Help::Name("max_grad_norm")),
    (&["bf16", "tf32"], Help::Say("`torch_dtype: bfloat16`, which most models have by themselves")),
    (&["fp16", "half"], Help::Say("`torch_dtype: float16`")),
    (&["evaluation_strategy"], Help::Name("eval_strategy")),
    (&["saves_per_epoch"], Help::Say("`save_strategy: epoch`")),
    (&["evals_per_epoch"], Help::Say("`eval_strategy: epoch`")),
    (&["save_interval"], Help::Name("save_steps")),
    (&["eval_interval"], Help::Name("eval_steps")),
    (&["log_interval", "log_every_n_steps"], Help::Name("logging_steps")),
    (&["output", "out_dir", "save_dir"], Help::Name("output_dir")),
    (&["train_file", "train_data", "data_path", "dataset_name", "data"], Help::Name("datasets")),
    (&["eval_dataset", "validation_file", "val_data", "test_datasets"], Help::Name("validation_datasets")),
    (&["train_on_inputs"], Help::Say("`loss_scale: all` trains prompts, too")),
    (&["neftune_alpha", "noisy_embedding_alpha", "neft_alpha"], Help::Name("neftune_noise_alpha")),
    (
        &["add_tokens", "added_tokens", "special_tokens", "new_special_tokens", "additional_special_tokens"],
        Help::Name("new_tokens"),
    ),
    (&["early_stopping"], Help::Name("early_stopping_patience")),
    (
        &["attn_implementation", "flash_attention", "use_flash_attention", "flash_attn", "sdp_attention"],
        Help::Say("remove it: the plan chooses the attention kernels"),
    ),
    (&["torch_compile", "use_unsloth", "use_liger"], Help::Say("remove it: every run is compiled")),
    (&["hub_model_id", "hub_repo"], Help::Name("push_to_hub")),
    (&["wandb_run_name", "wandb_run"], Help::Name("wandb_name")),
    (&["warmup"], Help::Name("warmup_steps")),
    (&["preprocessing_num_workers", "dataset_num_proc"], Help::Name("dataloader_num_workers")),
];

/// What helps whoever wrote a foreign name.
enum Help {
    /// It has this name here.
    Name(&'static str),
    Say(&'static str),
}

/// The hint for a name of another trainer.
pub fn hint(name: &str) -> Option<String> {
    let plain = name.to_ascii_lowercase();
    let (_, help) = FOREIGN.iter().find(|(names, _)| names.contains(&plain.as_str()))?;
    Some(match help {
        Help::Name(option) => format!("it is `{option}` here"),
        Help::Say(sentence) => (*sentence).to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::rows;

    #[test]
    fn each_hint_names_an_option_and_no_foreign_name_is_one() {
        let is_option = |name: &str| rows().any(|row| row.name == name);
        for (names, help) in FOREIGN {
            for name in *names {
                assert!(!is_option(name), "`{name}` is an option");
                let hint = hint(name).unwrap();
                let mut quoted = hint.split('`').skip(1).step_by(2).map(|word| word.split(':').next().unwrap());
                assert!(quoted.all(is_option), "{hint}");
            }
            if let Help::Name(option) = help {
                assert!(is_option(option), "there is no `{option}`");
            }
        }
        assert_eq!(hint("learning_rte"), None);
    }
}
