//! Readers, renderer and spans under bytes that no one meant: whatever comes in, there is a row, an error, and no
//! panic.
//!
//! The bytes are drawn, the same in every run; a failure names its number. `SUROGATE_ROUNDS=100` draws a hundred times
//! as many.

use std::fs;
use std::path::{Path, PathBuf};

use data::spans::{Markers, Message, trained_spans};
use data::template::{ChatTemplate, Conversation, clock_now};
use data::{AgentForm, ConversationColumns, DatasetKind, DatasetSpec, DialogueOptions, InstructionColumns, LossRule};
use data::{PrepareOptions, Tokenizer, Truncation, prepare, rows};
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

/// The number of draws of a test, which makes `usual` by default.
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

/// Values that a row may hold where something else is meant.
fn any_value(dice: &mut Dice, depth: usize) -> Value {
    const NAMES: [&str; 16] = [
        "role",
        "content",
        "from",
        "value",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "thinking",
        "weight",
        "train",
        "reasoning_content",
        "type",
        "text",
        "id",
        "parameters",
    ];
    let texts =
        ["", "a", "user", "assistant", "tool", "system", "f", "{\"x\": 1}", "[", "ü\u{fdd0}", "<|im_end|>", "text"];
    match dice.below(if depth > 4 { 6 } else { 9 }) {
        0 => Value::Null,
        1 => json!(dice.below(2) == 0),
        2 => json!(dice.below(300) as i64 - 150),
        3 => json!(1e300),
        4 | 5 => json!(dice.pick(&texts)),
        6 => (0..dice.below(4)).map(|_| any_value(dice, depth + 1)).collect(),
        _ => (0..dice.below(5)).map(|_| (dice.pick(&NAMES).to_owned(), any_value(dice, depth + 1))).collect(),
    }
}

/// Replaces, removes or doubles something anywhere in a value.
fn spoil(value: &mut Value, dice: &mut Dice) {
    let inside = match value {
        Value::Array(list) if !list.is_empty() => {
            let i = dice.below(list.len());
            list.get_mut(i)
        }
        Value::Object(fields) if !fields.is_empty() => {
            let i = dice.below(fields.len());
            fields.values_mut().nth(i)
        }
        _ => None,
    };
    match (inside, dice.below(4)) {
        (Some(inside), 1..) => spoil(inside, dice),
        _ => *value = any_value(dice, 0),
    }
}

