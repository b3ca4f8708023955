//! Remarks of the data check: what rows bring that does not reach training, counted by kind.
//!
//! Counts and words only; what is missing in a rendering is found in [`crate::shown`].

use std::fmt;

use serde::{Deserialize, Serialize};

/// Kinds that are kept apart: names of roles and fields come from the data.
const MOST: usize = 32;

/// Roles that need no remark, as templates know them.
pub(crate) const KNOWN_ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// One kind of thing that a row brings and training does not see.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Remark {
    /// Nothing of a message of this role is in the rendering.
    Message(String),
    /// A part of a message of this role is not in the rendering.
    Part(String, Part),
    /// An answer without a text, a thought or a call, of which the end token alone is trained.
    EmptyAnswer,
    /// The tools of a row are not all in its rendering.
    Tools,
    /// A null in the arguments of a call that is taken for the padding of a columnar file and left out.
    Padding,
    /// The images of a row of which only the text is trained.
    Images,
    /// The objects of a row without a word for any.
    Objects,
    /// The system prompt of a row's own column, whose messages begin with another.
    System,
    /// Messages as a text of JSON among texts.
    Source,
    /// A content that is parts as a text of JSON, and was read as parts.
    PartsRead,
    /// The same among plain texts, kept as a text.
    PartsKept,
    /// An optional column by its usual name, of which a row holds a value of another kind.
    Column(String),
    /// A message of a role that is not known and that the template shows.
    Role(String),
    /// A field of a message that changes nothing.
    Field(String),
}

/// A part of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Part {
    Text,
    Reasoning,
    Calls,
}

/// Remarks with their counts, in order.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Remarks(Vec<(Remark, usize)>);

impl Remarks {
    pub(crate) fn add(&mut self, remark: Remark, count: usize) {
        match self.0.binary_search_by(|(known, _)| known.cmp(&remark)) {
            Ok(at) => self.0[at].1 += count,
            Err(at) if count > 0 && self.0.len() < MOST => self.0.insert(at, (remark, count)),
            Err(_) => {}
        }
    }

    pub(crate) fn extend(&mut self, others: &Remarks) {
        others.0.iter().for_each(|(remark, count)| self.add(remark.clone(), *count));
    }

    /// Takes over what others count that is not counted here, or less often.
    pub(crate) fn widen(&mut self, others: &Remarks) {
        for (remark, count) in &others.0 {
            let known = self.0.iter().find(|(known, _)| known == remark).map_or(0, |(_, known)| *known);
            self.add(remark.clone(), count.saturating_sub(known));
        }
    }

    /// Returns those of kinds that others do not count.
    pub(crate) fn without(&self, others: &Remarks) -> Remarks {
        let is_new = |(remark, _): &&(Remark, usize)| others.0.iter().all(|(known, _)| known != remark);
        Remarks(self.0.iter().filter(is_new).cloned().collect())
    }

    /// A line each; all fields that change nothing share one.
    pub fn lines(&self) -> Vec<String> {
        let (fields, others): (Vec<_>, Vec<_>) =
            self.0.iter().partition(|(remark, _)| matches!(remark, Remark::Field(_)));
        let mut lines: Vec<String> = others.iter().map(|(remark, count)| line(remark, *count)).collect();
        let names: Vec<String> = fields
            .iter()
            .filter_map(|(remark, count)| match remark {
                Remark::Field(name) => Some(format!("`{name}` (of {})", several(*count, "message"))),
                _ => None,
            })
            .collect();
        if !names.is_empty() {
            lines.push(format!("fields of messages that change nothing: {}", names.join(", ")));
        }
        lines
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::Text => "the text",
            Part::Reasoning => "the reasoning",
            Part::Calls => "a tool call",
        })
    }
}

fn line(remark: &Remark, count: usize) -> String {
    let are = if count == 1 { "is" } else { "are" };
    match remark {
        Remark::Message(role) => {
            format!("{} of role `{role}` {are} not shown by the template", several(count, "message"))
        }
        Remark::Part(role, part) => {
            format!("{part} of {} of role `{role}` is not shown by the template", several(count, "message"))
        }
        Remark::EmptyAnswer => {
            let of = if count == 1 { "its end token" } else { "their end tokens" };
            format!("{} {are} empty: {of} alone {are} trained", several(count, "answer"))
        }
        Remark::Tools => format!("the tools of {} are not all shown by the template", several(count, "row")),
        Remark::Padding => format!(
            "{} of tool calls that {are} null {are} left out, as columnar files pad calls with the arguments of others",
            several(count, "argument")
        ),
        Remark::Images => {
            format!("the images of {} are not read: only text is trained here", several(count, "row"))
        }
        Remark::Objects => format!(
            "the objects of {} are not read: no `<bbox>` or `<ref-object>` stands in the messages",
            several(count, "row")
        ),
        Remark::System => format!(
            "the system prompts of {} are not read: their messages begin with one of their own",
            several(count, "row")
        ),
        Remark::Source => {
            format!("{} {are} messages as JSON, whose source is trained as text", several(count, "text"))
        }
        Remark::PartsRead => {
            format!("{} that {are} lists of parts as JSON {are} read as parts", several(count, "content"))
        }
        Remark::PartsKept => format!(
            "{} that {are} lists of parts as JSON {are} kept as text: other messages of the row are plain texts",
            several(count, "content")
        ),
        Remark::Column(name) => {
            format!("`{name}` of {} is not read: its value is of another kind", several(count, "row"))
        }
        Remark::Role(role) => format!(
            "{} {are} of role `{role}`, which is none of {}: what `loss_scale` does not name is not trained",
            several(count, "message"),
            KNOWN_ROLES.map(|known| format!("`{known}`")).join(", ")
        ),
        Remark::Field(name) => format!("`{name}`"),
    }
}

fn several(count: usize, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_counted_and_have_a_line_each() {
        let mut remarks = Remarks::default();
        remarks.add(Remark::Field("id".to_owned()), 2);
        remarks.add(Remark::Message("critic".to_owned()), 1);
        remarks.add(Remark::Part("assistant".to_owned(), Part::Reasoning), 3);
        remarks.add(Remark::Message("critic".to_owned()), 1);
        remarks.add(Remark::Field("name".to_owned()), 1);
        remarks.add(Remark::Padding, 0);
        remarks.add(Remark::Images, 1);
        remarks.add(Remark::Role("agent".to_owned()), 2);
        assert_eq!(
            remarks.lines(),
            [
                "2 messages of role `critic` are not shown by the template",
                "the reasoning of 3 messages of role `assistant` is not shown by the template",
                "the images of 1 row are not read: only text is trained here",
                "2 messages are of role `agent`, which is none of `system`, `developer`, `user`, `assistant`, `tool`: what \
                 `loss_scale` does not name is not trained",
                "fields of messages that change nothing: `id` (of 2 messages), `name` (of 1 message)",
            ]
        );
        (0..100).for_each(|n| remarks.add(Remark::Field(format!("f{n}")), 1));
        assert_eq!(remarks.0.len(), MOST);
    }
}
