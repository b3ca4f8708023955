//! Finds the trained text of a conversation in its rendering.
//!
//! The sentinel method: the conversation is rendered, then once more per message and field with that field replaced by
//! each of two sentinels. What all three renderings share before and after the difference comes from the template; the
//! rest is the message's text. No text of a message is searched for, and no prefix of the conversation is rendered,
//! because real templates print a message differently when another follows. Where the template writes each message by
//! its own text alone, seven renderings suffice for all messages ([`together`]). Knows no tokens and no template
//! language.

mod together;

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::{Map, Value, json};

use crate::error::{RowError, RowReason};
use crate::template::Rendered;

/// Fields of a message that hold its train of thought.
pub(crate) const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// One message and what is asked of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// The fields that the template reads: `role`, `content`, …
    pub fields: Map<String, Value>,
    /// Weight of its tokens in the loss; 0 = not trained; `None`: 1 for the assistant, 0 for everybody else.
    pub weight: Option<f32>,
    /// The images of its content, as the data hold them, in their order; null where a column of the row has it.
    pub images: Vec<Value>,
}

impl Message {
    pub fn new(role: &str, content: &str) -> Self {
        let fields = Map::from_iter([("role".to_owned(), json!(role)), ("content".to_owned(), json!(content))]);
        Message { fields, weight: None, images: Vec::new() }
    }

    /// Empty where the message names none.
    pub fn role(&self) -> &str {
        self.fields.get("role").and_then(Value::as_str).unwrap_or_default()
    }

    pub(crate) fn is_assistant(&self) -> bool {
        self.role() == "assistant"
    }

    fn trained_weight(&self) -> f32 {
        self.weight.unwrap_or(if self.is_assistant() { 1.0 } else { 0.0 })
    }
}

/// Bytes of the rendering that are trained, with their weight.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainedSpan {
    pub range: Range<usize>,
    pub weight: f32,
}

/// Renders messages; given by the caller, so that the method can be tested with any renderer.
pub type Render<'a> = &'a dyn Fn(&[Map<String, Value>]) -> Result<Rendered, RowError>;

/// Texts and tokens by which the search recognizes turns in a template's output.
#[derive(Clone, Copy)]
pub struct Markers<'a> {
    /// The text that opens the assistant's turn.
    pub generation_prompt: &'a str,
    /// The text between a user's message and a plain answer; read if there is no generation prompt.
    pub answer_opening: &'a str,
    /// Special tokens that end a turn.
    pub end_of_turn: &'a [String],
    /// All special tokens of the tokenizer.
    pub special: &'a [String],
}

/// Two texts without common first or last character, which no template trims or splits and which `base` does not hold.
pub(crate) fn sentinels(base: &str) -> [String; 2] {
    let [first, second] = sentinel_begins(base);
    [format!("{first}foxJ3b"), format!("{second}wH8k")]
}

/// The beginnings of sentinels, which `base` does not hold.
fn sentinel_begins(base: &str) -> [String; 2] {
    ["Qv7nulla", "Xz4lantern"].map(|first| {
        let mut numbered = (0..).map(|n: u32| format!("{first}{n}"));
        numbered.find(|text| !base.contains(text)).expect("a finite text lacks some number")
    })
}

