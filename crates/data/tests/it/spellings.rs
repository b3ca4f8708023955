//! Rows as other tools write them: every spelling of a conversation gives the tokens of its plainest form, on the
//! templates of real models and on such as print calls in other ways; what a template does not show is counted.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use data::{
    AutoColumns, DataError, DatasetKind, DatasetSpec, DialogueOptions, EncodedCorpus, IGNORE, InstructionColumns,
    LossRule, PrepareOptions, Tokenizer, Truncation, prepare,
};
use serde_json::{Value, json};

use crate::shared;

const REAL: [&str; 3] = ["qwen3", "mistral-nemo", "gpt-oss"];

/// Prints arguments as a text, and has no calls where there is a content.
const PRINTS_TEXT: &str = "{{ tools|tojson }}{% for m in messages %}{% if m.role == 'assistant' and m['content'] is none %}\
    assistant: {% for c in m.tool_calls %}<call>{{ c.function.name + ' ' + c.function.arguments }}</call>{% endfor %}\
    {{ eos_token }}{% else %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}\
    {% if add_generation_prompt %}assistant: {% endif %}";

/// Prints whatever the arguments are.
const PRINTS_ANYTHING: &str = "{{ tools|tojson }}{% for m in messages %}{{ m.role }}: {{ m.content or '' }}\
    {% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}{{ eos_token }}{% endfor %}\
    {% if add_generation_prompt %}assistant: {% endif %}";

const CHAT: &str = "{{ bos_token }}{% for m in messages %}{% if m.role != 'critic' %}{{ m.role }}: {{ m.content }}\
    {{ eos_token }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The template of a model, with the end token of the tests' tokenizer.
fn template(name: &str) -> String {
    let text = fs::read_to_string(fixture(&format!("templates/{name}/chat_template.jinja"))).unwrap();
    ["<|im_end|>", "<|end|>", "<|return|>", "<|call|>"].iter().fold(text, |text, end| text.replace(end, "</s>"))
}

fn tokenizer() -> Arc<Tokenizer> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/stories/model");
    Arc::new(Tokenizer::from_folder(&folder).unwrap())
}

fn options(template: &str) -> PrepareOptions {
    let dialogue = DialogueOptions {
        template: Some(template.to_owned()),
        clock: Some("2026-11-20".to_owned()),
        ..DialogueOptions::default()
    };
    PrepareOptions {
        max_length: 8192,
        truncation: Truncation::Delete,
        vocab_size: 512,
        positions: None,
        workers: 1,
        dialogue,
        preference: data::PreferenceOptions::default(),
    }
}

fn prepared(path: &Path, options: &PrepareOptions) -> Result<EncodedCorpus, DataError> {
    let kind = DatasetKind::Auto(Box::<AutoColumns>::default());
    prepare(&[DatasetSpec::new(path, kind)], Some(&tokenizer()), options)
}

fn of_rows(rows: &[Value], options: &PrepareOptions) -> Result<EncodedCorpus, DataError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    fs::write(&path, rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
    prepared(&path, options)
}

/// The text of every document, and what of it is trained.
fn texts(of: &EncodedCorpus, tokenizer: &Tokenizer) -> Vec<(String, String)> {
    let decode = |ids: Vec<u32>| tokenizer.encoder().decode(&ids, false).unwrap();
    let document = |i: usize| {
        let view = of.corpus.document(i).unwrap();
        let pairs = view.ids.iter().zip(view.labels.iter());
        let trained = pairs.filter(|(_, label)| **label != IGNORE).map(|(id, _)| *id as u32);
        (decode(view.ids.iter().map(|id| *id as u32).collect()), decode(trained.collect()))
    };
    (0..of.corpus.len()).map(document).collect()
}

fn all_texts(rows: &[Value], template: &str) -> Vec<(String, String)> {
    let encoded = of_rows(rows, &options(template)).unwrap_or_else(|error| panic!("{error}\n{}", rows[0]));
    assert_eq!(encoded.corpus.len(), rows.len(), "{}", encoded.summary);
    texts(&encoded, &tokenizer())
}

fn table(rows: &[Value], template: &str) -> String {
    of_rows(rows, &options(template)).unwrap().summary.to_string()
}

