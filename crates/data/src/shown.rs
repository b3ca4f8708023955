//! Finds what of a conversation its rendering does not show: a template may leave out messages of roles that it does not
//! know, earlier thoughts, text next to calls, and calls after the first.
//!
//! A field is shown if another text in its place shows. Knows no tokens and no labels.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::remarks::{KNOWN_ROLES, Part, Remark, Remarks};
use crate::spans::REASONING;
use crate::spans::{Found, Message, Render, THOUGHTS, replaced, replacement, sentinels, shown_fields};

/// Bytes of a text that does not stand in a rendering by chance.
const DISTINCT: usize = 24;

/// Signs of a name that are shown.
const MOST_OF_NAME: usize = 64;

/// Fields of a message that every template is expected to read.
fn is_known(name: &str) -> bool {
    ["role", "content", "tool_calls"].contains(&name) || REASONING.contains(&name)
}

/// Adds what the rendering of some messages does not show of them.
pub(crate) fn remark(
    found: &Found,
    messages: &[Message],
    tools: Option<&Value>,
    render: Render<'_>,
    remarks: &mut Remarks,
) {
    let mut plain: Vec<Map<String, Value>> = messages.iter().map(|message| message.fields.clone()).collect();
    for (i, message) in messages.iter().enumerate() {
        let hidden = match &found.hidden[i] {
            Some(hidden) => hidden.clone(),
            None => hidden_fields(&found.text, &mut plain, i, render),
        };
        of_message(&found.text, message, &hidden, remarks);
    }
    let names =
        tools.and_then(Value::as_array).into_iter().flatten().filter_map(|tool| tool["function"]["name"].as_str());
    if names.into_iter().any(|name| !found.text.contains(name)) {
        remarks.add(Remark::Tools, 1);
    }
    idle_fields(&found.text, &plain, render, remarks);
}

/// Adds what one message comes to, given its fields that are not shown.
fn of_message(text: &str, message: &Message, hidden: &[String], remarks: &mut Remarks) {
    let (role, fields) = (short(message.role()), &message.fields);
    let is_hidden = |pointer: &str| hidden.iter().any(|of| of == pointer);
    let has_text = |name: &str| fields.get(name).and_then(Value::as_str).is_some_and(|text| !text.trim().is_empty());
    let thoughts: Vec<String> = REASONING.iter().filter(|name| has_text(name)).map(|name| format!("/{name}")).collect();
    let calls = fields.get("tool_calls").and_then(Value::as_array).map_or(0, Vec::len);
    let lost_calls = hidden.iter().any(|pointer| pointer.starts_with("/tool_calls"));
    let lost_text = has_text("content") && is_hidden("/content");
    let lost_thoughts = !thoughts.is_empty() && thoughts.iter().all(|pointer| is_hidden(pointer));
    let inner = fields.get("content").and_then(Value::as_str).and_then(thought_in);
    let lost_inner = !lost_text && inner.is_some_and(|thought| !text.contains(thought));
    let is_shown = (has_text("content") && !lost_text)
        || (!thoughts.is_empty() && !lost_thoughts)
        || (calls > 0 && !hidden.iter().any(|pointer| pointer.starts_with("/tool_calls/0/")));
    let is_there = has_text("content") || !thoughts.is_empty() || calls > 0;
    if !is_there && message.is_assistant() && message.weight != Some(0.0) {
        remarks.add(Remark::EmptyAnswer, 1);
    }
    if is_there && !is_shown {
        remarks.add(Remark::Message(role), 1);
        return;
    }
    if is_there && !KNOWN_ROLES.contains(&message.role()) {
        remarks.add(Remark::Role(role.clone()), 1);
    }
    for (is_lost, part) in
        [(lost_text, Part::Text), (lost_thoughts || lost_inner, Part::Reasoning), (lost_calls, Part::Calls)]
    {
        remarks.add(Remark::Part(role.clone(), part), usize::from(is_lost));
    }
}

/// A train of thought that stands in a content.
fn thought_in(content: &str) -> Option<&str> {
    let inside = |(open, close): &(&str, &str)| {
        let (before, _) = content.split_once(close)?;
        let thought = before.rsplit_once(open).map_or(before, |(_, thought)| thought).trim();
        (!thought.is_empty()).then_some(thought)
    };
    THOUGHTS.iter().find_map(inside)
}