/// Pairs between which a template may insert an empty train of thought.
pub(crate) const THOUGHTS: [(&str, &str); 3] =
    [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<thinking>", "</thinking>")];

/// A rendering, and what was found in it.
pub struct Found {
    pub text: String,
    /// The trained bytes: they ascend and do not overlap.
    pub spans: Vec<TrainedSpan>,
    /// The fields of each message that the rendering does not show, as JSON pointers; `None` where none was looked for.
    pub hidden: Vec<Option<Vec<String>>>,
}

/// The place of a message, and its fields that the rendering does not show.
type Place = (Option<Located>, Vec<String>);

/// The location of one message: from the first to the last byte that depends on it.
#[derive(Clone, Debug, PartialEq)]
struct Located {
    range: Range<usize>,
    /// True if tool calls are the last that it shows.
    calls_tools: bool,
}

/// Renders a conversation and finds what is trained: for each message of positive weight from after the generation
/// prompt to the first end-of-turn token, inclusive. A train of thought that the template inserts itself is left out.
/// The spans ascend and do not overlap.
pub fn trained_spans(
    messages: &[Message],
    render: Render<'_>,
    markers: Markers<'_>,
) -> Result<(String, Vec<TrainedSpan>), RowError> {
    let weights: Vec<Option<f32>> =
        messages.iter().map(|message| Some(message.trained_weight()).filter(|&weight| weight != 0.0)).collect();
    let found = weighted_spans(messages, &weights, messages.iter().all(|m| m.weight.is_none()), render, markers)?;
    Ok((found.text, found.spans))
}

/// The spans of the messages that have a weight here, be it 0. `by_marks`: the template's own marks decide where it has
/// any.
pub fn weighted_spans(
    messages: &[Message],
    weights: &[Option<f32>],
    by_marks: bool,
    render: Render<'_>,
    markers: Markers<'_>,
) -> Result<Found, RowError> {
    let mut plain: Vec<Map<String, Value>> = messages.iter().map(|message| message.fields.clone()).collect();
    let base = render(&plain)?;
    let wanted = |i: usize| weights[i].is_some();
    if !base.generation.is_empty() && by_marks {
        let spans = base.generation.iter().map(|range| TrainedSpan { range: range.clone(), weight: 1.0 });
        return Ok(Found { spans: spans.collect(), text: base.text, hidden: vec![None; messages.len()] });
    }
    // Only trained messages and their neighbours are looked for.
    let sentinels = sentinels(&base.text);
    let is_near = |i: usize| wanted(i) || (i > 0 && wanted(i - 1)) || (i + 1 < messages.len() && wanted(i + 1));
    let near: Vec<bool> = (0..messages.len()).map(is_near).collect();
    let together = together::locate_all(&base.text, &plain, &near, render)?;
    let openings = together.is_some().then(BTreeMap::new);
    let places = match together {
        Some(places) => places,
        None => {
            let mut one = |i: usize| locate(&base.text, &mut plain, i, &sentinels, render);
            let of = |(i, &near): (usize, &bool)| if near { one(i) } else { Ok((None, Vec::new())) };
            near.iter().enumerate().map(of).collect::<Result<Vec<_>, _>>()?
        }
    };
    let (located, hidden): (Vec<_>, Vec<_>) = places.into_iter().unzip();
    let hidden = hidden.into_iter().zip(&near).map(|(fields, &near)| near.then_some(fields)).collect();
    let mut turns =
        Turns { text: &base.text, plain: &plain, located: &located, sentinels: &sentinels, render, markers, openings };
    let mut spans: Vec<TrainedSpan> = Vec::new();
    for (i, weight) in weights.iter().enumerate() {
        let Some(weight) = *weight else { continue };
        let Some(own) = &located[i] else {
            return Err(disagreement(i, "the template does not show it"));
        };
        if spans.last().is_some_and(|last| own.range.start < last.range.end) {
            return Err(disagreement(i, "its text depends on an earlier message's place"));
        }
        // The template's own marks ascend and do not overlap.
        let marks_before = base.generation.partition_point(|range| range.start <= own.range.start);
        let marked = base.generation[..marks_before].last().filter(|range| own.range.end <= range.end);
        let range = match marked {
            Some(range) => range.clone(),
            None => turns.range(i, own)?,
        };
        if spans.last().is_some_and(|last| range.start < last.range.end) || range.start > range.end {
            return Err(disagreement(i, "it cannot be distinguished from an earlier message"));
        }
        spans.push(TrainedSpan { range, weight });
    }
    Ok(Found { text: base.text, spans, hidden })
}

fn disagreement(i: usize, what: &str) -> RowError {
    RowError::new(RowReason::Span, format!("message {}: {what}", i + 1))
}

/// A rendering in which the messages are located.
struct Turns<'a> {
    text: &'a str,
    plain: &'a [Map<String, Value>],
    located: &'a [Option<Located>],
    sentinels: &'a [String; 2],
    render: Render<'a>,
    markers: Markers<'a>,
    /// The template's text from where a plain answer would begin to the calls in its place, by the role of the message
    /// before. `None`: the template writes messages depending on one another.
    openings: Option<BTreeMap<String, String>>,
}

