//! Entries as they are requested: a task each, with and without adapters, over one parameter table.

use crate::support::{self, TASK, VARIANT, adapter, loaded, model, options, read, run};
use compiler::{CompileError, CompileOptions, EntryOptions, compile};
use program::{EntryKind, Machine, Program};
use serde_json::json;

fn machine() -> Machine {
    Machine::cpu(1 << 30, 2)
}

/// A preference loss needs the trained model and the model that training began with in one program.
#[test]
fn an_entry_without_adapters_is_the_base_model() {
    let forward = || EntryOptions::forward().keeping(["logits"]);
    let base = EntryOptions { adapter: false, name: "base".into(), ..forward() };
    let options = CompileOptions { adapter: Some(adapter()), entries: vec![EntryOptions::train(TASK)], ..options() };
    let plain = CompileOptions { adapter: None, entries: vec![forward()], ..options.clone() };
    let both = CompileOptions { entries: [options.entries.clone(), vec![forward(), base]].concat(), ..options };
    let program = compile(&model(), &both, &machine()).unwrap();
    assert_eq!(program.entry(EntryKind::Forward, Some(VARIANT)), program.named(EntryKind::Forward, "", Some(VARIANT)));
    let adapted = program.to_string();
    assert!(adapted.contains("entry forward base ["), "{adapted}");
    let logits = |program: Program, name: &str| {
        let entry = program.named(EntryKind::Forward, name, Some(VARIANT)).unwrap();
        let at = program.entries[entry].outputs.iter().find(|(name, _)| name == "logits").unwrap().1.clone();
        let mut session = loaded(program);
        run(session.as_mut(), entry);
        read(session.as_mut(), &at)
    };
    let alone = logits(compile(&model(), &plain, &machine()).unwrap(), "");
    assert!(logits(program.clone(), "base") == alone, "the adapters are still at work");
    assert!(logits(program, "") != alone, "the adapters do nothing");
}

/// Scores of three classes from the last hidden state, with a weight of its own.
fn with_scores() -> graph::Model {
    let mut text = serde_json::to_value(model()).unwrap();
    let rows = |dtype: &str| json!({"dtype": dtype, "shape": ["B", "T"]});
    let mut scores = text["tasks"][0].clone();
    scores["name"] = json!("scores");
    scores["parameters"] = json!([{"name": "score.weight", "shape": [3, support::HIDDEN], "init": "ones"}]);
    scores["nodes"] = json!([
        {"op": "linear", "inputs": ["final", "score.weight"], "outputs": ["scores"],
         "types": [{"dtype": "float", "shape": ["B", "T", 3]}]},
        {"op": "cross_entropy", "inputs": ["scores", "classes"], "outputs": ["token_loss", "lse"],
         "types": [rows("f32"), rows("f32")]},
        scores["nodes"][1].clone(),
    ]);
    scores["inputs"][0]["name"] = json!("classes");
    text["tasks"].as_array_mut().unwrap().push(scores);
    graph::from_json(&text.to_string()).unwrap()
}

#[test]
fn a_second_task_has_inputs_and_weights_of_its_own() {
    let entries = vec![EntryOptions::train("scores"), EntryOptions::evaluate(TASK)];
    let program = compile(&with_scores(), &CompileOptions { entries, ..options() }, &machine()).unwrap();
    let inputs = |kind| {
        let entry = &program.entries[program.entry(kind, Some(VARIANT)).unwrap()];
        entry.inputs.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>()
    };
    let (trained, evaluated) = (inputs(EntryKind::FirstMicroStep), inputs(EntryKind::Evaluate));
    assert!(trained.contains(&"classes".to_owned()) && !trained.contains(&"targets".to_owned()), "{trained:?}");
    assert!(evaluated.contains(&"targets".to_owned()) && !evaluated.contains(&"classes".to_owned()), "{evaluated:?}");
    let slot = program.parameter("score.weight").unwrap();
    assert!(slot.trainable && slot.gradient.is_some());
    // A program that never asks for it does not hold its weight.
    let plain = compile(&with_scores(), &options(), &machine()).unwrap();
    assert!(plain.parameter("score.weight").is_none());
}

#[test]
fn a_task_that_was_not_recorded_is_named() {
    let entries = vec![EntryOptions::train("preferences")];
    let error = compile(&model(), &CompileOptions { entries, ..options() }, &machine()).unwrap_err();
    assert!(matches!(error, CompileError::Options(_)));
    assert!(error.to_string().ends_with("was recorded without the task `preferences`, with: causal_lm"), "{error}");
}
