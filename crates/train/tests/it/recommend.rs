//! `apply_recommended_values`: what is chosen, for which machine; what is never touched; what a resumed run does.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::stories::{Lines, config, device, events, root, source};
use program::Machine;
use serde_json::{Value, json};
use train::config::{Config, Task};
use train::{ModelSource, Outcome, recommended};

/// The published sizes of models, of which only the configuration is needed.
fn model(folder: &Path, ir: &str, fields: Value) -> ModelSource {
    std::fs::write(folder.join("config.json"), fields.to_string()).unwrap();
    ModelSource::open(folder, ir).unwrap()
}

/// Qwen3 in the size of its recorded graph.
fn qwen3(folder: &Path) -> ModelSource {
    let fields = json!({
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 2,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
    });
    model(folder, include_str!("../ir/qwen3.json"), fields)
}

fn options(changed: &[(&str, Value)]) -> Config {
    let mut all = json!({"model": "m", "apply_recommended_values": true});
    for (name, value) in changed {
        all[*name] = value.clone();
    }
    Config::load_json(&all.to_string(), Task::Sft, &[]).unwrap()
}

/// The chosen values by option, without the reasons.
fn chosen(config: &Config) -> BTreeMap<String, Value> {
    config.recommended.iter().flatten().map(|(name, of)| (name.clone(), of.value.clone())).collect()
}

fn choose(changed: &[(&str, Value)], machine: &Machine) -> Config {
    let folder = tempfile::tempdir().unwrap();
    recommended(&options(changed), &qwen3(folder.path()), machine, None, &|| false).unwrap()
}

#[test]
fn the_cut_of_a_step_follows_the_machine() {
    let small = Machine { memory: 24 << 20, context_bytes: 0, ..Machine::h200() };
    let (short, rows) = (("sequence_len", json!(512)), ("sequence_len", json!(2048)));
    let cases: [(&[(&str, Value)], &Machine, [u32; 2]); 6] = [
        // Four rows of 8192 tokens fill the device.
        (&[], &Machine::h200(), [4, 2]),
        (&[("lora", json!(false))], &Machine::h200(), [4, 2]),
        (std::slice::from_ref(&short), &Machine::h200(), [8, 1]),
        (std::slice::from_ref(&rows), &small, [2, 4]),
        (std::slice::from_ref(&short), &Machine::cpu(8 << 30, 4), [4, 2]),
        (&[("gradient_accumulation_steps", json!(2))], &Machine::h200(), [4, 1]),
    ];
    for (changed, machine, cut) in cases {
        let config = choose(changed, machine);
        let found = [config.micro_rows(), config.micro_steps()];
        assert_eq!(found, cut, "{changed:?} on {}: {:#?}", machine.name, config.micro_batch);
    }
    let because = choose(std::slice::from_ref(&rows), &small).micro_batch.unwrap().because;
    assert!(because.ends_with("; 2 of the possible splits do not fit"), "{because}");
}

#[test]
fn a_step_keeps_its_rows_and_what_was_written_is_never_touched() {
    let rows = Config::device_rows;
    for machine in [Machine::h200(), Machine::cpu(8 << 30, 2)] {
        assert_eq!(rows(&choose(&[], &machine)), 8, "the default");
        // The rows of a step follow from what was written and the other default: neither may change.
        for (name, value, step) in [
            ("per_device_train_batch_size", 3, 12),
            ("gradient_accumulation_steps", 6, 12),
            ("gradient_accumulation_steps", 1, 2),
        ] {
            let config = choose(&[(name, json!(value))], &machine);
            assert_eq!((rows(&config), config.to_json()[name].clone()), (step, json!(value)), "{name}");
            assert!(!chosen(&config).contains_key(name), "{name}");
        }
        let given = [
            ("per_device_train_batch_size", json!(1)),
            ("gradient_accumulation_steps", json!(5)),
            ("sample_packing", json!(false)),
            ("recipe", json!("bf16")),
            ("micro_batch_size", json!(1)),
            ("sequence_len", json!(64)),
        ];
        let config = choose(&given, &machine);
        assert_eq!(chosen(&config), BTreeMap::new());
        given.iter().for_each(|(name, value)| assert_eq!(config.to_json()[*name], *value, "{name}"));
    }
}

