//! `type: conversation`: lists of messages, in role/content or from/value form.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::EncodeRow;
use super::columns::{optional_text, required, wrong};
use crate::dialogue::DialogueEncoder;
use crate::document::Document;
use crate::error::{RowError, RowReason};
use crate::rows::json::kind;
use crate::spans::Message;
use crate::summary::Expected;

/// The columns of a conversation dataset.
#[derive(Clone, Debug, Default)]
pub struct ConversationColumns {
    pub messages: String,
    /// Column of a system prompt that is put first.
    pub system: Option<String>,
    /// Column of function definitions: a list, or a string of JSON.
    pub tools: Option<String>,
    /// Our name of a message's property (`role`, `content`, …) to the dataset's name.
    pub properties: BTreeMap<String, String>,
}

pub(super) struct ConversationRows {
    encoder: DialogueEncoder,
    columns: ConversationColumns,
}

impl ConversationRows {
    pub(super) fn new(encoder: DialogueEncoder, columns: ConversationColumns) -> Self {
        ConversationRows { encoder, columns }
    }
}

impl EncodeRow for ConversationRows {
    fn encode(&self, row: &Map<String, Value>) -> Result<Document, RowError> {
        let value = required(row, &self.columns.messages).map_err(|error| suggesting(row, error))?;
        let list = value.as_array().ok_or_else(|| wrong(&self.columns.messages, "a list of messages", value))?;
        let mut messages = Vec::with_capacity(list.len() + 1);
        if let Some(name) = &self.columns.system
            && let Some(prompt) = optional_text(row, name)?.filter(|prompt| !prompt.is_empty())
        {
            messages.push(Message::new("system", prompt));
        }
        messages.extend(self::messages(list, &self.columns.properties)?);
        let tools = match &self.columns.tools {
            Some(name) => tools(name, row.get(name))?,
            None => None,
        };
        self.encoder.encode(&messages, tools.as_ref())
    }

    fn expected(&self) -> Expected {
        self.encoder.expected()
    }

    fn clock_readings(&self) -> BTreeMap<String, String> {
        self.encoder.clock_readings()
    }
}

/// An error of a missing column, with the option that names the one that holds messages by its looks.
fn suggesting(row: &Map<String, Value>, error: RowError) -> RowError {
    let is_message = |value: &Value| value.get("role").or(value.get("from")).is_some_and(Value::is_string);
    let holds = |value: &Value| value.as_array().and_then(|list| list.first()).is_some_and(is_message);
    match row.iter().find(|(_, value)| holds(value)) {
        Some((name, _)) => RowError { detail: format!("{}: set `messages_field: {name}`", error.detail), ..error },
        None => error,
    }
}

/// The messages of a list, in either form and with words on their weights, as a row of the data holds them.
pub fn messages(list: &[Value], properties: &BTreeMap<String, String>) -> Result<Vec<Message>, RowError> {
    let read = |(i, value): (usize, &Value)| {
        let in_message = |e: RowError| RowError { detail: format!("message {}: {}", i + 1, e.detail), ..e };
        message(value, properties).map_err(in_message)
    };
    list.iter().enumerate().map(read).collect()
}

/// A message in the form that templates read. Properties that are null are left out (columnar files write them), apart
/// from `content`; text-only lists of parts become one string.
fn message(value: &Value, properties: &BTreeMap<String, String>) -> Result<Message, RowError> {
    let object = value
        .as_object()
        .ok_or_else(|| RowError::new(RowReason::WrongType, format!("expected an object, found {}", kind(value))))?;
    let mut fields: Map<String, Value> = Map::new();
    for (name, value) in object {
        let ours = properties.iter().find(|(_, theirs)| *theirs == name).map_or(name.as_str(), |(ours, _)| ours);
        fields.insert(ours.to_owned(), value.clone());
    }
    // The form from/value, unless the file already has role and content.
    for (theirs, ours) in [("from", "role"), ("value", "content")] {
        if !fields.contains_key(ours)
            && let Some(value) = fields.shift_remove(theirs)
        {
            fields.insert(ours.to_owned(), value);
        }
    }
    let weight = take_weight(&mut fields)?;
    fields.retain(|name, value| name == "content" || !value.is_null());
    let role = match fields.get("role") {
        Some(Value::String(role)) => role.clone(),
        Some(other) => return Err(wrong("role", "a string", other)),
        None => return Err(RowError::new(RowReason::MissingField, "no `role` (and no `from`)")),
    };
    rename_role(&role, &mut fields)?;
    if let Some(Value::Array(parts)) = fields.get("content")
        && let Some(text) = joined_text(parts)
    {
        fields.insert("content".to_owned(), Value::String(text));
    }
    // What a tool returns may be anything; templates write it as they see fit.
    let is_result = fields.get("role").is_some_and(|role| role == "tool");
    match fields.get("content") {
        None | Some(Value::Null | Value::String(_)) => {}
        Some(Value::Array(_) | Value::Object(_)) if is_result => {}
        Some(Value::Array(_)) => {
            let problem = "column `content`: a list of parts, some of which are not text (only text is trained)";
            return Err(RowError::new(RowReason::WrongType, problem));
        }
        Some(other) => return Err(wrong("content", "a string", other)),
    }
    if let Some(calls) = fields.get("tool_calls") {
        check_calls(calls)?;
    }
    if !fields.contains_key("content") && !fields.contains_key("tool_calls") {
        return Err(RowError::new(RowReason::MissingField, "no `content` (and no `value`)"));
    }
    Ok(Message { fields, weight })
}

