//! Messages of data in the form that templates read: role, content, reasoning and calls of the OpenAI interface.
//!
//! Knows the spellings of other tools; no columns, no templates.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::calls::calls;
use super::columns::wrong;
use super::json_text::opened;
use super::part_kinds::{Kind, joined_text, text_of};
use super::part_texts::{PartTexts, parts_to_read};
use super::results;
use super::roles::{PAIRS, ROLES, is_caller, is_name_of, plain_name, stands_for_result};
use crate::error::{RowError, RowReason};
use crate::image_parts::{image_of, is_image};
use crate::json_values::kind;
use crate::spans::Message;
use crate::spans::REASONING;
use crate::template::parts::MARK;

/// The messages of a list, in either form and with words on their weights, as a row of the data holds them. Each may be
/// a text of JSON.
pub fn messages(list: &[Value], properties: &BTreeMap<String, String>) -> Result<Vec<Message>, RowError> {
    let mut texts = PartTexts::default();
    texts.add(list, properties);
    messages_with(list, properties, texts.are_read())
}

/// The same of a row that has further texts; `reads_parts`: a content that is parts as a text of JSON is read as parts.
pub(crate) fn messages_with(
    list: &[Value],
    properties: &BTreeMap<String, String>,
    reads_parts: bool,
) -> Result<Vec<Message>, RowError> {
    let mut messages: Vec<Message> = Vec::with_capacity(list.len());
    for (i, value) in list.iter().enumerate() {
        let in_message = |e: RowError| RowError { detail: format!("message {}: {}", i + 1, e.detail), ..e };
        let value = opened(value);
        if let Some(pair) = pair(&value) {
            messages.extend(pair);
            continue;
        }
        let fields = named(&value, properties, reads_parts).map_err(in_message)?;
        for fields in results::split(&fields).unwrap_or_else(|| vec![fields]) {
            let (message, continues) = message(fields).map_err(in_message)?;
            match messages.last_mut().filter(|last| continues && last.is_assistant() && last.weight == message.weight) {
                Some(last) => add_calls(last, message),
                None => messages.push(message),
            }
        }
    }
    Ok(messages)
}

/// The list of messages that a value is, or that it holds as a text of JSON.
pub fn messages_in(value: &Value) -> Option<Vec<Value>> {
    let is_message = |of: &Value| ["role", "from"].iter().any(|key| of.get(*key).is_some_and(Value::is_string));
    match opened(value).into_owned() {
        Value::Array(list) if !list.is_empty() && list.iter().all(is_message) => Some(list),
        _ => None,
    }
}

/// A question and its answer in one object, after a system prompt where it has one. What else it holds is left to the
/// question, so that it is named if nothing reads it.
fn pair(value: &Value) -> Option<Vec<Message>> {
    let fields = value.as_object().filter(|fields| !fields.contains_key("role"))?;
    let text = |name: &str| fields.get(name).and_then(Value::as_str);
    let (names, question, answer) = PAIRS.iter().find_map(|names| Some((names, text(names.0)?, text(names.1)?)))?;
    let system = text("system").filter(|text| !text.is_empty());
    let mut asked = Message::new("user", question);
    let is_read = |name: &str| name == names.0 || name == names.1 || (name == "system" && text(name).is_some());
    let others = fields.iter().filter(|(name, value)| !is_read(name) && !value.is_null());
    asked.fields.extend(others.map(|(name, value)| (name.clone(), value.clone())));
    let system = system.map(|text| Message::new("system", text));
    Some(system.into_iter().chain([asked, Message::new("assistant", answer)]).collect())
}

/// Puts the calls of a message that holds nothing else into the turn before it.
fn add_calls(last: &mut Message, message: Message) {
    let mut all = last.fields.get("tool_calls").and_then(Value::as_array).cloned().unwrap_or_default();
    all.extend(message.fields.get("tool_calls").and_then(Value::as_array).cloned().unwrap_or_default());
    last.fields.insert("tool_calls".to_owned(), Value::Array(all));
}