#[test]
fn rows_of_any_form_are_counted() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/stories/model");
    let tokenizer = std::sync::Arc::new(Tokenizer::from_folder(&model).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    let good = json!({
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
                {"name": "g", "arguments": "{}"},
            ]},
            {"role": "tool", "content": {"y": 2}},
            {"role": "assistant", "content": "b", "weight": 0.5},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "instruction": "i", "output": "o", "input": "x",
        "input_ids": [1, 2, 3], "labels": [-100, 2, 3], "position_ids": [0, 1, 2], "weights": [1.0, 1.0, 0.5],
        "text": "t",
    });
    let text = |name: &str| Some(name.to_owned());
    let columns = ConversationColumns { messages: "messages".into(), tools: text("tools"), ..Default::default() };
    let instruction = InstructionColumns {
        instruction: "instruction".into(),
        output: "output".into(),
        input: text("input"),
        prompt_format: text("{input}{instruction}{output}!"),
        ..Default::default()
    };
    let kinds = [
        DatasetKind::Conversation(columns.clone()),
        DatasetKind::Instruction(instruction.clone()),
        DatasetKind::Instruction(InstructionColumns { prompt_format: None, ..instruction }),
        DatasetKind::Tokens,
        DatasetKind::Text { field: "text".into() },
        DatasetKind::Auto(Box::default()),
    ];
    let templates: Vec<String> = ["qwen3", "smollm2", "gpt-oss", "mistral-nemo"]
        .iter()
        .map(|name| fs::read_to_string(fixture(&format!("templates/{name}/chat_template.jinja"))).unwrap())
        .collect();
    const ROWS: usize = 40;
    let mut kept = 0;
    for seed in 0..rounds(60) {
        let mut dice = Dice { seed, at: 0 };
        let mut lines = good.to_string() + "\n";
        for _ in 1..ROWS {
            let mut row = good.clone();
            (0..1 + dice.below(3)).for_each(|_| spoil(&mut row, &mut dice));
            lines += &format!("{row}\n");
        }
        fs::write(&path, lines).unwrap();
        let losses = [LossRule::Answers, LossRule::LastRound, LossRule::Everything];
        let weights = [("user", 0.5), ("a+", 2.0), ("system", 1.0)];
        let by_name = LossRule::by_name(weights).unwrap();
        let dialogue = DialogueOptions {
            template: Some(templates[dice.below(4)].clone()),
            system: (dice.below(2) == 0).then(|| "S".to_owned()),
            loss: losses.into_iter().chain([by_name]).nth(dice.below(4)).unwrap(),
            response_prefix: (dice.below(3) == 0).then(|| "a".to_owned()),
            agent: [None, Some(AgentForm::Hermes), Some(AgentForm::React)][dice.below(3)],
            keeps_system: dice.below(2) == 0,
            ..DialogueOptions::default()
        };
        let truncation = [Truncation::Delete, Truncation::Left, Truncation::Right, Truncation::Split][dice.below(4)];
        let options = PrepareOptions {
            max_length: 1 + dice.below(300),
            truncation,
            vocab_size: 1 << 20,
            positions: None,
            workers: dice.below(3),
            dialogue,
            preference: data::PreferenceOptions::default(),
        };
        let kind = kinds[dice.below(kinds.len())].clone();
        match prepare(&[DatasetSpec::new(&path, kind)], Some(&tokenizer), &options) {
            Ok(prepared) => {
                let of = &prepared.summary.datasets[0];
                let dropped: usize = of.dropped.values().map(|dropped| dropped.rows).sum();
                assert_eq!((of.rows_read, of.rows_kept + dropped), (ROWS, ROWS), "{seed}");
                kept += of.rows_kept;
            }
            Err(error) => assert!(!error.to_string().is_empty(), "{seed}"),
        }
    }
    assert!(kept > 100, "only {kept} rows were kept");
}