fn tools() -> Value {
    let tool = |name: &str, properties: Value| {
        let required: Vec<&String> = properties.as_object().unwrap().keys().collect();
        let parameters = json!({"type": "object", "properties": properties, "required": required});
        json!({"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}})
    };
    let integer = json!({"type": "integer"});
    json!([tool("weather", json!({"city": {"type": "string"}})), tool("add", json!({"a": integer, "b": integer}))])
}

/// A question, a call, its result and an answer, with the given content next to the call.
fn calling(content: Option<Value>, arguments: Value) -> Value {
    let mut call = json!({"role": "assistant", "content": "", "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": arguments}}]});
    match content {
        Some(content) => call["content"] = content,
        None => drop(call.as_object_mut().unwrap().remove("content")),
    }
    let result = json!({"role": "tool", "content": "3", "tool_call_id": "abcdefghi"});
    json!([{"role": "user", "content": "1 plus 2?"}, call, result, {"role": "assistant", "content": "It is 3."}])
}

fn templates() -> Vec<String> {
    let other = [PRINTS_TEXT, PRINTS_ANYTHING].map(str::to_owned);
    REAL.iter().map(|name| template(name)).chain(other).collect()
}

#[test]
fn arguments_as_text_and_as_an_object_give_the_same_tokens() {
    let arguments = json!({"a": 1, "b": {"c": [1.5, null, "é \" \\"], "d": true}});
    for template in templates() {
        let row = |arguments: Value| json!({"messages": calling(None, arguments), "tools": tools()});
        let forms = [
            arguments.clone(),
            json!(arguments.to_string()),
            json!(serde_json::to_string_pretty(&arguments).unwrap()),
            json!(json!(arguments.to_string()).to_string()),
        ];
        let all = all_texts(&forms.map(row), &template);
        assert!(
            all[0].1.contains("\"a\": 1, \"b\": {\"c\": [1.5, null, \"é \\\" \\\\\"], \"d\": true}"),
            "{}",
            all[0].1
        );
        assert!(all.iter().all(|of| of == &all[0]), "{all:#?}");
    }
}

#[test]
fn calls_without_a_content_are_as_those_with_an_empty_one_or_none() {
    for template in templates() {
        let row = |content| json!({"messages": calling(content, json!({"a": 1})), "tools": tools()});
        let all = all_texts(&[row(None), row(Some(json!(null)))], &template);
        assert_eq!(all[0], all[1]);
        assert!(all[0].1.contains("add") && all[0].1.contains("It is 3."), "{}", all[0].1);
        assert_eq!(all_texts(&[row(Some(json!("")))], &template)[0], all[0]);
    }
}

/// The rows of `calls.parquet` and `calls.arrow` as text that was never columnar.
fn clean() -> [Value; 2] {
    let call = |id: &str, name: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let talk = |question: &str, call: Value, result: &str, answer: &str| {
        json!({"messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": result, "tool_call_id": "abcdefghi"},
            {"role": "assistant", "content": answer},
        ], "tools": tools()})
    };
    [
        talk("Rome?", call("abcdefghi", "weather", json!({"city": "Rome"})), "sunny", "Sunny."),
        talk("1 plus 2?", call("abcdefghi", "add", json!({"a": 1, "b": 2})), "3", "It is 3."),
    ]
}

/// The same with every struct as wide as all of its column together.
fn padded() -> [Value; 2] {
    let mut rows = clean();
    for row in &mut rows {
        for message in row["messages"].as_array_mut().unwrap() {
            for name in ["tool_calls", "tool_call_id"] {
                message.as_object_mut().unwrap().entry(name).or_insert(Value::Null);
            }
            for call in message["tool_calls"].as_array_mut().into_iter().flatten() {
                let own = call["function"]["arguments"].as_object().unwrap().clone();
                let mut wide = json!({"city": null, "a": null, "b": null});
                wide.as_object_mut().unwrap().extend(own);
                call["function"]["arguments"] = wide;
            }
        }
        for tool in row["tools"].as_array_mut().unwrap() {
            let own = tool["function"]["parameters"]["properties"].as_object().unwrap().clone();
            let mut wide = json!({"city": null, "a": null, "b": null});
            wide.as_object_mut().unwrap().extend(own);
            tool["function"]["parameters"]["properties"] = wide;
        }
    }
    rows
}

