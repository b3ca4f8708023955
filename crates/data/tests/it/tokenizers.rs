//! Encodings and renderings of real tokenizers against the recorded ones of the Hugging Face libraries.

use std::path::{Path, PathBuf};

use crate::shared;
use data::template::{ChatTemplate, Conversation};
use data::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

fn folders(assets: &Path) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(assets.join("tokenizers")).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.push(assets.join("weights/stories260k"));
    folders.sort();
    folders
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
#[ignore = "reads ../shared/assets"]
fn every_recorded_encoding_and_rendering_is_equal() {
    let assets = shared::assets();
    let scratch = tempfile::tempdir().unwrap();
    let (mut encodings, mut renderings) = (0, 0);
    for source in folders(&assets) {
        let folder = shared::tokenizer_folder(&source, scratch.path());
        let tokenizer = Tokenizer::from_folder(&folder).unwrap();
        for row in shared::json_lines(&source.join("golden_encodings.jsonl")) {
            check_encoding(&tokenizer, &row, &source);
            encodings += 1;
        }
        let golden = source.join("golden_chat.jsonl");
        if golden.is_file() {
            for row in shared::json_lines(&golden) {
                check_rendering(&tokenizer, &row, &source);
                renderings += 1;
            }
        }
    }
    assert_eq!((encodings, renderings), (7 * 13, 4 * 4));
}

fn check_encoding(tokenizer: &Tokenizer, row: &Value, source: &Path) {
    let text = row["text"].as_str().unwrap();
    let place = format!("{}: {text:?}", source.display());
    let encoder = tokenizer.encoder();
    assert_eq!(encoder.encode(text, true).unwrap(), ids(&row["ids"]), "{place}");
    let plain = encoder.encode_with_offsets(text, false).unwrap();
    assert_eq!(plain.ids, ids(&row["ids_no_special"]), "{place}");
    assert_eq!(encoder.decode(&plain.ids, false).unwrap(), row["decoded"].as_str().unwrap(), "{place}");
    check_offsets(text, &plain.offsets, &place);
}

/// Offsets stay in the text and leave no byte out: no white space is trimmed away. (Where a tokenizer composes accents,
/// the accent's own bytes belong to no token; only ASCII is held to the rule.)
fn check_offsets(text: &str, offsets: &[(usize, usize)], place: &str) {
    let mut covered = 0;
    for &(begin, end) in offsets {
        assert!((begin <= covered || !text.is_ascii()) && begin <= end && end <= text.len(), "{place}: {offsets:?}");
        covered = covered.max(end);
    }
    assert!(covered == text.len() || !text.is_ascii(), "{place}: {offsets:?}");
}

fn check_rendering(tokenizer: &Tokenizer, row: &Value, source: &Path) {
    let place = format!("{} {}", source.display(), row["case"]);
    let kwargs = row["kwargs"].as_object().unwrap();
    let tools = kwargs.get("tools");
    let text = tokenizer.chat_template(tools.is_some()).unwrap();
    let clock = "2026-11-20T00:00:00".parse().unwrap();
    let template = ChatTemplate::new(text, tokenizer.template_variables().clone(), clock).unwrap();
    let messages: Vec<Map<String, Value>> =
        row["messages"].as_array().unwrap().iter().map(|m| m.as_object().unwrap().clone()).collect();
    let prompt = kwargs.get("add_generation_prompt").and_then(Value::as_bool).unwrap_or(false);
    let rendered = template.render(Conversation { messages: &messages, tools }, prompt).unwrap();
    assert_eq!(rendered.text, row["rendered"].as_str().unwrap(), "{place}");
    assert_eq!(tokenizer.encoder().encode(&rendered.text, false).unwrap(), ids(&row["ids"]), "{place}");
}

#[test]
#[ignore = "reads ../shared/assets"]
fn offsets_keep_white_space_even_if_the_file_says_otherwise() {
    let assets = shared::assets();
    let scratch = tempfile::tempdir().unwrap();
    let text = std::fs::read(assets.join("tokenizers/gpt2/tokenizer.json")).unwrap();
    let mut file: Value = serde_json::from_slice(&text).unwrap();
    let trimming = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    file["post_processor"] = json!({"type": "Sequence", "processors": [trimming]});
    std::fs::write(scratch.path().join("tokenizer.json"), file.to_string()).unwrap();
    let tokenizer = Tokenizer::from_folder(scratch.path()).unwrap();
    let text = "assistant\n  one  two\n\n";
    let encoded = tokenizer.encoder().encode_with_offsets(text, false).unwrap();
    check_offsets(text, &encoded.offsets, "gpt2 with trimming");
}