/// The fields of a message under our names. Those that are null are left out: columnar files write them, and `content` of
/// a message that calls tools may be null. A content that is parts as a text of JSON becomes the parts, if they are read.
fn named(
    value: &Value,
    properties: &BTreeMap<String, String>,
    reads_parts: bool,
) -> Result<Map<String, Value>, RowError> {
    let object = value
        .as_object()
        .ok_or_else(|| RowError::new(RowReason::WrongType, format!("expected an object, found {}", kind(value))))?;
    let mut fields: Map<String, Value> = Map::new();
    for (name, value) in object.iter().filter(|(_, value)| !value.is_null()) {
        let ours = properties.iter().find(|(_, theirs)| *theirs == name).map_or(name.as_str(), |(ours, _)| ours);
        fields.insert(ours.to_owned(), value.clone());
    }
    // The forms from/value and role/parts, unless the file already has role and content.
    for (theirs, ours) in [("from", "role"), ("value", "content"), ("parts", "content")] {
        if !fields.contains_key(ours)
            && let Some(value) = fields.shift_remove(theirs)
        {
            fields.insert(ours.to_owned(), value);
        }
    }
    let role = fields.get("role").and_then(Value::as_str).unwrap_or_default().trim();
    let is_result = stands_for_result(role);
    let never_asks = is_name_of("assistant", role) || is_result;
    // A result that is JSON stays as it stands, but for parts that hold a result.
    let is_read =
        |part: &Value| !is_result || matches!(Kind::of(part), Some(Kind::Text | Kind::Result)) || is_image(part);
    if let Some(Value::String(text)) = fields.get("content").filter(|_| !is_caller(role))
        && let Some(parts) = parts_to_read(text, reads_parts, never_asks).filter(|parts| parts.iter().all(is_read))
    {
        fields.insert("content".to_owned(), Value::Array(parts));
    }
    Ok(fields)
}

/// A message in the form that templates read, and whether it continues the turn of an assistant before it.
fn message(mut fields: Map<String, Value>) -> Result<(Message, bool), RowError> {
    let weight = take_weight(&mut fields)?;
    let role = match fields.get("role") {
        Some(Value::String(role)) => role.clone(),
        Some(other) => return Err(wrong("role", "a string", other)),
        None => return Err(RowError::new(RowReason::MissingField, "no `role` (and no `from`)")),
    };
    let continues = ["tool_call", "tool_use"].contains(&plain_name(&role).as_str());
    read_role(&role, &mut fields)?;
    read_calls(&mut fields)?;
    let images = read_content(&mut fields)?;
    Ok((Message { fields, weight, images }, continues))
}

/// `train`, `loss`, `weight` and `loss_scale` say what the loss makes of a message; templates do not see them.
fn take_weight(fields: &mut Map<String, Value>) -> Result<Option<f32>, RowError> {
    let (mut trains, mut weight) = (None, None);
    for name in ["train", "training", "loss", "weight", "loss_scale"] {
        let Some(value) = fields.shift_remove(name) else { continue };
        match &value {
            Value::Bool(train) if name != "weight" => trains = trains.or(Some(*train)),
            Value::Number(number) if !["train", "training"].contains(&name) => {
                let number = number.as_f64().map(|w| w as f32).filter(|w| w.is_finite() && *w >= 0.0);
                weight = weight.or(Some(number.ok_or_else(|| wrong(name, "a finite number from 0", &value))?));
            }
            _ if ["weight", "loss_scale"].contains(&name) => {
                return Err(wrong(name, "a finite number from 0", &value));
            }
            _ => return Err(wrong(name, "true or false", &value)),
        }
    }
    Ok(match trains {
        Some(false) => Some(0.0),
        Some(true) => Some(weight.unwrap_or(1.0)),
        None => weight,
    })
}

/// Writes the usual name of a role, and the calls of a role that stands for them.
fn read_role(role: &str, fields: &mut Map<String, Value>) -> Result<(), RowError> {
    let role = role.trim();
    let (lower, plain) = (role.to_ascii_lowercase(), plain_name(role));
    let known = ROLES.iter().find(|(_, names)| names.contains(&lower.as_str()) || names.contains(&plain.as_str()));
    if let Some((ours, _)) = known {
        fields.insert("role".to_owned(), json!(ours));
    } else if is_caller(role) {
        if !fields.contains_key("tool_calls") {
            let content = fields.get("content").cloned().unwrap_or_default();
            let found = match joined_text(&content) {
                // A call in pieces, or a call in each of several texts.
                Some(text) => calls("content", &Value::String(text)).or_else(|error| {
                    let texts = content.as_array().into_iter().flatten().filter_map(text_of).map(Value::String);
                    let each = texts.map(|text| calls("content", &text)).collect::<Result<Vec<_>, _>>();
                    each.map(|each| each.concat()).map_err(|_| error)
                }),
                None => calls("content", &content),
            }?;
            if found.is_empty() {
                return Err(RowError::new(RowReason::MissingField, "the function call is empty"));
            }
            fields.insert("tool_calls".to_owned(), Value::Array(found));
            fields.insert("content".to_owned(), json!(""));
        }
        fields.insert("role".to_owned(), json!("assistant"));
    } else {
        fields.insert("role".to_owned(), json!(role));
    }
    Ok(())
}