#[test]
fn the_nulls_of_columnar_files_are_no_data() {
    for template in templates() {
        let expected = all_texts(&clean(), &template);
        assert_eq!(all_texts(&padded(), &template), expected);
        for name in ["parquet/calls.parquet", "arrow/calls.arrow"] {
            let encoded = prepared(&fixture(name), &options(&template)).unwrap();
            assert_eq!(texts(&encoded, &tokenizer()), expected, "{name}");
            let table = encoded.summary.to_string();
            assert!(table.contains("3 arguments of tool calls that are null are left out"), "{table}");
        }
    }
    // Each sign of padding is enough, and a null of a row's own stays.
    let plain = template("qwen3");
    let mut only_calls = padded()[1].clone();
    only_calls["tools"] = tools();
    only_calls["messages"].as_array_mut().unwrap().iter_mut().for_each(|message| {
        message.as_object_mut().unwrap().retain(|name, value| name != "tool_calls" || !value.is_null());
    });
    assert_eq!(all_texts(&[only_calls], &plain), all_texts(&clean()[1..], &plain));
    let own = json!({"messages": calling(None, json!({"a": 1, "b": null})), "tools": tools()});
    assert!(all_texts(&[own], &plain)[0].1.contains("{\"a\": 1, \"b\": null}"));
    let mut schema = json!({"messages": calling(None, json!({"a": 1})), "tools": tools()});
    schema["tools"][1]["function"]["parameters"]["properties"]["b"]["default"] = json!(null);
    assert!(all_texts(&[schema], &plain)[0].0.contains("\"default\": null"));
}

#[test]
fn only_the_completion_of_a_prompt_is_trained() {
    let prompt = json!([
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "OLD ANSWER"},
        {"role": "user", "content": "Say 1."},
    ]);
    let completion = json!([{"role": "assistant", "content": "NEW ANSWER"}]);
    let messages = Value::Array([prompt.as_array().unwrap().clone(), completion.as_array().unwrap().clone()].concat());
    for (name, template) in ["smollm2", "qwen3", "gpt-oss", "mistral-nemo"].map(|name| (name, template(name))) {
        let whole = &all_texts(&[json!({"messages": messages})], &template)[0];
        for row in [
            json!({"prompt": prompt, "completion": completion}),
            json!({"prompt": prompt.to_string(), "completion": completion.to_string()}),
            json!({"prompt": prompt, "completion": "NEW ANSWER"}),
            json!({"prompt": prompt, "response": completion[0].to_string()}),
            json!({"prompt": {"role": ["user", "assistant", "user"], "content": ["Hello", "OLD ANSWER", "Say 1."]},
                "completion": completion}),
        ] {
            let found = &all_texts(std::slice::from_ref(&row), &template)[0];
            assert_eq!(found.0, whole.0, "{name}: {row}");
            assert!(found.1.contains("NEW ANSWER") && !found.1.contains("OLD ANSWER"), "{name}: {found:?}");
        }
    }
    let everything = PrepareOptions {
        dialogue: DialogueOptions { loss: LossRule::Everything, ..options(CHAT).dialogue },
        ..options(CHAT)
    };
    let encoded = of_rows(&[json!({"prompt": prompt, "completion": completion})], &everything).unwrap();
    let (all, trained) = texts(&encoded, &tokenizer()).remove(0);
    assert_eq!(all, trained);
    // With tools, and with a call in the completion.
    let talk = calling(None, json!({"a": 1}));
    let (asked, answered) = talk.as_array().unwrap().split_at(1);
    let row = json!({"prompt": asked, "completion": answered, "tools": tools()});
    let whole = json!({"messages": talk, "tools": tools()});
    assert_eq!(all_texts(&[row], &template("qwen3")), all_texts(&[whole], &template("qwen3")));
}