/// Untrusted templates that try to take time or memory are rejected or end, soon and at little memory, and nothing
/// overflows.
#[test]
fn hostile_templates_are_refused_or_end() {
    let messages = [Message::new("user", "q").fields, Message::new("assistant", &"a".repeat(1000)).fields];
    let nested = |open: &str, inner: &str, close: &str, n: usize| open.repeat(n) + inner + &close.repeat(n);
    let a_loop = |body: &str| {
        format!("{{% for i in range(100000) %}}{{% for j in range(100000) %}}{body}{{% endfor %}}{{% endfor %}}")
    };
    let sources = [
        // Nesting of the text.
        format!("{{{{ {}1 }}}}", "not ".repeat(20_000)),
        format!("{{{{ {}1 }}}}", "-".repeat(20_000)),
        format!("{{{{ 1{} }}}}", "+1".repeat(100_000)),
        format!("{{{{ x{} }}}}", "|string".repeat(50_000)),
        format!("{{{{ x{} }}}}", ".y".repeat(100_000)),
        format!("{{{{ {} }}}}", nested("[", "1", "]", 50_000)),
        format!("{{{{ {} }}}}", nested("(", "1", ")", 50_000)),
        format!("{{{{ {} }}}}", vec!["a if b else"; 20_000].join(" ") + " c"),
        nested("{% if x %}", "y", "{% endif %}", 20_000),
        nested("{% for i in x %}", "y", "{% endfor %}", 20_000),
        format!("{{% if x %}}{}{{% endif %}}", "{% elif x %}".repeat(20_000)),
        format!("{{% if x %}}{}{{% endif %}}", "{% elif x %}".repeat(4000)),
        "{% set x = 'a' %}".repeat(1 << 16),
        format!("{{{{ f({}) }}}}", vec!["1"; 70_000].join(",")),
        // Values inside of themselves.
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}".into(),
        "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns|tojson }}".into(),
        "{% set a = namespace() %}{% set b = namespace() %}{% set a.x = b %}{% set b.x = {'y': [a]} %}{{ a == b }}".into(),
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns == ns }}{{ [ns]|join }}{{ ns|upper }}{{ 'a' ~ ns }}".into(),
        "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}".into(),
        "{% set ns = namespace(x={}) %}{% for i in range(100000) %}{% set ns.x = {'a': ns.x} %}{% endfor %}{{ ns.x|tojson }}".into(),
        "{% set ns = namespace(x=[1]) %}{% for i in range(100000) %}{% set ns.x = ns.x[0:] %}{% endfor %}{{ ns.x }}".into(),
        "{% set ns = namespace(x=[1]) %}{% for i in range(100000) %}{% set ns.x = ns.x|reverse %}{% endfor %}{{ ns.x }}".into(),
        "{% set ns = namespace(x=[1]) %}{% for i in range(100000) %}{% set ns.x = ns.x|batch(1) %}{% endfor %}{{ ns.x }}".into(),
        "{% set ns = namespace(x=[1]) %}{% for i in range(100000) %}{% set ns.x = ns.x|map('string') %}{% endfor %}{{ ns.x|list }}".into(),
        "{% set ns = namespace(x=dict()) %}{% for i in range(100000) %}{% set ns.x = dict(a=ns.x) %}{% endfor %}{{ ns.x }}".into(),
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".into(),
        "{% include 'chat' %}{% extends 'chat' %}".into(),
        "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}".into(),
        // Texts and lists that grow.
        "{{ messages|tojson(indent=100000000000) }}".into(),
        "{{ messages|tojson(indent='          '*100000) }}".into(),
        "{{ messages|tojson(separators=('x'*10000000, 'y')) }}".into(),
        "{{ '{:>10000000000}'.format('a') }}".into(),
        "{{ '%10000000000d'|format(1) }}".into(),
        "{{ '%*d'|format(1000000000, 1) }}".into(),
        "{{ '{:{}}'.format('a', 1000000000) }}".into(),
        "{{ 'a'|indent(10000000000) }}".into(),
        "{{ 'a'|indent(width=10000000000, first=true) }}".into(),
        "{{ [1]|batch(10000000000, 'a')|list }}".into(),
        "{{ [1]|slice(10000000000, 'a')|list }}".into(),
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}".into(),
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|length }}".into(),
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|length }}".into(),
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}".into(),
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x|replace('', ns.x) %}{% endfor %}".into(),
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x.join(ns.x) %}{% endfor %}".into(),
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}".into(),
        "{% macro f(x, n) %}{{ x if n == 0 else f(x ~ x, n - 1) }}{% endmacro %}{{ f('ab', 60)|length }}".into(),
        format!("{{% set x = 'ab' %}}{}{{{{ x|length }}}}", "{% set x = x ~ x %}".repeat(60)),
        format!("{{{{ {}'ab'{} }}}}", "(".repeat(40), "*9)".repeat(40)),
        "{{ ('a'*100000000)|length }}".into(),
        "{{ [1, 2]*40000000 }}".into(),
        "{{ ((1, 2)*40000000)|length }}".into(),
        "{% set x = 'a'*10000000 %}{{ [x, x, x, x]*1000000 }}".into(),
        format!("{{{{ [{}] }}}}", vec!["'a'*100000000"; 500].join(",")),
        // Work.
        a_loop("{{ 'x' }}"),
        a_loop(&"raw text that a template writes ".repeat(1000)),
        format!("{{% set x %}}{}{{% endset %}}", a_loop(&"raw text that a template writes ".repeat(1000))),
        a_loop("{% set x = range(100000)|list %}"),
        a_loop("{% set x = messages == messages %}"),
        a_loop("{% set x = 'b' in messages[1].content %}"),
        a_loop("{% set x = messages[1].content.split('a') %}"),
        a_loop("{% set x = (messages[1].content|list)|sort|unique|list %}"),
        a_loop("{% macro f(a) %}{{ a }}{% endmacro %}"),
        a_loop("{% set x = strftime_now('%Y' ~ i ~ j) %}"),
        "{{ raise_exception('x'*10000000) }}".into(),
        "{{ debug() }}".into(),
        // The engine indexes what is empty.
        "{{ ''[::-1] }}{{ [][::-1] }}{{ messages[0].missing[::-1] }}".into(),
    ];
    for (number, source) in sources.iter().enumerate() {
        let shown: String = source.chars().take(90).collect();
        let start = std::time::Instant::now();
        let compiled = ChatTemplate::new(source, Map::new(), clock_now());
        let rendered =
            compiled.map(|template| template.render(Conversation { messages: &messages, tools: None }, true));
        let reported = match &rendered {
            Ok(Ok(rendered)) => format!("{} bytes", rendered.text.len()),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        println!("{number}: {shown}: {reported}, {:?}", start.elapsed());
        assert!(reported.len() < 6000, "{shown}");
        assert!(start.elapsed().as_secs() < 60, "{shown}");
        if let Ok(Ok(rendered)) = rendered {
            assert!(rendered.text.len() < 1 << 25, "{shown}");
        }
    }
    let peak = fs::read_to_string("/proc/self/status").unwrap();
    let peak = peak.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap().trim().trim_end_matches(" kB");
    assert!(peak.parse::<usize>().unwrap() < 2 << 20, "{peak} kB");
}

