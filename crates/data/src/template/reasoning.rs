//! A message's train of thought under the names by which templates read it.
//!
//! Data call it `reasoning_content`, `thinking` or `reasoning`; templates read the first, those of gpt-oss the second.
//! Transformers fills both in from whichever is there, and so does this. Knows no template.

use std::borrow::Cow;

use serde_json::{Map, Value};

/// In the order in which they are requested.
const NAMES: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// The messages with their reasoning under both names; a `thinking` of the message's own stays as it is.
pub(super) fn under_every_name(messages: &[Map<String, Value>]) -> Cow<'_, [Map<String, Value>]> {
    let of = |message: &Map<String, Value>| {
        NAMES.iter().find_map(|name| message.get(*name).filter(|v| !v.is_null()).cloned())
    };
    if !messages.iter().any(|message| of(message).is_some()) {
        return Cow::Borrowed(messages);
    }
    let named = |message: &Map<String, Value>| {
        let Some(reasoning) = of(message) else { return message.clone() };
        let mut all = Map::from_iter([("thinking".to_owned(), reasoning.clone())]);
        all.extend(message.clone());
        all.insert("reasoning_content".to_owned(), reasoning);
        all
    };
    Cow::Owned(messages.iter().map(named).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn reasoning_is_found_under_both_names_and_order_is_kept() {
        let messages = json!([
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a", "reasoning": "r", "thinking": null},
            {"reasoning_content": "r", "content": "a"},
            {"content": "a", "thinking": "own", "reasoning_content": "r"},
        ]);
        let messages: Vec<Map<String, Value>> = serde_json::from_value(messages).unwrap();
        let named = under_every_name(&messages);
        let texts: Vec<String> = named.iter().map(|message| json!(message).to_string()).collect();
        assert_eq!(texts[0], r#"{"role":"user","content":"q"}"#);
        let second = r#"{"thinking":null,"role":"assistant","content":"a","reasoning":"r","reasoning_content":"r"}"#;
        assert_eq!(texts[1], second);
        assert_eq!(texts[2], r#"{"thinking":"r","reasoning_content":"r","content":"a"}"#);
        assert_eq!(texts[3], r#"{"thinking":"own","content":"a","reasoning_content":"r"}"#);
        assert!(matches!(under_every_name(&messages[..1]), Cow::Borrowed(_)));
    }
}
