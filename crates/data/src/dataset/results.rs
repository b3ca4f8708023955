//! Results of tools that stand as parts of a message, as the interfaces of Anthropic and Google have them: each becomes a
//! message of its own.
//!
//! Knows messages before they are read; no columns, no templates.

use serde_json::{Map, Value, json};

use super::part_kinds::Kind;
use super::roles::is_name_of;
use crate::image_parts::is_image;
use crate::template::json_dumps;

/// The messages that one with results of tools among its parts comes to: the results in their order, and between them
/// what else it holds. A result in the message of a tool keeps that message's other fields. `None`: it has no such parts.
pub(super) fn split(fields: &Map<String, Value>) -> Option<Vec<Map<String, Value>>> {
    let parts = fields.get("content")?.as_array()?;
    let is_tool = fields.get("role").and_then(Value::as_str).is_some_and(|role| is_name_of("tool", role));
    let mut own = if is_tool { fields.clone() } else { Map::new() };
    own.insert("role".to_owned(), json!("tool"));
    if !parts.iter().any(|part| result(part, &own).is_some()) {
        return None;
    }
    let mut messages: Vec<Map<String, Value>> = Vec::new();
    let mut rest: Vec<Value> = Vec::new();
    let close = |rest: &mut Vec<Value>, messages: &mut Vec<Map<String, Value>>| {
        if !rest.is_empty() {
            let mut other = fields.clone();
            other.insert("content".to_owned(), Value::Array(std::mem::take(rest)));
            messages.push(other);
        }
    };
    for part in parts {
        match result(part, &own) {
            Some(message) => {
                close(&mut rest, &mut messages);
                messages.push(message);
            }
            None => rest.push(part.clone()),
        }
    }
    close(&mut rest, &mut messages);
    Some(messages)
}

/// Names of what a result is.
const OUTPUTS: [&str; 6] = ["content", "value", "output", "result", "response", "text"];

/// Names of the call that a result answers.
const CALLS: [&str; 4] = ["tool_use_id", "tool_call_id", "toolCallId", "call_id"];

/// Names of the function that was called.
const FUNCTIONS: [&str; 3] = ["name", "tool_name", "toolName"];

/// Fields that say nothing of what was returned.
const SILENT: [&str; 5] = ["type", "id", "is_error", "isError", "cache_control"];

/// The message of a part that is a result, with the fields `own`.
fn result(part: &Value, own: &Map<String, Value>) -> Option<Map<String, Value>> {
    if Kind::of(part) != Some(Kind::Result) {
        return None;
    }
    let nested = ["functionResponse", "function_response", "tool_result", "toolResult"];
    let fields = nested.iter().find_map(|name| part.get(*name)?.as_object()).or(part.as_object())?;
    let given = |names: &[&str]| names.iter().find_map(|name| fields.get(*name).filter(|value| !value.is_null()));
    let content = match given(&OUTPUTS) {
        Some(value) => plain(value),
        None => {
            let is_other =
                |name: &str| [&OUTPUTS[..], &CALLS, &FUNCTIONS, &SILENT].iter().all(|of| !of.contains(&name));
            if fields.iter().any(|(name, value)| is_other(name) && !value.is_null()) {
                return None;
            }
            json!("")
        }
    };
    let mut message = own.clone();
    for (ours, names) in [("tool_call_id", &CALLS[..]), ("name", &FUNCTIONS)] {
        if let Some(value) = given(names) {
            message.insert(ours.to_owned(), value.clone());
        }
    }
    message.insert("content".to_owned(), content);
    Some(message)
}

/// The content of a result: a text, or a list of parts. Everything else is written as JSON.
fn plain(value: &Value) -> Value {
    match value {
        Value::String(_) => value.clone(),
        Value::Array(list) if list.iter().all(|part| Kind::of(part) == Some(Kind::Text) || is_image(part)) => {
            value.clone()
        }
        // A value with the type that it has.
        Value::Object(fields) if fields.get("type").is_some_and(Value::is_string) && fields.contains_key("value") => {
            plain(&fields["value"])
        }
        other => json!(json_dumps(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(message: &Value) -> Option<Vec<Value>> {
        Some(super::split(message.as_object()?)?.into_iter().map(Value::Object).collect())
    }

    #[test]
    fn results_among_parts_become_messages() {
        let call = |id: &str, content: Value| json!({"type": "tool_result", "tool_use_id": id, "content": content});
        let text = json!({"type": "text", "text": "and?"});
        let message =
            json!({"role": "user", "content": [call("a", json!("1")), text, call("b", json!([text]))], "id": 7});
        let expected = [
            json!({"role": "tool", "tool_call_id": "a", "content": "1"}),
            json!({"role": "user", "content": [text], "id": 7}),
            json!({"role": "tool", "tool_call_id": "b", "content": [text]}),
        ];
        assert_eq!(split(&message).unwrap(), expected);
        let google =
            json!({"role": "user", "content": [{"functionResponse": {"name": "f", "response": {"r": [1, 2]}}}]});
        assert_eq!(split(&google).unwrap(), [json!({"role": "tool", "name": "f", "content": "{\"r\": [1, 2]}"})]);
        let said = json!({"type": "text", "value": "1"});
        for (part, content) in [
            (json!({"type": "tool_result", "value": "1"}), json!("1")),
            (json!({"type": "tool_response", "text": "1", "content": null}), json!("1")),
            (
                json!({"type": "tool-result", "toolCallId": "a", "toolName": "f", "result": {"r": [1]}}),
                json!("{\"r\": [1]}"),
            ),
            (json!({"type": "tool-result", "output": said}), json!("1")),
            (
                json!({"type": "tool-result", "output": {"type": "json", "value": [1, {"a": 2}]}}),
                json!("[1, {\"a\": 2}]"),
            ),
            (json!({"type": "function_call_output", "call_id": "a", "output": "1"}), json!("1")),
            (json!({"type": "tool_result", "tool_use_id": "a", "is_error": true}), json!("")),
            (json!({"type": "tool_result", "content": [said]}), json!([said])),
        ] {
            let own = json!({"role": "observation", "tool_call_id": "a", "content": [part]});
            let all = split(&own).unwrap();
            assert_eq!((all.len(), &all[0]["role"], &all[0]["content"]), (1, &json!("tool"), &content), "{part}");
            assert_eq!(all[0]["tool_call_id"], "a", "{part}");
            assert_eq!(all[0].get("name").is_some(), part.get("toolName").is_some(), "{part}");
        }
        let other = json!({"role": "tool", "content": [{"type": "tool_result", "temperature": 20}]});
        assert_eq!(split(&other), None, "a result in a field that has no known name");
        for other in [json!({"role": "user", "content": [text]}), json!({"role": "user", "content": "x"}), json!("x")] {
            assert_eq!(split(&other), None);
        }
    }
}