/// `train: false` and `weight: x` say what the loss makes of a message; templates do not see them.
fn take_weight(fields: &mut Map<String, Value>) -> Result<Option<f32>, RowError> {
    let train = match fields.shift_remove("train") {
        None | Some(Value::Null) => None,
        Some(Value::Bool(train)) => Some(train),
        Some(other) => return Err(wrong("train", "true or false", &other)),
    };
    let weight = match fields.shift_remove("weight") {
        None | Some(Value::Null) => None,
        Some(other) => {
            let number = other.as_f64().map(|w| w as f32).filter(|w| w.is_finite() && *w >= 0.0);
            Some(number.ok_or_else(|| wrong("weight", "a finite number from 0", &other))?)
        }
    };
    Ok(match train {
        Some(false) => Some(0.0),
        Some(true) => Some(weight.unwrap_or(1.0)),
        None => weight,
    })
}

/// The role names of ShareGPT; every other name is the template's business.
fn rename_role(role: &str, fields: &mut Map<String, Value>) -> Result<(), RowError> {
    let ours = match role {
        "human" => "user",
        "gpt" | "chatgpt" | "bing" | "bard" => "assistant",
        "observation" | "function_response" => "tool",
        "function_call" => {
            let calls = parse_calls(fields.get("content").unwrap_or(&Value::Null))?;
            fields.insert("tool_calls".to_owned(), calls);
            fields.insert("content".to_owned(), json!(""));
            "assistant"
        }
        _ => return Ok(()),
    };
    fields.insert("role".to_owned(), json!(ours));
    Ok(())
}

/// `{"name": …, "arguments": …}` or a list of them, possibly as a string of JSON, in the form of the OpenAI interface.
fn parse_calls(value: &Value) -> Result<Value, RowError> {
    let parsed = match value {
        Value::String(text) => serde_json::from_str(text)
            .map_err(|e| RowError::new(RowReason::WrongType, format!("the function call is not valid JSON: {e}")))?,
        other => other.clone(),
    };
    let calls = match parsed {
        Value::Array(calls) => calls,
        one => vec![one],
    };
    let wrapped = calls.into_iter().map(|call| match (call.get("function"), call.get("name")) {
        (Some(_), _) => Ok(call),
        (None, Some(_)) => Ok(json!({ "type": "function", "function": call })),
        _ => Err(RowError::new(RowReason::MissingField, "the function call has no `name`")),
    });
    Ok(Value::Array(wrapped.collect::<Result<_, _>>()?))
}

/// Calls as templates read them: objects, each with a name, in `function` or by itself. Arguments may be missing. What
/// is no list is the template's business.
fn check_calls(calls: &Value) -> Result<(), RowError> {
    for (i, call) in calls.as_array().into_iter().flatten().enumerate() {
        let (place, function) = match call.get("function") {
            Some(function) => (format!("tool_calls[{i}].function"), function),
            None => (format!("tool_calls[{i}]"), call),
        };
        let function = function.as_object().ok_or_else(|| wrong(&place, "an object with a `name`", function))?;
        match function.get("name") {
            Some(Value::String(_)) => {}
            None | Some(Value::Null) => {
                return Err(RowError::new(RowReason::MissingField, format!("`{place}` has no `name`")));
            }
            Some(other) => return Err(wrong(&format!("{place}.name"), "a string", other)),
        }
    }
    Ok(())
}