impl Turns<'_> {
    /// Returns the trained bytes of message `i`, which is at `own`.
    fn range(&mut self, i: usize, own: &Located) -> Result<Range<usize>, RowError> {
        let (text, markers, start) = (self.text, self.markers, own.range.start);
        let before = match i {
            0 => Some(0),
            _ => self.located[i - 1].as_ref().map(|message| message.range.end).filter(|&end| end <= start),
        };
        let role = |i: usize| self.plain[i].get("role").and_then(Value::as_str).unwrap_or_default();
        let after_user = i > 0 && role(i - 1) == "user";
        let begin = if role(i) != "assistant" {
            start
        } else if !markers.generation_prompt.is_empty() {
            turn_begin(text, before, start, markers.generation_prompt)
        } else if after_user && let Some(begin) = after_opening(text, before, start, markers) {
            begin
        } else if own.calls_tools {
            self.plain_answer_start(i, before, start)
                .ok_or_else(|| disagreement(i, "where its tool calls begin cannot be determined"))?
        } else {
            start
        };
        let next = self.located.get(i + 1).and_then(Option::as_ref).map(|message| message.range.start);
        let limit = next.filter(|&start| start >= own.range.end).unwrap_or(text.len());
        Ok(begin..turn_end(text, own, limit, markers))
    }

    /// Returns [`plain_answer_start`] for message `i`. After messages of one role it is rendered once.
    fn plain_answer_start(&mut self, i: usize, before: Option<usize>, start: usize) -> Option<usize> {
        let find = || plain_answer_start(self.text, &self.plain[..i], before, self.sentinels, self.render);
        let (Some(openings), Some(before), true) = (&mut self.openings, before, i > 0) else { return find() };
        let role = self.plain[i - 1].get("role").and_then(Value::as_str).unwrap_or_default();
        let between = &self.text[before..start];
        if let Some(opening) = openings.get(role).filter(|opening| between.ends_with(opening.as_str())) {
            return Some(start - opening.len());
        }
        let found = find()?;
        if let Some(opening) = self.text.get(found..start) {
            openings.insert(role.to_owned(), opening.to_owned());
        }
        Some(found)
    }
}

/// The end of the prefix of a rendering that truncation keeps: the system prompt, the template's own too, with the
/// token that ends it. 0: there is none before the first other message.
pub fn system_end(messages: &[Message], render: Render<'_>, markers: Markers<'_>) -> Result<usize, RowError> {
    let mut plain: Vec<Map<String, Value>> = messages.iter().map(|message| message.fields.clone()).collect();
    let base = render(&plain)?.text;
    let sentinels = sentinels(&base);
    let is_opening = |message: &Message| ["system", "developer"].contains(&message.role());
    let first = messages.iter().position(|message| !is_opening(message)).unwrap_or(messages.len());
    let mut start = |i: usize| -> Result<Option<Range<usize>>, RowError> {
        if i >= plain.len() {
            return Ok(None);
        }
        Ok(locate(&base, &mut plain, i, &sentinels, render)?.0.map(|located| located.range))
    };
    let Some(other) = start(first)? else { return Ok(0) };
    let head = &base[..other.start];
    let ends = markers.end_of_turn.iter().filter_map(|token| head.rfind(token.as_str()).map(|at| at + token.len()));
    match ends.max() {
        Some(end) => Ok(end),
        None if first == 0 => Ok(0),
        None => Ok(start(0)?.map(|system| system.end).filter(|&end| end <= other.start).unwrap_or(0)),
    }
}

