//! The configuration as a user meets it: what is read, what is rejected, and in which words.

use options::{Problem, render_problems};

use super::*;

fn load(text: &str) -> Result<Config, Vec<Problem>> {
    Config::load(text, "run.yaml", Task::Sft, &[])
}

fn good(text: &str) -> Config {
    load(text).unwrap_or_else(|problems| panic!("{}", render_problems(&problems)))
}

fn bad(text: &str) -> Vec<Problem> {
    load(text).expect_err("the text has a problem")
}

fn overridden(text: &str, overrides: &[(&str, &str)]) -> Result<Config, Vec<Problem>> {
    let overrides: Vec<_> = overrides.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
    Config::load(text, "run.yaml", Task::Sft, &overrides)
}

/// The only problem of a text, as `line:column message | hint`.
fn reported(text: &str) -> String {
    let problems = bad(text);
    assert_eq!(problems.len(), 1, "{}", render_problems(&problems));
    let at = problems[0].place.location.as_ref();
    let place = at.map_or("-".to_string(), |at| format!("{}:{}", at.line, at.column));
    format!("{place} {} | {}", problems[0].message, problems[0].hint.as_deref().unwrap_or("-"))
}

#[test]
fn a_model_is_all_that_is_needed_and_the_defaults_are_the_reference_s() {
    let config = good("model: Qwen/Qwen3-0.6B\n");
    assert_eq!(config.model.model, "Qwen/Qwen3-0.6B");
    assert_eq!(config.optimizer.optimizer, OptimizerKind::AdamW8bit);
    assert_eq!(config.optimizer.learning_rate, 2e-4);
    assert_eq!(config.lora.lora_target_modules, ["all-linear"]);
    assert_eq!(config.lora.lora_dtype, Dtype::Float32);
    assert_eq!(config.training.fixed_steps(), None);
    assert_eq!(config.data.train_seed, 1234);
    assert_eq!(config.precision.recipe, Recipe::Bf16);
    assert_eq!(config.multi_node.distributed.ray_address, "auto");
    assert!(config.hardware.device.is_auto() && config.recompute.recompute_block.is_auto());
    assert!(config.is_written("model") && !config.is_written("lora"));
}

#[test]
fn every_default_is_a_valid_value_and_every_option_has_a_name_of_its_own() {
    // Reading an empty group walks every row and panics at a default that its own type rejects.
    assert_eq!(bad("").len(), 1);
    let names: std::collections::BTreeSet<&str> = rows().map(|row| row.name).collect();
    assert_eq!(names.len(), rows().count());
    for row in rows() {
        assert!(row.doc_text().ends_with('.'), "`{}` needs a sentence of documentation", row.name);
    }
}

/// The settings of the reference's own example.
const REFERENCE_EXAMPLE: &str = r#"
model: Qwen/Qwen3-0.6B
model_type: qwen
sequence_len: 2048
max_model_len: 2048
torch_dtype: bfloat16
output_dir: ./output
save_steps: 100
save_total_limit: 3
num_epochs: 3
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 2e-4
lr_scheduler_type: cosine
warmup_ratio: 0.03
datasets:
  - path: "mlabonne/FineTome-100k"
    type: conversation
    messages_field: conversations
    split: train
validation_split_ratio: 0.1
train_seed: 1234
eval_seed: 1234
sample_packing: true
dataloader_num_workers: 4
use_chat_template: true
template: qwen
truncation_strategy: delete
padding_side: right
lora: true
lora_rank: 16
lora_alpha: 32
lora_dropout: 0.05
lora_dtype: fp32
recompute_block: true
recipe: bf16
gpus: 1
use_cuda_graphs: true
"#;