/// Operators, lists and texts of templates give the same results with bounds around them.
#[test]
fn bounds_change_nothing_that_templates_write() {
    let messages = [Message::new("user", "q").fields, Message::new("assistant", "a b").fields];
    for (source, expected) in [
        ("{{ 'a' ~ 1 ~ 'b' }}{{ 'x' * 3 }}{{ 2 * 3 + 1 }}{{ 'a' + 'b' }}", "a1bxxx7ab"),
        ("{{ [1] + [2, 3] }}{{ ([1] + [2])[1] }}{{ [1, 2] * 2 }}", "[1, 2, 3]2[1, 2, 1, 2]"),
        ("{{ messages[1:][0].content }}{{ messages[::-1][0].role }}", "a bassistant"),
        ("{{ {'a': 1, 'b': [2]}|tojson }}{{ {'a': 1}.items()|list }}", "{\"a\": 1, \"b\": [2]}[('a', 1)]"),
        ("{{ 1 < 2 < 3 }}{{ 'a' in 'abc' }}{{ 'z' not in ['a'] }}{{ 1 == 1.0 }}", "TrueTrueTrueTrue"),
        (
            "{% set ns = namespace(n=0, l=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.l = ns.l + [m.role] %}{% endfor %}{{ ns.n }}{{ ns.l }}",
            "2['user', 'assistant']",
        ),
        ("{% macro f(a, b=2) %}{{ a }}-{{ b }}{% endmacro %}{{ f(1) }} {{ f(1, b=3) }}", "1-2 1-3"),
        ("{% call f() %}x{% endcall %}{% macro f() %}[{{ caller() }}]{% endmacro %}", ""),
        ("{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}x{% endcall %}", "[x]"),
        (
            "{% set x %}a{% endset %}{{ x }}{% filter upper %}b{% endfilter %}{% set y | upper %}c{% endset %}{{ y }}",
            "aBC",
        ),
        ("{% for a, b in {'k': 'v'}.items() %}{{ a }}{{ b }}{{ loop.index }}{{ loop.last }}{% endfor %}", "kv1True"),
        (
            "{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}",
            "1(2(3))",
        ),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}none{% endfor %}", "q"),
        ("{{ missing is defined }}{{ missing | default('d') }}{{ missing }}{{ (missing or 'e') }}", "Falsede"),
        ("{{ 'a,b'.split(',')[-1] }}{{ '  x '.strip() }}{{ 'abc'[1:] }}{{ 'abc'[::-1] }}", "bxbccba"),
        ("{{ '%s-%d' | format('a', 3) }}{{ '{}:{:>3}'.format('b', 1) }}", "a-3b:  1"),
        (
            "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
            "user, assistant1",
        ),
        ("{% with a = 1, b = a %}{{ a }}{% endwith %}{% raw %}{{ x }}{% endraw %}{# c #}", "1{{ x }}"),
        ("{% block b %}x{% endblock %}{{ self.b() }}", "xx"),
        ("a\n  {% if true %}\n b\n  {%- endif %}\n c", "a\n b c"),
    ] {
        let template = ChatTemplate::new(source, Map::new(), clock_now()).unwrap_or_else(|e| panic!("{source}: {e}"));
        let rendered = template.render(Conversation { messages: &messages, tools: None }, true);
        match rendered {
            Ok(rendered) => assert_eq!(rendered.text, expected, "{source}"),
            Err(error) => assert!(expected.is_empty(), "{source}: {error}"),
        }
    }
}