/// The fields of a message that a template may show, as JSON pointers; true: the field is a text. Only fields that are
/// there: what a call lacks, a template shows by text of its own.
pub(crate) fn shown_fields(message: &Map<String, Value>) -> Vec<(String, bool)> {
    let mut fields = Vec::new();
    for name in REASONING {
        if message.get(name).and_then(Value::as_str).is_some_and(|text| !text.trim().is_empty()) {
            fields.push((format!("/{name}"), true));
        }
    }
    let calls = message.get("tool_calls").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    match message.get("content") {
        Some(Value::String(text)) if !text.is_empty() || calls.is_empty() => {
            fields.push(("/content".to_owned(), true));
        }
        _ => {}
    }
    for (i, call) in calls.iter().enumerate() {
        let (place, function) = match call.get("function") {
            Some(function) => (format!("/tool_calls/{i}/function"), function),
            None => (format!("/tool_calls/{i}"), call),
        };
        if function.get("name").is_some() {
            fields.push((format!("{place}/name"), true));
        }
        if let Some(arguments) = function.get("arguments") {
            fields.push((format!("{place}/arguments"), arguments.is_string()));
        }
    }
    fields
}

/// The value of a field that is replaced by a sentinel of either kind.
pub(crate) fn replacement(is_text: bool, sentinel: &str, kind: usize) -> Value {
    if is_text { json!(sentinel) } else { json!({ sentinel: kind }) }
}

/// The place of a message that is known so far, with that of a further field.
fn join(before: Option<Located>, field: Located) -> Located {
    let Some(before) = before else { return field };
    Located {
        calls_tools: if field.range.end > before.range.end { field.calls_tools } else { before.calls_tools },
        range: before.range.start.min(field.range.start)..before.range.end.max(field.range.end),
    }
}

fn too_often(i: usize, times: usize) -> RowError {
    RowError::new(RowReason::Span, format!("message {}: the template shows one field {times} times", i + 1))
}

/// Finds message `i` of the rendering `base`. `None`: the template shows nothing of it, or the place of what it shows
/// cannot be determined. With it the fields that the rendering does not show. `messages` is returned as it was.
fn locate(
    base: &str,
    messages: &mut [Map<String, Value>],
    i: usize,
    sentinels: &[String; 2],
    render: Render<'_>,
) -> Result<Place, RowError> {
    let original = messages[i].clone();
    let mut found: Option<Located> = None;
    let mut hidden = Vec::new();
    for (pointer, is_text) in shown_fields(&original) {
        let mut renderings = Vec::with_capacity(2);
        for (kind, sentinel) in sentinels.iter().enumerate() {
            messages[i] = replaced(&original, &pointer, replacement(is_text, sentinel, kind));
            let rendering = render(messages);
            messages[i] = original.clone();
            renderings.push(rendering?.text);
        }
        if renderings.iter().zip(sentinels).all(|(rendering, sentinel)| !rendering.contains(sentinel.as_str())) {
            hidden.push(pointer);
            continue;
        }
        let is_name = pointer.ends_with("/name");
        if let Some(range) = difference(base, &renderings, sentinels, is_name, i)? {
            let calls_tools = pointer.starts_with("/tool_calls");
            found = Some(join(found, Located { range, calls_tools }));
        }
    }
    Ok((found, hidden))
}

/// A message with another value of one of its fields.
pub(crate) fn replaced(message: &Map<String, Value>, pointer: &str, replacement: Value) -> Map<String, Value> {
    let mut changed = Value::Object(message.clone());
    *changed.pointer_mut(pointer).expect("the field is there") = replacement;
    let Value::Object(changed) = changed else { unreachable!("an object stays an object") };
    changed
}

/// The byte at which a message that calls tools differs from a plain answer in its place, given everything before it:
/// what a template writes around the calls is the assistant's own text. `None`: the template rejects a plain answer
/// there, or writes what comes before differently when the conversation ends with it.
fn plain_answer_start(
    base: &str,
    earlier: &[Map<String, Value>],
    before: Option<usize>,
    sentinels: &[String; 2],
    render: Render<'_>,
) -> Option<usize> {
    let mut messages = earlier.to_vec();
    messages.push(Map::new());
    let mut start = base.len();
    for sentinel in sentinels {
        *messages.last_mut().expect("just pushed") = Message::new("assistant", sentinel).fields;
        let text = render(&messages).ok()?.text;
        start = start.min(prefix_length(base, &text));
        text.find(sentinel.as_str()).filter(|&at| at == start)?;
    }
    (start >= before?).then_some(start)
}

