//! Tests the tables of every scaling type against values recorded from transformers.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tensor::Attrs;

use super::{Rope, RopeFrequencies, RopeFrequenciesOfBatch};
use crate::evaluate::{Array, apply};
use crate::op::Op;

const VARIANTS: &[&str] = &[
    "default",
    "linear",
    "yarn",
    "yarn_no_truncate",
    "yarn_mscale",
    "yarn_attention_factor",
    "llama3",
    "dynamic",
    "longrope",
];

fn fixtures() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/ops lies in the repository");
    root.join("tests/golden/llama_rope")
}

fn json(bytes: &[u8]) -> Map<String, Value> {
    serde_json::from_slice(bytes).expect("the fixtures are valid JSON")
}

/// One f32 tensor of a safetensors file.
fn recorded(file: &[u8], name: &str) -> Vec<f32> {
    let header_len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let (header, body) = file[8..].split_at(header_len);
    let entry = &json(header)[name];
    let at = |index: usize| entry["data_offsets"][index].as_u64().unwrap() as usize;
    assert_eq!(entry["dtype"], "F32", "{name}");
    body[at(0)..at(1)].chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// The operation's attributes from a model's config.
fn attributes(config: &Map<String, Value>) -> Attrs {
    let mut attrs = Attrs::new().with("head_dim", config["head_dim"].clone());
    for (name, value) in config["rope_parameters"].as_object().expect("the configs are of version 5") {
        let name = match name.as_str() {
            "rope_theta" => "theta",
            "rope_type" => "scaling_type",
            other => other,
        };
        attrs = attrs.with(name, value.clone());
    }
    if attrs.get("scaling_type").is_some_and(|kind| kind == "dynamic") {
        attrs = attrs.with("original_max_position_embeddings", config["max_position_embeddings"].clone());
    }
    attrs
}

/// inv_freq and attention_scaling for the positions 0 to `tokens`.
fn table(attrs: &Attrs, tokens: usize) -> (Array<f32>, Array<f32>) {
    let pairs = attrs.size("head_dim").unwrap() / 2;
    let positions = Array::Int((0..tokens as i32).collect());
    let of_batch = attrs.get("scaling_type").is_some_and(|kind| kind == "dynamic" || kind == "longrope");
    let (op, inputs): (&dyn Op, &[(&[usize], &Array<f32>)]) = match of_batch {
        true => (&RopeFrequenciesOfBatch, &[(&[1, tokens], &positions)]),
        false => (&RopeFrequencies, &[]),
    };
    let mut out = [(vec![pairs], Array::Real(vec![0f32; pairs])), (vec![1], Array::Real(vec![0f32]))];
    apply(op, attrs, inputs, &mut out);
    let [(_, inv_freq), (_, scaling)] = out;
    (inv_freq, scaling)
}

/// cos | sin of the first `tokens` positions: the rotation of (1, 0).
fn cosines_and_sines(inv_freq: &Array<f32>, scaling: &Array<f32>, tokens: usize) -> Vec<f32> {
    let pairs = inv_freq.real().len();
    let shape = [1, tokens, 1, 2 * pairs];
    let x = Array::Real((0..tokens * 2 * pairs).map(|i| if i % (2 * pairs) < pairs { 1.0 } else { 0.0 }).collect());
    let positions = Array::Int((0..tokens as i32).collect());
    let inputs: [(&[usize], &Array<f32>); 4] =
        [(&shape, &x), (&[1, tokens], &positions), (&[pairs], inv_freq), (&[1], scaling)];
    let mut out = [(shape.to_vec(), Array::Real(vec![0f32; tokens * 2 * pairs]))];
    apply(&Rope, &Attrs::new(), &inputs, &mut out);
    out[0].1.real().to_vec()
}

fn assert_close(found: impl Iterator<Item = f32>, wanted: impl Iterator<Item = f32>, what: &str) {
    let worst = found.zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= 1e-5, "{what}: off by {worst}");
}

#[test]
fn tables_equal_those_of_transformers() {
    let folder = fixtures();
    let file = std::fs::read(folder.join("reference.safetensors")).unwrap();
    for variant in VARIANTS {
        let config = json(&std::fs::read(folder.join(format!("config.{variant}.json"))).unwrap());
        for (length, tokens) in [("short", 24), ("long", 80)] {
            let (inv_freq, scaling) = table(&attributes(&config), tokens);
            let wanted = |name: &str| recorded(&file, &format!("{variant}.{length}.{name}"));
            let expected = wanted("inv_freq");
            assert_eq!(inv_freq.real().len(), expected.len());
            assert_close(inv_freq.real().iter().copied(), expected.iter().copied(), &format!("{variant} inv_freq"));
            let (pairs, turned) = (expected.len(), cosines_and_sines(&inv_freq, &scaling, tokens));
            for (name, offset) in [("cos", 0), ("sin", pairs)] {
                let expected = wanted(name);
                assert_eq!(expected.len(), tokens * 2 * pairs);
                // The recorded tables repeat their halves.
                let found = turned.chunks(2 * pairs).flat_map(|row| &row[offset..offset + pairs]).copied();
                let expected = expected.chunks(2 * pairs).flat_map(|row| &row[..pairs]).copied();
                assert_close(found, expected, &format!("{variant} {name}"));
            }
        }
    }
}
