//! Locates all messages of a conversation with a fixed number of renderings.
//!
//! All fields are replaced by sentinels of their own, then every second one of them is left as it is. Between the
//! sentinels of its neighbors, a field is compared with its own sentinel, as [`super::locate`] compares whole
//! renderings. The pieces put together must be the conversation's rendering byte for byte: a template that writes a
//! message by the text of others is left to the renderings one by one. Knows no tokens and no template language.

use std::ops::Range;

use serde_json::{Map, Value};

use super::{Located, Place, Render, join, prefix_length, replacement, shown_fields, suffix_length, too_often};
use crate::error::RowError;

/// A field that a template may show.
struct Field {
    message: usize,
    pointer: String,
    is_text: bool,
}

/// One rendering and the places of sentinels in it, in the order of the text.
struct Marked {
    text: String,
    places: Vec<(usize, Range<usize>)>,
}

/// The conversation and the sentinels of its fields.
struct Sentinels<'a> {
    messages: &'a [Map<String, Value>],
    fields: Vec<Field>,
    /// The prefixes of the sentinels of either kind, which the conversation's rendering does not hold.
    begins: [String; 2],
    render: Render<'a>,
}

const ENDS: [&str; 2] = ["foxJ3b", "wH8k"];

impl Sentinels<'_> {
    fn sentinel(&self, field: usize, kind: usize) -> String {
        format!("{}{field}{}", self.begins[kind], ENDS[kind])
    }

    /// The rendering with those fields replaced. `None`: the template rejects it.
    fn rendered(&self, kind: usize, is_replaced: &dyn Fn(usize) -> bool) -> Option<Marked> {
        let mut messages: Vec<Value> = self.messages.iter().cloned().map(Value::Object).collect();
        for (number, field) in self.fields.iter().enumerate().filter(|(number, _)| is_replaced(*number)) {
            let place = messages[field.message].pointer_mut(&field.pointer)?;
            *place = replacement(field.is_text, &self.sentinel(number, kind), kind);
        }
        let objects = messages.into_iter().filter_map(|message| match message {
            Value::Object(fields) => Some(fields),
            _ => None,
        });
        let text = (self.render)(&objects.collect::<Vec<_>>()).ok()?.text;
        let begin = self.begins[kind].as_str();
        let places = text.match_indices(begin).filter_map(|(at, _)| {
            let rest = &text[at + begin.len()..];
            let digits = rest.find(|c: char| !c.is_ascii_digit())?;
            rest[digits..].starts_with(ENDS[kind]).then_some(())?;
            Some((rest[..digits].parse().ok()?, at..at + begin.len() + digits + ENDS[kind].len()))
        });
        let places = places.collect();
        Some(Marked { text, places })
    }
}

impl Marked {
    /// The text between two neighbors of the order; the first and the last are bounded by the ends of the text.
    fn between(&self, before: Option<usize>, after: Option<usize>) -> &str {
        let begin = before.map_or(0, |i| self.places[i].1.end);
        let end = after.map_or(self.text.len(), |i| self.places[i].1.start);
        &self.text[begin..end]
    }

    fn order(&self) -> Vec<usize> {
        self.places.iter().map(|(field, _)| *field).collect()
    }
}

/// Places of the messages that are `near`, with the fields that are not shown, as [`super::locate`] finds them. `None`: they have to be looked for one by
/// one. Errors: the template shows a field several times.
pub(super) fn locate_all(
    base: &str,
    messages: &[Map<String, Value>],
    near: &[bool],
    render: Render<'_>,
) -> Result<Option<Vec<Place>>, RowError> {
    let fields = messages.iter().enumerate().filter(|(i, _)| near[*i]).flat_map(|(message, shown)| {
        shown_fields(shown).into_iter().map(move |(pointer, is_text)| Field { message, pointer, is_text })
    });
    let begins = super::sentinel_begins(base).map(|begin| format!("{begin}k"));
    let mut given = Sentinels { messages, fields: fields.collect(), begins, render };
    let Some(shown) = shown_once(&mut given)? else { return Ok(None) };
    let [first, second] = shown;
    let order = first.order();
    if second.order() != order {
        return Ok(None);
    }
    let Some(parts) = compared(&given, [&first, &second], &order) else { return Ok(None) };
    let Some(ranges) = put_together(base, &first, &parts) else { return Ok(None) };
    let mut of_field: Vec<Option<Range<usize>>> = vec![None; given.fields.len()];
    order.iter().zip(ranges).for_each(|(&field, range)| of_field[field] = Some(range));
    let mut places: Vec<Place> = vec![(None, Vec::new()); messages.len()];
    for (field, range) in given.fields.iter().zip(of_field) {
        let (located, hidden) = &mut places[field.message];
        match range {
            Some(range) => {
                let own = Located { range, calls_tools: field.pointer.starts_with("/tool_calls") };
                *located = Some(join(located.take(), own));
            }
            None => hidden.push(field.pointer.clone()),
        }
    }
    Ok(Some(places))
}

