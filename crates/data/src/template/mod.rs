//! Chat templates: the model's own Jinja text, rendered byte for byte as transformers renders it.
//!
//! A template is untrusted: it runs without files, without network, with a pinned clock, and within bounds of
//! instructions, work, texts and depth ([`allowance`]). Knows no tokens and no labels.

mod allowance;
mod calls;
mod compiled;
#[cfg(test)]
mod differential;
pub mod families;
mod generation;
mod guarded;
mod operators;
pub(crate) mod parts;
mod python;
mod reasoning;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use jiff::civil::DateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::{Map, Value as Json};

use self::allowance::{bounded, charge, check_text, measure, part, refused, searched};
use self::calls::CallForm;
use self::compiled::Compiled;
use crate::error::{DataError, RowError, RowReason};
use crate::guard::guarded;
use crate::template::parts::with_parts;

/// Bytes of what a template says itself, in an error or as a format of the clock, and different formats.
const MOST_SAID: usize = 4096;
const MOST_FORMATS: usize = 256;

/// The conversation that a template renders.
#[derive(Clone, Copy, Debug)]
pub struct Conversation<'a> {
    /// Objects with `role`, `content` and whatever else the template reads.
    pub messages: &'a [Map<String, Json>],
    /// Function definitions that the template may show.
    pub tools: Option<&'a Json>,
}

/// A rendered conversation with the assistant's parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    pub text: String,
    /// Bytes of `text` that the template's own `{% generation %}` blocks enclose.
    pub generation: Vec<Range<usize>>,
}

/// A compiled chat template with everything but the conversation filled in.
pub struct ChatTemplate {
    environment: Environment<'static>,
    compiled: Compiled,
    /// Special tokens by name (`bos_token`, …) and further variables (`enable_thinking`, …).
    variables: Map<String, Json>,
    marks: bool,
    clock: Readings,
    /// Found when the first call is rendered.
    call_form: OnceLock<CallForm>,
    /// True if it takes contents as lists of parts alone; found when the first conversation is rendered.
    lists: OnceLock<bool>,
}

/// Values read from the clock: each format with its reading.
type Readings = Arc<Mutex<BTreeMap<String, String>>>;

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("variables", &self.variables).field("marks", &self.marks).finish()
    }
}

impl ChatTemplate {
    /// Compiles `source`. `variables` are visible to the template by name; `clock` is what `strftime_now` reads.
    /// Errors: the text is no Jinja.
    pub fn new(source: &str, variables: Map<String, Json>, clock: DateTime) -> Result<Self, DataError> {
        let rewritten = generation::rewrite(source);
        let marks = rewritten.is_some();
        let readings = Readings::default();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let syntax = syntax.expect("the standard delimiters are valid");
        let compiled = Compiled::new(rewritten.as_deref().unwrap_or(source), &syntax)
            .map_err(|e| DataError::invalid("chat template", describe(&e)))?;
        Ok(ChatTemplate {
            environment: environment(clock, readings.clone()),
            compiled,
            variables,
            marks,
            clock: readings,
            call_form: OnceLock::new(),
            lists: OnceLock::new(),
        })
    }

    /// Values that renderings have read from the clock so far: each format with its reading.
    pub fn clock_readings(&self) -> BTreeMap<String, String> {
        self.clock.lock().expect("no holder of the lock panics").clone()
    }

    /// True if the template marks the assistant's text itself.
    pub fn has_generation_marks(&self) -> bool {
        self.marks
    }

    /// The text of a conversation; with `generation_prompt`, the assistant's turn is opened at its end. Tool calls reach
    /// the template in the form that it takes, whichever of them a conversation has.
    pub fn render(&self, conversation: Conversation<'_>, generation_prompt: bool) -> Result<Rendered, RowError> {
        self.render_with(conversation, generation_prompt, None)
    }

