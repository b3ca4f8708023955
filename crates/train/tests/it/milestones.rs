//! Steps at which a run evaluates, saves and ends: by epochs, by the best evaluation, by early stopping; an interrupted
//! run does the same at the same steps.

use std::path::{Path, PathBuf};

use crate::stories::{self, Lines, config, device, events, source};
use serde_json::{Value, json};
use train::Outcome;

/// A run on a few rows; gives the lines that it reported.
fn run(output: &Path, options: &Value, stop_after: Option<usize>) -> Vec<String> {
    let mut lines = Lines { stop_after, ..Lines::default() };
    train::run(config(output, options), source(), device(), &mut lines).unwrap();
    lines.lines
}

/// Short rows of their own: two passes over them are about a dozen steps.
fn base() -> Value {
    static ROWS: std::sync::OnceLock<tempfile::TempDir> = std::sync::OnceLock::new();
    let folder = ROWS.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let line = |i: usize| {
            let words = ["the cat sat", "a dog ran", "we saw a bird", "he said no", "rain fell all day"];
            let text: Vec<&str> = (0..4 + i % 5).map(|j| words[(i * 7 + j * j) % words.len()]).collect();
            json!({"text": text.join(" and ")}).to_string() + "\n"
        };
        std::fs::write(folder.path().join("rows.jsonl"), (0..120).map(line).collect::<String>()).unwrap();
        folder
    });
    let rows = folder.path().join("rows.jsonl");
    json!({
        "datasets": [{"path": rows, "type": "text"}], "max_steps": -1, "num_epochs": 2,
        "eval_steps": 100, "save_steps": 50, "save_total_limit": 5, "validation_split_ratio": 0.2,
    })
}

fn with(changes: Value) -> Value {
    let mut options = base();
    changes.as_object().unwrap().iter().for_each(|(name, value)| options[name] = value.clone());
    options
}

/// The steps of the events of a kind.
fn steps(output: &Path, kind: &str) -> Vec<u64> {
    let of_kind = |event: &&Value| event["event"] == kind;
    events(output).iter().filter(of_kind).map(|event| event["step"].as_u64().unwrap()).collect()
}

/// The last step of each pass over the data, by the epochs in the log.
fn ends_of_epochs(output: &Path) -> Vec<u64> {
    let all = events(output);
    let of: Vec<(u64, f64)> = all
        .iter()
        .filter(|event| event["event"] == "step")
        .map(|event| (event["step"].as_u64().unwrap() + 1, event["epoch"].as_f64().unwrap()))
        .collect();
    let before = |done: u64| of.iter().find(|(step, _)| *step + 1 == done).map_or(0.0, |(_, epoch)| *epoch);
    of.iter()
        .filter(|(done, epoch)| (epoch + 1e-9).floor() > (before(*done) + 1e-9).floor())
        .map(|(done, _)| *done)
        .collect()
}

#[test]
fn epochs_end_where_evaluations_and_checkpoints_are() {
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("straight");
    let options = with(json!({"eval_strategy": "epoch", "save_strategy": "epoch"}));
    run(&output, &options, None);
    let ends = ends_of_epochs(&output);
    assert_eq!(ends.len(), 2, "{ends:?}");
    assert_eq!(steps(&output, "evaluation"), ends);
    assert_eq!(steps(&output, "checkpoint"), ends);

    let broken = place.path().join("broken");
    run(&broken, &options, Some(ends[0] as usize + 1));
    let mut resumed = options.clone();
    resumed["resume_from_checkpoint"] = json!(true);
    run(&broken, &resumed, None);
    assert_eq!(steps(&broken, "evaluation"), ends);
    assert_eq!(stories::losses(&events(&broken), "evaluation"), stories::losses(&events(&output), "evaluation"));

    let never = place.path().join("never");
    run(&never, &with(json!({"eval_strategy": "no", "save_strategy": "no"})), None);
    assert!(steps(&never, "evaluation").is_empty());
    assert_eq!(steps(&never, "checkpoint"), ends[1..], "the last step is always saved");
}

#[test]
fn a_part_of_an_epoch_is_a_part_of_its_steps() {
    let place = tempfile::tempdir().unwrap();
    let count = |name: &str, epochs: f64| {
        let output = place.path().join(name);
        run(&output, &with(json!({"num_epochs": epochs})), None);
        (steps(&output, "step").len(), events(&output).iter().rev().find_map(|of| of["epoch"].as_f64()).unwrap())
    };
    let ((one, _), (two, _)) = (count("one", 1.0), count("two", 2.0));
    let (half, epochs) = count("half", 0.5);
    let (more, _) = count("more", 1.5);
    assert!(half >= one / 2 && half <= one / 2 + 1 && (0.5..0.8).contains(&epochs), "{half} of {one}, {epochs}");
    assert!(more > one && more < two, "{one} {more} {two}");
}

#[test]
fn a_run_without_a_lower_loss_ends_early_and_a_resumed_one_at_the_same_step() {
    let place = tempfile::tempdir().unwrap();
    let options = with(json!({"learning_rate": 0.0, "max_steps": 12, "eval_steps": 1, "early_stopping_patience": 3}));
    let output = place.path().join("straight");
    let lines = run(&output, &options, None);
    assert_eq!(steps(&output, "evaluation"), [1, 2, 3, 4], "the first is the best");
    assert_eq!(steps(&output, "stopped_early"), [4]);
    let text = "Stopping early: 3 evaluations without a lower loss (the best was";
    assert!(lines.iter().any(|line| line.starts_with(text)), "{lines:?}");
    assert!(output.join("adapter/adapter_model.safetensors").is_file());

    let broken = place.path().join("broken");
    run(&broken, &options, Some(3));
    let mut resumed = options.clone();
    resumed["resume_from_checkpoint"] = json!(true);
    run(&broken, &resumed, None);
    assert_eq!(steps(&broken, "evaluation"), [1, 2, 3, 4]);
    // It has ended: to go on once more does nothing but write the result.
    run(&broken, &resumed, None);
    assert_eq!(steps(&broken, "step"), [0, 1, 2, 3]);
}

