//! Contents of messages as lists of parts, with the places of images.

use serde_json::{Map, Value, json};

/// An image in a content: a noncharacter, which no text holds.
pub(crate) const MARK: char = '\u{FDD3}';

/// Messages as a template gets them: contents with marks as lists of parts, with `all` every content.
pub(crate) fn with_parts(messages: &[Map<String, Value>], all: bool) -> Option<Vec<Map<String, Value>>> {
    let text = |message: &Map<String, Value>| message.get("content").and_then(Value::as_str).map(str::to_owned);
    if !all && !messages.iter().any(|message| text(message).is_some_and(|text| text.contains(MARK))) {
        return None;
    }
    let parts = |text: &str| -> Vec<Value> {
        let mut parts = Vec::new();
        for (number, piece) in text.split(MARK).enumerate() {
            if number > 0 {
                parts.push(json!({"type": "image"}));
            }
            if !piece.is_empty() {
                parts.push(json!({"type": "text", "text": piece}));
            }
        }
        parts
    };
    let of = |message: &Map<String, Value>| {
        let mut message = message.clone();
        if let Some(text) = text(&message).filter(|text| all || text.contains(MARK)) {
            message.insert("content".to_owned(), Value::Array(parts(&text)));
        }
        message
    };
    Some(messages.iter().map(of).collect())
}
