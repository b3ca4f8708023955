//! Real datasets through real tokenizers and templates, the counts explained. Needs the reference assets.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use crate::shared;
use data::{
    ConversationColumns, DatasetKind, DatasetSpec, DialogueOptions, DocumentSet, EncodedCorpus, IGNORE,
    InstructionColumns, Layout, LoaderSpec, PrepareOptions, Tokenizer, Truncation, extent, prepare,
};
use serde_json::Value;

fn tokenizer(assets: &Path, name: &str) -> Arc<Tokenizer> {
    let scratch = tempfile::tempdir().unwrap();
    let folder = shared::tokenizer_folder(&assets.join("tokenizers").join(name), scratch.path());
    Arc::new(Tokenizer::from_folder(&folder).unwrap())
}

fn load(path: &Path, kind: DatasetKind, tokenizer: &Arc<Tokenizer>, max_length: usize) -> EncodedCorpus {
    let options = PrepareOptions {
        max_length,
        truncation: Truncation::Delete,
        vocab_size: tokenizer.encoder().vocab_size(),
        positions: None,
        workers: 2,
        dialogue: DialogueOptions { clock: Some("2026-11-20".to_owned()), ..DialogueOptions::default() },
        preference: data::PreferenceOptions::default(),
    };
    let spec = DatasetSpec::new(path, kind);
    prepare(&[spec], Some(tokenizer), &options).unwrap()
}

fn conversation(messages: &str, tools: Option<&str>) -> DatasetKind {
    DatasetKind::Conversation(ConversationColumns {
        messages: messages.to_owned(),
        tools: tools.map(str::to_owned),
        ..ConversationColumns::default()
    })
}

fn trained_text(prepared: &EncodedCorpus, tokenizer: &Tokenizer, i: usize) -> String {
    let view = prepared.corpus.document(i).unwrap();
    let ids: Vec<u32> = view
        .ids
        .iter()
        .zip(view.labels.iter())
        .filter(|(_, label)| **label != IGNORE)
        .map(|(id, _)| *id as u32)
        .collect();
    tokenizer.encoder().decode(&ids, false).unwrap()
}

fn same_documents(a: &EncodedCorpus, b: &EncodedCorpus) {
    assert_eq!(a.corpus.len(), b.corpus.len());
    for i in 0..a.corpus.len() {
        let (x, y) = (a.corpus.document(i).unwrap(), b.corpus.document(i).unwrap());
        assert_eq!(x, y, "document {i}");
    }
}

#[test]
#[ignore = "reads ../shared/assets"]
fn conversations_train_the_answers_and_nothing_else_in_every_file_form() {
    let assets = shared::assets();
    let small = assets.join("data/small");
    for name in ["smollm2", "qwen3", "mistral-nemo"] {
        let tokenizer = tokenizer(&assets, name);
        let lines = load(&small.join("messages_multiturn_106.jsonl"), conversation("messages", None), &tokenizer, 8192);
        let summary = &lines.summary.datasets[0];
        assert_eq!((summary.rows_read, summary.rows_kept), (106, 106), "{}", lines.summary);
        for (i, row) in shared::json_lines(&small.join("messages_multiturn_106.jsonl")).iter().enumerate() {
            let end = if name == "mistral-nemo" { "</s>" } else { "<|im_end|>" };
            let messages = row["messages"].as_array().unwrap();
            let answers = messages.iter().filter(|message| message["role"] == "assistant");
            let expected: String =
                answers.map(|answer| format!("{}{end}", answer["content"].as_str().unwrap())).collect();
            assert_eq!(trained_text(&lines, &tokenizer, i), expected, "{name}, row {i}");
        }
        let parquet =
            load(&small.join("messages_multiturn_106.parquet"), conversation("messages", None), &tokenizer, 8192);
        same_documents(&lines, &parquet);
        let sharegpt =
            load(&small.join("sharegpt_multiturn_106.jsonl"), conversation("conversations", None), &tokenizer, 8192);
        same_documents(&lines, &sharegpt);
    }
}

#[test]
#[ignore = "reads ../shared/assets"]
fn tool_calls_of_sharegpt_rows_are_trained() {
    let assets = shared::assets();
    let tokenizer = tokenizer(&assets, "qwen3");
    let path = assets.join("data/small/toolcall_sharegpt_200.jsonl");
    let prepared = load(&path, conversation("conversations", Some("tools")), &tokenizer, 16384);
    let summary = &prepared.summary.datasets[0];
    assert_eq!((summary.rows_read, summary.rows_kept), (200, 200), "{}", prepared.summary);
    for (i, row) in shared::json_lines(&path).iter().enumerate() {
        let text = trained_text(&prepared, &tokenizer, i);
        let turns = row["conversations"].as_array().unwrap();
        let from = |name: &str| turns.iter().filter(|turn| turn["from"] == name).count();
        assert_eq!(text.matches("<|im_end|>").count(), from("gpt") + from("function_call"), "row {i}: {text}");
        assert_eq!(text.matches("<tool_call>").count(), from("function_call"), "row {i}: {text}");
        assert!(!text.contains("<tool_response>") && !text.contains("<think>"), "row {i}: {text}");
        for turn in turns.iter().filter(|turn| turn["from"] == "gpt") {
            assert!(text.contains(turn["value"].as_str().unwrap().trim_start_matches('\n')), "row {i}");
        }
    }
}