    /// The same with further variables, which win over the template's own.
    pub(crate) fn render_with(
        &self,
        conversation: Conversation<'_>,
        generation_prompt: bool,
        further: Option<&Map<String, Json>>,
    ) -> Result<Rendered, RowError> {
        if !conversation.messages.iter().any(|message| message.contains_key("tool_calls")) {
            return self.render_as_given(conversation, generation_prompt, further);
        }
        let form = self.call_form.get_or_init(|| {
            CallForm::of(&|messages, tools| {
                self.render_as_given(Conversation { messages, tools }, false, None).map(|rendered| rendered.text)
            })
        });
        let messages = form.write(conversation.messages);
        self.render_as_given(Conversation { messages: &messages, ..conversation }, generation_prompt, further)
    }

    /// Returns true if contents reach it as lists of parts alone: it cannot write a text, but one in a list.
    fn takes_lists(&self) -> bool {
        const PROBE: &str = "Qv7probe";
        let shows = |content: Json| {
            let message = Map::from_iter([("role".to_owned(), "user".into()), ("content".to_owned(), content)]);
            let conversation = Conversation { messages: &[message], tools: None };
            self.render_parts(conversation, false, None).is_ok_and(|rendered| rendered.text.contains(PROBE))
        };
        *self.lists.get_or_init(|| !shows(PROBE.into()) && shows(serde_json::json!([{"type": "text", "text": PROBE}])))
    }

    fn render_as_given(
        &self,
        conversation: Conversation<'_>,
        generation_prompt: bool,
        further: Option<&Map<String, Json>>,
    ) -> Result<Rendered, RowError> {
        match with_parts(conversation.messages, self.takes_lists()) {
            None => self.render_parts(conversation, generation_prompt, further),
            Some(messages) => {
                let conversation = Conversation { messages: &messages, ..conversation };
                self.render_parts(conversation, generation_prompt, further)
            }
        }
    }

    /// Renders messages whose contents are as the template takes them.
    fn render_parts(
        &self,
        conversation: Conversation<'_>,
        generation_prompt: bool,
        further: Option<&Map<String, Json>>,
    ) -> Result<Rendered, RowError> {
        let reported = |e: Error| RowError::new(RowReason::Template, describe(&e));
        allowance::go_on().map_err(reported)?;
        let mut variables: Vec<(&str, Value)> =
            self.variables.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value)))).collect();
        let further = further.into_iter().flatten();
        variables.extend(further.map(|(name, value)| (name.as_str(), Value::from(Serde(value)))));
        let messages = reasoning::under_every_name(conversation.messages);
        variables.push(("messages", Value::from(Serde(&*messages))));
        variables.push(("tools", conversation.tools.map_or(Value::from(()), |tools| Value::from(Serde(tools)))));
        if !self.variables.contains_key("documents") {
            variables.push(("documents", Value::from(())));
        }
        variables.push(("add_generation_prompt", Value::from(generation_prompt)));
        let bytes = conversation.messages.iter().flat_map(Map::values).chain(conversation.tools).map(weight).sum();
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(allowance::fuel(conversation.messages.len(), bytes)));
        let variables = Value::from_pairs(variables);
        let render = || guarded(|| self.compiled.render(&environment, variables));
        let rendered = allowance::during(bytes, render);
        let gave_up =
            |panic: String| RowError::new(RowReason::Template, format!("the template engine gave up: {panic}"));
        let text = rendered.map_err(gave_up)?.map_err(reported)?;
        if !self.marks {
            return Ok(Rendered { text, generation: Vec::new() });
        }
        let source = serde_json::to_string(conversation.messages).expect("messages are plain JSON");
        if generation::contains_mark(&source) {
            return Err(RowError::new(RowReason::Template, "the messages hold noncharacters U+FDD0 or U+FDD1"));
        }
        let (text, generation) = generation::take_marks(&text)
            .ok_or_else(|| RowError::new(RowReason::Template, "generation blocks are nested"))?;
        Ok(Rendered { text, generation })
    }
}

/// A value as Python's `json.dumps` writes it; one that is nested too deeply, without blanks.
pub(crate) fn json_dumps(value: &Json) -> String {
    allowance::during(weight(value), || python::dumps(value)).unwrap_or_else(|_| value.to_string())
}

/// Bytes of a JSON value, roughly as it is written.
fn weight(value: &Json) -> usize {
    match value {
        Json::String(text) => text.len() + 2,
        Json::Array(list) => 2 + list.iter().map(weight).sum::<usize>(),
        Json::Object(fields) => 2 + fields.iter().map(|(name, value)| name.len() + 4 + weight(value)).sum::<usize>(),
        _ => 4,
    }
}

