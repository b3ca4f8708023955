//! Contents that are a list of parts as a text of JSON, and whether those of a row are read as such.
//!
//! A text of JSON may also be what an assistant is to answer. So parts are read where all texts of the row are such texts.

use std::collections::BTreeMap;

use serde_json::Value;

use super::part_kinds::is_known;
use super::roles::{is_name_of, is_pair, stands_for_result};
use crate::image_parts::is_image;
use crate::json_values::parsed;
use crate::remarks::{Remark, Remarks};

/// The contents of a row's messages that are texts, results of tools left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PartTexts {
    /// Number of texts that are parts as JSON.
    parts: usize,
    others: usize,
}

impl PartTexts {
    /// Counts the contents of some messages.
    pub fn add(&mut self, messages: &[Value], properties: &BTreeMap<String, String>) {
        for message in messages {
            let opened = message.as_str().and_then(parsed);
            let message = opened.as_ref().unwrap_or(message);
            let theirs = |ours: &'static str| properties.get(ours).map_or(ours, String::as_str);
            let first = |names: &[&str]| names.iter().find_map(|name| message.get(*name).filter(|of| !of.is_null()));
            let role = first(&[theirs("role"), "role", "from"]).and_then(Value::as_str).unwrap_or_default().trim();
            match first(&[theirs("content"), "content", "value", "parts"]) {
                _ if is_pair(message) => self.others += 1,
                Some(Value::String(text)) if !text.trim().is_empty() && !stands_for_result(role) => {
                    match parts_of(text) {
                        Some(parts) if !is_name_of("assistant", role) && parts.iter().any(is_image) => {}
                        Some(_) => self.parts += 1,
                        None => self.others += 1,
                    }
                }
                Some(Value::Array(_)) => self.others += 1,
                _ => {}
            }
        }
    }

    /// Counts a text that is a message by itself.
    pub fn add_text(&mut self) {
        self.others += 1;
    }

    /// True if texts of parts are read as parts.
    pub fn are_read(self) -> bool {
        self.others == 0
    }

    /// Notes what was decided, where there was a choice.
    pub fn note(self, remarks: &mut Remarks) {
        remarks.add(if self.are_read() { Remark::PartsRead } else { Remark::PartsKept }, self.parts);
    }
}

/// The parts that a content is as a text of JSON: objects with a type, of which one at least is of a known kind.
pub(super) fn parts_of(content: &str) -> Option<Vec<Value>> {
    let Value::Array(parts) = parsed(content)? else { return None };
    let is_part = |part: &Value| part.get("type").is_some_and(Value::is_string);
    (parts.iter().all(is_part) && parts.iter().any(is_known)).then_some(parts)
}

/// The parts of a content that is a text, where they are read: those of a question with an image always.
pub(super) fn parts_to_read(content: &str, are_read: bool, is_assistant: bool) -> Option<Vec<Value>> {
    parts_of(content).filter(|parts| are_read || (!is_assistant && parts.iter().any(is_image)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn counted(messages: Value) -> PartTexts {
        let mut texts = PartTexts::default();
        texts.add(messages.as_array().unwrap(), &BTreeMap::from([("content".into(), "says".into())]));
        texts
    }

    #[test]
    fn parts_are_read_where_no_text_of_the_row_is_plain() {
        let parts = r#"[{"type": "text", "text": "hi"}]"#;
        let asks = |content: Value| json!({"role": "user", "content": content});
        let answer = json!({"role": "assistant", "content": parts});
        for others in [json!(parts), json!(""), json!(null)] {
            assert!(counted(json!([asks(others), answer])).are_read());
        }
        let result = json!({"role": "tool", "content": "20 C"});
        assert!(counted(json!([asks(json!(parts)), result, answer])).are_read());
        for plain in [asks(json!("Write parts")), asks(json!([{"type": "text", "text": "Write"}])), asks(json!("[1]"))]
        {
            assert_eq!(counted(json!([plain, answer])), PartTexts { parts: 1, others: 1 });
        }
        assert!(!counted(json!([{"from": "human", "value": "Write"}, answer])).are_read());
        assert!(!counted(json!([{"human": "Write", "assistant": parts}])).are_read());
        assert!(!counted(json!([{"role": "user", "says": "Write"}, {"role": "assistant", "says": parts}])).are_read());
    }

    #[test]
    fn parts_are_known_in_every_spelling() {
        for parts in [
            json!([{"type": "text", "value": "hi"}, {"type": "other"}]),
            json!([{"type": "tool_call", "value": "{}"}]),
            json!([{"type": "thinking", "thinking": "r"}]),
            json!([{"type": "tool-result", "result": 1}]),
        ] {
            assert_eq!(parts_of(&parts.to_string()), parts.as_array().cloned());
        }
        let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
        for other in [tools, json!([{"type": "text"}]), json!([{"text": "hi"}]), json!({"type": "text", "text": "hi"})]
        {
            assert_eq!(parts_of(&other.to_string()), None, "{other}");
        }
    }

    #[test]
    fn a_question_with_an_image_is_read_next_to_plain_answers() {
        let image = r#"[{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}]"#;
        let text = r#"[{"type": "text", "text": "What is it?"}]"#;
        let reads = |content: &str, is_assistant: bool| parts_to_read(content, false, is_assistant).is_some();
        assert_eq!([reads(image, false), reads(image, true), reads(text, false)], [true, false, false]);
        assert!(parts_to_read(text, true, true).is_some());
    }
}