#[test]
#[ignore = "reads ../shared/assets"]
fn gsm8k_as_chat_instructions() {
    let assets = shared::assets();
    for name in ["smollm2", "qwen3", "gpt-oss"] {
        let tokenizer = tokenizer(&assets, name);
        let columns = InstructionColumns {
            instruction: "question".to_owned(),
            output: "answer".to_owned(),
            ..InstructionColumns::default()
        };
        let path = assets.join("data/small/gsm8k_train_200.jsonl");
        let prepared = load(&path, DatasetKind::Instruction(columns), &tokenizer, 2048);
        let summary = &prepared.summary.datasets[0];
        assert_eq!((summary.rows_read, summary.rows_kept), (200, 200), "{}", prepared.summary);
        for (i, row) in shared::json_lines(&path).iter().enumerate() {
            let answer = row["answer"].as_str().unwrap();
            let expected = match name {
                "gpt-oss" => format!("<|channel|>final<|message|>{answer}<|return|>"),
                _ => format!("{answer}<|im_end|>"),
            };
            assert_eq!(trained_text(&prepared, &tokenizer, i), expected, "{name}, row {i}");
        }
    }
}

#[test]
#[ignore = "reads ../shared/assets"]
fn alpaca_rows_come_from_json_lines_and_parquet_and_packing_is_full() {
    let assets = shared::assets();
    let tokenizer = tokenizer(&assets, "smollm2");
    let columns = InstructionColumns {
        instruction: "instruction".to_owned(),
        input: Some("input".to_owned()),
        output: "output".to_owned(),
        prompt_format: Some("### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n{output}".into()),
        prompt_format_no_input: Some("### Instruction:\n{instruction}\n\n### Response:\n{output}".into()),
        ..InstructionColumns::default()
    };
    let kind = DatasetKind::Instruction(columns);
    let lines = load(&assets.join("data/small/alpaca_200.jsonl"), kind.clone(), &tokenizer, 2048);
    let parquet = load(&assets.join("data/small/alpaca_200.parquet"), kind.clone(), &tokenizer, 2048);
    // Both are samples of the same file, each another one.
    let whole = load(&assets.join("data/llama-factory/alpaca_en_demo.json"), kind, &tokenizer, 2048);
    assert_eq!(whole.corpus.len(), 999);
    let documents = |prepared: &EncodedCorpus| -> HashSet<Vec<i32>> {
        (0..prepared.corpus.len()).map(|i| prepared.corpus.document(i).unwrap().ids.to_vec()).collect()
    };
    assert!(documents(&whole).is_superset(&documents(&lines)) && documents(&whole).is_superset(&documents(&parquet)));
    assert_eq!(parquet.corpus.len(), 200);
    assert_eq!(lines.summary.datasets[0].rows_kept, 200, "{}", lines.summary);
    for (i, row) in shared::json_lines(&assets.join("data/small/alpaca_200.jsonl")).iter().enumerate() {
        assert_eq!(
            trained_text(&lines, &tokenizer, i).trim_start(),
            format!("{}<|im_end|>", row["output"].as_str().unwrap().trim_start())
        );
    }
    let spec = LoaderSpec {
        batch_size: 2,
        share: data::Share::WHOLE,
        seq_len: 2048,
        layout: Layout::Packed,
        padding: data::Padding::End,
        shuffle: true,
        seed: 1,
        epochs: Some(1),
        pad_id: 0,
        longest_padding: usize::MAX,
        prefetch: 0,
        logits: Vec::new(),
        images: None,
    };
    let extent = extent(&DocumentSet::all(whole.corpus), &spec).unwrap();
    assert!(extent.fill > 0.97, "{extent:?}");
}

#[test]
#[ignore = "reads ../shared/assets"]
fn plain_text_rows_end_with_eos() {
    let assets = shared::assets();
    let tokenizer = tokenizer(&assets, "qwen3");
    let path = assets.join("data/small/wikisql_text_200.jsonl");
    let prepared = load(&path, DatasetKind::Text { field: "text".to_owned() }, &tokenizer, 512);
    assert_eq!(prepared.summary.datasets[0].rows_kept, 200);
    for (i, row) in shared::json_lines(&path).iter().enumerate() {
        let Value::String(text) = &row["text"] else { panic!() };
        let view = prepared.corpus.document(i).unwrap();
        let ids: Vec<u32> = view.ids.iter().map(|id| *id as u32).collect();
        assert_eq!(tokenizer.encoder().decode(&ids, false).unwrap(), format!("{text}<|im_end|>"));
        assert_eq!(view.labels, *view.ids);
    }
}