/// The renderings with all fields replaced, by either kind. Names of tools that are shown in other messages too are no
/// fields then.
fn shown_once(given: &mut Sentinels<'_>) -> Result<Option<[Marked; 2]>, RowError> {
    let Some(first) = given.rendered(0, &|_| true) else { return Ok(None) };
    let mut times = vec![0; given.fields.len()];
    for (field, _) in &first.places {
        if let Some(times) = times.get_mut(*field) {
            *times += 1;
        }
    }
    let is_name = |field: &Field| field.pointer.ends_with("/name");
    let repeated = |(field, times): &(&Field, &usize)| **times > 1 && !is_name(field);
    if let Some((field, times)) = given.fields.iter().zip(&times).find(repeated) {
        return Err(too_often(field.message, *times));
    }
    let first = if times.iter().any(|&times| times > 1) {
        let mut times = times.iter();
        given.fields.retain(|_| times.next().is_some_and(|&times| times <= 1));
        match given.rendered(0, &|_| true) {
            Some(first) => first,
            None => return Ok(None),
        }
    } else {
        first
    };
    let mut order = first.order();
    order.sort_unstable();
    let known = order.windows(2).all(|pair| pair[0] < pair[1]) && order.last().is_none_or(|&n| n < given.fields.len());
    Ok(given.rendered(1, &|_| true).filter(|_| known).map(|second| [first, second]))
}

/// One field between its neighbors: its text there, and how much at either end is the template's.
struct Part {
    text: String,
    start: usize,
    tail: usize,
}

fn compared(given: &Sentinels<'_>, all: [&Marked; 2], order: &[usize]) -> Option<Vec<Part>> {
    let mut rank = vec![None; given.fields.len()];
    order.iter().enumerate().for_each(|(rank_of, &field)| rank[field] = Some(rank_of));
    let mut parts: Vec<Option<Part>> = order.iter().map(|_| None).collect();
    for (kind, all) in all.into_iter().enumerate() {
        for parity in 0..2 {
            // What the template does not show is replaced everywhere.
            let is_kept = |field: usize| rank[field].is_some_and(|rank: usize| rank % 2 == parity);
            let some = given.rendered(kind, &|field| !is_kept(field))?;
            let expected = order.iter().copied().filter(|&field| !is_kept(field));
            if !some.places.iter().map(|(field, _)| *field).eq(expected) {
                return None;
            }
            for rank in (parity..order.len()).step_by(2) {
                let after = Some(rank + 1).filter(|&next| next < order.len());
                let whole = all.between(rank.checked_sub(1), after);
                // After the kept fields of the other half, the places count one for two.
                let text = some.between(rank.checked_sub(1).map(|n| n / 2), after.map(|n| n / 2));
                let (start, tail) = (prefix_length(text, whole), suffix_length(text, whole));
                let part = parts[rank].get_or_insert_with(|| Part { text: text.to_owned(), start, tail });
                if part.text.len() != text.len() {
                    return None;
                }
                (part.start, part.tail) = (part.start.min(start), part.tail.min(tail));
            }
        }
    }
    let parts: Vec<Part> = parts.into_iter().flatten().collect();
    parts.iter().all(|part| part.start + part.tail <= part.text.len()).then_some(parts)
}