/// Brings `tool_calls` into one form; `function_call` is the earlier name of a single one.
fn read_calls(fields: &mut Map<String, Value>) -> Result<(), RowError> {
    if let Some(calls) = fields.shift_remove("toolCalls") {
        fields.entry("tool_calls").or_insert(calls);
    }
    let mut all = match fields.get("tool_calls") {
        Some(value) => calls("tool_calls", value)?,
        None => Vec::new(),
    };
    if let Some(call) = fields.shift_remove("function_call") {
        // Logs of the interface may hold a call in both fields.
        let earlier = calls("function_call", &call)?;
        let is_new = |call: &Value| !all.iter().any(|of| of["function"] == call["function"]);
        all = all.iter().cloned().chain(earlier.into_iter().filter(is_new)).collect();
    }
    match all.is_empty() {
        true => drop(fields.shift_remove("tool_calls")),
        false => drop(fields.insert("tool_calls".to_owned(), Value::Array(all))),
    }
    Ok(())
}

/// Takes a list of parts apart: text becomes the content, reasoning and calls their fields. Returns its images, which the
/// content has marks of.
fn read_content(fields: &mut Map<String, Value>) -> Result<Vec<Value>, RowError> {
    let is = |role: &str| fields.get("role").is_some_and(|of| of == role);
    let (is_result, is_assistant) = (is("tool"), is("assistant"));
    let mut images = Vec::new();
    match fields.get("content").cloned() {
        Some(Value::String(text)) => drop(unmarked(text)?),
        Some(Value::Array(parts)) => match joined(&parts, is_assistant) {
            Ok(mut parts) => {
                images = std::mem::take(&mut parts.images);
                parts.write(fields);
            }
            // What a tool returns may be anything; templates write it as they see fit.
            Err(_) if is_result => {}
            Err(error) => return Err(error),
        },
        Some(Value::Object(_)) if is_result => {}
        Some(other) => return Err(wrong("content", "a string", &other)),
        None if fields.contains_key("tool_calls") => {}
        None if is_result || (is_assistant && REASONING.iter().any(|name| fields.contains_key(*name))) => {
            fields.insert("content".to_owned(), json!(""));
        }
        None => return Err(RowError::new(RowReason::MissingField, "no `content` (and no `value`), or it is null")),
    }
    Ok(images)
}

/// The text, reasoning and calls of the parts of a message.
#[derive(Default)]
struct Parts {
    text: Option<String>,
    reasoning: Option<String>,
    calls: Vec<Value>,
    images: Vec<Value>,
}

impl Parts {
    /// Writes the parts into the fields of their message. Calls that its own field repeats are there once.
    fn write(self, fields: &mut Map<String, Value>) {
        let is_call = !self.calls.is_empty() || fields.contains_key("tool_calls");
        match self.text {
            None if is_call => drop(fields.shift_remove("content")),
            text => drop(fields.insert("content".to_owned(), json!(text.unwrap_or_default()))),
        }
        if let Some(reasoning) = self.reasoning {
            fields.entry(REASONING[0]).or_insert_with(|| json!(reasoning));
        }
        if !self.calls.is_empty() {
            let mut all = fields.get("tool_calls").and_then(Value::as_array).cloned().unwrap_or_default();
            let given = all.len();
            for call in self.calls {
                if !all[..given].iter().any(|of| of["function"] == call["function"]) {
                    all.push(call);
                }
            }
            fields.insert("tool_calls".to_owned(), Value::Array(all));
        }
    }
}