#[test]
fn without_the_option_nothing_is_chosen() {
    let folder = tempfile::tempdir().unwrap();
    let plain = options(&[("apply_recommended_values", json!(false))]);
    let mut of = recommended(&plain, &qwen3(folder.path()), &Machine::h200(), None, &|| false).unwrap();
    assert_eq!(of.micro_batch.take().unwrap().value, json!(4), "the split of a step is always the plan's");
    assert_eq!(of, plain);
}

#[test]
fn what_waits_on_the_host_is_left_to_the_plan() {
    let full = [
        ("lora", json!(false)),
        ("optimizer", json!("adamw")),
        ("sequence_len", json!(128)),
        // The slices in which states are copied otherwise are larger than this model.
        ("use_zero_copy", json!(true)),
    ];
    let stays = [&full[..], &[("offload_optimizer", json!(false)), ("offload_grads", json!(false))]].concat();
    let at = |kib: usize| Machine { memory: kib << 10, context_bytes: 0, ..Machine::h200() };
    let fits = |kib: usize| choose(&stays, &at(kib)).micro_batch.is_some();
    // About the least memory in which the run fits as it is; just below it, something has to move.
    let (mut memory, mut enough) = (64, 1 << 20);
    while enough - memory > 1 + memory / 32 {
        let middle = (memory + enough) / 2;
        if fits(middle) { enough = middle } else { memory = middle }
    }
    assert!(!fits(memory) && fits(enough));
    let config = choose(&full, &at(memory));
    assert!(config.micro_batch.is_some() && !chosen(&config).contains_key("offload_optimizer"), "{config:?}");
    let folder = tempfile::tempdir().unwrap();
    let preview = train::Preview::new(&config, &qwen3(folder.path()), &at(memory), None).unwrap();
    assert!(!preview.program.host_memory().is_empty());
}

#[test]
fn gpus_share_a_micro_batch_only_where_nothing_else_fits() {
    let common = [("sequence_len", json!(4096)), ("gpus", json!(4)), ("qlora_bnb", json!(false))];
    let at = |changed: &[(&str, Value)], mib: usize| {
        let machine = Machine { memory: mib << 20, context_bytes: 0, ..Machine::h200() };
        choose(&[&common, changed].concat(), &machine)
    };
    // About the least memory in which a row fits on one GPU.
    let fits = |mib: usize| {
        let found = at(&[], mib);
        found.micro_batch.is_some() && !chosen(&found).contains_key("sequence_parallel_size")
    };
    let (mut memory, mut enough) = (1, 1 << 12);
    while enough - memory > 1 + memory / 32 {
        let middle = (memory + enough) / 2;
        if fits(middle) { enough = middle } else { memory = middle }
    }
    assert!(fits(enough) && !fits(memory));
    let config = at(&[], memory);
    let found = (config.template.sequence_parallel_size, config.device_rows());
    assert_eq!(found, (2, 16), "{:#?}", config.recommendations());
    let line = "Recommended: gradient_accumulation_steps: 8, sequence_parallel_size: 2 (no split of the step fits";
    assert!(config.recommendations().iter().any(|of| of.starts_with(line)), "{:#?}", config.recommendations());
    let folder = tempfile::tempdir().unwrap();
    let machine = Machine { memory: memory << 20, context_bytes: 0, ..Machine::h200() };
    let preview = train::Preview::new(&config, &qwen3(folder.path()), &machine, None).unwrap();
    assert_eq!(preview.program.cluster.sequence, 2);
    // What was written is never touched, and on one GPU there is no other rank.
    for written in [("sequence_parallel_size", json!(1)), ("gradient_accumulation_steps", json!(4)), ("gpus", json!(1))]
    {
        let found = chosen(&at(std::slice::from_ref(&written), memory));
        assert!(!found.contains_key("sequence_parallel_size"), "{written:?}: {found:?}");
    }
}

