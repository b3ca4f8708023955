//! A problem in the user's input: place, value, expectation, hint. Knows how to print itself, not how it is found.

use serde_json::{Value, json};
use std::fmt;
use std::ops::Range;

/// A position in a named text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// Name of the text: a file, or `command line`.
    pub source: String,
    /// Number of the line, from 1.
    pub line: usize,
    /// Number of the column in characters, from 1.
    pub column: usize,
    /// Byte range in the text.
    pub bytes: Range<usize>,
    /// Characters to underline on the line.
    pub width: usize,
    /// The whole line, without its end.
    pub line_text: String,
}

/// The option in question and, where it is in a text, the position there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptionPosition {
    /// The path of the option, such as `distributed.num_nodes` or `datasets[0].path`. Empty for the whole text.
    pub path: String,
    /// Absent for values that come from no text (a Python dict, a missing option).
    pub location: Option<Location>,
}

/// The kind of a problem: wrong input, or a request for something that is not built yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Availability {
    /// The input is wrong and will stay wrong.
    Mistake,
    /// The input is right, but this version cannot do it.
    NotYet,
}

/// One thing that the user has to change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// A mistake, or a request that comes too early.
    pub availability: Availability,
    /// The option and its position.
    pub place: OptionPosition,
    /// The fault, with the value and what was expected, in one sentence without a full stop.
    pub message: String,
    /// Advice on how to correct the input.
    pub hint: Option<String>,
}

impl Problem {
    /// The problem as a JSON object: `path`, `source`, `line`, `column`, `start`, `end` (bytes), `message`, `hint`,
    /// `not_available_yet`; unknown parts are null.
    pub fn to_json(&self) -> Value {
        let location = self.place.location.as_ref();
        json!({
            "path": self.place.path,
            "source": location.map(|at| &at.source),
            "line": location.map(|at| at.line),
            "column": location.map(|at| at.column),
            "start": location.map(|at| at.bytes.start),
            "end": location.map(|at| at.bytes.end),
            "message": self.message,
            "hint": self.hint,
            "not_available_yet": self.availability == Availability::NotYet,
        })
    }
}

impl fmt::Display for Problem {
    /// `file:line:column: message`, the line with the place underlined, and the hint.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place.location {
            None => write!(out, "{}", self.message)?,
            Some(at) => {
                write!(out, "{}:{}:{}: {}", at.source, at.line, at.column, self.message)?;
                let number = at.line.to_string();
                let gutter = " ".repeat(number.len());
                // Tabs are kept before the mark, so that it stays below its place.
                let before = at.line_text.chars().take(at.column - 1);
                let indent: String = before.map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
                write!(out, "\n  {number} | {}", at.line_text)?;
                write!(out, "\n  {gutter} | {indent}{}", "^".repeat(at.width))?;
            }
        }
        match &self.hint {
            Some(hint) => write!(out, "\n  hint: {hint}"),
            None => Ok(()),
        }
    }
}

/// All problems in the order of the text, each as its [`Display`](fmt::Display) form, after one line with their number.
pub fn render_problems(problems: &[Problem]) -> String {
    let mut sorted: Vec<&Problem> = problems.iter().collect();
    sorted.sort_by_key(|problem| problem.place.location.as_ref().map(|at| (at.source.as_str(), at.bytes.start)));
    let title = match problems.len() {
        1 => "1 problem in the configuration".to_string(),
        count => format!("{count} problems in the configuration"),
    };
    let bodies = sorted.iter().map(|problem| problem.to_string());
    std::iter::once(title).chain(bodies).collect::<Vec<_>>().join("\n\n")
}
