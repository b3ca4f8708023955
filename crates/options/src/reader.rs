//! Reads a tree by option rows and collects problems with their places. Knows no option by name.

use crate::home::{self, Unexpanded};
use crate::kind::{Kind, Limits};
use crate::nearest;
use crate::problem::{Availability, Location, OptionPosition, Problem};
use crate::row::Row;
use crate::source::{Source, Span};
use crate::tree::{Key, Node, Tree};
use crate::value::{Fault, OptionValue};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// Collects the problems of one configuration.
#[derive(Debug, Default)]
pub struct Reader {
    sources: Vec<Source>,
    problems: Vec<Problem>,
    written: BTreeMap<String, Option<Span>>,
    faulty: BTreeSet<String>,
    defaults: Vec<(&'static str, &'static str)>,
    path: String,
}

/// The options that the user wrote, with their positions, for problems that are found later.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Written {
    sources: Vec<Source>,
    spans: BTreeMap<String, Option<Span>>,
}

impl Written {
    /// True if the user gave this option a value. Paths are spelled as in [`OptionPosition`].
    pub fn contains(&self, path: &str) -> bool {
        self.spans.contains_key(path)
    }

    /// A mistake at an option, with the position of its value if it was written in a text.
    pub fn mistake(&self, path: &str, message: impl Into<String>, hint: Option<String>) -> Problem {
        let span = self.spans.get(path).copied().flatten();
        let location = span.map(|span| self.sources[span.source].locate(span.start, span.end));
        let place = OptionPosition { path: path.to_string(), location };
        Problem { availability: Availability::Mistake, place, message: message.into(), hint }
    }
}

impl Reader {
    /// Replaces the defaults that differ from those of the rows.
    pub fn set_defaults(&mut self, defaults: &[(&'static str, &'static str)]) {
        self.defaults = defaults.to_vec();
    }

    /// A reader in which some options have other defaults than their rows say: (path, default as in YAML).
    pub fn new(defaults: &[(&'static str, &'static str)]) -> Reader {
        Reader { defaults: defaults.to_vec(), ..Reader::default() }
    }

    /// Adds a text and returns its number.
    pub fn add_source(&mut self, name: &str, text: &str) -> usize {
        self.sources.push(Source { name: name.to_string(), text: text.to_string() });
        self.sources.len() - 1
    }

    /// Adds a YAML text and parses it. `None` if it is not YAML; the problem is recorded then.
    pub fn read_yaml(&mut self, name: &str, text: &str) -> Option<Node> {
        let source = self.add_source(name, text);
        self.parse_yaml(source)
    }

    /// The texts read so far.
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// The problems found so far.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// True if the user wrote this option and its value could be read.
    pub fn is_written(&self, path: &str) -> bool {
        self.written.contains_key(path)
    }

    /// True if the option's own value was a problem, so that nothing may be concluded from the placeholder.
    pub fn is_faulty(&self, path: &str) -> bool {
        self.faulty.contains(path)
    }

    /// Line and column of a span.
    pub fn locate(&self, span: Span) -> Location {
        self.sources[span.source].locate(span.start, span.end)
    }

    /// Records a mistake at a place.
    pub fn report_at(&mut self, span: Option<Span>, path: &str, message: String, hint: Option<String>) {
        self.push(Availability::Mistake, span, path, message, hint);
    }

    /// Records a mistake at the value of an option that was read before.
    pub fn report(&mut self, path: &str, message: impl Into<String>, hint: Option<String>) {
        let span = self.written.get(path).copied().flatten();
        self.push(Availability::Mistake, span, path, message.into(), hint);
    }

    /// Gives the problems at an option another hint.
    pub fn replace_hint(&mut self, path: &str, hint: &str) {
        for problem in self.problems.iter_mut().filter(|problem| problem.place.path == path) {
            problem.hint = Some(hint.to_string());
        }
    }

    /// Returns the written options, and all problems.
    pub fn finish(self) -> (Written, Vec<Problem>) {
        (Written { sources: self.sources, spans: self.written }, self.problems)
    }