/// The bytes of `base` that depend on a field, given the renderings with either sentinel in its place. `None`: the
/// field is not shown, or is a tool's name that is shown in other messages too.
fn difference(
    base: &str,
    renderings: &[String],
    sentinels: &[String; 2],
    is_name: bool,
    i: usize,
) -> Result<Option<Range<usize>>, RowError> {
    let mut start = base.len();
    let mut tail = base.len();
    for (rendering, sentinel) in renderings.iter().zip(sentinels) {
        match rendering.matches(sentinel.as_str()).count() {
            0 => return Ok(None),
            1 => {}
            _ if is_name => return Ok(None),
            times => return Err(too_often(i, times)),
        }
        start = start.min(prefix_length(base, rendering));
        tail = tail.min(suffix_length(base, rendering));
    }
    if start + tail > base.len() {
        let problem = format!("message {}: what stands before and after it overlaps", i + 1);
        return Err(RowError::new(RowReason::Span, problem));
    }
    Ok(Some(start..base.len() - tail))
}

/// Bytes, cut back to a character's border.
fn prefix_length(a: &str, b: &str) -> usize {
    let mut n = a.bytes().zip(b.bytes()).take_while(|(x, y)| x == y).count();
    while !a.is_char_boundary(n) {
        n -= 1;
    }
    n
}

fn suffix_length(a: &str, b: &str) -> usize {
    let mut n = a.bytes().rev().zip(b.bytes().rev()).take_while(|(x, y)| x == y).count();
    while !a.is_char_boundary(a.len() - n) {
        n -= 1;
    }
    n
}

/// The first byte of the assistant's own text: after the generation prompt. `before` is the end of the previous
/// message, `None` if unknown; between it and `start` is only text of the template.
fn turn_begin(base: &str, before: Option<usize>, start: usize, prompt: &str) -> usize {
    let header = &base[before.unwrap_or(0)..start];
    let offset = start - header.len();
    // A model that always thinks has the opening of the thought in its prompt, but not in its earlier turns: there, the
    // header ends with a part of the prompt.
    let after_prompt = header.rfind(prompt).map(|at| at + prompt.len());
    let after_part = || {
        let lengths = (1..prompt.len()).rev().filter(|&n| prompt.is_char_boundary(n));
        lengths.into_iter().any(|n| header.ends_with(&prompt[..n])).then_some(header.len())
    };
    let Some(begin) = after_prompt.or_else(after_part) else { return start };
    let begin = begin + empty_thought(&header[begin..], prompt);
    // Without knowing where the previous message ends, only a prompt right before this one can be trusted.
    if before.is_none() { start } else { offset + begin }
}

/// The same for templates without generation prompt: an answer begins after what is between a question and its
/// answer.
fn after_opening(base: &str, before: Option<usize>, start: usize, markers: Markers<'_>) -> Option<usize> {
    let inserted = base[before?..start].strip_prefix(markers.answer_opening)?;
    Some(start - inserted.len() + empty_thought(inserted, markers.answer_opening))
}

/// Bytes at the beginning of the text that are a thought without content, or close the one that the prompt has opened,
/// with the white space around them.
fn empty_thought(text: &str, prompt: &str) -> usize {
    let trimmed = text.trim_start();
    let after = THOUGHTS.iter().find_map(|(open, close)| {
        let inside = match trimmed.strip_prefix(open) {
            Some(rest) => rest,
            None if prompt.trim_end().ends_with(open) => trimmed,
            None => return None,
        };
        inside.trim_start().strip_prefix(close)
    });
    after.map_or(0, |rest| text.len() - rest.trim_start().len())
}

/// The end of the first end-of-turn token after the message and before `limit`; without one, the end of the message.
fn turn_end(base: &str, own: &Located, limit: usize, markers: Markers<'_>) -> usize {
    let tail = &base[own.range.end..limit];
    let first = |tokens: &[String]| {
        let places = tokens.iter().filter_map(|token| tail.find(token.as_str()).map(|at| (at, at + token.len())));
        places.min_by_key(|&(at, end)| (at, std::cmp::Reverse(end))).map(|(_, end)| own.range.end + end)
    };
    let fallback = || if own.calls_tools { first(markers.special) } else { None };
    first(markers.end_of_turn).or_else(fallback).unwrap_or(own.range.end)
}