#[test]
fn the_reference_s_example_has_no_mistake() {
    let config = good(REFERENCE_EXAMPLE);
    assert_eq!(config.template.template, Setting::Value("qwen".into()));
    assert_eq!(config.model.torch_dtype, Setting::Value(Dtype::BFloat16));
    assert_eq!(config.optimizer.lr_scheduler_type, Schedule::Cosine);
    let datasets = config.data.datasets.unwrap();
    assert_eq!((datasets[0].r#type, datasets[0].messages_field.as_str()), (DatasetType::Conversation, "conversations"));
}

#[test]
fn ten_mistakes_are_reported_in_one_go_with_line_column_and_hint() {
    let text = "\
model: [a]
lerning_rate: 1e-3
learning_rate: \"2e-4\"
num_epochs: -1
lora_rank: 0
lr_scheduler_type: cosin
recompute_block: true
recompute_att: false
save_steps: 5
save_steps: 6
datasets:
  - path: a.jsonl
    type: instruktion
  - type: text
    text_feild: x
max_steps: 10
warmup_steps: 11
lora_target_modules: q_proj
";
    let problems = bad(text);
    let mut reported: Vec<_> = problems
        .iter()
        .filter(|problem| problem.availability == options::Availability::Mistake)
        .map(|problem| {
            let at = problem.place.location.as_ref().unwrap_or_else(|| panic!("no place: {problem}"));
            (at.line, at.column, problem.place.path.as_str(), problem.hint.as_deref().unwrap_or("-"))
        })
        .collect();
    reported.sort();
    assert_eq!(
        reported,
        [
            (1, 8, "model", "-"),
            (2, 1, "lerning_rate", "did you mean `learning_rate`?"),
            (3, 16, "learning_rate", "remove the quotes"),
            (4, 13, "num_epochs", "-"),
            (5, 12, "lora_rank", "-"),
            (6, 20, "lr_scheduler_type", "did you mean `cosine`?"),
            (8, 16, "recompute_att", "remove one of `recompute_att` and `recompute_block`"),
            (10, 1, "save_steps", "keep one of the two"),
            (13, 11, "datasets[0].type", "did you mean `instruction`?"),
            (14, 5, "datasets[1].path", "add `path: ...` (text)"),
            (15, 5, "datasets[1].text_feild", "did you mean `text_field`?"),
            (17, 15, "warmup_steps", "shorten them, or train for more steps"),
        ],
        "{}",
        render_problems(&problems)
    );
}

#[test]
fn a_problem_is_shown_with_its_line() {
    let shown = render_problems(&bad("model: m\ndistributed:\n  num_node: 2\n"));
    assert_eq!(
        shown,
        "1 problem in the configuration\n\n\
         run.yaml:3:3: there is no option `distributed.num_node`\n  \
         3 |   num_node: 2\n    |   ^^^^^^^^\n  \
         hint: did you mean `num_nodes`?"
    );
}

#[test]
fn messages_name_option_value_and_expectation() {
    assert_eq!(
        reported("model: m\nlearning_rate: fast\n"),
        "2:16 `learning_rate` is `fast`, expected a number from 0 | -"
    );
    assert_eq!(
        reported("model: m\nadamw_beta1: 1\n"),
        "2:14 `adamw_beta1` is `1`, expected a number from 0 and below 1 | -"
    );
    assert_eq!(
        reported("model: m\nqlora_block_size: 100\n"),
        "2:19 `qlora_block_size` is `100`, expected a whole number, one of 64, 128, 256 | -"
    );
    assert_eq!(
        reported("model: m\nsave_steps:\n"),
        "2:11 `save_steps` is empty (null), expected a whole number from 1 | \
         give a value, or remove the line to take the default, which is `50`"
    );
    assert_eq!(reported("lora: true\n"), "- `model` is required | add `model: ...` (text)");
    assert_eq!(
        reported("model: m\nlora_dtype: fp64\n"),
        "2:13 `lora_dtype` is `fp64`, expected `float32`, `bfloat16` or `float16` | did you mean `fp16`?"
    );
    assert_eq!(reported("model: m\nlora: maybe\n"), "2:7 `lora` is `maybe`, expected `true` or `false` | -");
}

#[test]
fn yaml_itself_may_be_wrong() {
    assert!(
        reported("model: \"m\nlora: true\n").starts_with("2:1 this is not YAML: "),
        "{}",
        reported("model: \"m\nlora: true\n")
    );
    assert!(reported("- model\n").contains("this is a list"));
    assert!(reported("model: m\n---\nmodel: n\n").contains("a second YAML document"));
    assert!(reported("model: !secret m\n").contains("the YAML tag `!secret` has no meaning here"));
}

#[test]
fn yaml_scalars_are_what_the_option_makes_of_them() {
    let config = good("model: no\nrun_name: 1e3\nlearning_rate: 1\nlora: yes\nsystem: \"null\"\nlog_file: auto\n");
    assert_eq!(config.model.model, "no");
    assert_eq!(config.run.run_name, Setting::Value("1e3".into()));
    assert_eq!((config.optimizer.learning_rate, config.lora.lora), (1.0, true));
    assert_eq!(config.template.system.as_deref(), Some("null"));
    assert!(config.logging.log_file.is_auto());
}

#[test]
fn the_clock_of_templates_is_a_moment() {
    for clock in ["2026-11-20", "2024-02-29T23:59:59"] {
        let config = good(&format!("model: m\nclock: {clock}\n"));
        assert_eq!(config.template.clock, Setting::Value(Clock(clock.into())));
    }
    for wrong in ["2026-02-29", "2026-13-01", "20-11-2026", "2026-11-20T24:00:00", "2026-11-20T12", "ö26-11-20"] {
        assert!(reported(&format!("model: m\nclock: {wrong}\n")).contains("expected a moment such as"), "{wrong}");
    }
}

#[test]
fn anchors_are_followed() {
    let config = good("model: &name m\nrun_name: *name\n");
    assert_eq!(config.run.run_name, Setting::Value("m".into()));
}

#[test]
fn the_command_line_wins_and_is_checked_like_the_file() {
    let config = overridden(
        "model: m\nlora_rank: 8\ndatasets:\n- {path: a, type: text}\n",
        &[
            ("lora-rank", "4"),
            ("lora_target_modules", "[q_proj, v_proj]"),
            ("system", "be: brief # always"),
            ("distributed.num_nodes", "1"),
            ("datasets.0.text_field", "body"),
            ("learning_rate", "1e-3"),
            ("learning_rate", "1e-4"),
        ],
    )
    .unwrap_or_else(|problems| panic!("{}", render_problems(&problems)));
    assert_eq!((config.lora.lora_rank, config.optimizer.learning_rate), (4, 1e-4));
    assert_eq!(config.lora.lora_target_modules, ["q_proj", "v_proj"]);
    assert_eq!(config.template.system.as_deref(), Some("be: brief # always"));
    assert_eq!(config.data.datasets.unwrap()[0].text_field, "body");

    let problems = overridden("model: m\n", &[("lora-rnk", "4"), ("gpus", "many"), ("model.name", "x")]).unwrap_err();
    let reported: Vec<String> = problems
        .iter()
        .map(|problem| {
            let at = problem.place.location.as_ref().unwrap();
            format!("{}:{} {} {:?}", at.source, at.column, problem.message, problem.hint)
        })
        .collect();
    assert_eq!(
        reported,
        [
            "command line:1 `model.name` cannot be set: `model` is a single value None",
            "command line:6 `gpus` is `many`, expected a whole number from 0 None",
            "command line:1 there is no option `lora_rnk` Some(\"did you mean `lora_rank`?\")",
        ]
    );
}

#[test]
fn second_spellings_are_read_but_not_beside_the_first() {
    let config = good("model_name: meta-llama/Llama-3.1-8B\ndataset: timdettmers/openassistant-guanaco\n");
    let datasets = config.data.datasets.unwrap();
    let set = &datasets[0];
    assert_eq!((set.r#type, set.path.as_str()), (DatasetType::Auto, "timdettmers/openassistant-guanaco"));
    assert_eq!(good("model_name: m\n").model.model, "m");
    assert_eq!(overridden("model: m\n", &[("model-name", "n")]).unwrap().model.model, "n");
    let both = reported_messages("model: m\nmodel_name: n\n");
    assert_eq!(both, ["`model_name` and `model` say the same, so only one of them may be given"]);
}

#[test]
fn conversations_are_checked_when_they_are_configured() {
    assert!(
        reported("model: m\nloss_scale: {assistant: -1}\n")
            .contains("`assistant`: the weight -1 is not a number from 0")
    );
    assert!(reported("model: m\nloss_scale: {\"(\": 1}\n").contains("neither a role"));
    assert!(
        reported("model: m\nagent_template: x\n").contains("there is no agent template `x` | known are hermes, react")
    );
    assert!(reported("model: m\npadding_free: true\n").contains("no effect on packed rows"));
    let from = |path: &str| format!("model: m\ndatasets: [{{path: '{path}', type: text}}]\n");
    assert!(reported(&from("https://host/rows.jsonl")).contains("cannot be read from `https://`"));
    for path in ["s3://bucket/rows.jsonl", "gs://bucket/rows", "rows.arrow"] {
        good(&from(path));
    }
    let formatted = "{path: d.jsonl, type: instruction, instruction_field: a, output_field: b, prompt_format: '{instruction}{output}'}";
    let text = format!("model: m\nloss_scale: all\ndatasets: [{formatted}]\n");
    assert!(reported(&text).contains("`datasets[0].prompt_format` writes the rows"));
    let text = "model: m\nsample_packing: false\npadding_free: true\nloss_scale: last_round\nagent_template: react\n";
    assert!(good(text).template.padding_free);
}

#[test]
fn templates_are_names_or_files() {
    assert!(reported("model: m\ntemplate: quen\n").contains("there is no template `quen` | did you mean `qwen`?"));
    assert!(reported("model: m\ntemplate: zzz\n").contains("known are qwen, llama"));
    assert_eq!(good("model: m\ntemplate: my.jinja\n").template.template, Setting::Value("my.jinja".into()));
}

fn reported_messages(text: &str) -> Vec<String> {
    bad(text).into_iter().map(|problem| problem.message).collect()
}

#[test]
fn what_is_not_built_yet_is_refused_by_name_and_its_default_is_not() {
    for (line, message) in [
        ("zero_level: 1\nshard_gradients: true", "`shard_gradients: true` contradicts `zero_level: 1`"),
        ("zero_level: 3\nshard_weights: false", "`shard_weights: false` contradicts `zero_level: 3`"),
        ("device: cpu\ngpus: 6\nsequence_parallel_size: 4", "`sequence_parallel_size: 4` does not divide `gpus: 6`"),
        ("sequence_parallel_size: 2\ngpus: 1", "`sequence_parallel_size: 2` does not divide `gpus: 1`"),
        ("device: cpu\ngpus: 65", "`gpus: 65`, but `device: cpu` runs at most 64 ranks"),
        (
            "gpus: 2\ndistributed: {num_nodes: 2}\noffload_grads: true\nshard_scope: node",
            "`offload_grads: true` is not available yet with `shard_scope: node` and 2 nodes",
        ),
        (
            "gpus: 2\ndistributed: {num_nodes: 2}\noffload_grads: true\ngradient_compression: int8",
            "`offload_grads: true` is not available yet with `gradient_compression: int8` and 2 nodes",
        ),
        ("gpus: 0\ndistributed: {num_nodes: 2}", "`gpus: 0` is every visible GPU, but all nodes have as many"),
        (
            "memcpy_send_recv: true\ndistributed: {num_nodes: 2}",
            "`memcpy_send_recv: true` copies inside one process, but there are several nodes",
        ),
        ("device: cpu\nmemcpy_all_gather: true", "`memcpy_all_gather` copies between GPUs, but `device` is cpu"),
        ("grad_accumulation_dtype: bfloat16", "`grad_accumulation_dtype: bfloat16` is not available yet"),
        (
            "device: cpu\ndistributed: {num_nodes: 2}\nzero_level: 2\nshard_scope: node",
            "`shard_scope: node` with `zero_level: 2`, but each node has one rank, which would share nothing",
        ),
        (
            "resume_from_checkpoint: a/b\ndistributed: {max_restarts: 1}",
            "`distributed.max_restarts` does not go with a `resume_from_checkpoint` that names a folder",
        ),
        (
            "distributed: {ray_address: 'ray://h'}",
            "`distributed.ray_address: ray://h`, expected `auto`, `local` or `ray://host:port`",
        ),
        (
            "device: cpu\ndistributed: {num_nodes: 2, min_nodes: 3}",
            "`distributed.min_nodes: 3` is more than `distributed.num_nodes: 2`",
        ),
        ("gpus: 2\ndistributed: {gpus_per_node: 3}", "`distributed.gpus_per_node: 3` contradicts `gpus: 2`"),
    ] {
        assert_eq!(reported_messages(&format!("model: m\n{line}\n")), [message]);
    }
    assert_eq!(good("model: m\ndevice: cpu\ngpus: 64\n").ranks(), 64);
    assert_eq!(good("model: m\ngpus: 0\n").ranks(), 1);
    // All that are visible, the number that a machine for plans has.
    let open = good("model: m\ngpus: 0\n");
    assert_eq!([1, 4].map(|visible| open.with_visible_gpus(visible).unwrap().ranks()), [1, 4]);
    assert_eq!(open.with_planned_gpus(8, "8xh200").unwrap().ranks(), 8);
    assert_eq!(good("model: m\n").with_planned_gpus(2, "2xh200").unwrap().ranks(), 2);
    let two = good("model: m\ngpus: 2\n");
    assert_eq!((two.with_visible_gpus(4).unwrap().ranks(), two.with_planned_gpus(1, "h200").unwrap().ranks()), (2, 2));
    let problem = &two.with_planned_gpus(8, "8xh200").unwrap_err()[0];
    assert_eq!(problem.message, "`gpus: 2`, but `--machine 8xh200` has 8");
    let problem = &good("model: m\ngpus: 0\nsequence_parallel_size: 3\n").with_visible_gpus(2).unwrap_err()[0];
    assert_eq!(problem.message, "`sequence_parallel_size: 3` does not divide `gpus: 2`");
    good("model: m\ngpus: 2\noffload_grads: true\ndistributed: {num_nodes: 2}\n");
    let nodes = good("model: m\ndevice: cpu\ndistributed: {num_nodes: 3, gpus_per_node: 2}\n");
    assert_eq!((nodes.ranks(), nodes.local_ranks(), nodes.nodes()), (6, 2, 3));
    for sharding in ["zero_level: 3", "shard_weights: true"] {
        for recipe in ["fp8_hybrid", "nvfp4"] {
            good(&format!("model: m\ndevice: cpu\ngpus: 2\nrecipe: {recipe}\n{sharding}\n"));
        }
    }
    good("model: m\nzero_level: 1\nrecipe: bf16\nreport_to: null\nmerge_adapter: false\nrecompute_swiglu: auto\n");
}

#[test]
fn float16_goes_with_no_recipe_that_quantises() {
    let message = "`torch_dtype: float16` cannot be combined with `recipe: fp8_hybrid`: both scale gradients";
    assert_eq!(
        reported("model: m\ntorch_dtype: fp16\nrecipe: fp8_hybrid\n"),
        format!("2:14 {message} | set `torch_dtype: bfloat16`, or remove `recipe`")
    );
    good("model: m\ntorch_dtype: fp16\nlora_dtype: fp16\nmaster_dtype: fp32\n");
}

#[test]
fn a_recipe_that_quantises_has_its_options_and_needs_a_gpu_that_can() {
    let (fp8, fp4) = ("`recipe: fp8_hybrid`", "`recipe: nvfp4`");
    let both = format!("{fp8} or {fp4}");
    for (line, takers, recipes, other) in [
        ("gradient_dtype: e5m2", fp8, vec!["fp8_hybrid"], "nvfp4"),
        ("fp8_amax_history: 4", fp8, vec!["fp8_hybrid"], "nvfp4"),
        ("fp4_backend: emulate", fp4, vec!["nvfp4"], "fp8_hybrid"),
        ("fp4_stochastic_rounding: false", fp4, vec!["nvfp4"], "fp8_hybrid"),
        ("skip_quant_first_layers: 1", &both, vec!["fp8_hybrid", "nvfp4"], "bf16"),
        ("skip_quant_last_layers: 1", &both, vec!["fp8_hybrid", "nvfp4"], "bf16"),
    ] {
        for wrong in ["bf16", other] {
            let reported = reported(&format!("model: m\nrecipe: {wrong}\n{line}\n"));
            let expected = format!("says how {takers} quantises, but the recipe is `{wrong}`");
            assert!(reported.contains(&expected), "{reported}");
        }
        for recipe in recipes {
            good(&format!("model: m\nrecipe: {recipe}\n{line}\n"));
        }
    }
    good("model: m\nrecipe: fp8_hybrid\ngradient_dtype: bfloat16\n");
    assert!(reported("model: m\nrecipe: nvfp4\ngradient_dtype: bfloat16\n").contains("the recipe is `nvfp4`"));
    let config = good("model: m\nrecipe: fp8_hybrid\n");
    let with = |arch: &str| config.check_machine(&facts(arch));
    for arch in ["sm_89", "sm_90a", "gfx942", "gfx950", "gfx1201"] {
        assert!(with(arch).is_empty(), "{arch}");
    }
    let message = &with("sm_86")[0].message;
    assert_eq!(message, "`recipe` needs a GPU of compute capability 8.9 or more, this one has 8.6");
    for arch in ["gfx90a", "gfx1100"] {
        let expected = format!(
            "`recipe` needs matrix units for codes of eight bits, which {arch} lacks (gfx942, gfx950 and gfx12 have them)"
        );
        assert_eq!(with(arch)[0].message, expected);
    }
    assert!(with("cpu").is_empty(), "a CPU is a reference");
}

/// One GPU of an architecture, or none.
fn facts(arch: &str) -> MachineFacts {
    MachineFacts { gpus: u32::from(arch != "cpu"), arch: arch.parse().unwrap() }
}

#[test]
fn products_of_four_bits_are_emulated_or_need_their_units() {
    let of = |lines: &str, device: &str, arch: &str| -> Vec<String> {
        let config = good(&format!("model: m\nrecipe: nvfp4\ndevice: {device}\n{lines}"));
        let problems = config.check_machine(&facts(arch));
        problems.iter().map(|problem| format!("{}: {}", problem.place.path, problem.message)).collect()
    };
    let refused = |path: &str, backend: &str, why: &str| vec![format!("{path}: `fp4_backend: {backend}` {why}")];
    let old = "needs a GPU of compute capability 10.0 or more, this one has 9.0";
    assert_eq!(of("", "auto", "sm_90a"), refused("recipe", "cutlass", old));
    for backend in ["cutlass", "cudnn"] {
        let written = format!("fp4_backend: {backend}\n");
        if backend == "cudnn" {
            assert_eq!(of(&written, "auto", "sm_90a"), refused("fp4_backend", backend, old));
        }
        // The CPU emulates them, whatever GPU is there.
        assert!(of(&written, "cpu", "sm_90a").is_empty() && of(&written, "auto", "cpu").is_empty());
        for has in ["sm_100a", "sm_103a", "sm_120a"] {
            assert!(of(&written, "auto", has).is_empty(), "{backend} {has}");
        }
    }
    let lacks = "needs matrix units for codes of four bits, which gfx950 lacks (no AMD GPU has them with the scales of `nvfp4`)";
    assert_eq!(of("", "auto", "gfx950"), refused("recipe", "cutlass", lacks));
    for machine in ["cpu", "sm_80", "sm_90a", "sm_120a", "gfx942"] {
        assert!(of("fp4_backend: emulate\n", "auto", machine).is_empty(), "{machine}");
    }
}

#[test]
fn permissions_are_given_on_any_machine_and_promises_are_not() {
    let config = good("model: m\ndevice: cpu\nuse_cuda_graphs: true\nuse_fused_rope: true\nuse_write_combined: true\n");
    assert!(config.check_machine(&facts("cpu")).is_empty());
    let reported = reported_messages("model: m\ndevice: cpu\noffload_optimizer: true\n");
    assert!(reported[0].contains("but `device` is cpu"), "{reported:?}");
    let several = |gpus| {
        good("model: m\ngpus: 2\n")
            .check_machine(&MachineFacts { gpus, ..facts(if gpus > 0 { "sm_90a" } else { "cpu" }) })
    };
    assert!(several(0)[0].message == "`gpus: 2`, but no GPU is visible" && several(2).is_empty());
    assert_eq!(several(1)[0].message, "`gpus: 2`, but 1 are visible");
    let problems = good("model: m\ndevice: cuda\n").check_machine(&facts("cpu"));
    assert_eq!(problems.len(), 1);
    assert_eq!(problems[0].message, "`device: cuda`, but no GPU is visible");
    for (device, arch) in [("cuda", "gfx942"), ("rocm", "sm_90a")] {
        let found = good(&format!("model: m\ndevice: {device}\n")).check_machine(&facts(arch));
        assert_eq!(found[0].message, format!("`device: {device}`, but this is {arch}"));
    }
    assert!(good("model: m\ndevice: rocm\n").check_machine(&facts("gfx1100")).is_empty());
    assert_eq!(problems[0].place.location.as_ref().map(|at| (at.line, at.column)), Some((2, 9)));
}

#[test]
fn contradictions() {
    let mistakes = |text: &str| -> Vec<String> {
        let problems = bad(&format!("model: m\n{text}")).into_iter();
        let mistakes = problems.filter(|problem| problem.availability == options::Availability::Mistake);
        mistakes.map(|problem| format!("{}: {}", problem.place.path, problem.message)).collect()
    };
    assert_eq!(
        mistakes("recompute_lora: true\nrecompute_block: false\n"),
        ["recompute_lora: `recompute_lora: true` needs `recompute_block: true`"]
    );
    assert_eq!(
        mistakes("recompute_ffn: true\nrecompute_swiglu: false\n"),
        ["recompute_swiglu: `recompute_swiglu: false` contradicts `recompute_ffn: true`, which includes it"]
    );
    assert_eq!(
        mistakes("recompute_block: true\nrecompute_qkv: false\n"),
        ["recompute_qkv: `recompute_qkv: false` contradicts `recompute_block: true`, which includes it"]
    );
    assert_eq!(mistakes("memory_limit: 0\n"), ["memory_limit: `memory_limit: 0` leaves no room for anything"]);
    assert_eq!(
        mistakes("recipe: nvfp4\nqlora_fp4: true\nqlora_four_over_six: true\n"),
        ["qlora_four_over_six: `qlora_four_over_six: true` contradicts `recipe: nvfp4`, which would round its blocks \
             again: tiles of the recipe have 6 as their largest value"]
    );
    load("model: m\nrecipe: nvfp4\nqlora_fp4: true\nqlora_four_over_six: false\n").unwrap();
    assert_eq!(
        mistakes("qlora_bnb: true\nqlora_block_size: 64\n"),
        ["qlora_block_size: `qlora_block_size` has no effect on `qlora_bnb`"]
    );
    // A resolved file has the defaults of the other formats, too.
    load("model: m\nqlora_bnb: true\nqlora_block_size: 128\nqlora_four_over_six: auto\n").unwrap();
    assert_eq!(mistakes("qlora_bnb: true\nlora: false\n"), ["qlora_bnb: `qlora_bnb: true` needs `lora: true`"]);
    assert_eq!(
        mistakes("sequence_len: 4096\nmax_model_len: 2048\n"),
        ["sequence_len: `sequence_len: 4096` is longer than `max_model_len: 2048`"]
    );
    assert_eq!(
        mistakes("rope_scaling: yarn\n"),
        ["rope_scaling: `rope_scaling` by name needs `max_model_len`, from which its factor follows"]
    );
    // A mistake in one dataset does not hide a contradiction in another.
    assert_eq!(
        mistakes("datasets:\n- {path: a, type: txt}\n- {path: b, type: instruction, output_field: o}\n- nothing\n")
            .iter()
            .map(|reported| reported.split(": ").next().unwrap())
            .collect::<Vec<_>>(),
        ["datasets[0].type", "datasets[2]", "datasets[1].type"]
    );
    assert_eq!(mistakes("max_steps: 0\n"), ["max_steps: `max_steps: 0` would train nothing"]);
    assert_eq!(
        mistakes("lora_target_modules: []\n"),
        ["lora_target_modules: `lora_target_modules: []` would train nothing"]
    );
    assert_eq!(
        mistakes("datasets:\n- {path: a, type: text, messages_field: m}\n"),
        [
            "datasets[0].messages_field: `datasets[0].messages_field` belongs to type `conversation`, but the type is `text`"
        ]
    );
    assert_eq!(
        mistakes(
            "datasets:\n- {path: a, type: text, prompt_field: m}\n- {path: a, type: preference, system_field: s}\n"
        ),
        [
            "datasets[0].prompt_field: `datasets[0].prompt_field` belongs to type `preference or unpaired`, but the type is \
             `text`"
        ]
    );
    assert_eq!(
        mistakes("preference_split: trl\ntruncation_mode: keep_end\n"),
        [
            "preference_split: `preference_split` has no effect on the rows of `sft`",
            "truncation_mode: `truncation_mode` has no effect on the rows of `sft`"
        ]
    );
    assert_eq!(
        mistakes("datasets:\n- {path: a, type: instruction, output_field: o, system_prompt_type: fixed}\n"),
        [
            "datasets[0].type: `datasets[0].instruction_field` is required for type `instruction`",
            "datasets[0].system_prompt_type: `system_prompt_type: fixed` needs `system_prompt`",
        ]
    );
}

#[test]
fn the_schedule_is_checked_when_the_number_of_steps_is_known() {
    let config = good("model: m\nwarmup_ratio: 0.5\ncooldown_steps: 6\n");
    assert!(config.check_steps(12).is_empty());
    let problems = config.check_steps(11);
    assert_eq!(problems[0].message, "6 steps of warm-up and 6 of cool-down do not fit into 11 steps");
    assert_eq!(problems[0].place.path, "cooldown_steps");
    let wsd = good("model: m\nlr_scheduler_type: wsd\nwarmup_ratio: 0.5\nwarmup_steps: 3\n");
    assert_eq!((wsd.optimizer.warmup(95), wsd.optimizer.cooldown(95)), (3, 10));
    let zero = good("model: m\nlr_scheduler_type: wsd\ncooldown_steps: 0\n");
    assert_eq!(zero.optimizer.cooldown(95), 0);
}

#[test]
fn pre_training_trains_the_weights_unless_set_otherwise() {
    let load = |text: &str| Config::load(text, "run.yaml", Task::Pt, &[]).unwrap();
    assert!(!load("model: m\n").lora.lora);
    assert!(load("model: m\nlora: true\n").lora.lora);
}

#[test]
fn a_python_dict_is_read_like_a_file_without_lines() {
    let text = r#"{"model": "m", "learning_rate": 1e-05, "lora": false, "run_name": null, "datasets": null}"#;
    let config = Config::load_json(text, Task::Sft, &[]).unwrap();
    assert_eq!((config.optimizer.learning_rate, config.lora.lora), (1e-5, false));
    let problems = Config::load_json(r#"{"model": "m", "lora_rank": "8"}"#, Task::Sft, &[]).unwrap_err();
    assert_eq!(
        problems[0].to_string(),
        "`lora_rank` is the text \"8\", expected a whole number from 1 to 262144\n  hint: remove the quotes"
    );
    assert_eq!(Config::load_json("{", Task::Sft, &[]).unwrap_err().len(), 1);
}

#[test]
fn numbers_that_no_run_has_are_refused() {
    for (option, most) in [
        ("lora_rank", 262_144_u64),
        ("lora_alpha", 16_777_216),
        ("gradient_accumulation_steps", 1_048_576),
        ("per_device_train_batch_size", 1_048_576),
    ] {
        let load = |value: u64| Config::load(&format!("model: m\n{option}: {value}\n"), "run.yaml", Task::Sft, &[]);
        assert!(load(most).is_ok(), "{option}");
        for value in [most + 1, 1 << 31, 1 << 32, u64::MAX] {
            assert!(load(value).is_err(), "{option}: {value}");
        }
    }
}

#[test]
fn passwords_of_addresses_are_in_no_record() {
    let text = "model: m\naim_repo: aim://user:password@host:1/x\n";
    let config = Config::load(text, "run.yaml", Task::Sft, &[]).unwrap();
    let reasons = Reasons::new();
    let records = [
        config.resolved_yaml(&reasons),
        config.resolved_json(&reasons).to_string(),
        config.recorded_json().to_string(),
    ];
    for record in records {
        assert!(!record.contains("password") && record.contains("aim://***@host:1/x"), "{record}");
    }
    assert_eq!(config.logging.aim_repo.as_deref(), Some("aim://user:password@host:1/x"), "the tracker needs it");
    for hidden in ["aim_repo: aim://***@host:1/x", "datasets: [{path: 's3://b/x?token=***', type: text}]"] {
        let problems = reported_messages(&format!("model: m\n{hidden}\n"));
        assert!(problems.iter().any(|text| text.contains("`***` for a password")), "{problems:?}");
    }
    good("model: m\nsystem: a*** b=*** 1\n");
}

#[test]
fn resolved_options_load_again_as_the_same_run() {
    let text = "model: m\nlearning_rate: 3e-5\nsystem: 'yes: \"no\" # 1'\nlora_target_modules: [\"q_.*\", a]\n\
                datasets:\n- {path: ./a b.jsonl, type: conversation, message_property_mappings: {role: from}}\n- {path: 'null', type: tokens}\n";
    let config = good(text);
    let resolved = config.resolved_yaml(&Reasons::new());
    let again = good(&resolved);
    assert_eq!(again.values(), config.values(), "{resolved}");
    assert_eq!(config.to_json()["datasets"][1]["type"], "tokens");
    assert_eq!(config.to_json()["sequence_len"], "auto");
    assert!(
        resolved.contains("learning_rate: 0.00003  # given\n") || resolved.contains("learning_rate: 3e-5  # given\n"),
        "{resolved}"
    );

    let reason = Reason { value: serde_json::json!(2048), because: "max_position_embeddings of the model".into() };
    let resolved = config.resolved_yaml(&Reasons::from([("sequence_len".to_string(), reason)]));
    assert!(resolved.contains("sequence_len: 2048  # auto: max_position_embeddings of the model\n"), "{resolved}");
}

#[test]
fn schema_and_help_name_every_option() {
    let schema = schema();
    let help = help_rows();
    let help_names: Vec<&str> = help.as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect();
    for row in rows() {
        assert!(schema["properties"].get(row.name).is_some(), "{}", row.name);
        assert!(help_names.iter().any(|name| name.split('.').next() == Some(row.name)), "{}", row.name);
    }
    assert_eq!(schema["properties"]["lora_rank"]["minimum"], 1);
    assert_eq!(schema["properties"]["learning_rate"]["default"], 2e-4);
    assert_eq!(schema["properties"]["distributed"]["additionalProperties"], false);
}

/// Options that are accepted and rightly read nowhere: permissions that this engine does not need. Rotations are computed in
/// the kernel, quantised weights are always kept, and gradients always go from all ranks to all.
const WITHOUT_EFFECT: &[&str] = &["use_fused_rope", "persistent_quants", "use_all_to_all_reduce"];

/// True if a source reads a field of this name: not a method, whose call continues with a parenthesis or types, and not
/// a longer name.
fn has_field(text: &str, name: &str) -> bool {
    let access = format!(".{name}");
    text.match_indices(&access).any(|(at, _)| {
        let rest = &text[at + access.len()..];
        !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_' || c == '(') && !rest.starts_with("::<")
    })
}

#[test]
fn a_method_is_no_field() {
    for text in ["line.split(',')", "text.split::<u8>()", "of.splits", "row.split_at(3)"] {
        assert!(!has_field(text, "split"), "{text}");
    }
    for text in ["of.split.clone()", "match of.split {", "(of.split, 1)", "of.split"] {
        assert!(has_field(text, "split"), "{text}");
    }
}

/// No accepted option may be without effect. Searches the sources for a field access of each available option.
#[test]
fn every_available_option_is_read_somewhere() {
    fn sources(folder: &std::path::Path, text: &mut String) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, text);
            } else if !path.ends_with("config/checks.rs") && !path.ends_with("config/tests.rs") {
                text.push_str(&std::fs::read_to_string(&path).unwrap());
            }
        }
    }
    let mut text = String::new();
    // Uploads are Python's, which asks the bindings for them.
    for folder in ["src", "../py/src"] {
        sources(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), &mut text);
    }
    let all = rows().flat_map(|row| std::iter::once(row).chain(row.kind.rows())).filter(|row| !row.is_pending);
    let is_read = |name: &str| has_field(&text, name) || has_field(&text, &format!("r#{name}"));
    let unread: Vec<&str> =
        all.map(|row| row.name).filter(|name| !is_read(name) && !WITHOUT_EFFECT.contains(name)).collect();
    assert!(unread.is_empty(), "accepted, but read nowhere: {unread:?}");
}

#[test]
fn no_text_makes_the_loader_panic() {
    let text = REFERENCE_EXAMPLE;
    for (at, _) in text.char_indices() {
        let (before, after) = text.split_at(at);
        let _ = load(before);
        for insert in ["\u{feff}", "\t", "- ", "&a ", "*a", "{", "\"", "ü: ", "\n? ", "!!int "] {
            let _ = load(&format!("{before}{insert}{after}"));
        }
    }
}

#[test]
fn rows_of_a_step_are_divided_over_any_number_of_gpus() {
    let of = |gpus: u32| {
        let text = format!("model: m\ngpus: {gpus}\nbatch_size: 12\n");
        let divided = good(&text).with_visible_gpus(12)?;
        Ok::<_, Vec<Problem>>((divided.device_rows(), divided.micro_rows()))
    };
    let divided = [1, 2, 3, 4, 6, 0].map(|gpus| of(gpus).unwrap());
    assert_eq!(divided, [(12, 2), (6, 2), (4, 2), (3, 1), (2, 2), (1, 1)]);
    let problem = &of(5).unwrap_err()[0];
    assert!(problem.to_string().contains("`batch_size: 12` is no multiple of 5"), "{problem}");
    for other in ["gradient_accumulation_steps: 4", "per_device_train_batch_size: 4"] {
        assert!(reported(&format!("model: m\nbatch_size: 8\n{other}\n")).contains("both say how many rows"));
    }
}

#[test]
fn rows_of_a_micro_step_divide_those_of_a_step() {
    let split = |text: &str| {
        let config = good(&format!("model: m\n{text}")).with_visible_gpus(1)?;
        Ok::<_, Vec<Problem>>((config.micro_rows(), config.micro_steps()))
    };
    let pair = "per_device_train_batch_size: 2\ngradient_accumulation_steps: 6\n";
    assert_eq!(split(pair).unwrap(), (2, 6), "as written, before a plan has chosen");
    for (rows, steps) in [(1, 12), (3, 4), (12, 1)] {
        assert_eq!(split(&format!("{pair}micro_batch_size: {rows}\n")).unwrap(), (rows, steps));
    }
    assert_eq!(split("batch_size: 12\nmicro_batch_size: 4\n").unwrap(), (4, 3));
    let problem = &split("batch_size: 12\nmicro_batch_size: 5\n").unwrap_err()[0];
    assert!(problem.to_string().contains("does not divide the 12 rows"), "{problem}");
    let text = reported(&format!("model: m\n{pair}micro_batch_size: 8\n"));
    assert!(text.contains("does not divide the 12 rows") && text.contains("1, 2, 3, 4, 6, 12"), "{text}");
}

#[test]
fn rows_of_a_micro_step_alone_are_refused_with_both_meanings() {
    for more in ["", "gradient_accumulation_steps: 4\n"] {
        let text = reported(&format!("model: m\nmicro_batch_size: 2\n{more}"));
        assert!(text.contains("as in Axolotl") && text.contains("`per_device_train_batch_size: 2`"), "{text}");
    }
}

#[test]
fn losses_that_compare_rows_keep_their_micro_batches() {
    let text = |more: &str| format!("model: m\nlora: true\nper_device_train_batch_size: 4\n{more}");
    let kto = |more: &str| Config::load(&text(more), "run.yaml", Task::Kto, &[]);
    assert!(!kto("").unwrap().splits_freely());
    let problem = &kto("micro_batch_size: 2\n").unwrap_err()[0];
    assert!(problem.to_string().contains("`loss_type: kto`"), "{problem}");
    assert!(kto("micro_batch_size: 4\n").is_ok());
}