/// True if a value is a namespace or holds it, in a list or in another namespace: it would never be freed.
fn holds(value: &Value, namespace: &Value) -> bool {
    let inside = |item: &Value| holds(item, namespace);
    if value.as_object().is_none() || minijinja::tests::is_sameas(value, namespace) {
        return value.as_object().is_some();
    }
    let Ok(mut items) = value.try_iter() else { return false };
    match value.kind() {
        ValueKind::Map => items.any(|key| value.get_item(&key).is_ok_and(|item| inside(&item))),
        _ => items.any(|item| inside(&item)),
    }
}

/// The clock's reading when the user pins none: now, in UTC, taken once per run.
pub fn clock_now() -> DateTime {
    jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC).datetime()
}

/// A moment as `strftime_now` writes it.
pub(crate) fn read_clock(format: &str, clock: DateTime) -> Result<String, jiff::Error> {
    jiff::fmt::strtime::format(format, clock)
}

fn describe(error: &Error) -> String {
    let text = match error.detail() {
        Some(detail) => detail.to_owned(),
        None => error.kind().to_string(),
    };
    match error.line() {
        Some(line) => format!("line {line}: {text}"),
        None => text,
    }
}

fn environment(clock: DateTime, readings: Readings) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    guarded::install(&mut environment);
    environment.set_formatter(|out, _, value| {
        let text = python::print(value)?;
        check_text(text.len())?;
        out.write_str(&text).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
    });
    environment.add_filter(operators::OPERAND, |value: Value| measure(&value).map(|_| value));
    environment.add_filter(operators::SEARCHED, searched);
    environment.add_filter(operators::RESULT, bounded);
    environment.add_filter(operators::PART, part);
    environment.add_filter(operators::FACTOR, |value: Value| match value.is_tuple() {
        true => Ok(Value::from(value.try_iter()?.collect::<Vec<_>>())),
        false => Ok::<_, Error>(value),
    });
    environment.add_filter(operators::KEPT, |value: Value, namespace: &Value| {
        measure(&value)?;
        if holds(&value, namespace) { Err(refused("the template puts a namespace into itself")) } else { Ok(value) }
    });
    environment.add_filter("tojson", |value: &Value, options: Kwargs| {
        let text = python::tojson(value, options)?;
        check_text(text.len()).map(|()| text)
    });
    environment.add_filter("string", |value: &Value| {
        let text = python::print(value)?.into_owned();
        check_text(text.len()).map(|()| text)
    });
    environment.add_filter(generation::FILTER, |value: &Value| {
        let text = value.as_str().ok_or_else(|| refused("a generation block holds text"))?;
        check_text(text.len()).map(|()| generation::mark(text))
    });
    // jinja2's undefined is empty, and so it has a length.
    for name in ["length", "count"] {
        environment.add_filter(name, |value: &Value| match value.is_undefined() {
            true => Ok(0),
            false => {
                charge(value.as_str().map_or(1, str::len) / 8)?;
                minijinja::filters::length(value)
            }
        });
    }
    // The engine's own test says that `none` can be iterated; jinja2 says that it cannot.
    environment.add_test("iterable", |value: &Value| {
        !value.is_none() && !value.is_undefined() && (value.as_str().is_some() || value.try_iter().is_ok())
    });
    environment.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        let said: String = python::print(message)?.chars().take(MOST_SAID).collect();
        Err(refused(said))
    });
    environment.add_function("strftime_now", move |format: &str| -> Result<String, Error> {
        if format.len() > MOST_SAID {
            return Err(refused("strftime_now: the format is too long"));
        }
        let reading = read_clock(format, clock).map_err(|e| refused(format!("strftime_now: {e}")))?;
        let mut readings = readings.lock().expect("no holder of the lock panics");
        if readings.len() >= MOST_FORMATS && !readings.contains_key(format) {
            return Err(refused("strftime_now: the template reads the clock in too many ways"));
        }
        readings.insert(format.to_owned(), reading.clone());
        Ok(reading)
    });
    environment
}
