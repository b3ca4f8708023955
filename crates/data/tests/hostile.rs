//! Readers, renderer and spans under bytes that nobody meant: whatever comes in, there is a row, an error, and no panic.
//!
//! The bytes are drawn, the same in every run; a failure names its number. `SUROGATE_ROUNDS=100` draws a hundred times as
//! many.

use std::fs;
use std::path::{Path, PathBuf};

use data::rows;
use data::spans::{Markers, Message, trained_spans};
use data::template::{ChatTemplate, Conversation, clock_now};
use serde_json::{Map, Value, json};
use tensor::philox::{Purpose, word};

struct Dice {
    seed: u64,
    at: u64,
}

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.at += 1;
        word(self.seed, Purpose::Shuffle, 77, 0, self.at) as usize % n
    }

    fn pick<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[self.below(from.len())]
    }
}

/// How many draws a test makes, when a usual run makes `usual`.
fn rounds(usual: u64) -> u64 {
    usual * std::env::var("SUROGATE_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

const PIECES: [&str; 24] = [
    "{",
    "}",
    "[",
    "]",
    "\"",
    ":",
    ",",
    "\n",
    "\r\n",
    "\\",
    "\\u12",
    "\u{feff}",
    "null",
    "1e999",
    "-",
    "text",
    "a,b",
    "\t",
    "ü",
    "\u{fdd0}",
    "{\"text\": \"x\"}\n",
    "\"\"\"",
    "\0",
    "[{\"a\":1}]",
];

#[test]
fn readers_take_any_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let whole = |name: &str| -> Vec<u8> {
        let text = b"{\"text\": \"one\"}\n{\"text\": \"two\"}\n";
        match name.rsplit('.').next().unwrap() {
            "gz" => {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                std::io::Write::write_all(&mut encoder, text).unwrap();
                encoder.finish().unwrap()
            }
            "zst" => zstd::encode_all(&text[..], 1).unwrap(),
            "parquet" => fs::read(fixture("parquet/rows.parquet")).unwrap(),
            "arrow" => fs::read(fixture("arrow/types.arrow")).unwrap(),
            _ => text.to_vec(),
        }
    };
    for name in ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt", "a.parquet", "a.arrow", "a.jsonl.gz", "a.csv.zst"] {
        for seed in 0..rounds(150) {
            let mut dice = Dice { seed, at: 0 };
            let mut bytes = whole(name);
            if seed % 3 == 0 {
                bytes = (0..dice.below(40)).flat_map(|_| dice.pick(&PIECES).bytes().collect::<Vec<_>>()).collect();
            }
            for _ in 0..dice.below(4) {
                let at = dice.below(bytes.len().max(1));
                match bytes.get_mut(at) {
                    Some(byte) if seed % 2 == 0 => *byte = dice.below(256) as u8,
                    _ => bytes.truncate(at),
                }
            }
            let path: PathBuf = folder.path().join(name);
            fs::write(&path, &bytes).unwrap();
            if let Ok(stream) = rows::open(std::slice::from_ref(&path), "text") {
                assert!(
                    stream.take(1000).count() < 1000,
                    "{name}, {seed}: the rows of {} bytes do not end",
                    bytes.len()
                );
            }
        }
    }
}

#[test]
fn templates_are_refused_or_end() {
    let pieces = [
        "{% for m in messages %}",
        "{% endfor %}",
        "{{ m.content }}",
        "{{ messages }}",
        "{% if tools %}",
        "{% endif %}",
        "{% set x = 'a' %}",
        "{{ x * 9 }}",
        "{% for i in range(100000) %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ m | tojson }}",
        "{{ raise_exception('no') }}",
        "{{ strftime_now('%Q%Y') }}",
        "{{ ''.join([1]) }}",
        "{% include 'x' %}",
        "{% generation %}",
        "{% endgeneration %}",
        "{{ messages[99].x.y }}",
        "{{ 1 / 0 }}",
        "text ü",
    ];
    let messages = [Message::new("user", "q").fields, Message::new("assistant", "a").fields];
    let mut rendered = 0;
    for seed in 0..rounds(400) {
        let mut dice = Dice { seed, at: 0 };
        let source: String = (0..1 + dice.below(6)).map(|_| dice.pick(&pieces)).collect();
        let Ok(template) = ChatTemplate::new(&source, Map::new(), clock_now()) else { continue };
        rendered += usize::from(template.render(Conversation { messages: &messages, tools: None }, true).is_ok());
    }
    assert!(rendered > 20, "only {rendered} of the templates are any");
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a %}{% endfor %}{% endfor %}";
    let endless = ChatTemplate::new(endless, Map::new(), clock_now()).unwrap();
    assert!(endless.render(Conversation { messages: &messages, tools: None }, false).is_err(), "fuel ends it");
}