#[test]
fn texts_of_json_are_read_wherever_they_stand() {
    let template = template("qwen3");
    let (talk, tools) = (calling(None, json!({"a": 1})), tools());
    let expected = &all_texts(&[json!({"messages": talk, "tools": tools})], &template)[0];
    let items = |list: &Value| Value::Array(list.as_array().unwrap().iter().map(|of| json!(of.to_string())).collect());
    let mut calls_in_text = talk.clone();
    calls_in_text[1]["tool_calls"] = json!(talk[1]["tool_calls"].to_string());
    let mut call_in_text = talk.clone();
    call_in_text[1]["tool_calls"] = items(&talk[1]["tool_calls"]);
    let mut function_in_text = talk.clone();
    function_in_text[1]["tool_calls"][0]["function"] = json!(talk[1]["tool_calls"][0]["function"].to_string());
    let mut schemas = tools.clone();
    for tool in schemas.as_array_mut().unwrap() {
        tool["function"]["parameters"] = json!(tool["function"]["parameters"].to_string());
    }
    let bare: Vec<Value> = tools.as_array().unwrap().iter().map(|tool| tool["function"].clone()).collect();
    for row in [
        json!({"messages": talk.to_string(), "tools": tools.to_string()}),
        json!({"messages": items(&talk), "tools": items(&tools)}),
        json!({"text": talk.to_string(), "tools": schemas}),
        json!({"messages": calls_in_text, "functions": bare}),
        json!({"messages": call_in_text, "tools": json!(bare).to_string()}),
        json!({"conversations": function_in_text, "tools": tools}),
    ] {
        assert_eq!(&all_texts(std::slice::from_ref(&row), &template)[0], expected, "{row}");
    }
    let csv = tempfile::tempdir().unwrap();
    let path = csv.path().join("rows.csv");
    let quoted = |value: &Value| format!("\"{}\"", value.to_string().replace('"', "\"\""));
    fs::write(&path, format!("messages;tools\n{};{}\n", quoted(&talk), quoted(&tools))).unwrap();
    let encoded = prepared(&path, &options(&template)).unwrap();
    assert_eq!(&texts(&encoded, &tokenizer())[0], expected);
    let broken = json!({"messages": talk.to_string().replace('"', "'")});
    let error = of_rows(&[broken], &options(&template)).unwrap_err().to_string();
    assert!(error.contains("`messages` holds messages as a text that is not valid JSON"), "{error}");
    let mut broken = talk;
    broken[1]["tool_calls"] = json!("add(1, 2)");
    let error = of_rows(&[json!({"messages": broken})], &options(&template)).unwrap_err().to_string();
    assert!(error.contains("message 2: `tool_calls`: the call is a text that is not valid JSON"), "{error}");
}