#[test]
fn the_last_layers_are_not_trained_in_four_bits() {
    let with = |changed: &[(&str, Value)]| {
        let four = [("recipe", json!("nvfp4")), ("fp4_backend", json!("emulate"))];
        chosen(&choose(&[&four, changed].concat(), &Machine::h200())).remove("skip_quant_last_layers")
    };
    assert_eq!(with(&[("lora", json!(false))]), Some(json!(1)), "15 % of two layers");
    assert_eq!(with(&[("lora", json!(true))]), None);
    for written in ["skip_quant_last_layers", "skip_quant_first_layers"] {
        assert_eq!(with(&[("lora", json!(false)), (written, json!(0))]), None, "{written}");
    }
}

#[test]
fn packing_gives_way_to_what_was_asked_for() {
    let config = choose(&[("padding_free", json!(true))], &Machine::h200());
    assert_eq!(chosen(&config)["sample_packing"], json!(false));
    let both = json!({"model": "m", "padding_free": true, "sample_packing": true, "apply_recommended_values": true});
    assert!(Config::load_json(&both.to_string(), Task::Sft, &[]).is_err());
}

/// The example without its batch size, stopped after some steps.
fn run(output: &Path, changed: Value, stop_after: Option<usize>) -> (train::Result<Outcome>, Lines) {
    let mut options = serde_json::from_str::<Value>(&config(output, &json!({})).to_json().to_string()).unwrap();
    let kept = [
        "run_name",
        "output_dir",
        "model",
        "datasets",
        "sequence_len",
        "max_steps",
        "eval_steps",
        "save_steps",
        "optimizer",
        "learning_rate",
        "lora_rank",
        "lora_alpha",
    ];
    options.as_object_mut().unwrap().retain(|name, _| kept.contains(&name.as_str()));
    options["datasets"] =
        json!([{"path": root().join("examples/stories/data/shakespeare.txt"), "type": "text", "samples": 200}]);
    options["apply_recommended_values"] = json!(true);
    changed.as_object().unwrap().iter().for_each(|(name, value)| options[name] = value.clone());
    let config = Arc::new(Config::load_json(&options.to_string(), Task::Sft, &[]).unwrap());
    let mut lines = Lines { stop_after, ..Lines::default() };
    (train::run(config, source(), device(), &mut lines), lines)
}

fn resolved(output: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(output.join("resolved.yaml")).unwrap();
    text.lines().filter(|line| line.contains("# recommended: ")).map(str::to_owned).collect()
}

#[test]
fn a_resumed_run_keeps_what_was_chosen() {
    let place = tempfile::tempdir().unwrap();
    let output: PathBuf = place.path().join("run");
    let (ended, lines) = run(&output, json!({"max_steps": 8}), Some(4));
    assert!(matches!(ended, Ok(Outcome::Interrupted(_))), "{ended:?}");
    let reported: Vec<&String> = lines.lines.iter().filter(|line| line.starts_with("Recommended: ")).collect();
    assert!(reported.iter().any(|line| line.contains("sample_packing: ")), "{reported:?}");
    let before = resolved(&output);
    assert!(before.len() >= 2, "{before:?}");

    // What was recorded is another choice than this machine's: it is taken all the same.
    let state = output.join("checkpoint-4/state.json");
    let recorded: Value = serde_json::from_str(&std::fs::read_to_string(&state).unwrap()).unwrap();
    let rows = recorded["resolved"]["micro_batch_size"].as_u64().unwrap();
    assert_eq!(8 % rows, 0, "{rows}");
    let (ended, lines) = run(&output, json!({"max_steps": 8, "resume_from_checkpoint": true}), None);
    assert!(matches!(ended, Ok(Outcome::Finished(_))), "{ended:?} {:?}", lines.lines);
    assert_eq!(resolved(&output), before);
    let opening = events(&output).into_iter().rfind(|event| event["event"] == "resume").unwrap();
    assert_eq!(opening["options"]["micro_batch_size"], json!(rows), "{opening}");
}

#[test]
fn a_run_that_was_begun_with_it_is_not_gone_on_with_without_it() {
    let place = tempfile::tempdir().unwrap();
    let output: PathBuf = place.path().join("run");
    run(&output, json!({"max_steps": 8}), Some(2)).0.unwrap();
    let changed = json!({"max_steps": 8, "resume_from_checkpoint": true, "apply_recommended_values": false});
    let error = run(&output, changed, None).0.unwrap_err().to_string();
    assert!(error.contains("apply_recommended_values"), "{error}");
}
