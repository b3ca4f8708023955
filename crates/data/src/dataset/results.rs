//! Results of tools that stand as parts of a message, as the interfaces of Anthropic and Google have them: each becomes a
//! message of its own.
//!
//! Knows messages before they are read; no columns, no templates.

use serde_json::{Map, Value, json};

use crate::template::json_dumps;

/// Fields that hold the parts of a message.
const PARTS: [&str; 2] = ["content", "parts"];

/// The messages that one with results of tools among its parts comes to: the results in their order, and between them
/// what else it holds. `None`: it has no such parts.
pub(super) fn split(message: &Value) -> Option<Vec<Value>> {
    let fields = message.as_object()?;
    let (name, parts) = PARTS.iter().find_map(|name| Some((*name, fields.get(*name)?.as_array()?)))?;
    if !parts.iter().any(|part| result(part).is_some()) {
        return None;
    }
    let mut messages = Vec::new();
    let mut rest: Vec<Value> = Vec::new();
    let close = |rest: &mut Vec<Value>, messages: &mut Vec<Value>| {
        if !rest.is_empty() {
            let mut other = fields.clone();
            other.insert(name.to_owned(), Value::Array(std::mem::take(rest)));
            messages.push(Value::Object(other));
        }
    };
    for part in parts {
        match result(part) {
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

/// The message of a part that is a result.
fn result(part: &Value) -> Option<Value> {
    let mut fields = Map::from_iter([("role".to_owned(), json!("tool"))]);
    if part.get("type").and_then(Value::as_str) == Some("tool_result") {
        if let Some(id) = part.get("tool_use_id").filter(|id| !id.is_null()) {
            fields.insert("tool_call_id".to_owned(), id.clone());
        }
        fields
            .insert("content".to_owned(), part.get("content").filter(|of| !of.is_null()).cloned().unwrap_or(json!("")));
        return Some(Value::Object(fields));
    }
    let response = ["functionResponse", "function_response"].iter().find_map(|name| part.get(*name)?.as_object())?;
    if let Some(name) = response.get("name").filter(|name| name.is_string()) {
        fields.insert("name".to_owned(), name.clone());
    }
    let content = match response.get("response") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => json_dumps(other),
    };
    fields.insert("content".to_owned(), json!(content));
    Some(Value::Object(fields))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let google = json!({"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"r": [1, 2]}}}]});
        assert_eq!(split(&google).unwrap(), [json!({"role": "tool", "name": "f", "content": "{\"r\": [1, 2]}"})]);
        for other in [json!({"role": "user", "content": [text]}), json!({"role": "user", "content": "x"}), json!("x")] {
            assert_eq!(split(&other), None);
        }
    }
}
