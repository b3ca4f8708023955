//! JSON values: words for their kinds, and those that a text holds.

use serde_json::{Value, json};

/// The word for a JSON value's type in messages.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The list or object that a text holds as JSON, be it wrapped in JSON twice.
pub(crate) fn parsed(text: &str) -> Option<Value> {
    let trimmed = text.trim().trim_start_matches('\u{feff}');
    let inner = || serde_json::from_str::<String>(trimmed).ok();
    let unwrapped = if trimmed.starts_with('"') { inner()? } else { trimmed.to_owned() };
    let trimmed = unwrapped.trim();
    if !trimmed.starts_with(['[', '{']) {
        return None;
    }
    serde_json::from_str(trimmed).ok()
}

/// The object that a text of arguments holds, be it wrapped in JSON twice; an empty text is an empty object.
pub(crate) fn object_of(arguments: &Value) -> Option<Value> {
    let text = arguments.as_str()?.trim();
    if text.is_empty() {
        return Some(json!({}));
    }
    parsed(text).filter(Value::is_object)
}
