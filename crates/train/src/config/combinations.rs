//! Options that do not go together: one table, which the checks of a configuration and the page of combinations read.
//!
//! Conflicts with the model, the data or the machine are refused where these are known.

use options::{Reader, Setting};

use super::{Config, Dtype, GradientCompression, Strategy, Task};

/// A value of an option.
struct Side {
    option: &'static str,
    /// The value as the page writes it.
    value: &'static str,
    /// The option as the configuration writes it; none where it has another value.
    written: fn(&Config) -> Option<String>,
}

/// An option that does not go with that of its group.
struct Conflict {
    side: Side,
    /// True if it is only not available yet.
    is_pending: bool,
    /// The reason; empty where there is none but the work.
    why: &'static str,
    /// The change that helps; empty: one of both is removed.
    hint: &'static str,
}

/// Options that do not go with one.
struct Group {
    with: Side,
    /// The change of this option that helps.
    hint: &'static str,
    conflicts: &'static [Conflict],
}

const fn side(option: &'static str, value: &'static str, written: fn(&Config) -> Option<String>) -> Side {
    Side { option, value, written }
}

const fn pending(side: Side) -> Conflict {
    Conflict { side, is_pending: true, why: "", hint: "" }
}

const fn never(side: Side, why: &'static str) -> Conflict {
    Conflict { side, is_pending: false, why, hint: "" }
}

impl Conflict {
    const fn because(self, why: &'static str) -> Conflict {
        Conflict { why, ..self }
    }

    const fn hint(self, hint: &'static str) -> Conflict {
        Conflict { hint, ..self }
    }
}

fn when(is: bool, written: &str) -> Option<String> {
    is.then(|| written.to_owned())
}

fn number(option: &str, value: usize) -> Option<String> {
    (value > 1).then(|| format!("{option}: {value}"))
}

/// Sides of options that are on.
macro_rules! on {
    ($($name:ident = $option:literal, $of:expr;)*) => {$(
        const $name: Side = side($option, "true", |config| {
            let of: fn(&Config) -> bool = $of;
            when(of(config), concat!($option, ": true"))
        });
    )*};
}

const TRUE: Setting<bool> = Setting::Value(true);

on! {
    SHARD_GRADIENTS = "shard_gradients", |config| config.sharding.shard_gradients == TRUE;
    SHARD_WEIGHTS = "shard_weights", |config| config.sharding.shard_weights == TRUE;
    OFFLOAD_RESIDUAL = "offload_residual", |config| config.offload.offload_residual == TRUE;
    OFFLOAD_MASTER = "offload_master", |config| config.offload.offload_master == TRUE;
    OFFLOAD_OPTIMIZER = "offload_optimizer", |config| config.offload.offload_optimizer == TRUE;
    OFFLOAD_GRADS = "offload_grads", |config| config.offload.offload_grads == TRUE;
    OFFLOAD_QUANTS = "offload_quants", |config| config.offload.offload_quants == TRUE;
    LORA = "lora", |config| config.lora.lora;
    LORA_DORA = "lora_dora", |config| config.lora.lora_dora;
    QLORA_BNB = "qlora_bnb", |config| config.qlora.qlora_bnb;
    QLORA_FP8 = "qlora_fp8", |config| config.qlora.qlora_fp8;
    QLORA_FP4 = "qlora_fp4", |config| config.qlora.qlora_fp4;
    RECOMMENDED = "apply_recommended_values", |config| config.run.apply_recommended_values;
    SAMPLE_PACKING = "sample_packing", |config| config.data.sample_packing;
    PADDING_FREE = "padding_free", |config| config.template.padding_free;
    PRECOMPUTED_REFERENCE = "precompute_ref_log_probs", |config| config.preferences.precompute_ref_log_probs;
    PRECOMPUTED_TEACHER = "precompute_teacher", |config| config.distillation.precompute_teacher;
    REFERENCE_FREE = "reference_free", |config| config.preferences.reference_free;
    STREAMING = "streaming", |config| config.data.streaming;
}

const STAGES: Side =
    side("pipeline_parallel_size", "above 1", |config| number("pipeline_parallel_size", config.stages()));
const SEQUENCE: Side =
    side("sequence_parallel_size", "above 1", |config| number("sequence_parallel_size", config.sequence()));