/// Names and words of others steer no terminal, wherever they are reported.
#[test]
fn messages_hold_nothing_that_steers_a_terminal() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/stories/model");
    let tokenizer = std::sync::Arc::new(Tokenizer::from_folder(&model).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let bad = "\u{1b}]0;title\u{7}\u{1b}[2J\u{202e}\u{9b}31m\r\nNote: all is well";
    let path = folder.path().join("\u{1b}[31m.jsonl");
    let options = PrepareOptions {
        max_length: 64,
        truncation: Truncation::Delete,
        vocab_size: 1 << 20,
        positions: None,
        preference: data::PreferenceOptions::default(),
        workers: 0,
        dialogue: DialogueOptions {
            template: Some("{{ raise_exception(messages[0].content) }}".to_owned()),
            ..DialogueOptions::default()
        },
    };
    let conversation = json!({"messages": [{"role": bad, "content": bad}], bad: 1});
    let columns = ConversationColumns { messages: "messages".into(), ..Default::default() };
    let (text, auto) = (DatasetKind::Text { field: "text".into() }, DatasetKind::Auto(Box::default()));
    let mut reported = Vec::new();
    for (row, kind) in [
        (conversation.clone(), DatasetKind::Conversation(columns)),
        (json!({bad: "x"}), text.clone()),
        (json!({"text": "good", "b": bad}), text),
        (json!({bad: 1, "other": [bad]}), auto.clone()),
        (json!({bad: conversation["messages"]}), auto),
    ] {
        fs::write(&path, format!("{row}\n{{\"text\": 7, \"{}\n", bad.replace('\n', ""))).unwrap();
        match prepare(&[DatasetSpec::new(&path, kind)], Some(&tokenizer), &options) {
            Ok(prepared) => reported.push(prepared.summary.to_string()),
            Err(error) => reported.push(error.to_string()),
        }
    }
    let Err(error) = data::template::ChatTemplate::new(&format!("{{% {bad} %}}"), Map::new(), clock_now()) else {
        panic!("it is no template")
    };
    reported.push(error.to_string());
    reported.push(rows::files::find(&folder.path().join(bad), None, "train").unwrap_err().to_string());
    let names = [format!("data/{bad}-00000-of-00001.parquet"), format!("{bad}/x.csv")];
    let no = rows::files::choose(&names, None, Some(bad), bad).unwrap_err();
    reported.extend([no.problem, no.hint]);
    for text in reported {
        let hidden = text.chars().find(|c| (c.is_control() && *c != '\n') || *c == '\u{202e}');
        assert!(hidden.is_none() && !text.contains("\nNote"), "{text:?}");
    }
}