#[test]
fn roles_and_calls_of_other_tools_give_the_same_tokens() {
    let (talk, tools) = (calling(None, json!({"a": 1})), tools());
    let call = json!({"name": "add", "arguments": {"a": 1}});
    let as_text = json!({"name": "add", "arguments": "{\"a\": 1}"});
    let turns = |call: Value, result: &str| {
        json!([{"role": "user", "content": "1 plus 2?"}, call, {"role": result, "content": "3", "name": "add"},
            {"role": "assistant", "content": "It is 3."}])
    };
    let sharegpt = json!([
        {"from": "human", "value": "1 plus 2?"}, {"from": "function_call", "value": call.to_string()},
        {"from": "observation", "value": "3"}, {"from": "gpt", "value": "It is 3."},
    ]);
    let google = json!([
        {"role": "user", "parts": [{"text": "1 plus 2?"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "add", "args": {"a": 1}}}]},
        {"role": "function", "parts": [{"text": "3"}]}, {"role": "model", "parts": [{"text": "It is 3."}]},
    ]);
    let template = template("qwen3");
    let expected = &all_texts(&[json!({"messages": talk, "tools": tools})], &template)[0];
    for (column, messages) in [
        ("messages", turns(json!({"role": "assistant", "content": "", "function_call": as_text}), "function")),
        (
            "messages",
            turns(json!({"role": "assistant", "content": null, "function_call": as_text}), "function_response"),
        ),
        ("messages", turns(json!({"role": "tool_call", "content": call.to_string()}), "tool_response")),
        ("messages", turns(json!({"role": "assistant", "content": [{"type": "tool_call", "value": call}]}), "tool")),
        ("conversations", sharegpt),
        ("contents", google),
    ] {
        let row = json!({column: messages, "functions": tools});
        assert_eq!(&all_texts(std::slice::from_ref(&row), &template)[0], expected, "{row}");
    }
    // The later name of the system's role, where the template does not know it, and where it does.
    let with_system = |role: &str| {
        json!({"messages": [{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes."}]})
    };
    for name in REAL {
        let [system, developer] =
            ["system", "developer"].map(|role| all_texts(&[with_system(role)], &self::template(name)).remove(0));
        assert_eq!(system, developer, "{name}");
    }
}

#[test]
fn earlier_turns_of_an_instruction_are_turns() {
    let row = |history: Value| json!({"instruction": "And 1?", "input": "", "output": "One.", "history": history});
    let pairs = json!([["Hello", "Hi."], ["0?", "Zero."]]);
    let talk = json!({"messages": [
        {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "0?"}, {"role": "assistant", "content": "Zero."},
        {"role": "user", "content": "And 1?"}, {"role": "assistant", "content": "One."},
    ]});
    let expected = &all_texts(std::slice::from_ref(&talk), CHAT)[0];
    let messages = Value::Array(talk["messages"].as_array().unwrap()[..4].to_vec());
    for history in [pairs.clone(), json!(pairs.to_string()), messages] {
        assert_eq!(&all_texts(&[row(history.clone())], CHAT)[0], expected, "{history}");
    }
    assert_eq!(all_texts(&[row(json!(null)), row(pairs), row(json!([]))], CHAT).len(), 3);
    let error = of_rows(&[row(json!([["a", 1]]))], &options(CHAT)).unwrap_err().to_string();
    assert!(error.contains("`history`: expected pairs of texts, found a number"), "{error}");
}

#[test]
fn what_a_template_does_not_show_is_counted() {
    let rows: Vec<Value> = (0..3)
        .map(|n| {
            json!({"messages": [
                {"role": "user", "content": "a", "id": n}, {"role": "critic", "content": "a"},
                {"role": "assistant", "content": "b", "reasoning_content": "c"},
            ], "notes": "several words", "lang": "en"})
        })
        .collect();
    let table = table(&rows, CHAT);
    for line in [
        "recognised as conversation (OpenAI form) in `messages`; not used: `notes`\n",
        "  3 messages of role `critic` are not shown by the template\n",
        "  the reasoning of 3 messages of role `assistant` is not shown by the template\n",
        "  fields of messages that change nothing: `id` (of 3 messages)\n",
    ] {
        assert!(table.contains(line), "{line}{table}");
    }
    let turns = |first: Value| {
        json!({"messages": [{"role": "user", "content": "a?"}, first,
        {"role": "user", "content": "c?"}, {"role": "assistant", "content": "d"}]})
    };
    for thought in [
        json!({"role": "assistant", "content": "b", "reasoning_content": "because of it"}),
        json!({"role": "assistant", "content": "<think>\nbecause of it\n</think>\n\nb"}),
    ] {
        let table = self::table(&[turns(thought)], &template("qwen3"));
        assert!(table.contains("the reasoning of 1 message of role `assistant` is not shown"), "{table}");
    }
    let system = json!({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"}]});
    let table = self::table(&[system], &template("mistral-nemo"));
    assert!(table.contains("1 message of role `system` is not shown"), "{table}");
    for (name, lines) in [("qwen3", 0), ("gpt-oss", 1)] {
        let mut talk = calling(None, json!({"a": 1}));
        let more = talk[1]["tool_calls"][0].clone();
        talk[1]["tool_calls"].as_array_mut().unwrap().push(more);
        talk[1]["tool_calls"][1]["function"]["arguments"] = json!({"b": 2});
        let table = self::table(&[json!({"messages": talk, "tools": tools()})], &template(name));
        assert_eq!(
            table.matches("a tool call of 1 message of role `assistant` is not shown").count(),
            lines,
            "{table}"
        );
    }
    // Nothing is lost, and nothing is said.
    let table =
        self::table(&[json!({"messages": calling(None, json!({"a": 1})), "tools": tools()})], &template("qwen3"));
    assert_eq!(table.lines().count(), 4, "{table}");
    assert!(table.ends_with("fields of messages that change nothing: `tool_call_id` (of 1 message)\n"), "{table}");
}

#[test]
fn the_data_say_what_is_not_trained() {
    for (field, value) in [("loss", json!(false)), ("train", json!(false)), ("weight", json!(0)), ("loss", json!(0.0))]
    {
        let mut first = json!({"role": "assistant", "content": "FIRST"});
        first[field] = value;
        let row = json!({"messages": [{"role": "user", "content": "a"}, first, {"role": "user", "content": "b"},
            {"role": "assistant", "content": "SECOND"}]});
        let (all, trained) = all_texts(&[row], CHAT).remove(0);
        assert!(
            all.contains("FIRST") && !trained.contains("FIRST") && trained.contains("SECOND"),
            "{field}: {trained}"
        );
    }
}

/// The counts of the cases of `../shared/cases`, with the tokenizers and templates of the models.
#[test]
#[ignore = "reads ../shared/assets and ../shared/cases"]
fn the_recorded_cases_come_out_right() {
    let assets = shared::assets();
    let scratch = tempfile::tempdir().unwrap();
    let cases = assets.parent().unwrap().join("cases");
    let mut tokenizers = HashMap::new();
    let mut load = |model: &'static str, file: &Path| {
        let read = || {
            let folder = shared::tokenizer_folder(&assets.join("tokenizers").join(model), scratch.path());
            Arc::new(Tokenizer::from_folder(&folder).unwrap())
        };
        let tokenizer = tokenizers.entry(model).or_insert_with(read).clone();
        let dialogue = DialogueOptions { clock: Some("2026-11-20".to_owned()), ..DialogueOptions::default() };
        let vocab_size = tokenizer.encoder().vocab_size();
        let options = PrepareOptions {
            max_length: 16384,
            truncation: Truncation::Delete,
            vocab_size,
            positions: None,
            workers: 2,
            dialogue,
            preference: data::PreferenceOptions::default(),
        };
        let spec = DatasetSpec::new(file, DatasetKind::Auto(Box::default()));
        let encoded = prepare(&[spec], Some(&tokenizer), &options).unwrap_or_else(|error| panic!("{model}: {error}"));
        (texts(&encoded, &tokenizer), encoded)
    };
    let (clean, encoded) = load("qwen3", &cases.join("tools-clean.jsonl"));
    let add = encoded.corpus.document(1).unwrap();
    let trained = add.labels.iter().skip(1).filter(|label| **label != IGNORE).count();
    assert_eq!((add.ids.len(), trained), (261, 31));
    for name in [
        "tools-nulls.parquet",
        "tools-nulls.jsonl",
        "openai-content-null.jsonl",
        "tools-string-arguments.jsonl",
        "legacy-function-call.jsonl",
    ] {
        assert_eq!(load("qwen3", &cases.join(name)).0[..2], clean[..2], "{name}");
    }
    for model in ["mistral-nemo", "gpt-oss"] {
        let (in_text, _) = load(model, &cases.join("tools-string-arguments.jsonl"));
        assert!(in_text[1].1.contains("{\"a\": 0, \"b\": 1}"), "{model}: {}", in_text[1].1);
        assert_eq!(load(model, &cases.join("openai-content-null.jsonl")).0, in_text, "{model}");
    }
    let (rows, _) = load("smollm2", &cases.join("prompt-completion-messages.jsonl"));
    assert_eq!(rows[0].1, "NEW ANSWER 0.<|im_end|>");
    assert!(load("smollm2", &cases.join("alpaca-history.jsonl")).0[0].0.contains("OLD ANSWER"));
    assert_eq!(load("smollm2", &cases.join("messages-as-text.jsonl")).0[1].1, "The number is 1.<|im_end|>");
    let (rows, encoded) = load("qwen3", &assets.join("data/llama-factory/reason_tool_use_demo_50.jsonl"));
    assert_eq!(rows.len(), 50, "{}", encoded.summary);
    let calls: usize = rows.iter().map(|(_, trained)| trained.matches("<tool_call>").count()).sum();
    assert_eq!(calls, 68);
}

#[test]
fn the_interfaces_of_anthropic_and_google_give_the_same_tokens() {
    let plain = json!({"messages": calling(None, json!({"a": 1, "b": 2})), "tools": tools()});
    let functions: Vec<Value> = tools().as_array().unwrap().iter().map(|tool| tool["function"].clone()).collect();
    let schemas: Vec<Value> = functions
        .iter()
        .map(|of| json!({"name": of["name"], "description": "d", "input_schema": of["parameters"]}))
        .collect();
    let use_of = json!({"type": "tool_use", "id": "abcdefghi", "name": "add", "input": {"a": 1, "b": 2}});
    let result = json!({"type": "tool_result", "tool_use_id": "abcdefghi", "content": [{"type": "text", "text": "3"}]});
    let anthropic = json!({"messages": [
        {"role": "user", "content": "1 plus 2?"}, {"role": "assistant", "content": [use_of]},
        {"role": "user", "content": [result]}, {"role": "assistant", "content": "It is 3."}], "tools": schemas});
    let call = json!({"functionCall": {"id": "abcdefghi", "name": "add", "args": {"a": 1, "b": 2}}});
    let response = json!({"functionResponse": {"name": "add", "response": "3"}});
    let google = json!({"contents": [
        {"role": "user", "parts": [{"text": "1 plus 2?"}]}, {"role": "model", "parts": [call]},
        {"role": "user", "parts": [response]}, {"role": "model", "parts": [{"text": "It is 3."}]}],
        "tools": [{"functionDeclarations": functions}]});
    for template in [template("qwen3"), template("gpt-oss"), PRINTS_ANYTHING.to_owned()] {
        let expected = all_texts(std::slice::from_ref(&plain), &template);
        for other in [&anthropic, &google] {
            assert_eq!(all_texts(std::slice::from_ref(other), &template), expected, "{other}");
        }
    }
}

#[test]
fn messages_that_end_with_a_question_are_the_prompt_of_another_column() {
    let turns = json!([{"role": "user", "content": "1 plus 2?"}]);
    let row = json!({"context": turns, "response": "3"});
    let found = all_texts(std::slice::from_ref(&row), CHAT);
    assert!(found[0].0.contains("1 plus 2?"), "{found:?}");
    assert_eq!(found[0].1.replace("</s>", "").trim(), "3", "{found:?}");
    let whole = json!({"talk": [turns[0], {"role": "assistant", "content": "It is 3."}], "answer": "3"});
    let shown = table(std::slice::from_ref(&whole), CHAT);
    assert!(shown.contains("recognised as conversation (OpenAI form) in `talk`; not used: `answer`\n"), "{shown}");
}

#[test]
fn roles_that_the_template_shows_nothing_of_are_named() {
    let rows = [json!({"messages": [{"role": "critic", "content": "q"}, {"role": "critic", "content": "a"}]})];
    let template = CHAT.replace("{{ bos_token }}", "");
    let error = of_rows(&rows, &options(&template)).unwrap_err().to_string();
    assert!(error.contains("shows none of the messages, whose roles are `critic`"), "{error}");
}

#[test]
fn files_in_utf_16_are_read_as_those_in_utf_8() {
    let folder = tempfile::tempdir().unwrap();
    let csv = "question;answer\n1 plus 2?;It is 3, é\nhello;you\n";
    let lines = "{\"text\": \"one day é\"}\n{\"text\": \"two\"}\n";
    for (name, text) in
        [("a.csv", csv), ("b.jsonl", lines), ("c.txt", "one day é"), ("d.json", "[{\"text\": \"one\"}]")]
    {
        let plain = folder.path().join(name);
        fs::write(&plain, text).unwrap();
        let wide = folder.path().join(format!("wide-{name}"));
        let bytes = [0xfeff].into_iter().chain(text.encode_utf16()).flat_map(u16::to_le_bytes);
        fs::write(&wide, bytes.collect::<Vec<u8>>()).unwrap();
        let of = |path: &Path| texts(&prepared(path, &options(CHAT)).unwrap(), &tokenizer());
        assert_eq!(of(&wide), of(&plain), "{name}");
    }
}

#[test]
fn messages_as_texts_of_json_are_read_or_refused_in_every_column() {
    let system = json!({"role": "system", "content": "Be brief."});
    let talk = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]);
    let as_text = json!({"system": system.to_string(), "messages": talk});
    let whole = json!({"messages": [system, talk[0], talk[1]]});
    assert_eq!(all_texts(&[as_text], CHAT), all_texts(&[whole], CHAT));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    fs::write(&path, json!({"q": json!([talk[0]]).to_string(), "a": "Yes."}).to_string()).unwrap();
    let columns = InstructionColumns { instruction: "q".into(), output: "a".into(), ..InstructionColumns::default() };
    let spec = DatasetSpec::new(&path, DatasetKind::Instruction(columns));
    let error = prepare(&[spec], Some(&tokenizer()), &options(CHAT)).unwrap_err().to_string();
    assert!(error.contains("column `q` holds messages as JSON"), "{error}");
}