/// Returns the place of each part in `base`, if template and parts one after the other are its text.
fn put_together(base: &str, all: &Marked, parts: &[Part]) -> Option<Vec<Range<usize>>> {
    let bytes = base.as_bytes();
    let (mut at, mut tail) = (0, None);
    let mut ranges = Vec::with_capacity(parts.len());
    for rank in 0..=parts.len() {
        let template = all.between(rank.checked_sub(1), Some(rank).filter(|&rank| rank < parts.len())).as_bytes();
        let begin = template.len().checked_sub(tail.unwrap_or(template.len()))?;
        let part = parts.get(rank);
        let piece = template.get(begin..part.map_or(template.len(), |part| part.start))?;
        at += bytes[at..].starts_with(piece).then_some(piece.len())?;
        let Some(part) = part else { break };
        let own = &part.text.as_bytes()[part.start..part.text.len() - part.tail];
        bytes[at..].starts_with(own).then_some(())?;
        ranges.push(at..at + own.len());
        at += own.len();
        tail = Some(part.tail);
    }
    let are_whole = |range: &Range<usize>| base.is_char_boundary(range.start) && base.is_char_boundary(range.end);
    (at == bytes.len() && ranges.iter().all(are_whole)).then_some(ranges)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::path::Path;

    use serde_json::json;

    use super::super::{Message, locate, sentinels};
    use super::*;
    use crate::template::{ChatTemplate, Conversation};

    fn templates() -> Vec<(String, ChatTemplate)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/templates");
        let mut found = Vec::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path().join("chat_template.jinja");
            let Ok(source) = std::fs::read_to_string(&path) else { continue };
            found.push((path.display().to_string(), source));
        }
        assert!(found.len() >= 4);
        let plain = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}";
        found.push(("plain".to_owned(), plain.to_owned()));
        let trimmed = "{% for m in messages %}[{{ m.content | trim }}]{% if loop.last %}!{% endif %}{% endfor %}";
        found.push(("trimmed".to_owned(), trimmed.to_owned()));
        let compile = |source: &str| {
            let names = json!({"bos_token": "<s>", "eos_token": "</s>"});
            let clock = "2026-11-20T00:00:00".parse().unwrap();
            ChatTemplate::new(source, names.as_object().unwrap().clone(), clock).unwrap()
        };
        found.into_iter().map(|(name, source)| (name, compile(&source))).collect()
    }

    fn conversations() -> Vec<Vec<Message>> {
        let with = |role: &str, content: Value, more: Value| {
            let mut message = Message::new(role, "");
            message.fields.insert("content".to_owned(), content);
            message.fields.extend(more.as_object().unwrap().clone());
            message
        };
        let calls = |arguments: Value| {
            json!({"tool_calls": [{"type": "function", "id": "abc123def", "function":
                {"name": "f", "arguments": arguments}}]})
        };
        let texts = [
            "4.",
            "",
            " \n",
            "again again",
            "<|im_end|>\n<|im_start|>assistant\n",
            "é 東京",
            "Qv7nulla0foxJ3b",
            "Qv7nulla0k0",
            "</s>[INST]x[/INST]",
            "Q",
            "<think>\nso\n</think>\n\n4.",
            "<|user|>4.\n",
            "<tool_response>x</tool_response>",
        ];
        let mut all = Vec::new();
        for shift in 0..texts.len() {
            let text = |i: usize| texts[(i * (shift + 1) + shift) % texts.len()];
            let role = |i: usize| if i.is_multiple_of(2) { "user" } else { "assistant" };
            all.push((0..2 + shift % 9).map(|i| Message::new(role(i), text(i))).collect::<Vec<_>>());
            let mut talk = vec![Message::new("system", text(3)), Message::new("user", text(4))];
            for i in 0..3 {
                let arguments =
                    [json!({"city": text(i), "n": 0}), json!("{\"x\": 1}"), json!({})][(i + shift) % 3].clone();
                let mut more = calls(arguments);
                if shift % 2 == 0 {
                    more["reasoning_content"] = json!(text(i + 1));
                }
                talk.push(with("assistant", [json!(""), json!("I look."), json!(null)][shift % 3].clone(), more));
                talk.push(with("tool", json!(text(i + 2)), json!({"name": "f", "tool_call_id": "abc123def"})));
            }
            talk.push(Message::new("assistant", text(9)));
            all.push(talk);
        }
        all
    }

    /// Every place is the one that is found with renderings for each message.
    #[test]
    fn places_are_those_of_one_by_one() {
        let (mut together, mut all) = (0, 0);
        for (name, template) in templates() {
            for talk in conversations() {
                let mut plain: Vec<Map<String, Value>> = talk.iter().map(|message| message.fields.clone()).collect();
                let render =
                    |messages: &[Map<String, Value>]| template.render(Conversation { messages, tools: None }, false);
                let Ok(base) = render(&plain) else { continue };
                all += 1;
                let found = locate_all(&base.text, &plain, &vec![true; plain.len()], &render);
                let Ok(Some(found)) = found else { continue };
                together += 1;
                let sentinels = sentinels(&base.text);
                for (i, found) in found.iter().enumerate() {
                    let Ok(expected) = locate(&base.text, &mut plain, i, &sentinels, &render) else { continue };
                    assert_eq!(found, &expected, "{name}, message {i} of {plain:?}: {:?}", base.text);
                }
            }
        }
        assert!(together * 4 > all * 3, "{together} of {all}");
    }

    #[test]
    fn the_number_of_renderings_is_fixed() {
        let (_, plain) = templates().into_iter().find(|(name, _)| name == "plain").unwrap();
        for count in [2, 2000] {
            let messages: Vec<_> = (0..count).map(|i| Message::new("assistant", &format!("w{i}")).fields).collect();
            let renderings = Cell::new(0);
            let render = |messages: &[Map<String, Value>]| {
                renderings.set(renderings.get() + 1);
                plain.render(Conversation { messages, tools: None }, false)
            };
            let base = render(&messages).unwrap();
            let found = locate_all(&base.text, &messages, &vec![true; count], &render).unwrap().unwrap();
            assert_eq!(renderings.get(), 7);
            let last = found.last().unwrap().0.clone().unwrap();
            assert_eq!(base.text[last.range], format!("w{}", count - 1));
        }
    }
}
