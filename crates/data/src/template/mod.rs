//! Chat templates: the model's own Jinja text, rendered byte for byte as transformers renders it.
//!
//! A template is untrusted: it runs without files, without network, under a fuel limit, and its clock is pinned. Knows
//! no tokens and no labels.

pub mod families;
mod generation;
mod python;
mod reasoning;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use jiff::civil::DateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::{Map, Value as Json};

use crate::error::{DataError, RowError, RowReason};

/// Instructions one rendering may execute: a conversation of a thousand messages needs about a million.
const FUEL: u64 = 50_000_000;

/// What is rendered.
#[derive(Clone, Copy, Debug)]
pub struct Conversation<'a> {
    /// Objects with `role`, `content` and whatever else the template reads.
    pub messages: &'a [Map<String, Json>],
    /// Function definitions, or nothing.
    pub tools: Option<&'a Json>,
}

/// A rendered conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    pub text: String,
    /// Bytes of `text` that the template's own `{% generation %}` blocks enclose.
    pub generation: Vec<Range<usize>>,
}

/// A compiled chat template with everything but the conversation filled in.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Special tokens by name (`bos_token`, …) and further variables (`enable_thinking`, …).
    variables: Map<String, Json>,
    marks: bool,
    clock: Readings,
}

/// What was read off the clock: format and reading.
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
        let mut environment = environment(clock, readings.clone());
        environment
            .add_template_owned("chat", rewritten.unwrap_or_else(|| source.to_owned()))
            .map_err(|e| DataError::invalid("chat template", describe(&e)))?;
        Ok(ChatTemplate { environment, variables, marks, clock: readings })
    }

    /// What renderings have read off the clock so far: each format with its reading.
    pub fn clock_readings(&self) -> BTreeMap<String, String> {
        self.clock.lock().expect("nobody panics while it is held").clone()
    }

    /// Whether the template marks the assistant's text itself.
    pub fn has_generation_marks(&self) -> bool {
        self.marks
    }

    /// The text of a conversation; with `generation_prompt`, the assistant's turn is opened at its end.
    pub fn render(&self, conversation: Conversation<'_>, generation_prompt: bool) -> Result<Rendered, RowError> {
        let refused = |e: Error| RowError::new(RowReason::Template, describe(&e));
        let mut variables: Vec<(&str, Value)> =
            self.variables.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value)))).collect();
        let messages = reasoning::under_every_name(conversation.messages);
        variables.push(("messages", Value::from(Serde(&*messages))));
        variables.push(("tools", conversation.tools.map_or(Value::from(()), |tools| Value::from(Serde(tools)))));
        if !self.variables.contains_key("documents") {
            variables.push(("documents", Value::from(())));
        }
        variables.push(("add_generation_prompt", Value::from(generation_prompt)));
        let template = self.environment.get_template("chat").expect("the template was added when it was compiled");
        let text = template.render(Value::from_pairs(variables)).map_err(refused)?;
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
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the standard delimiters are valid"));
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, _, value| {
        out.write_str(&python::print(value)?).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
    });
    environment.add_filter("tojson", |value: &Value, options: Kwargs| python::tojson(value, options));
    environment.add_filter("string", |value: &Value| python::print(value));
    environment.add_filter(generation::FILTER, generation::mark);
    // jinja2's undefined is empty, and so it has a length.
    for name in ["length", "count"] {
        environment.add_filter(name, |value: &Value| match value.is_undefined() {
            true => Ok(0),
            false => minijinja::filters::length(value),
        });
    }
    // The engine's own test says that `none` can be iterated; jinja2 says that it cannot.
    environment.add_test("iterable", |value: &Value| {
        !value.is_none() && !value.is_undefined() && (value.as_str().is_some() || value.try_iter().is_ok())
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", move |format: &str| -> Result<String, Error> {
        let reading = read_clock(format, clock)
            .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}")))?;
        readings.lock().expect("nobody panics while it is held").insert(format.to_owned(), reading.clone());
        Ok(reading)
    });
    environment
}