    /// Reads with the path of messages extended by `segment` (`.name` or `[3]`).
    pub fn inside<T>(&mut self, segment: &str, read: impl FnOnce(&mut Reader) -> T) -> T {
        let length = self.path.len();
        self.path.push_str(if self.path.is_empty() { segment.trim_start_matches('.') } else { segment });
        let result = read(self);
        self.path.truncate(length);
        result
    }

    /// Reads a value inside another one, where no row gives the expectation.
    pub(crate) fn read_part<T: OptionValue>(&mut self, node: &Node) -> Option<T> {
        match T::read(node, self) {
            Ok(value) => {
                self.written.insert(self.path.clone(), node.span);
                Some(value)
            }
            Err(fault) => {
                self.report_fault(fault, node, &T::KIND.describe(&Limits::default()));
                None
            }
        }
    }

    fn report_fault(&mut self, fault: Fault, node: &Node, expectation: &str) {
        let path = self.path.clone();
        self.faulty.insert(path.clone());
        if let Fault::Mismatch { hint } = fault {
            let message = format!("`{path}` is {}, expected {expectation}", node.describe());
            self.push(Availability::Mistake, node.span, &path, message, hint);
        }
    }

    fn push(
        &mut self,
        availability: Availability,
        span: Option<Span>,
        path: &str,
        message: String,
        hint: Option<String>,
    ) {
        let location = span.map(|span| self.locate(span));
        self.problems.push(Problem {
            availability,
            place: OptionPosition { path: path.to_string(), location },
            message,
            hint,
        });
    }

    fn default_text(&self, row: &Row) -> &'static str {
        let other = self.defaults.iter().find(|(path, _)| *path == self.path);
        other.map_or(row.default, |(_, text)| text)
    }
}

/// The entries of one map while tables take their options out of it.
pub struct Fields<'a> {
    reader: &'a mut Reader,
    entries: &'a [(Key, Node)],
    span: Option<Span>,
    taken: BTreeSet<&'a str>,
}

impl<'a> Fields<'a> {
    /// All entries of a map that is at `span`.
    pub fn new(reader: &'a mut Reader, entries: &'a [(Key, Node)], span: Option<Span>) -> Fields<'a> {
        Fields { reader, entries, span, taken: BTreeSet::new() }
    }

    /// Reads one option. Records a problem and returns a placeholder where that is not possible.
    pub fn read<T: OptionValue>(&mut self, row: &Row) -> T {
        let entry = self.entries.iter().find(|(key, _)| key.name == row.name);
        let (reader, span) = (&mut *self.reader, self.span);
        if let Some((key, _)) = entry {
            self.taken.insert(&key.name);
        }
        reader.inside(&format!(".{}", row.name), |reader| match entry {
            Some((_, node)) => read_given(reader, row, node),
            None if row.is_required() => {
                let path = reader.path.clone();
                reader.faulty.insert(path.clone());
                // A missing key of the whole document has no place; one of a group is reported at the group.
                let place = span.filter(|_| path != row.name);
                let hint = Some(format!("add `{}: ...` ({})", row.name, row.expectation()));
                reader.report_at(place, &path, format!("`{path}` is required"), hint);
                T::placeholder()
            }
            None => default_of(reader, row),
        })
    }

    /// Records a problem for each entry that no table took; `known` are the names to choose a hint from, `hint` is
    /// asked before them.
    pub fn refuse_unknown<'n>(
        self,
        known: impl Iterator<Item = &'n str> + Clone,
        hint: impl Fn(&str, &Node) -> Option<String>,
    ) {
        for (key, node) in self.entries.iter().filter(|(key, _)| !self.taken.contains(key.name.as_str())) {
            let near = || nearest(&key.name, known.clone()).map(|near| format!("did you mean `{near}`?"));
            let hint = hint(&key.name, node).or_else(near);
            let segment = format!(".{}", key.name);
            let path = self.reader.inside(&segment, |reader| reader.path.clone());
            self.reader.report_at(key.span, &path, format!("there is no option `{path}`"), hint);
        }
    }
}