#[test]
fn real_templates_with_holes_are_refused_or_end() {
    let mut call = Message::new("assistant", "a").fields;
    call.insert("tool_calls".into(), json!([{"function": {"name": "f", "arguments": {"x": 1}}}]));
    let messages = [Message::new("system", "s").fields, Message::new("user", "q").fields, call];
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    let mut rendered = 0;
    for (number, name) in ["qwen3", "smollm2", "gpt-oss", "mistral-nemo"].into_iter().enumerate() {
        let source = fs::read_to_string(fixture(&format!("templates/{name}/chat_template.jinja"))).unwrap();
        let lines: Vec<&str> = source.split_inclusive('\n').collect();
        for seed in 0..rounds(60) {
            let mut dice = Dice { seed: seed * 4 + number as u64, at: 0 };
            let mut lines = lines.clone();
            for _ in 0..1 + dice.below(3) {
                let (from, to) = (dice.below(lines.len()), dice.below(lines.len()));
                match dice.below(3) {
                    0 => drop(lines.remove(from)),
                    1 => lines.swap(from, to),
                    _ => lines.insert(to, lines[from]),
                }
            }
            let Ok(template) = ChatTemplate::new(&lines.concat(), Map::new(), clock_now()) else { continue };
            let conversation = Conversation { messages: &messages, tools: Some(&tools) };
            rendered += usize::from(template.render(conversation, true).is_ok());
        }
    }
    assert!(rendered > 20, "only {rendered} of the templates are any");
}

#[test]
fn spans_hold_the_answers_whatever_stands_in_them() {
    let source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}\
                  {% if add_generation_prompt %}<|assistant|>{% endif %}";
    let template = ChatTemplate::new(source, Map::new(), clock_now()).unwrap();
    let ends = ["<|end|>".to_owned()];
    let markers =
        Markers { generation_prompt: "<|assistant|>", answer_opening: "", end_of_turn: &ends, special: &ends };
    let pieces = [
        "a",
        "a",
        " ",
        "\n",
        "<|assistant|>",
        "<|user|>",
        "{\"x\": 1}",
        "ü",
        "Qv7nulla0foxJ3b",
        "{{ x }}",
        "</think>",
        "same",
    ];
    for seed in 0..rounds(300) {
        let mut dice = Dice { seed, at: 0 };
        let count = 1 + dice.below(6);
        let talk: Vec<Message> = (0..count)
            .map(|i| {
                let text: String = (0..dice.below(5)).map(|_| dice.pick(&pieces)).collect();
                Message::new(if i % 2 == 0 { "user" } else { "assistant" }, &text)
            })
            .collect();
        let render = |messages: &[Map<String, Value>]| template.render(Conversation { messages, tools: None }, false);
        let (text, spans) = trained_spans(&talk, &render, markers).unwrap_or_else(|e| panic!("{seed}: {e}"));
        let found: Vec<Value> = spans.iter().map(|span| json!(text[span.range.clone()])).collect();
        let answers = talk.iter().filter(|message| message.role() == "assistant");
        let expected: Vec<Value> =
            answers.map(|answer| json!(format!("{}<|end|>", answer.fields["content"].as_str().unwrap()))).collect();
        assert_eq!(found, expected, "{seed}: {text}");
    }
}