/// The text of parts that are all text: `{"type": "text", "text": …}`.
fn joined_text(parts: &[Value]) -> Option<String> {
    parts
        .iter()
        .map(|part| match part {
            Value::String(text) => Some(text.as_str()),
            _ if part.get("type")? == "text" => part.get("text").or_else(|| part.get("value"))?.as_str(),
            _ => None,
        })
        .collect()
}

/// Function definitions; an empty list is none. Bare functions get the wrapping that templates expect.
fn tools(name: &str, value: Option<&Value>) -> Result<Option<Value>, RowError> {
    let parsed = match value {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Value::String(text)) => serde_json::from_str(text)
            .map_err(|e| RowError::new(RowReason::WrongType, format!("column `{name}` is not valid JSON: {e}")))?,
        Some(other) => other.clone(),
    };
    let Value::Array(list) = parsed else { return Err(wrong(name, "a list of tools", &parsed)) };
    if list.is_empty() {
        return Ok(None);
    }
    let wrap = |tool: Value| match tool.get("function").is_none() && tool.get("name").is_some() {
        true => json!({ "type": "function", "function": tool }),
        false => tool,
    };
    Ok(Some(Value::Array(list.into_iter().map(wrap).collect())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Result<Message, RowError> {
        message(&value, &BTreeMap::new())
    }

    #[test]
    fn both_forms_give_the_same_message() {
        let openai = read(json!({"role": "user", "content": "hi", "tool_calls": null})).unwrap();
        assert_eq!(openai, read(json!({"from": "human", "value": "hi"})).unwrap());
        assert_eq!(openai, Message::new("user", "hi"));
        let mapped = message(
            &json!({"speaker": "user", "says": "hi"}),
            &BTreeMap::from([("role".into(), "speaker".into()), ("content".into(), "says".into())]),
        );
        assert_eq!(mapped.unwrap(), openai);
        let parts = json!({"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]});
        assert_eq!(read(parts).unwrap(), openai);
    }

    #[test]
    fn content_is_text() {
        for content in [json!([{"type": "image"}]), json!(["a", 1]), json!({"text": "a"}), json!(7), json!(true)] {
            let error = read(json!({"role": "user", "content": content})).unwrap_err();
            assert_eq!(error.reason, RowReason::WrongType, "{error}");
        }
        for content in [json!({"temperature": 20}), json!([1, 2]), json!("20"), json!(null)] {
            let result = read(json!({"role": "tool", "content": content})).unwrap();
            assert_eq!(result.fields["content"], content);
        }
    }

    #[test]
    fn train_and_weight_are_taken_out() {
        let cases = [
            (json!({"role": "assistant", "content": "a", "train": false}), Some(0.0)),
            (json!({"role": "assistant", "content": "a", "train": true}), Some(1.0)),
            (json!({"role": "assistant", "content": "a", "weight": 0.25}), Some(0.25)),
            (json!({"role": "assistant", "content": "a", "weight": 2, "train": false}), Some(0.0)),
            (json!({"role": "assistant", "content": "a"}), None),
        ];
        for (value, weight) in cases {
            let message = read(value).unwrap();
            assert_eq!(message.weight, weight);
            assert_eq!(message.fields, Message::new("assistant", "a").fields);
        }
        assert_eq!(read(json!({"role": "user", "content": "", "train": 1})).unwrap_err().reason, RowReason::WrongType);
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
            (json!([{"function": null, "name": "f"}]), RowReason::WrongType, "`tool_calls[0].function`"),
        ] {
            let error = of(calls).unwrap_err();
            assert_eq!(error.reason, reason, "{error}");
            assert!(error.detail.contains(reported), "{error}");
        }
        for calls in [json!([]), json!(""), json!([{"name": "f"}]), json!([{"function": {"name": "f"}}])] {
            assert!(of(calls.clone()).is_ok(), "{calls}");
        }
    }

    #[test]
    fn function_calls_become_tool_calls() {
        let call =
            read(json!({"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {\"x\": 1}}"})).unwrap();
        let expected = json!([{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]);
        assert_eq!(call.fields["tool_calls"], expected);
        assert_eq!(call.fields["role"], "assistant");
        assert_eq!(read(json!({"from": "function_call", "value": "f(x)"})).unwrap_err().reason, RowReason::WrongType);
        assert_eq!(read(json!({"role": "user"})).unwrap_err().reason, RowReason::MissingField);
    }
}
