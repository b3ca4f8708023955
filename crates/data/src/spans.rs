//! Finds the trained text of a conversation in its rendering.
//!
//! The sentinel method: the conversation is rendered, then once more per message and field with that field replaced by
//! each of two sentinels. What all three renderings share before and after the difference comes from the template; the
//! rest is the message's text. No text of a message is searched for, and no prefix of the conversation is rendered,
//! because real templates print a message differently when another follows. Knows no tokens and no template language.

use std::ops::Range;

use serde_json::{Map, Value, json};

use crate::dataset::REASONING;
use crate::error::{RowError, RowReason};
use crate::template::Rendered;

/// One message and what is asked of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// What the template sees: `role`, `content`, …
    pub fields: Map<String, Value>,
    /// Weight of its tokens in the loss; 0 = not trained; `None`: 1 for the assistant, 0 for everybody else.
    pub weight: Option<f32>,
}

impl Message {
    pub fn new(role: &str, content: &str) -> Self {
        let fields = Map::from_iter([("role".to_owned(), json!(role)), ("content".to_owned(), json!(content))]);
        Message { fields, weight: None }
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

/// What the method must know of a template and its tokenizer.
#[derive(Clone, Copy)]
pub struct Markers<'a> {
    /// What opens the assistant's turn.
    pub generation_prompt: &'a str,
    /// What is between a user's message and a plain answer; read where there is no generation prompt.
    pub answer_opening: &'a str,
    /// Special tokens that end a turn.
    pub end_of_turn: &'a [String],
    /// All special tokens.
    pub special: &'a [String],
}

/// Two texts without common first or last character, which no template trims or splits and which `base` does not hold.
pub(crate) fn sentinels(base: &str) -> [String; 2] {
    let absent = |first: &str, last: &str| {
        let mut numbered = (0..).map(|n: u32| format!("{first}{n}{last}"));
        numbered.find(|text| !base.contains(text)).expect("a finite text lacks some number")
    };
    [absent("Qv7nulla", "foxJ3b"), absent("Xz4lantern", "wH8k")]
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

/// Where one message is: from the first to the last byte that depends on it.
#[derive(Clone, Debug)]
struct Located {
    range: Range<usize>,
    /// Whether tool calls are the last that it shows.
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
    let mut hidden: Vec<Option<Vec<String>>> = vec![None; messages.len()];
    if !base.generation.is_empty() && by_marks {
        let spans = base.generation.iter().map(|range| TrainedSpan { range: range.clone(), weight: 1.0 });
        return Ok(Found { spans: spans.collect(), text: base.text, hidden });
    }
    // Only trained messages and their neighbours are looked for.
    let sentinels = sentinels(&base.text);
    let mut located: Vec<Option<Located>> = Vec::with_capacity(messages.len());
    for i in 0..messages.len() {
        let near = wanted(i) || (i > 0 && wanted(i - 1)) || (i + 1 < messages.len() && wanted(i + 1));
        located.push(if near {
            let (place, fields) = locate(&base.text, &mut plain, i, &sentinels, render)?;
            hidden[i] = Some(fields);
            place
        } else {
            None
        });
    }
    let mut spans: Vec<TrainedSpan> = Vec::new();
    for (i, (message, weight)) in messages.iter().zip(weights).enumerate() {
        let Some(weight) = *weight else { continue };
        let disagreement = |what: &str| RowError::new(RowReason::Span, format!("message {}: {what}", i + 1));
        let Some(own) = &located[i] else {
            return Err(disagreement("the template does not show it"));
        };
        if spans.last().is_some_and(|last| own.range.start < last.range.end) {
            return Err(disagreement("its text depends on an earlier message's place"));
        }
        let marked = base.generation.iter().find(|range| range.start <= own.range.start && own.range.end <= range.end);
        let range = match marked {
            Some(range) => range.clone(),
            None => {
                let before = match i {
                    0 => Some(0),
                    _ => located[i - 1].as_ref().map(|m| m.range.end).filter(|&end| end <= own.range.start),
                };
                let after_user = i > 0 && messages[i - 1].fields.get("role").is_some_and(|role| role == "user");
                let begin = if !message.is_assistant() {
                    own.range.start
                } else if !markers.generation_prompt.is_empty() {
                    turn_begin(&base.text, before, own.range.start, markers.generation_prompt)
                } else if after_user && let Some(begin) = after_opening(&base.text, before, own.range.start, markers) {
                    begin
                } else if own.calls_tools {
                    let earlier = &plain[..i];
                    plain_answer_start(&base.text, earlier, before, &sentinels, render)
                        .ok_or_else(|| disagreement("where its tool calls begin cannot be determined"))?
                } else {
                    own.range.start
                };
                let next = located.get(i + 1).and_then(Option::as_ref).map(|m| m.range.start);
                let limit = next.filter(|&start| start >= own.range.end).unwrap_or(base.text.len());
                begin..turn_end(&base.text, own, limit, markers)
            }
        };
        if spans.last().is_some_and(|last| range.start < last.range.end) || range.start > range.end {
            return Err(disagreement("it cannot be distinguished from an earlier message"));
        }
        spans.push(TrainedSpan { range, weight });
    }
    Ok(Found { text: base.text, spans, hidden })
}

/// Where the part of a rendering ends that survives when its beginning is cut off: the system prompt, the template's
/// own too, with the token that ends it. 0: there is none before the first other message.
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

/// The fields of a message that a template may show, as JSON pointers with the values that replace them. Only fields
/// that are there: what a call lacks, a template shows by text of its own.
pub(crate) fn shown_fields(message: &Map<String, Value>, sentinels: &[String; 2]) -> Vec<(String, [Value; 2])> {
    let texts = sentinels.clone().map(Value::from);
    let mut fields = Vec::new();
    for name in REASONING {
        if message.get(name).and_then(Value::as_str).is_some_and(|text| !text.trim().is_empty()) {
            fields.push((format!("/{name}"), texts.clone()));
        }
    }
    let calls = message.get("tool_calls").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    match message.get("content") {
        Some(Value::String(text)) if !text.is_empty() || calls.is_empty() => {
            fields.push(("/content".to_owned(), texts.clone()));
        }
        _ => {}
    }
    for (i, call) in calls.iter().enumerate() {
        let (place, function) = match call.get("function") {
            Some(function) => (format!("/tool_calls/{i}/function"), function),
            None => (format!("/tool_calls/{i}"), call),
        };
        if function.get("name").is_some() {
            fields.push((format!("{place}/name"), texts.clone()));
        }
        if let Some(arguments) = function.get("arguments") {
            let replacement = match arguments {
                Value::String(_) => texts.clone(),
                _ => [json!({ sentinels[0].as_str(): 0 }), json!({ sentinels[1].as_str(): 1 })],
            };
            fields.push((format!("{place}/arguments"), replacement));
        }
    }
    fields
}

/// Finds message `i` of the rendering `base`. `None`: the template shows nothing of it, or the place of what it shows
/// cannot be determined. With it the fields that the rendering does not show. `messages` is returned as it was.
fn locate(
    base: &str,
    messages: &mut [Map<String, Value>],
    i: usize,
    sentinels: &[String; 2],
    render: Render<'_>,
) -> Result<(Option<Located>, Vec<String>), RowError> {
    let original = messages[i].clone();
    let mut found: Option<Located> = None;
    let mut hidden = Vec::new();
    for (pointer, replacements) in shown_fields(&original, sentinels) {
        let mut renderings = Vec::with_capacity(2);
        for replacement in replacements {
            messages[i] = replaced(&original, &pointer, replacement);
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
            found = Some(match found {
                None => Located { range, calls_tools },
                Some(before) => Located {
                    calls_tools: if range.end > before.range.end { calls_tools } else { before.calls_tools },
                    range: before.range.start.min(range.start)..before.range.end.max(range.end),
                },
            });
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

/// Where a message that calls tools parts from a plain answer in its place, given everything before it: what a template
/// writes around the calls is the assistant's own text. `None`: the template rejects a plain answer there, or writes
/// what comes before differently when the conversation ends with it.
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
        start = start.min(common_prefix(base, &text));
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
            times => {
                let problem = format!("message {}: the template shows one field {times} times", i + 1);
                return Err(RowError::new(RowReason::Span, problem));
            }
        }
        start = start.min(common_prefix(base, rendering));
        tail = tail.min(common_suffix(base, rendering));
    }
    if start + tail > base.len() {
        let problem = format!("message {}: what stands before and after it overlaps", i + 1);
        return Err(RowError::new(RowReason::Span, problem));
    }
    Ok(Some(start..base.len() - tail))
}

/// Bytes, cut back to a character's border.
fn common_prefix(a: &str, b: &str) -> usize {
    let mut n = a.bytes().zip(b.bytes()).take_while(|(x, y)| x == y).count();
    while !a.is_char_boundary(n) {
        n -= 1;
    }
    n
}

fn common_suffix(a: &str, b: &str) -> usize {
    let mut n = a.bytes().rev().zip(b.bytes().rev()).take_while(|(x, y)| x == y).count();
    while !a.is_char_boundary(a.len() - n) {
        n -= 1;
    }
    n
}

/// Where the assistant begins to speak: after the generation prompt. `before` is the end of the previous message,
/// `None` where that is not known; between it and `start` is only text of the template.
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
