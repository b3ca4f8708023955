//! Runs in f16: the log says which loss scale a step had and whether it was skipped, what is skipped leaves no trace but
//! the scale, and a run whose steps are all skipped ends.

use std::path::Path;

use crate::stories::{Lines, config, device, events, losses, source};
use serde_json::{Value, json};
use train::{Outcome, Result};

fn run(output: &Path, options: &Value) -> (Result<Outcome>, Vec<String>) {
    let mut observer = Lines::default();
    (train::run(config(output, options), source(), device(), &mut observer), observer.lines)
}

fn merged(options: &Value, more: Value) -> Value {
    let mut options = options.clone();
    for (key, value) in more.as_object().unwrap() {
        options[key] = value.clone();
    }
    options
}

fn steps(output: &Path) -> Vec<Value> {
    events(output).into_iter().filter(|event| event["event"] == "step").collect()
}

/// Steps from the first one that is applied: before, the scale comes down to where the gradients fit.
#[test]
fn runs_in_f16_learn_as_runs_in_f32_do() {
    let place = tempfile::tempdir().unwrap();
    let base = json!({"max_steps": 24});
    for (name, changed) in [
        ("adapter", json!({"merge_adapter": true})),
        ("adapter-16", json!({"lora_dtype": "float16", "lora_dropout": 0})),
        ("full", json!({"lora": false, "learning_rate": 1e-3})),
        ("full-8bit", json!({"lora": false, "learning_rate": 1e-3, "optimizer": "adamw_8bit"})),
    ] {
        let curve = |dtype: &str| {
            let output = place.path().join(format!("{name}-{dtype}"));
            let (outcome, lines) =
                run(&output, &merged(&merged(&base, changed.clone()), json!({"torch_dtype": dtype})));
            assert!(matches!(outcome.unwrap(), Outcome::Finished(_)));
            (output, lines)
        };
        let ((half, lines), (single, _)) = (curve("float16"), curve("float32"));
        let logged = steps(&half);
        let mut scale = 65536.0;
        for event in &logged {
            let skipped = event["skipped"].as_bool().unwrap();
            assert_eq!(
                (event["loss_scale"].as_f64(), event["applied"].as_bool()),
                (Some(scale), Some(!skipped)),
                "{event}"
            );
            assert_eq!(event["grad_norm"].is_null(), skipped, "{event}");
            scale *= if skipped { 0.5 } else { 1.0 };
        }
        let skipped = logged.iter().filter(|event| event["skipped"] == true).count();
        assert!((1..10).contains(&skipped), "{skipped} of {} steps were skipped", logged.len());
        let last = |output: &Path| *losses(&events(output), "evaluation").last().unwrap();
        let (found, expected) = (last(&half), last(&single));
        println!("{name}: {found} {expected}");
        assert!((found / expected - 1.0).abs() < 0.05, "{name}: {found} in f16, {expected} in f32");
        let reported = |text: &str| assert!(lines.iter().any(|line| line.contains(text)), "no `{text}` in {lines:?}");
        reported("`torch_dtype: float16`: ");
        reported("the loss is scaled, by 65536 at first");
        reported("| update skipped: the gradient overflows at a loss scale of 65536");
        let resolved = std::fs::read_to_string(half.join("resolved.yaml")).unwrap();
        let forced =
            resolved.contains("master_dtype: float32  # auto: float16 is trained with master weights in float32");
        assert_eq!(forced, name != "adapter", "{resolved}");
        assert!(steps(&single).iter().all(|event| event.get("loss_scale").is_none() && event.get("skipped").is_none()));
    }
}

/// Weights that no scale makes fit: the loss is finite, no gradient ever is.
#[test]
fn a_run_whose_steps_are_all_skipped_diverges() {
    let place = tempfile::tempdir().unwrap();
    let talk = place.path().join("talk.jsonl");
    let row = json!({"messages": [{"role": "user", "content": "Who is there?"}, {"role": "assistant", "content": "A friend."}]});
    std::fs::write(&talk, format!("{row}\n").repeat(8)).unwrap();
    let template = place.path().join("lines.jinja");
    std::fs::write(&template, "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>\n{% endfor %}").unwrap();
    let output = place.path().join("out");
    let options = json!({
        "datasets": [{"path": talk, "type": "conversation"}], "template": template, "loss_scale": {"assistant": 1e33},
        "torch_dtype": "float16", "max_steps": 60, "validation_split_ratio": 0, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
    });
    let (outcome, _) = run(&output, &options);
    let error = outcome.unwrap_err();
    let text = error.to_string();
    assert_eq!(error.exit_code(), 5, "{text}");
    assert!(
        text.contains("the gradients of 50 steps up to 49 are not finite, the last with a loss scale of 1"),
        "{text}"
    );
    assert!(text.contains("first came out of"), "{text}");
    let logged = steps(&output);
    assert!(logged.len() == 50 && logged.iter().all(|event| event["skipped"] == true), "{}", logged.len());
}