/// Takes parts apart: text, and of an assistant also reasoning and calls.
fn joined(parts: &[Value], is_assistant: bool) -> Result<Parts, RowError> {
    let mut all = Parts::default();
    for (i, part) in parts.iter().enumerate() {
        if is_image(part) {
            append(&mut all.text).push(MARK);
            all.images.push(image_of(part).unwrap_or_default());
            continue;
        }
        let found = match Kind::of(part) {
            Some(Kind::Text) => {
                text_of(part).map(|text| unmarked(text).map(|text| *append(&mut all.text) += &text)).transpose()?
            }
            Some(Kind::Reasoning) if is_assistant => text_of(part).map(|text| *append(&mut all.reasoning) += &text),
            Some(Kind::Call) if is_assistant => {
                all.calls.extend(calls(&format!("content[{i}]"), &call_of(part))?);
                Some(())
            }
            _ => None,
        };
        if found.is_none() {
            let of_type = part.get("type").and_then(Value::as_str);
            let what = of_type.map_or(kind(part).to_owned(), |name| format!("a part of type `{name}`"));
            let problem =
                format!("column `content`: a list of parts, of which part {} is {what} (only text is trained)", i + 1);
            return Err(RowError::new(RowReason::WrongType, problem));
        }
    }
    Ok(all)
}

/// The call that a part is, or holds.
fn call_of(part: &Value) -> Value {
    const NAMES: [&str; 6] = ["value", "functionCall", "function_call", "tool_call", "tool_calls", "toolCall"];
    if let Some(held) = NAMES.iter().find_map(|name| part.get(*name).filter(|value| !value.is_null())) {
        return held.clone();
    }
    let mut call = part.as_object().cloned().unwrap_or_default();
    call.shift_remove("type");
    Value::Object(call)
}

/// The text, which stands next to marks of images. Errors: it has a mark itself.
fn unmarked(text: String) -> Result<String, RowError> {
    match text.contains(MARK) {
        true => Err(RowError::new(RowReason::WrongType, "`content` holds the noncharacter U+FDD3")),
        false => Ok(text),
    }
}