const NODES: Side = side("distributed.num_nodes", "above 1", |config| number("distributed.num_nodes", config.nodes()));
const MOST_NODES: Side = side("distributed.num_nodes", "above 1", |config| {
    let most = config.multi_node.distributed.most_nodes() as usize;
    number("distributed.num_nodes", config.nodes()).or_else(|| number("distributed.max_nodes", most))
});
const FLOAT16: Side = side("torch_dtype", "float16", |config| {
    when(config.model.torch_dtype == Setting::Value(Dtype::Float16), "torch_dtype: float16")
});
const OTHER_RECIPES: Side = side("recipe", "other than bf16", |config| {
    let recipe = config.precision.recipe;
    (recipe != super::Recipe::Bf16).then(|| format!("recipe: {recipe}"))
});
const RECIPES_OF_CODES: Side = side("recipe", "fp8_hybrid or nvfp4", |config| {
    let recipe = config.precision.recipe;
    recipe.quantises_weights().then(|| format!("recipe: {recipe}"))
});
const QUANTIZE_AWARE: Side = side("quantize_aware", "any", |config| {
    config.precision.quantize_aware.map(|scheme| format!("quantize_aware: {scheme}"))
});
const COMPRESSION: Side = side("gradient_compression", "other than none", |config| {
    let compression = config.sharding.gradient_compression;
    (compression != GradientCompression::None).then(|| format!("gradient_compression: {}", compression.name()))
});
const ZERO: Side = side("zero_level", "2 and 3", |config| match config.sharding.zero_level {
    Setting::Value(level) if level > 1 => Some(format!("zero_level: {level}")),
    _ => None,
});
const NO_COPIES_OF_ALL: Side = side("memcpy_all_gather", "false", |config| {
    when(config.sharding.memcpy_all_gather == Setting::Value(false), "memcpy_all_gather: false")
});
const NO_COPIES: Side = side("memcpy_send_recv", "false", |config| {
    when(config.sharding.memcpy_send_recv == Setting::Value(false), "memcpy_send_recv: false")
});
const SAMPLE_PROMPTS: Side =
    side("sample_prompts", "any", |config| when(!config.logging.sample_prompts.is_empty(), "sample_prompts"));
const ROUTER_BIAS: Side = side("router_bias_update_rate", "any", |config| {
    when(config.optimizer.router_bias_update_rate.is_some(), "router_bias_update_rate")
});
const MIXED: Side =
    side("interleave_probs", "any", |config| when(config.data.interleave_probs.is_some(), "interleave_probs"));
const EVALUATED_BY_EPOCH: Side = side("eval_strategy", "epoch", |config| {
    when(config.training.eval_strategy == Strategy::Epoch, "eval_strategy: epoch")
});
const SAVED_BY_EPOCH: Side =
    side("save_strategy", "epoch", |config| when(config.run.save_strategy == Strategy::Epoch, "save_strategy: epoch"));
const ANSWERS: Side = side("task", "dpo, kto, orpo, cpo and reward", |config| {
    let compares = [Task::Dpo, Task::Kto, Task::Orpo, Task::Cpo, Task::Reward].contains(&config.task);
    compares.then(|| format!("task: {}", config.task))
});
const GRPO: Side = side("task", "grpo", |config| when(config.task == Task::Grpo, "task: grpo"));
const DISTIL: Side = side("task", "distil", |config| when(config.task == Task::Distil, "task: distil"));
const ESTIMATES: Side = side("loss_type", "kto", |config| {
    when(config.task == Task::Kto && config.preferences.estimates_divergence(), "loss_type: kto")
});

const WHOLE_ROWS: &str = "answers are rows of their own";
const CODES_OF_THE_RECIPE: &str = "the recipe rounds weights to codes of its own";

const GROUPS: &[Group] = &[
    Group {
        with: STAGES,
        hint: "set `pipeline_parallel_size: 1`",
        conflicts: &[
            pending(SHARD_GRADIENTS),
            pending(SHARD_WEIGHTS),
            pending(ZERO),
            pending(OFFLOAD_RESIDUAL),
            pending(OFFLOAD_MASTER),
            pending(OFFLOAD_OPTIMIZER),
            pending(OFFLOAD_GRADS),
            pending(OFFLOAD_QUANTS),
            pending(LORA_DORA),
            pending(QLORA_BNB),
            pending(QLORA_FP8),
            pending(QLORA_FP4),
            pending(OTHER_RECIPES),
            pending(QUANTIZE_AWARE),
            pending(FLOAT16),
            pending(SEQUENCE),
            pending(COMPRESSION),
            pending(NODES),
            pending(SAMPLE_PROMPTS),
            pending(RECOMMENDED),
            pending(NO_COPIES_OF_ALL).because("what crosses is copied from GPU to GPU"),
            pending(NO_COPIES).because("what crosses is copied from GPU to GPU"),
        ],
    },
    Group {
        with: RECIPES_OF_CODES,
        hint: "set `recipe: bf16`",
        conflicts: &[
            never(FLOAT16, "both scale gradients").hint("set `torch_dtype: bfloat16`, or remove `recipe`"),
            pending(LORA_DORA).because("magnitudes are those of whole weights"),
            never(QUANTIZE_AWARE, CODES_OF_THE_RECIPE),
        ],
    },
    Group {
        with: LORA,
        hint: "set `lora: false`",
        conflicts: &[
            never(QUANTIZE_AWARE, "codes are those of whole weights, and an adapter leaves them unquantized"),
            never(ROUTER_BIAS, "with adapters the model's own biases stay"),
        ],
    },
    Group {
        with: COMPRESSION,
        hint: "remove `gradient_compression`",
        conflicts: &[never(ROUTER_BIAS, "the experts' loads would be rounded")],
    },
    Group { with: ANSWERS, hint: "take another task", conflicts: &[pending(STAGES), pending(SEQUENCE)] },
    Group {
        with: PRECOMPUTED_REFERENCE,
        hint: "remove `precompute_ref_log_probs`",
        conflicts: &[
            never(REFERENCE_FREE, "it computes no reference"),
            never(
                ESTIMATES,
                "the loss compares answers with prompts of their micro-batch, which only the reference can",
            ),
            pending(NODES).because("a node knows its own rows alone"),
        ],
    },
    Group {
        with: GRPO,
        hint: "take another task",
        conflicts: &[
            never(SAMPLE_PACKING, WHOLE_ROWS),
            never(PADDING_FREE, WHOLE_ROWS),
            pending(SEQUENCE).because("answers are sampled in whole rows"),
            pending(STAGES).because("answers are sampled with all layers on a device"),
            pending(NODES).because("answers are sampled on one machine"),
            pending(MIXED).hint("remove it; `samples` takes fewer prompts of a dataset"),
        ],
    },
    Group { with: DISTIL, hint: "take another task", conflicts: &[pending(STAGES), pending(SEQUENCE), pending(NODES)] },
    Group {
        with: STREAMING,
        hint: "remove `streaming`",
        conflicts: &[
            never(EVALUATED_BY_EPOCH, "an epoch has no known end").hint("set `eval_strategy: steps`"),
            never(SAVED_BY_EPOCH, "an epoch has no known end").hint("set `save_strategy: steps`"),
            never(PRECOMPUTED_REFERENCE, "the rows are not known before training"),
            never(PRECOMPUTED_TEACHER, "the rows are not known before training"),
            pending(MOST_NODES).hint("train on one node"),
            pending(GRPO).because("rows with prompts are read as a whole"),
        ],
    },
];

