//! Agreement of a plan with its run: the same length of rows, the same shapes, the same memory to the byte, for all
//! kinds of data.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::stories::{Lines, device, events, root, source};
use serde_json::{Value, json};
use train::config::{Config, Task};
use train::preview::documents;
use train::{Preview, run};

/// Documents of given lengths in tokens.
fn tokens(folder: &Path, lengths: &[usize]) -> PathBuf {
    let path = folder.join("data.jsonl");
    let mut file = std::fs::File::create(&path).unwrap();
    for (row, length) in lengths.iter().enumerate() {
        let ids: Vec<usize> = (0..*length).map(|i| (7 * row + i) % 90 + 1).collect();
        writeln!(file, "{}", json!({"input_ids": ids})).unwrap();
    }
    path
}

fn options(folder: &Path, lengths: &[usize], changed: &Value) -> Arc<Config> {
    let mut all = json!({
        "run_name": "test", "output_dir": folder.join("output"), "model": root().join("examples/stories/model"),
        "datasets": [{"path": tokens(folder, lengths), "type": "tokens"}], "data_cache": "off",
        "validation_split_ratio": 0.1, "max_steps": 1, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1, "lora_rank": 4, "lora_alpha": 8,
    });
    for (name, value) in changed.as_object().unwrap() {
        all[name] = value.clone();
    }
    Arc::new(Config::load_json(&all.to_string(), Task::Sft, &[]).unwrap())
}

fn planned(config: &Config) -> Preview {
    let data = documents(config, &source(), &[]).unwrap().unwrap();
    Preview::advised(config, &source(), &device().machine, Some(&data)).unwrap()
}

fn lines<C: std::fmt::Display>(of: &[program::MemoryLine<C>]) -> Value {
    of.iter().map(|line| json!({"class": line.class.to_string(), "bytes": line.bytes, "note": line.note})).collect()
}

#[test]
fn the_plan_is_the_runs_own() {
    let short: Vec<usize> = (0..80).map(|i| 5 + i % 9).collect();
    let several: Vec<usize> = (0..40).map(|i| [12, 60, 140, 200][i % 4] + i).collect();
    let cases = [
        (&short, json!({"sequence_len": 128})),
        (&short, json!({"sequence_len": 128, "lora": false})),
        (&short, json!({"sequence_len": 256, "sample_packing": false})),
        (&several, json!({"sequence_len": 256})),
        (&several, json!({"sequence_len": 256, "lora": false, "sample_packing": false})),
        (&several, json!({"sequence_len": 256, "sample_packing": false, "padding_free": true})),
        (&several, json!({"sequence_len": 256, "sample_packing": false, "padding_side": "left"})),
        (&several, json!({"sequence_len": 128, "truncation_strategy": "right"})),
        (&several, json!({"sequence_len": 256, "apply_recommended_values": true})),
    ];
    for (lengths, changed) in cases {
        let folder = tempfile::tempdir().unwrap();
        let config = options(folder.path(), lengths, &changed);
        let data = documents(&config, &source(), &[]).unwrap().unwrap();
        let recommended = train::recommended(&config, &source(), &device().machine, Some(&data), &|| false).unwrap();
        let before = Preview::new(&recommended, &source(), &device().machine, Some(&data)).unwrap();
        run(config, source(), device(), &mut Lines::default()).unwrap();
        let log = events(&folder.path().join("output"));
        let own = &log[0]["plan"];
        assert_eq!(lines(&before.program.memory), own["memory"], "{changed}");
        assert_eq!(lines(&before.program.activations), own["activations"], "{changed}");
        assert_eq!(lines(&before.program.phases), own["phases"], "{changed}");
        assert_eq!(json!(before.shapes.steps), log[0]["manifest"]["steps"], "{changed}");
    }
}

