//! Conversations: rows of datasets, and the template of a model applied to them.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use data::{
    AutoColumns, DatasetKind, DatasetSpec, DialogueEncoder, DialogueOptions, Message, PrepareOptions, Tokenizer,
    Truncation, dataset::messages, prepare,
};
use serde_json::{Value, json};

use super::{file, stories, written};

/// Models whose templates are in the repository.
const FAMILIES: [&str; 4] = ["qwen3", "smollm2", "gpt-oss", "mistral-nemo"];

const CLOCK: &str = "2026-01-02";

static TOKENIZER: LazyLock<Arc<Tokenizer>> =
    LazyLock::new(|| Arc::new(Tokenizer::from_folder(&stories()).expect("the example's tokenizer is whole")));

fn template_of(family: &str) -> Vec<u8> {
    file(&format!("crates/data/tests/fixtures/templates/{family}/chat_template.jinja"))
}

fn dialogue(template: &[u8]) -> Option<DialogueOptions> {
    let template = Some(std::str::from_utf8(template).ok()?.to_owned());
    Some(DialogueOptions { template, clock: Some(CLOCK.to_owned()), keeps_system: true, ..DialogueOptions::default() })
}

fn encoder(template: &[u8]) -> Option<DialogueEncoder> {
    DialogueEncoder::new(TOKENIZER.clone(), &dialogue(template)?).ok()
}

static ENCODERS: LazyLock<Vec<DialogueEncoder>> =
    LazyLock::new(|| FAMILIES.iter().map(|family| encoder(&template_of(family)).expect("a real template")).collect());

/// A row's `messages` and `tools`, through the template of every family.
pub fn conversation(bytes: &[u8]) -> bool {
    let Ok(row) = serde_json::from_slice::<Value>(bytes) else { return false };
    let Some(list) = row["messages"].as_array() else { return false };
    let Ok(messages) = messages(list, &BTreeMap::new()) else { return false };
    let tools = row.get("tools").filter(|tools| !tools.is_null());
    ENCODERS.iter().filter(|encoder| encoder.encode(&messages, tools).is_ok()).count() > 0
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "f", "description": "d", "parameters": {
        "type": "object", "properties": {"x": {"type": "integer", "enum": [1, 2]}}, "required": ["x"]}}}])
}

pub fn conversation_seeds() -> Vec<Vec<u8>> {
    let call = |call: Value| json!({"role": "assistant", "content": "", "tool_calls": [call]});
    let user = json!({"role": "user", "content": "q"});
    [
        json!([{"role": "system", "content": "s"}, user, {"role": "assistant", "content": "a", "weight": 0.5}]),
        json!([{"from": "human", "value": "q"}, {"from": "gpt", "value": "<think>\nt\n</think>\n\na"}]),
        json!([user, call(json!({"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}})),
            {"role": "tool", "content": "{\"y\": 2}", "tool_call_id": "abcdefghi"}, {"role": "assistant", "content": "a"}]),
        json!([user, call(json!({"function": {"name": "f", "arguments": "{\"x\": 1}"}})),
            {"role": "assistant", "content": "a", "reasoning_content": "r", "train": false}]),
        json!([user, {"role": "assistant", "content": [{"type": "text", "text": "a"}], "thinking": "t"}]),
    ]
    .into_iter()
    .map(|messages| json!({"messages": messages, "tools": tools()}).to_string().into_bytes())
    .collect()
}

/// A dataset of JSON lines whose type is left open.
pub fn dataset(bytes: &[u8]) -> bool {
    let path = written("dataset", "a.jsonl", bytes);
    let specs = [DatasetSpec::new(path, DatasetKind::Auto(Box::<AutoColumns>::default()))];
    // With the end of a turn that the example's tokenizer knows.
    let template = String::from_utf8(template_of("qwen3")).expect("a template is text").replace("<|im_end|>", "</s>");
    let dialogue = dialogue(template.as_bytes()).expect("a real template");
    let options = PrepareOptions {
        max_length: 4096,
        truncation: Truncation::Right,
        vocab_size: 512,
        positions: None,
        workers: 1,
        dialogue,
        preference: data::PreferenceOptions::default(),
    };
    prepare(&specs, Some(&TOKENIZER), &options).is_ok()
}

pub fn dataset_seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = vec![
        "{\"text\": \"Once upon a time\"}\n{\"text\": \"there was\"}\n".into(),
        "{\"instruction\": \"add\", \"input\": \"1 2\", \"output\": \"3\"}\n".into(),
        "{\"prompt\": \"q\", \"completion\": \"a\"}\n".into(),
        "{\"input_ids\": [1, 2, 3], \"labels\": [-100, 2, 3], \"weights\": [0.0, 1.0, 0.5]}\n".into(),
        "{\"conversations\": [{\"from\": \"human\", \"value\": \"q\"}, {\"from\": \"gpt\", \"value\": \"a\"}]}\n"
            .into(),
    ];
    seeds.extend(conversation_seeds().into_iter().map(|row| [row, b"\n".to_vec()].concat()));
    seeds
}

/// A chat template, rendered and with the spans of its answers found.
pub fn template(bytes: &[u8]) -> bool {
    let Some(encoder) = encoder(bytes) else { return false };
    let mut call = Message::new("assistant", "");
    call.fields
        .insert("tool_calls".into(), json!([{"id": "abcdefghi", "function": {"name": "f", "arguments": {"x": 1}}}]));
    let plain = [Message::new("system", "s"), Message::new("user", "q"), Message::new("assistant", "a")];
    let calling = [Message::new("user", "q"), call, Message::new("tool", "{}"), Message::new("assistant", "a")];
    let plain = encoder.encode(&plain, None).is_ok();
    encoder.encode(&calling, Some(&tools())).is_ok() || plain
}

pub fn template_seeds() -> Vec<Vec<u8>> {
    let own = "{%- macro say(m) -%}{{ m.role | upper }}: {{ m['name'] | default('x') | trim }}{%- endmacro -%}\
               {% set ns = namespace(n=0) %}{% for m in messages if m.role in ['user', 'assistant'] %}\
               {% set ns.n = ns.n + loop.index0 * 2 %}{{ say(m) }}{{ m.get('x', '') | tojson(indent=2) }}\
               {{ '%d' | format(ns.n) }}{{ ('{:>3}').format(1) }}{{ m.role[::-1] }}\
               {% generation %}{{ m.content or none }}{% endgeneration %}{% endfor %}\
               {{ strftime_now('%d %b %Y') }}{{ range(3) | list | join(',') }}{{ dict(a=1).items() | list }}\
               {{ messages | map(attribute='role') | select('equalto', 'user') | list | length }}\
               {%- if tools is defined and tools is not none -%}{{ tools | tojson }}{%- endif -%}\
               {% if add_generation_prompt %}ASSISTANT:{% endif %}";
    let mut seeds: Vec<Vec<u8>> = FAMILIES.iter().map(|family| template_of(family)).collect();
    seeds.push(own.into());
    seeds
}
