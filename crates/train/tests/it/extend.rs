//! A model with further special tokens: its files, and an adapter that trains their rows.

use std::path::Path;
use std::sync::Arc;

use crate::stories::{config, device, root};
use data::safetensors::Weights;
use data::{Batch, Tokenizer};
use serde_json::{Value, json};
use tensor::{DType, HostTensor};
use train::{Extend, Extended, Model, ModelSource, Trainer, extend, merge};

const TABLE: &str = "model.embed_tokens.weight";

fn names(tokens: &[&str]) -> Vec<String> {
    tokens.iter().map(|token| (*token).to_owned()).collect()
}

fn read(files: &Weights, name: &str) -> HostTensor {
    files.get(name).unwrap().to_host().unwrap()
}

#[test]
fn tokenizer_tables_and_configuration_grow_together() {
    let (place, model) = (tempfile::tempdir().unwrap(), root().join("examples/stories/model"));
    let [output, tight] = ["extended", "tight"].map(|name| place.path().join(name));
    let tokens = names(&["<|note|>", "<|end|>"]);
    // Asked to stop, it leaves nothing.
    assert!(extend(&model, &tokens, 64, &output, Extend::Whole, &|| true).is_err());
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
    let done = extend(&model, &tokens, 64, &output, Extend::Whole, &|| false).unwrap();
    assert_eq!(done, Extended { first_id: 512, rows: (512, 576), tensors: vec![TABLE.into()] });
    let encoded =
        |folder: &Path, text: &str| Tokenizer::from_folder(folder).unwrap().encoder().encode(text, false).unwrap();
    let ids = encoded(&output, "Once <|note|>upon<|end|>");
    assert!(ids.contains(&512) && ids.last() == Some(&513), "{ids:?}");
    assert_eq!(encoded(&output, "Once upon a time"), encoded(&model, "Once upon a time"));
    let (own, files) = (Weights::open(&model).unwrap(), Weights::open(&output).unwrap());
    assert_eq!(own.names(), files.names());
    for name in own.names() {
        let (old, new) = (read(&own, name), read(&files, name));
        assert!(new.bytes.starts_with(&old.bytes) && (name == TABLE || old.shape == new.shape), "{name}");
    }
    let (old, new) = (read(&own, TABLE), read(&files, TABLE));
    let (columns, values) = (old.shape[1], old.to_f64());
    for column in 0..columns {
        let mean = (0..512).map(|row| values[row * columns + column]).sum::<f64>() / 512.0;
        let of_new = |row: usize| new.to_f64()[row * columns + column];
        assert!((of_new(512) - mean).abs() < 1e-6 && of_new(575) == of_new(512), "{column}");
    }
    let text = std::fs::read_to_string(output.join("config.json")).unwrap();
    let fields: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&fields["vocab_size"], &fields["torch_dtype"]), (&json!(576), &json!("float32")));
    // The rows that are there now are used before tables grow again.
    let more = extend(&output, &names(&["<|more|>"]), 64, &tight, Extend::Whole, &|| false).unwrap();
    assert_eq!((more.first_id, more.rows), (514, (576, 576)));
    for (tokens, problem) in [
        (names(&["<|note|>"]), "is a token already, 512"),
        (names(&["<s>"]), "is a token already, 1"),
        (names(&[""]), "cannot be a new token"),
    ] {
        let error =
            extend(&output, &tokens, 64, &place.path().join("no"), Extend::Whole, &|| false).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
    let error = extend(&model, &names(&["<|x|>"]), 64, &output, Extend::Whole, &|| false).unwrap_err().to_string();
    assert!(error.contains("nothing is overwritten"), "{error}");
}

#[test]
fn rows_of_new_tokens_are_trained_beside_an_adapter() {
    let (place, model) = (tempfile::tempdir().unwrap(), root().join("examples/stories/model"));
    let [base, adapter, merged] = ["extended", "adapter", "merged"].map(|name| place.path().join(name));
    extend(&model, &names(&["<|note|>"]), 1, &base, Extend::Whole, &|| false).unwrap();
    let graph = include_str!("../ir/stories.json").replace("512", "513");
    let source = |folder: &Path| Arc::new(ModelSource::open(folder, &graph).unwrap());
    let more = json!({"model": base, "modules_to_save": ["embed_tokens", "lm_head"], "torch_dtype": "float32"});
    let mut trainer = Trainer::begin(config(place.path(), &more), source(&base), device()).unwrap();
    let ids: Vec<i32> = (0..32).map(|i| if i % 3 == 0 { 512 } else { i * 7 % 400 + 3 }).collect();
    let rows = || Batch::from_labels(2, 16, ids.clone(), &ids, None, None).unwrap();
    let losses: Vec<f64> = (0..8).map(|_| trainer.step(&[rows()], Some(1e-2)).unwrap().loss).collect();
    assert!(losses[7] < losses[0] - 1.0, "{losses:?}");
    trainer.export(&adapter).unwrap();
    let (before, after) = (Weights::open(&base).unwrap(), Weights::open(&adapter).unwrap());
    let (before, after) = (read(&before, TABLE), read(&after, &format!("base_model.model.{TABLE}")));
    let row = |of: &HostTensor| of.to_f64()[512 * of.shape[1]..].to_vec();
    assert_eq!(before.shape, after.shape);
    assert!(row(&before).iter().zip(row(&after)).any(|(a, b)| (a - b).abs() > 1e-2));
    assert!(adapter.join("tokenizer.json").is_file());
    merge(&base, &adapter, &merged, &Default::default(), false, &|| false).unwrap();
    let logits = |folder: &Path, adapter: Option<&Path>| {
        Model::load(device(), source(folder), adapter, DType::F32).unwrap().forward(&rows(), false).unwrap().logits
    };
    let (with, whole) = (logits(&base, Some(&adapter)).to_f64(), logits(&merged, None).to_f64());
    let largest = with.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    assert!(with.iter().zip(&whole).all(|(a, b)| (a - b).abs() < 1e-4 * largest));
}