#[test]
fn rows_that_nobody_asked_for_hold_the_longest_document() {
    // The model has 512 positions: more than these no row has.
    let of = |lengths: &[usize], changed: Value| {
        let folder = tempfile::tempdir().unwrap();
        let preview = planned(&options(folder.path(), lengths, &changed));
        let text = preview.plan_text();
        assert_eq!(text.matches("Warning: ").count(), preview.warnings.len(), "{text}");
        (preview.shapes.variants.last().unwrap().seq_len, [preview.notes, preview.warnings].concat().join("\n"))
    };
    let of = |lengths: &[usize], mut changed: Value| {
        changed["trained_logits_only"] = false.into();
        of(lengths, changed)
    };
    let positions = source().max_positions().unwrap();
    assert!(positions < 2048);
    let (length, note) = of(&[30; 20], json!({}));
    assert_eq!(length, positions);
    assert_eq!(note, format!("`sequence_len` is not set: rows have {positions} tokens, the longest document has 30"));
    let (length, note) = of(&[&[30; 20][..], &[positions + 9; 3]].concat(), json!({"truncation_strategy": "delete"}));
    assert_eq!(length, positions);
    let (note, warning) = note.split_once('\n').unwrap();
    assert!(note.ends_with("the number of positions of the model; 3 longer documents are dropped"), "{note}");
    assert!(
        warning.starts_with("13.0 % of the rows of ") && warning.contains(" are too long and dropped: "),
        "{warning}"
    );
    let (length, note) = of(&[30; 20], json!({"max_model_len": 64}));
    assert_eq!(length, 64);
    assert!(!note.contains("sequence_len"), "{note}");
}

#[test]
fn a_run_goes_on_with_the_length_that_it_began_with() {
    let folder = tempfile::tempdir().unwrap();
    let begin = options(folder.path(), &[30; 40], &json!({"max_steps": 2, "save_steps": 1}));
    run(begin, source(), device(), &mut Lines { stop_after: Some(1), ..Lines::default() }).unwrap();
    let text = std::fs::read_to_string(folder.path().join("output/checkpoint-1/state.json")).unwrap();
    let resolved = serde_json::from_str::<Value>(&text).unwrap()["resolved"]["sequence_len"].clone();
    assert_eq!(resolved, json!(source().max_positions().unwrap()));
    let again = json!({"max_steps": 2, "save_steps": 1, "resume_from_checkpoint": true});
    let mut lines = Lines::default();
    run(options(folder.path(), &[30; 40], &again), source(), device(), &mut lines).unwrap();
    let reported = format!("Note: `sequence_len` is not set: rows have {resolved} tokens, as the run began");
    assert!(lines.lines.contains(&reported), "{:#?}", lines.lines);
}

#[test]
fn batches_that_fit_nowhere_are_refused_without_making_one() {
    let folder = tempfile::tempdir().unwrap();
    let config = options(folder.path(), &[30; 20], &json!({"per_device_train_batch_size": 1_000_000}));
    let data = documents(&config, &source(), &[]).unwrap().unwrap();
    let refused = Preview::advised(&config, &source(), &device().machine, Some(&data)).err().unwrap();
    assert_eq!(refused.exit_code(), 3);
    assert!(refused.to_string().contains("`per_device_train_batch_size: "), "{refused}");
}

/// An option that does not fit the model is reported at the option's line, although only the model shows it.
#[test]
fn an_option_that_does_not_fit_the_model_is_refused_at_its_line() {
    let cases = [
        ("attn_bwd_chunks: 4096", "set `attn_bwd_chunks` to at most"),
        ("recipe: nvfp4\nfp4_backend: emulate\nskip_quant_first_layers: 99", "hint: skip fewer layers"),
    ];
    for (options, hint) in cases {
        let text = format!("model: m\nsequence_len: 64\n{options}\n");
        let config = Config::load(&text, "run.yaml", Task::Sft, &[]).unwrap();
        let message = Preview::new(&config, &source(), &device().machine, None).err().unwrap().to_string();
        assert!(message.contains("run.yaml:3:") && message.contains(hint), "{message}");
    }
}

/// An adapter that cannot be is no matter of its targets.
#[test]
fn what_is_wrong_with_an_adapter_is_said_of_its_own_option() {
    let folder = tempfile::tempdir().unwrap();
    let config = options(folder.path(), &[9, 12], &json!({"sequence_len": 64, "lora_dora": true, "lora_rank": 4096}));
    let message = run(config, source(), device(), &mut Lines::default()).err().unwrap().to_string();
    assert!(message.contains("lora_rank") && !message.contains("all-linear"), "{message}");
}