fn read_given<T: OptionValue>(reader: &mut Reader, row: &Row, node: &Node) -> T {
    let path = reader.path.clone();
    let before = reader.problems.len();
    let node = match with_home(row, node) {
        Ok(node) => node,
        Err(why) => {
            reader.faulty.insert(path.clone());
            let message = format!("`{path}` is {}, and {}", node.describe(), why.message);
            reader.report_at(node.span, &path, message, Some(why.hint));
            return T::placeholder();
        }
    };
    let node = node.as_ref();
    let value = match T::read(node, reader) {
        Ok(value) => value,
        Err(mut fault) => {
            if let (Fault::Mismatch { hint: hint @ None }, Tree::Null) = (&mut fault, &node.tree) {
                let keep = if row.is_required() { String::new() } else { format!(", which is `{}`", row.default) };
                *hint = Some(format!("give a value, or remove the line to take the default{keep}"));
            }
            reader.report_fault(fault, node, &row.expectation());
            return T::placeholder();
        }
    };
    if reader.problems.len() > before {
        // The parts of the value have reported their problems; nothing is concluded from the placeholder.
        reader.faulty.insert(path);
        return value;
    }
    let written = value.write();
    if numbers(&row.kind, &written).any(|number| !row.limits.allow(number)) {
        reader.report_fault(Fault::MISMATCH, node, &row.expectation());
        return T::placeholder();
    }
    reader.written.insert(path.clone(), node.span);
    if is_pending(reader, row, &value, &written) {
        let message = format!("`{path}: {}` is not available yet", shown(&written));
        let hint = pending_hint(reader, row, &path);
        reader.push(Availability::NotYet, node.span, &path, message, hint);
    }
    value
}

/// The value of a path with the user's own folder in it.
fn with_home<'n>(row: &Row, node: &'n Node) -> Result<Cow<'n, Node>, Unexpanded> {
    let Tree::Scalar { text, quoted } = &node.tree else { return Ok(Cow::Borrowed(node)) };
    if !row.is_path {
        return Ok(Cow::Borrowed(node));
    }
    Ok(match home::expand(text)? {
        Cow::Borrowed(_) => Cow::Borrowed(node),
        Cow::Owned(text) => Cow::Owned(Node { tree: Tree::Scalar { text, quoted: *quoted }, span: node.span }),
    })
}

fn is_pending<T: OptionValue>(reader: &mut Reader, row: &Row, value: &T, written: &Value) -> bool {
    let by_word = written.as_str().is_some_and(|word| row.pending_words.contains(&word));
    let by_size = row.pending_over.is_some_and(|most| written.as_f64().is_some_and(|number| number > most as f64));
    by_word || by_size || (row.is_pending && *value != default_of::<T>(reader, row))
}

/// Returns a hint at the values that are available.
fn pending_hint(reader: &Reader, row: &Row, path: &str) -> Option<String> {
    if row.is_pending {
        return Some(format!("leave `{path}` at its default, `{}`, for now", reader.default_text(row)));
    }
    if let Some(most) = row.pending_over {
        return Some(format!("values up to {most} are available"));
    }
    let words = row.kind.choices().iter().map(|choice| choice.name);
    let available: Vec<String> =
        words.filter(|word| !row.pending_words.contains(word)).map(|word| format!("`{word}`")).collect();
    Some(format!("available: {}", available.join(", ")))
}

/// Returns the numbers of a value that the limits of its row apply to.
fn numbers<'v>(kind: &Kind, written: &'v Value) -> Box<dyn Iterator<Item = f64> + 'v> {
    match (kind, written) {
        (_, Value::Number(number)) => Box::new(number.as_f64().into_iter()),
        (Kind::List(_), Value::Array(items)) => Box::new(items.iter().filter_map(Value::as_f64)),
        _ => Box::new(std::iter::empty()),
    }
}

fn shown(written: &Value) -> String {
    match written {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The default, read by the same reader as the user's text.
fn default_of<T: OptionValue>(reader: &mut Reader, row: &Row) -> T {
    let text = reader.default_text(row);
    let mut own = Reader::new(&[]);
    let node = own.read_yaml("default", text);
    let value = node.and_then(|node| T::read(&node, &mut own).ok()).filter(|_| own.problems.is_empty());
    value.unwrap_or_else(|| panic!("the default `{text}` of option `{}` must be a valid value of it", row.name))
}
