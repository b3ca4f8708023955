//! The note of `recipe: fp8_hybrid` on values that become 0 in E4M3: the largest share, by name, once after the first
//! step.

use std::path::Path;
use std::sync::Arc;

use crate::recorded::{Golden, golden};
use crate::stories::{self, Lines, events};
use data::safetensors::{NamedTensor, SafeTensors, write};
use serde_json::{Value, json};
use tensor::HostTensor;
use train::{Flushed, ModelSource, Trainer};

/// The norm before the second layer's gate and up.
const NORM: &str = "model.layers.1.post_attention_layernorm.weight";
const QUANTISER: &str = "model.layers.1.mlp.gate_proj.x";

/// The recorded model with a quarter of that norm's columns at 0 and a quarter far below the others.
fn tampered(folder: &Path) -> Golden {
    let golden = golden("llama");
    std::fs::copy(golden.model.join("config.json"), folder.join("config.json")).unwrap();
    let files = SafeTensors::open(&golden.model.join("model.safetensors")).unwrap();
    let tensors: Vec<(String, HostTensor)> = files
        .names()
        .map(|name| {
            let tensor = files.get(name).unwrap().to_host().unwrap();
            let mut values = tensor.to_f32();
            if name == NORM {
                for (column, value) in values.iter_mut().enumerate() {
                    *value *= [0.0, 2f32.powi(-30), 1.0, 1.0][column % 4];
                }
            }
            (name.to_string(), HostTensor::from_f32(tensor.shape.clone(), &values).cast(tensor.dtype))
        })
        .collect();
    let named: Vec<NamedTensor<'_>> = tensors.iter().map(|(name, tensor)| NamedTensor::new(name, tensor)).collect();
    write(&folder.join("model.safetensors"), &named, files.metadata()).unwrap();
    let ir = std::fs::read_to_string(stories::root().join("crates/train/tests/ir/llama.json")).unwrap();
    let source = Arc::new(ModelSource::open(folder, &ir).unwrap());
    Golden { model: folder.to_owned(), source, ..golden }
}

/// The flushed shares of each step up to `to`, from that of the trainer on.
fn said(trainer: &mut Trainer, to: usize) -> Vec<Option<Flushed>> {
    let batches = golden("llama").curve_batches();
    let from = trainer.steps_done() as usize;
    (from..to).map(|step| trainer.step(&batches[step], Some(0.0)).unwrap().fp8_flushed).collect()
}

fn is_a_third(of: &Option<Flushed>) -> bool {
    // Of the other half hardly any is below 2^-17 of the largest.
    of.as_ref().is_some_and(|of| of.tensor == QUANTISER && (of.share - 1.0 / 3.0).abs() < 1e-3)
}

/// The first step says it, of the tensor that it is true of: what is 0 itself is no part of the share.
#[test]
fn the_largest_share_is_told_once_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let tampered = tampered(folder.path());
    let mut all = Vec::new();
    for (options, is_reported) in [
        (json!({}), true),
        (json!({ "recompute_block": true }), true),
        (json!({ "fp8_amax_history": 0 }), true),
        (json!({ "gradient_dtype": "bfloat16" }), true),
        (json!({ "lora": true, "lora_rank": 4, "lora_dropout": 0.0 }), true),
        (json!({ "skip_quant_first_layers": 2 }), false),
        (json!({ "recipe": "bf16" }), false),
    ] {
        let mut given = json!({ "recipe": "fp8_hybrid" });
        given.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
        let mut trainer = tampered.trainer(false, given);
        let said = said(&mut trainer, 4);
        assert!(said[1..].iter().all(Option::is_none), "{options}: {said:?}");
        assert_eq!(is_a_third(&said[0]), is_reported, "{options}: {said:?}");
        all.push(said[0].clone());
    }
    assert_eq!(all[0], all[1], "what is recomputed is not counted again");
    assert_eq!(all[0], all[3]);
    assert!(all[5].as_ref().is_some_and(|of| of.share < 0.1), "the rest of the model is sound: {:?}", all[5]);
    assert_eq!(all[6], None);
}

/// A state that has lived its first step has said it; another recipe begins again.
#[test]
fn a_resumed_run_does_not_tell_it_again() {
    let folder = tempfile::tempdir().unwrap();
    let tampered = tampered(folder.path());
    let checkpoint = |steps: usize, options: Value| {
        let path = folder.path().join(format!("checkpoint-{steps}-{}", options["recipe"]));
        let mut trainer = tampered.trainer(false, options);
        said(&mut trainer, steps);
        trainer.save(&path).unwrap();
        path
    };
    let fp8 = || json!({ "recipe": "fp8_hybrid" });
    for (path, expected) in [
        (checkpoint(1, fp8()), [None, None]),
        (checkpoint(3, fp8()), [None, None]),
        (checkpoint(3, json!({ "recipe": "bf16" })), [Some(3), None]),
    ] {
        let mut trainer = tampered.trainer(false, fp8());
        trainer.resume(&path).unwrap();
        let first = trainer.steps_done();
        let said = said(&mut trainer, first as usize + 2);
        let at: Vec<Option<u64>> = said.iter().zip(first..).map(|(of, step)| of.as_ref().map(|_| step)).collect();
        assert_eq!(at, expected, "{}", path.display());
        assert!(said.iter().flatten().all(|of| is_a_third(&Some(of.clone()))), "{said:?}");
    }
}

/// A run has one line of it, and its log one event: that of the first step.
#[test]
fn a_run_logs_it_once() {
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("run");
    let run = |resume: bool, stop_after: Option<usize>| {
        let options = json!({ "recipe": "fp8_hybrid", "max_steps": 5, "resume_from_checkpoint": resume });
        let mut observer = Lines { stop_after, ..Lines::default() };
        train::run(stories::config(&output, &options), stories::source(), stories::device(), &mut observer).unwrap();
        observer.lines.iter().filter(|line| line.contains("became 0 in 8 bits")).count()
    };
    assert_eq!(run(false, Some(3)), 1);
    assert_eq!(run(true, None), 0, "it has been said");
    let flushed: Vec<Value> = events(&output).into_iter().filter(|of| of.get("fp8_flushed").is_some()).collect();
    assert_eq!(flushed.len(), 1);
    assert!(flushed[0]["event"] == "step" && flushed[0]["step"] == 0, "{}", flushed[0]);
    let of = &flushed[0]["fp8_flushed"];
    assert!(of["tensor"].as_str().is_some_and(|name| name.starts_with("model.layers.") && name.ends_with(".x")));
    assert!(of["share"].as_f64().is_some_and(|share| (0.0..0.5).contains(&share)), "{of}");
}