/// Reports the options that do not go together.
pub(super) fn check(config: &Config, reader: &mut Reader) {
    for group in GROUPS {
        let Some(with) = (group.with.written)(config).filter(|_| !reader.is_faulty(group.with.option)) else {
            continue;
        };
        for of in group.conflicts {
            let option = of.side.option;
            let Some(given) = (of.side.written)(config).filter(|_| !reader.is_faulty(option)) else { continue };
            let verdict = if of.is_pending { "is not available yet" } else { "cannot be combined" };
            let why = if of.why.is_empty() { String::new() } else { format!(": {}", of.why) };
            let hint = match of.hint {
                "" => format!("remove `{option}`, or {}", group.hint),
                hint => hint.to_owned(),
            };
            reader.report(option, format!("`{given}` {verdict} with `{with}`{why}"), Some(hint));
        }
    }
}

/// The page of combinations, in Markdown.
pub fn combinations_page() -> String {
    let mut page = "\
# Combinations

Options that do not go together are refused before anything runs, with the line of the file. *Not yet*: the combination makes sense
and is not built. Conflicts with a model, such as heads that a number of GPUs does not divide, are refused when it is read. This page
is generated from the table of the checks by `cargo xtask generate`.
"
    .to_owned();
    for group in GROUPS {
        page.push_str(&format!(
            "\n## `{}`: {}\n\n| Option | Value | |\n|---|---|---|\n",
            group.with.option, group.with.value
        ));
        for of in group.conflicts {
            let verdict = match (of.is_pending, of.why) {
                (true, "") => "not yet".to_owned(),
                (true, why) => format!("not yet: {why}"),
                (false, why) => why.to_owned(),
            };
            page.push_str(&format!("| `{}` | {} | {verdict} |\n", of.side.option, of.side.value));
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::super::SECTIONS;
    use super::*;

    #[test]
    fn options_of_the_table_exist() {
        let known = |name: &str| {
            let (group, inner) = name.split_once('.').map_or((name, None), |(group, inner)| (group, Some(inner)));
            let row = SECTIONS.iter().flat_map(|section| section.rows.iter()).find(|row| row.name == group);
            row.is_some_and(|row| inner.is_none_or(|inner| row.kind.rows().iter().any(|row| row.name == inner)))
        };
        for group in GROUPS {
            assert!(known(group.with.option), "{}", group.with.option);
            for of in group.conflicts {
                assert!(known(of.side.option), "{}", of.side.option);
                assert!(of.is_pending || !of.why.is_empty(), "{}: a reason is missing", of.side.option);
            }
        }
    }

    #[test]
    fn a_conflict_names_both_options_the_reason_and_what_to_change() {
        let text = "model: m\nquantize_aware: w4a16\nlora: true\n";
        let problems = Config::load(text, "run.yaml", Task::Sft, &[]).unwrap_err();
        let found: Vec<_> = problems.iter().map(|of| (of.message.as_str(), of.hint.as_deref().unwrap_or(""))).collect();
        let message = "`quantize_aware: w4a16` cannot be combined with `lora: true`: codes are those of whole weights, and an \
                       adapter leaves them unquantized";
        assert_eq!(found, [(message, "remove `quantize_aware`, or set `lora: false`")]);
    }
}