fn append(text: &mut Option<String>) -> &mut String {
    text.get_or_insert_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Result<Message, RowError> {
        message(named(&value, &BTreeMap::new(), true)?).map(|(message, _)| message)
    }

    #[test]
    fn every_form_gives_the_same_message() {
        let openai = read(json!({"role": "user", "content": "hi", "tool_calls": null})).unwrap();
        assert_eq!(openai, Message::new("user", "hi"));
        for form in [
            json!({"from": "human", "value": "hi"}),
            json!({"role": "User", "content": "hi", "name": null}),
            json!({"role": "user", "parts": [{"text": "hi"}]}),
            json!({"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}),
            json!({"role": "user", "content": [{"type": "text", "value": "hi", "image": null}]}),
            json!({"role": "user", "content": [{"type": "input_text", "text": "hi"}]}),
            json!({"role": "user", "content": ["hi"], "function_call": null}),
            json!({"role": "user", "content": "[{\"type\": \"text\", \"text\": \"hi\"}]"}),
        ] {
            assert_eq!(read(form.clone()).unwrap(), openai, "{form}");
        }
        let names = BTreeMap::from([("role".into(), "speaker".into()), ("content".into(), "says".into())]);
        let mapped = messages(&[json!({"speaker": "user", "says": "hi"})], &names).unwrap();
        assert_eq!(mapped, std::slice::from_ref(&openai));
        let list = [json!(json!({"role": "user", "content": "hi"}).to_string())];
        assert_eq!(messages(&list, &BTreeMap::new()).unwrap(), std::slice::from_ref(&openai));
        let pair = messages(&[json!({"human": "hi", "assistant": "a"})], &BTreeMap::new()).unwrap();
        assert_eq!(pair, [openai.clone(), Message::new("assistant", "a")]);
        let pair = messages(&[json!({"user": "hi", "gpt": "a", "system": "s", "id": 7})], &BTreeMap::new()).unwrap();
        assert_eq!((&pair[0], &pair[2]), (&Message::new("system", "s"), &Message::new("assistant", "a")));
        assert_eq!((&pair[1].fields["content"], &pair[1].fields["id"]), (&json!("hi"), &json!(7)));
    }

    #[test]
    fn a_mark_of_thoughts_does_not_hide_a_call() {
        let call = json!({"name": "f", "args": {"x": 1}});
        let usual = read(json!({"role": "assistant", "content": [{"functionCall": call}]})).unwrap();
        assert!(usual.fields["tool_calls"].is_array());
        let marked =
            read(json!({"role": "model", "parts": [{"thought": false, "functionCall": call, "text": null}]})).unwrap();
        assert_eq!(marked.fields["tool_calls"], usual.fields["tool_calls"]);
    }

    #[test]
    fn a_result_of_json_stays_as_it_stands_unless_its_parts_are_read() {
        let resource = r#"[{"type":"text","text":"x"},{"type":"resource","uri":"u"}]"#;
        assert_eq!(read(json!({"role": "tool", "content": resource})).unwrap().fields["content"], resource);
        let parts = r#"[{"type":"tool_result","content":"x"}]"#;
        assert_ne!(read(json!({"role": "tool", "content": parts})).unwrap().fields["content"], parts);
    }

    #[test]
    fn calls_in_several_texts_are_all_read() {
        let [first, second] = ["f", "g"].map(|name| json!({"name": name, "arguments": {}}).to_string());
        let parts = json!([{"type": "text", "text": first}, {"type": "text", "text": second}]);
        let calls = read(json!({"role": "tool_call", "content": parts})).unwrap().fields["tool_calls"].clone();
        assert_eq!(calls.as_array().unwrap().iter().map(|of| &of["function"]["name"]).collect::<Vec<_>>(), ["f", "g"]);
        let (head, tail) = first.split_at(7);
        let pieces = json!([{"type": "text", "text": head}, {"type": "text", "text": tail}]);
        let calls = read(json!({"role": "tool_call", "content": pieces})).unwrap().fields["tool_calls"].clone();
        assert_eq!(calls[0]["function"]["name"], "f");
    }

    #[test]
    fn role_names_of_other_tools_are_known() {
        let mut cases: Vec<(&str, &str)> =
            ["gpt", "chatgpt", "bing", "bard", "model", "bot", "Assistant"].map(|name| (name, "assistant")).to_vec();
        cases.extend(
            [
                "function",
                "observation",
                "function_response",
                "tool_response",
                "ipython",
                "Function-Response",
                "toolResult",
            ]
            .map(|of| (of, "tool")),
        );
        cases.extend([("human", "user"), ("HUMAN", "user"), ("critic", "critic"), ("developer", "developer")]);
        cases.extend([(" Bot ", "assistant"), ("user\n", "user"), ("critic ", "critic")]);
        for (name, role) in cases {
            assert_eq!(read(json!({"role": name, "content": "x"})).unwrap().role(), role, "{name}");
        }
    }

    #[test]
    fn content_is_text() {
        for content in [json!([{"type": "audio"}]), json!(["a", 1]), json!({"text": "a"}), json!(7), json!(true)] {
            let error = read(json!({"role": "user", "content": content})).unwrap_err();
            assert_eq!(error.reason, RowReason::WrongType, "{error}");
        }
        let error = read(json!({"role": "user", "content": [{"type": "video", "video": "x"}]})).unwrap_err();
        assert!(error.detail.contains("part 1 is a part of type `video`"), "{error}");
        for content in [json!({"temperature": 20}), json!([1, 2]), json!("20")] {
            let result = read(json!({"role": "tool", "content": content})).unwrap();
            assert_eq!(result.fields["content"], content);
        }
        for nothing in [json!({"role": "tool", "content": null}), json!({"role": "tool"})] {
            assert_eq!(read(nothing).unwrap().fields["content"], "");
        }
        for nothing in [json!({"role": "user"}), json!({"role": "assistant", "content": null})] {
            assert_eq!(read(nothing).unwrap_err().reason, RowReason::MissingField);
        }
    }

    #[test]
    fn images_of_a_content_are_marks_with_their_payload() {
        let url = json!({"type": "image_url", "image_url": {"url": "b.png", "detail": "low"}});
        for (part, image) in [
            (json!({"type": "image", "image": "a.png"}), json!("a.png")),
            (json!({"type": "image", "path": "a.png", "url": null}), json!("a.png")),
            (json!({"image": "a.png"}), json!("a.png")),
            (json!({"type": "image", "base64": "YWJj"}), json!({"bytes": "YWJj"})),
            (json!({"type": "image_url", "image_url": "a.png"}), json!("a.png")),
            (
                json!({"type": "image", "image": {"path": "a.png", "bytes": null}}),
                json!({"path": "a.png", "bytes": null}),
            ),
            (json!({"type": "image"}), json!(null)),
        ] {
            let content = json!([{"type": "text", "text": "x"}, part, url, {"text": "y"}]);
            let message = read(json!({"role": "user", "content": content})).unwrap();
            assert_eq!(message.fields["content"], format!("x{MARK}{MARK}y"), "{part}");
            assert_eq!(message.images, [image, json!("b.png")], "{part}");
        }
    }

    #[test]
    fn words_on_the_loss_are_taken_out() {
        let cases = [
            (json!({"train": false}), Some(0.0)),
            (json!({"train": true}), Some(1.0)),
            (json!({"training": false}), Some(0.0)),
            (json!({"loss": false}), Some(0.0)),
            (json!({"loss": true}), Some(1.0)),
            (json!({"loss": 0}), Some(0.0)),
            (json!({"loss": 0.5}), Some(0.5)),
            (json!({"loss_scale": 0.5, "loss": true}), Some(0.5)),
            (json!({"weight": 0.25}), Some(0.25)),
            (json!({"weight": 2, "train": false}), Some(0.0)),
            (json!({"loss": null, "weight": null}), None),
            (json!({}), None),
        ];
        for (mut value, weight) in cases {
            value["role"] = json!("assistant");
            value["content"] = json!("a");
            let message = read(value.clone()).unwrap();
            assert_eq!(message.weight, weight, "{value}");
            assert_eq!(message.fields, Message::new("assistant", "a").fields);
        }
        for wrong in [json!({"train": 1}), json!({"loss": "no"}), json!({"weight": -1}), json!({"weight": true})] {
            let mut value = wrong;
            value["role"] = json!("user");
            value["content"] = json!("");
            assert_eq!(read(value.clone()).unwrap_err().reason, RowReason::WrongType, "{value}");
        }
    }

    #[test]
    fn calls_without_a_name_are_refused_with_their_place() {
        let of = |calls: Value| read(json!({"role": "assistant", "content": "a", "tool_calls": calls}));
        for (calls, reason, reported) in [
            (
                json!([{"function": {"arguments": {}}}]),
                RowReason::MissingField,
                "`tool_calls[0].function` has no `name`",
            ),
            (json!([{"name": "f"}, {"arguments": "{}"}]), RowReason::MissingField, "`tool_calls[1]` has no `name`"),
            (json!([{"name": null}]), RowReason::MissingField, "`tool_calls[0]` has no `name`"),
            (json!([{"name": 7}]), RowReason::WrongType, "`tool_calls[0].name`: expected a string, found a number"),
            (json!(["f()"]), RowReason::WrongType, "`tool_calls[0]`: expected an object"),
            (json!([{"function": 7, "name": "f"}]), RowReason::WrongType, "`tool_calls[0].function`"),
            (json!("f()"), RowReason::WrongType, "`tool_calls`: the call is a text that is not valid JSON"),
        ] {
            let error = of(calls).unwrap_err();
            assert_eq!(error.reason, reason, "{error}");
            assert!(error.detail.contains(reported), "{error}");
        }
        for calls in [json!([]), json!(""), json!([{"name": "f"}]), json!([{"function": {"name": "f"}}])] {
            assert!(of(calls.clone()).is_ok(), "{calls}");
        }
        assert!(!of(json!([])).unwrap().fields.contains_key("tool_calls"));
    }

    #[test]
    fn function_calls_become_tool_calls() {
        let expected = json!([{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]);
        let text = "{\"name\": \"f\", \"arguments\": {\"x\": 1}}";
        let earlier = json!({"name": "f", "arguments": "{\"x\": 1}"});
        for form in [
            json!({"from": "function_call", "value": text}),
            json!({"role": "tool_call", "content": text}),
            json!({"role": "tool_calls", "content": [earlier]}),
            json!({"from": "Function-Call", "value": text}),
            json!({"role": "toolUse", "content": earlier}),
            json!({"role": "assistant", "content": "", "toolCalls": [earlier]}),
            json!({"role": "assistant", "content": "", "function_call": earlier}),
            json!({"role": "assistant", "content": null, "function_call": earlier.to_string()}),
            json!({"role": "assistant", "content": null, "function_call": earlier, "tool_calls": expected}),
            json!({"role": "assistant", "content": [{"type": "tool_call", "value": text}]}),
            json!({"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"x": 1}}}]}),
            json!({"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {"x": 1}}]}),
        ] {
            let call = read(form.clone()).unwrap();
            assert_eq!(call.fields["tool_calls"], expected, "{form}");
            assert_eq!(call.fields["role"], "assistant");
            assert!(!call.fields.contains_key("function_call"));
        }
        assert_eq!(read(json!({"from": "function_call", "value": "f(x)"})).unwrap_err().reason, RowReason::WrongType);
        let parallel = json!([{"role": "tool_call", "content": text}, {"role": "tool_call", "content": text}]);
        let merged = messages(parallel.as_array().unwrap(), &BTreeMap::new()).unwrap();
        assert_eq!((merged.len(), merged[0].fields["tool_calls"].as_array().unwrap().len()), (1, 2));
    }

    #[test]
    fn parts_of_reasoning_and_calls_are_taken_apart() {
        let call = "{\"name\": \"f\", \"arguments\": {}}";
        let parts = json!([{"type": "reasoning", "value": "r"}, {"type": "text", "value": "t"},
            {"type": "tool_call", "value": call}, {"type": "tool_call", "value": call}]);
        let message = read(json!({"role": "assistant", "content": parts})).unwrap();
        assert_eq!((&message.fields["content"], &message.fields["reasoning_content"]), (&json!("t"), &json!("r")));
        assert_eq!(message.fields["tool_calls"].as_array().unwrap().len(), 2);
        let thought =
            json!([{"type": "thinking", "thinking": [{"type": "text", "text": "r"}]}, {"type": "text", "text": "t"}]);
        let message = read(json!({"role": "assistant", "content": thought})).unwrap();
        assert_eq!(message.fields["reasoning_content"], "r");
        let error = read(json!({"role": "user", "content": parts})).unwrap_err();
        assert!(error.detail.contains("part 1 is a part of type `reasoning`"), "{error}");
    }

    fn taken_apart(parts: Value, own: Value) -> Map<String, Value> {
        let mut fields = own.as_object().unwrap().clone();
        joined(parts.as_array().unwrap(), true).unwrap().write(&mut fields);
        fields
    }

    #[test]
    fn every_spelling_of_reasoning_and_calls_is_the_same() {
        let function = json!({"name": "f", "arguments": {"x": 1}});
        let call = json!([{"type": "function", "function": function}]);
        let expected = json!({"reasoning_content": "r", "tool_calls": call});
        let thought = json!({"type": "thinking", "thinking": "r", "signature": "s"});
        let use_of = json!({"type": "tool_use", "name": "f", "input": {"x": 1}});
        for parts in [
            json!([thought, use_of]),
            json!([{"type": "reasoning", "value": "r"}, {"type": "tool_call", "value": function.to_string()}]),
            json!([{"type": "reasoning", "value": [{"type": "text", "value": "r"}]}, {"type": "tool_calls", "value": [function]}]),
            json!([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]}, {"type": "function", "function": function}]),
            json!([{"type": "reasoning_content", "text": "r"}, {"type": "tool_calls", "tool_calls": call}]),
            json!([{"type": "think", "text": "r"}, {"type": "tool-call", "toolName": "f", "args": {"x": 1}}]),
            json!([{"type": "reasoning", "text": "r"}, {"type": "tool-call", "toolName": "f", "input": {"x": 1}}]),
            json!([{"text": "r", "thought": true}, {"functionCall": {"name": "f", "args": {"x": 1}}}]),
            json!([{"reasoning": "r", "text": null}, {"tool_call": function}]),
            json!([{"thinking": "r"}, {"toolCall": function.to_string()}]),
        ] {
            assert_eq!(json!(taken_apart(parts.clone(), json!({}))), expected, "{parts}");
        }
        let twice = taken_apart(json!([thought, use_of]), json!({"tool_calls": call}));
        assert_eq!(twice["tool_calls"], call, "the same call as a part and in its field");
        let other = json!({"type": "tool_use", "name": "g", "input": {}});
        assert_eq!(taken_apart(json!([use_of, use_of, other]), json!({}))["tool_calls"].as_array().unwrap().len(), 3);
        for unknown in
            [json!({"type": "redacted_thinking", "data": "x"}), json!({"x": 1}), json!({"type": 7}), json!(1)]
        {
            let error = joined(&[unknown], true).err().unwrap();
            assert!(error.detail.contains("of which part 1 is"), "{error}");
        }
        assert!(joined(&[thought], false).is_err() && joined(&[use_of], false).is_err());
    }
}
