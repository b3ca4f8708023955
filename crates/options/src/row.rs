//! One option as data. Everything that is shown about an option anywhere is read from here.

use crate::kind::{Kind, Limits};
use crate::reader::Reader;

/// A row of an option table. The setters are the words that may follow the default in [`options!`](crate::options).
#[derive(Debug)]
pub struct Row {
    /// The key in the YAML.
    pub name: &'static str,
    /// The type of the option's value.
    pub kind: Kind,
    /// The default as one would write it in YAML; `required` if there is none.
    pub default: &'static str,
    /// The doc comment, by lines.
    pub doc: &'static [&'static str],
    /// The bounds of a number's value.
    pub limits: Limits,
    /// The option is not implemented yet: only the default is accepted.
    pub is_pending: bool,
    /// Words of a choice that are not implemented yet.
    pub pending_words: &'static [&'static str],
    /// Numbers above this are not available yet.
    pub pending_over: Option<i64>,
    /// In a group with a `type`: the types to which the option belongs, with ` or ` between. Absent for those of every
    /// type.
    pub owner: Option<&'static str>,
    /// May differ when a run is resumed.
    pub changes_on_resume: bool,
    /// A path, in which `~` is expanded.
    pub is_path: bool,
}

impl Row {
    /// A row without bounds, available, fixed over resumes.
    pub const fn new(name: &'static str, kind: Kind, default: &'static str, doc: &'static [&'static str]) -> Row {
        Row {
            name: without_raw_prefix(name),
            kind,
            default,
            doc,
            limits: Limits { min: None, max: None, above: None, below: None, one_of: &[] },
            is_pending: false,
            pending_words: &[],
            pending_over: None,
            owner: None,
            changes_on_resume: false,
            is_path: false,
        }
    }

    /// Sets the least allowed value.
    pub const fn min(mut self, min: i64) -> Row {
        self.limits.min = Some(min);
        self
    }

    /// Sets the greatest allowed value.
    pub const fn max(mut self, max: i64) -> Row {
        self.limits.max = Some(max);
        self
    }

    /// Sets a number that the value must exceed.
    pub const fn above(mut self, above: i64) -> Row {
        self.limits.above = Some(above);
        self
    }

    /// Sets a number that the value must stay below.
    pub const fn below(mut self, below: i64) -> Row {
        self.limits.below = Some(below);
        self
    }

    /// Sets the only allowed numbers.
    pub const fn one_of(mut self, allowed: &'static [i64]) -> Row {
        self.limits.one_of = allowed;
        self
    }

    /// Rejects any value but the default as not available yet.
    pub const fn pending(mut self) -> Row {
        self.is_pending = true;
        self
    }

    /// Rejects these words as not available yet.
    pub const fn pending_words(mut self, words: &'static [&'static str]) -> Row {
        self.pending_words = words;
        self
    }

    /// Rejects numbers above this as not available yet.
    pub const fn pending_over(mut self, number: i64) -> Row {
        self.pending_over = Some(number);
        self
    }

    /// Assigns the option to one `type` of its group, or to several with ` or ` between.
    pub const fn belongs_to(mut self, owner: &'static str) -> Row {
        self.owner = Some(owner);
        self
    }

    /// Allows a resumed run to set another value.
    pub const fn resumable(mut self) -> Row {
        self.changes_on_resume = true;
        self
    }

    /// The value is a path: `~` in it is expanded, variables are refused.
    pub const fn path(mut self) -> Row {
        self.is_path = true;
        self
    }

    /// The types to which the option belongs; none: to all.
    pub fn owners(&self) -> impl Iterator<Item = &'static str> + use<> {
        self.owner.into_iter().flat_map(|owner| owner.split(" or "))
    }

    /// True if the option means something for a type of its group.
    pub fn is_of(&self, kind: &str) -> bool {
        self.owner.is_none() || self.owners().any(|owner| owner == kind)
    }

    /// True if the user must give a value.
    pub fn is_required(&self) -> bool {
        self.default == "required"
    }

    /// The default in its canonical spelling as JSON; null if the option is required.
    pub fn default_json(&self) -> serde_json::Value {
        if self.is_required() {
            return serde_json::Value::Null;
        }
        let node = Reader::new(&[]).read_yaml("default", self.default);
        node.expect("a default is YAML").to_json()
    }

    /// Returns the allowed values in words.
    pub fn expectation(&self) -> String {
        self.kind.describe(&self.limits)
    }

    /// The doc comment as one line.
    pub fn doc_text(&self) -> String {
        join_doc(self.doc)
    }
}

/// Doc comment lines as one line.
pub(crate) fn join_doc(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

/// `r#type` is spelled `type` in YAML.
const fn without_raw_prefix(name: &'static str) -> &'static str {
    match name.as_bytes() {
        [b'r', b'#', rest @ ..] => match std::str::from_utf8(rest) {
            Ok(name) => name,
            Err(_) => panic!("an identifier is UTF-8"),
        },
        _ => name,
    }
}