/// The fields of a message that were not looked for in finding what is trained. `messages` is returned as it was.
fn hidden_fields(text: &str, messages: &mut [Map<String, Value>], i: usize, render: Render<'_>) -> Vec<String> {
    let sentinels = sentinels(text);
    let original = messages[i].clone();
    let mut is_hidden = |pointer: &str, is_text: bool| {
        let own = Value::Object(original.clone());
        if own.pointer(pointer).and_then(Value::as_str).is_some_and(|own| own.len() >= DISTINCT && text.contains(own)) {
            return false;
        }
        messages[i] = replaced(&original, pointer, replacement(is_text, &sentinels[0], 0));
        let rendering = render(messages);
        messages[i] = original.clone();
        // What the template refuses, it looks at.
        rendering.is_ok_and(|rendering| !rendering.text.contains(sentinels[0].as_str()))
    };
    let fields = shown_fields(&original).into_iter();
    fields.filter_map(|(pointer, is_text)| is_hidden(&pointer, is_text).then_some(pointer)).collect()
}

/// Adds the fields of messages without which the rendering is the same.
fn idle_fields(text: &str, messages: &[Map<String, Value>], render: Render<'_>, remarks: &mut Remarks) {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for name in messages.iter().flat_map(Map::keys).filter(|name| !is_known(name)) {
        *counts.entry(name).or_default() += 1;
    }
    let is_idle = |gone: &dyn Fn(&str) -> bool| {
        let without = |message: &Map<String, Value>| {
            message.iter().filter(|(name, _)| !gone(name)).map(|(name, value)| (name.clone(), value.clone())).collect()
        };
        let messages: Vec<Map<String, Value>> = messages.iter().map(without).collect();
        render(&messages).is_ok_and(|rendering| rendering.text == text)
    };
    if counts.is_empty() {
        return;
    }
    let all_idle = is_idle(&|name| !is_known(name));
    for (name, count) in counts {
        if all_idle || is_idle(&|of| of == name) {
            remarks.add(Remark::Field(short(name)), count);
        }
    }
}

fn short(name: &str) -> String {
    name.chars().take(MOST_OF_NAME).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::error::RowError;
    use crate::template::{ChatTemplate, Conversation, clock_now};

    /// The remarks on some messages, for a template that looks for each of them or for none.
    fn lines(source: &str, messages: &Value, is_located: bool) -> Vec<String> {
        let template = ChatTemplate::new(source, Map::new(), clock_now()).unwrap();
        let messages: Vec<Message> = messages
            .as_array()
            .unwrap()
            .iter()
            .map(|fields| Message { fields: fields.as_object().unwrap().clone(), weight: None, images: Vec::new() })
            .collect();
        let render = |messages: &[Map<String, Value>]| -> Result<_, RowError> {
            template.render(Conversation { messages, tools: None }, false)
        };
        let mut plain: Vec<_> = messages.iter().map(|message| message.fields.clone()).collect();
        let text = render(&plain).unwrap().text;
        let hidden =
            (0..messages.len()).map(|i| is_located.then(|| hidden_fields(&text, &mut plain, i, &render))).collect();
        let mut remarks = Remarks::default();
        remark(&Found { text, spans: Vec::new(), hidden }, &messages, None, &render, &mut remarks);
        remarks.lines()
    }

    #[test]
    fn what_a_template_leaves_out_is_counted() {
        let source = "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.role }}: \
            {% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments|tojson }}\
            {% else %}{{ m.content.split('</think>')[-1] }}{% endif %}\n{% endif %}{% endfor %}";
        let call = |name: &str| json!({"function": {"name": name, "arguments": {"x": 1}}});
        let messages = json!([
            {"role": "user", "content": "a", "id": 1},
            {"role": "critic", "content": "a"},
            {"role": "assistant", "content": "I look.", "tool_calls": [call("f"), call("g")]},
            {"role": "assistant", "content": "<think>\nhm\n</think>b", "reasoning_content": "because", "id": 2},
            {"role": "assistant", "content": ""},
        ]);
        let expected = [
            "1 message of role `critic` is not shown by the template",
            "the text of 1 message of role `assistant` is not shown by the template",
            "the reasoning of 1 message of role `assistant` is not shown by the template",
            "a tool call of 1 message of role `assistant` is not shown by the template",
            "1 answer is empty: its end token alone is trained",
            "fields of messages that change nothing: `id` (of 2 messages)",
        ];
        for is_located in [true, false] {
            assert_eq!(lines(source, &messages, is_located), expected);
        }
        let all = "{% for m in messages %}{{ m|tojson }}{% endfor %}";
        let unknown = "1 message is of role `critic`, which is none of `system`, `developer`, `user`, `assistant`, `tool`: what \
            `loss_scale` does not name is not trained";
        assert_eq!(lines(all, &messages, true), [expected[4], unknown]);
    }
}