#[test]
fn the_result_has_the_weights_of_the_best_evaluation() {
    let place = tempfile::tempdir().unwrap();
    // A rate that grows without bounds spoils what the first steps learned.
    let options = with(json!({
        "learning_rate": 0.5, "warmup_steps": 8, "max_steps": 8, "eval_steps": 1, "save_total_limit": 1,
        "load_best_model_at_end": true, "optimizer": "adamw",
    }));
    for lora in [true, false] {
        let output = place.path().join(format!("lora-{lora}"));
        let mut options = options.clone();
        options["lora"] = json!(lora);
        run(&output, &options, None);
        let losses = stories::losses(&events(&output), "evaluation");
        let best = (1..=losses.len()).min_by(|a, b| losses[a - 1].total_cmp(&losses[b - 1])).unwrap();
        assert!(best < losses.len(), "the last evaluation is the best: {losses:?}");
        let (folder, file) =
            if lora { ("adapter", "adapter_model.safetensors") } else { ("model", "model.safetensors") };
        let read = |folder: PathBuf| std::fs::read(folder.join(file)).unwrap();
        assert_eq!(read(output.join(folder)), read(output.join(format!("checkpoint-{best}"))));
        assert_ne!(read(output.join(folder)), read(output.join("checkpoint-8")));
        let kept = std::fs::read_dir(&output).unwrap().flatten();
        let kept = kept.filter(|of| of.file_name().to_string_lossy().starts_with("checkpoint-")).count();
        assert_eq!(kept, 2, "the last one, and the best as well");
        assert_eq!(steps(&output, "evaluation").len(), 8);

        // A checkpoint that is gone cannot be the result, and nothing else is taken for it.
        std::fs::remove_dir_all(output.join(format!("checkpoint-{best}"))).unwrap();
        std::fs::remove_dir_all(output.join(folder)).unwrap();
        let mut resumed = options.clone();
        resumed["resume_from_checkpoint"] = json!(true);
        let lines = run(&output, &resumed, None);
        assert!(lines.iter().any(|line| line.contains("searches for the best from here on")), "{lines:?}");
        assert_eq!(read(output.join(folder)), read(output.join("checkpoint-8")));
    }
}

/// A run that begins at a checkpoint of another one, which was not evaluated there, and finds nothing better.
#[test]
fn the_best_evaluation_may_be_that_of_the_checkpoint_which_a_run_began_with() {
    let place = tempfile::tempdir().unwrap();
    let (first, second) = (place.path().join("first"), place.path().join("second"));
    let options = with(json!({
        "learning_rate": 1e-4, "max_steps": 8, "eval_steps": 100, "lora": true,
        "load_best_model_at_end": true, "optimizer": "adamw", "save_total_limit": 1,
    }));
    run(&first, &options, Some(2));
    let mut options = options.clone();
    options["eval_steps"] = json!(2);
    options["learning_rate"] = json!(4.0);
    options["resume_from_checkpoint"] = json!(first.join("checkpoint-2"));
    run(&second, &options, None);
    let losses = stories::losses(&events(&second), "evaluation");
    assert!(losses.len() >= 4 && losses[1..].iter().all(|loss| *loss > losses[0]), "{losses:?}");
    let read = |folder: PathBuf| std::fs::read(folder.join("adapter_model.safetensors")).unwrap();
    assert_eq!(read(second.join("adapter")), read(first.join("checkpoint-2")));
}

#[test]
fn repeats_make_an_epoch_longer_by_their_share() {
    let place = tempfile::tempdir().unwrap();
    let rows = |name: &str, repeats: f64| {
        let output = place.path().join(name);
        let mut options = with(json!({"num_epochs": 1, "validation_split_ratio": 0.0}));
        options["datasets"][0]["repeats"] = json!(repeats);
        let outcome = train::run(config(&output, &options), source(), device(), &mut Lines::default()).unwrap();
        assert!(matches!(outcome, Outcome::Finished(_)));
        events(&output)[0]["data"]["documents"].as_u64().unwrap()
    };
    let once = rows("once", 1.0);
    assert_eq!(rows("twice", 2.0), 2 * once);
    assert_eq!(rows("half", 0.5), (once as f64 / 2.0).round() as u64);
    assert_eq!(rows("more", 1.25), once + (once as f64 / 4.0).round() as u64);
}

#[test]
fn a_part_of_an_epoch_is_told_as_such() {
    let place = tempfile::tempdir().unwrap();
    let table = |epochs: f64| {
        let config = config(place.path(), &with(json!({"num_epochs": epochs})));
        train::check_data(&config, &source(), 0, &|| false).unwrap().table
    };
    let (whole, half) = (table(1.0), table(0.5));
    let column = |table: &str, after: &str| -> f64 {
        let line = table.lines().find(|line| line.contains("in an epoch")).unwrap();
        let before = line.split(after).next().unwrap();
        before.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert!(whole.contains(" in 1 epoch\n") && half.contains(" in 0.5 epochs\n"), "{whole}{half}");
    assert_eq!(column(&whole, " rows of up to"), column(&half, " rows of up to"), "an epoch is one");
    let (all, some) = (column(&whole, " rows in "), column(&half, " rows in "));
    assert!(some > 0.0 && some <= (all / 2.0).ceil() + 8.0 && some < all, "{all} {some}");
}
