//! Tool calls in the form that a template takes: arguments as an object or as a text, and what stands in place of the
//! text of a message that only calls.
//!
//! Templates differ: some write the arguments as JSON themselves, others print a text; some fail on a null content,
//! others hide the calls where there is a content. The form is found by rendering a probe with each.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use super::json_dumps;
use crate::error::RowError;
use crate::json_values::object_of;

/// The form that a template takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallForm {
    /// Arguments are a text of JSON.
    text: bool,
    content: Content,
    /// An empty content hides the calls.
    empty_hides: bool,
}

/// The content of a message that only calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Null,
    Absent,
    Empty,
}

/// Words of the probe, which no template contains.
const NAME: &str = "Qv7call";
const KEY: &str = "Qv7key";

type Render<'a> = &'a dyn Fn(&[Map<String, Value>], Option<&Value>) -> Result<String, RowError>;

impl CallForm {
    /// The first form with which a template shows a call and prints neither an object nor a null as Python does.
    pub(super) fn of(render: Render<'_>) -> CallForm {
        let form = |text, content| CallForm { text, content, empty_hides: false };
        let nulls = |of: &str| of.matches("None").count() + of.matches("null").count();
        for text in [false, true] {
            let empty = probe(render, form(text, Content::Empty));
            for content in [Content::Null, Content::Absent, Content::Empty] {
                let Some(shown) = probe(render, form(text, content)) else { continue };
                let is_plain = empty.as_ref().is_none_or(|empty| nulls(empty) == nulls(&shown));
                if is_plain && !shown.contains(&format!("'{KEY}'")) {
                    return CallForm { empty_hides: empty.is_none(), ..form(text, content) };
                }
            }
        }
        form(false, Content::Empty)
    }

    /// The messages with their calls in this form.
    pub(super) fn write(self, messages: &[Map<String, Value>]) -> Cow<'_, [Map<String, Value>]> {
        let written: Vec<Option<Map<String, Value>>> = messages.iter().map(|message| self.message(message)).collect();
        if written.iter().all(Option::is_none) {
            return Cow::Borrowed(messages);
        }
        let all = written.into_iter().zip(messages).map(|(written, own)| written.unwrap_or_else(|| own.clone()));
        Cow::Owned(all.collect())
    }

    /// A message that is not yet in this form.
    fn message(self, message: &Map<String, Value>) -> Option<Map<String, Value>> {
        let calls = message.get("tool_calls")?.as_array().filter(|calls| !calls.is_empty())?;
        let wanted = match self.content {
            Content::Null => Some(Value::Null),
            Content::Absent => None,
            Content::Empty => Some(json!("")),
        };
        let content = message.get("content");
        let is_empty = |content: &Value| content.is_null() || (self.empty_hides && *content == "");
        let has_text = content.is_some_and(|content| !is_empty(content));
        let arguments: Vec<Option<Value>> = calls.iter().map(|call| self.arguments(call)).collect();
        if (has_text || content == wanted.as_ref()) && arguments.iter().all(Option::is_none) {
            return None;
        }
        let mut message = message.clone();
        if !has_text {
            match wanted {
                Some(content) => drop(message.insert("content".to_owned(), content)),
                None => drop(message.shift_remove("content")),
            }
        }
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten();
        for (call, arguments) in calls.zip(arguments) {
            let nested = call.get("function").is_some_and(Value::is_object);
            let function = if nested { &mut call["function"] } else { call };
            if let Some(arguments) = arguments {
                function["arguments"] = arguments;
            }
        }
        Some(message)
    }

    /// The arguments of a call that are not yet in this form.
    fn arguments(self, call: &Value) -> Option<Value> {
        let function = call.get("function").filter(|function| function.is_object()).unwrap_or(call);
        let given = function.get("arguments")?;
        let object = object_of(given);
        if !self.text {
            return object;
        }
        let object = object.or_else(|| given.is_object().then(|| given.clone()))?;
        let text = json!(json_dumps(&object));
        (text != *given).then_some(text)
    }
}

/// The rendering of a call and its result, if the template shows the call.
fn probe(render: Render<'_>, form: CallForm) -> Option<String> {
    let arguments = json!({KEY: "Xz4value"});
    let function = json!({"name": NAME, "arguments": arguments});
    let call = json!({"id": "abcdefghi", "type": "function", "function": function});
    let result = json!({"role": "tool", "name": NAME, "tool_call_id": "abcdefghi", "content": "Qv7result"});
    let messages = [
        json!({"role": "user", "content": "Qv7question"}),
        json!({"role": "assistant", "tool_calls": [call]}),
        result,
        json!({"role": "assistant", "content": "Qv7answer"}),
    ];
    let messages = messages.map(|message| message.as_object().cloned().unwrap_or_default());
    let schema = json!({"type": "object", "properties": {KEY: {"type": "string", "description": "d"}}});
    let tools =
        json!([{"type": "function", "function": {"name": "Qv7tool", "description": "d", "parameters": schema}}]);
    let written = form.write(&messages);
    // Some have no place for what follows a call.
    let text = render(&written, Some(&tools)).or_else(|_| render(&written[..2], Some(&tools))).ok()?;
    text.contains(NAME).then_some(text)
}
