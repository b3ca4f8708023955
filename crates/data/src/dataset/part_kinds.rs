//! Kinds of the parts of a message's content, in the spellings of other tools.
//!
//! Knows single parts; no messages.

use serde_json::Value;

use super::roles::plain_name;

/// The kind of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Reasoning,
    Call,
    Result,
}

impl Kind {
    const NAMES: [(Kind, &[&str]); 4] = [
        (Kind::Text, &["text", "input_text", "output_text"]),
        (
            Kind::Reasoning,
            &["reasoning", "thinking", "think", "thought", "reasoning_content", "reasoning_text", "summary_text"],
        ),
        (Kind::Call, &["tool_call", "tool_calls", "tool_use", "function_call", "function_calls", "function"]),
        (
            Kind::Result,
            &[
                "tool_result",
                "tool_results",
                "tool_response",
                "function_response",
                "function_result",
                "function_call_output",
            ],
        ),
    ];

    /// The kind of a part by its type, or by what it holds if it has none.
    pub fn of(part: &Value) -> Option<Kind> {
        let named = |name: &str| {
            let name = plain_name(name);
            Kind::NAMES.into_iter().find(|(_, names)| names.contains(&name.as_str())).map(|(kind, _)| kind)
        };
        let is_given = |name: &str| part.get(name).is_some_and(|value| !value.is_null());
        // Google's interface marks parts of any kind as thoughts or not.
        let held = |value: &Value| !value.is_null() && !value.is_boolean();
        let found = match part.get("type").filter(|of| !of.is_null()) {
            Some(of) => named(of.as_str()?)?,
            None if part.is_string() || is_given("text") => Kind::Text,
            None => part.as_object()?.iter().filter(|(_, value)| held(value)).find_map(|(name, _)| named(name))?,
        };
        let is_thought = found == Kind::Text && part.get("thought") == Some(&Value::Bool(true));
        Some(if is_thought { Kind::Reasoning } else { found })
    }
}

/// True for a part of a known kind with something in it; definitions of functions are none.
pub(super) fn is_known(part: &Value) -> bool {
    match Kind::of(part) {
        Some(Kind::Text | Kind::Reasoning) => text_of(part).is_some(),
        Some(Kind::Call) => part.get("type").is_none_or(|name| name != "function"),
        Some(Kind::Result) => true,
        None => false,
    }
}

/// The text of a list of nothing else.
pub(super) fn joined_text(content: &Value) -> Option<String> {
    let parts = content.as_array().filter(|parts| !parts.is_empty())?;
    parts.iter().map(|part| text_of(part).filter(|_| Kind::of(part) == Some(Kind::Text))).collect()
}

/// The text of a part, or the texts of a list of them.
pub(super) fn text_of(value: &Value) -> Option<String> {
    const NAMES: [&str; 7] = ["value", "text", "thinking", "reasoning", "reasoning_content", "content", "summary"];
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Object(part) => {
            NAMES.iter().find_map(|name| part.get(*name).filter(|of| !of.is_null())).and_then(text_of)
        }
        other => other.as_array()?.iter().map(text_of).collect(),
    }
}
