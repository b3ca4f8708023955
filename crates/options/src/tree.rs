//! The configuration tree before options are interpreted: scalars, lists, maps, each with its span. A scalar keeps its
//! text; the type of the option decides whether `2` is a number or a name.

use crate::source::Span;

/// The name of an entry of a map.
#[derive(Clone, Debug, PartialEq)]
pub struct Key {
    /// The name as it is written.
    pub name: String,
    /// Absent for trees that come from no text.
    pub span: Option<Span>,
}

/// A value and its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The scalar, list or map.
    pub tree: Tree,
    /// Absent for trees that come from no text.
    pub span: Option<Span>,
}

/// The value of a [`Node`].
#[derive(Clone, Debug, PartialEq)]
pub enum Tree {
    /// `null`, `~`, or nothing after the colon.
    Null,
    /// Any other single value. `quoted` keeps `"2"` apart from `2`.
    Scalar {
        /// The text after YAML's own escapes.
        text: String,
        /// True for quoted and block scalars: these are texts and nothing else.
        quoted: bool,
    },
    /// A sequence of nodes, in order.
    List(Vec<Node>),
    /// A mapping, in the order of the text. Names are unique.
    Map(Vec<(Key, Node)>),
}

impl Node {
    /// A tree without places, from a JSON value.
    pub fn from_json(value: &serde_json::Value) -> Node {
        use serde_json::Value;
        let tree = match value {
            Value::Null => Tree::Null,
            Value::Bool(flag) => Tree::Scalar { text: flag.to_string(), quoted: false },
            Value::Number(number) => Tree::Scalar { text: number.to_string(), quoted: false },
            Value::String(text) => Tree::Scalar { text: text.clone(), quoted: true },
            Value::Array(items) => Tree::List(items.iter().map(Node::from_json).collect()),
            Value::Object(entries) => Tree::Map(
                entries
                    .iter()
                    .map(|(name, value)| (Key { name: name.clone(), span: None }, Node::from_json(value)))
                    .collect(),
            ),
        };
        Node { tree, span: None }
    }

    /// The tree as JSON, with plain scalars in their YAML meaning.
    pub fn to_json(&self) -> serde_json::Value {
        use serde_json::Value;
        match &self.tree {
            Tree::Null => Value::Null,
            Tree::Scalar { text, quoted: true } => Value::String(text.clone()),
            Tree::Scalar { text, quoted: false } => match text.as_str() {
                "true" => Value::Bool(true),
                "false" => Value::Bool(false),
                // Text that JSON does not take as a number (`.5`, `0x10`, a name) stays text.
                text => serde_json::from_str::<serde_json::Number>(text)
                    .map_or_else(|_| Value::String(text.to_string()), Value::Number),
            },
            Tree::List(items) => Value::Array(items.iter().map(Node::to_json).collect()),
            Tree::Map(entries) => {
                Value::Object(entries.iter().map(|(key, node)| (key.name.clone(), node.to_json())).collect())
            }
        }
    }

    /// Returns the words that name the value in a message: the text of a scalar, the kind of anything else.
    pub fn describe(&self) -> String {
        match &self.tree {
            Tree::Null => "empty (null)".into(),
            Tree::Scalar { text, quoted } => {
                let shown: String = text.chars().take(60).collect();
                let cut = if shown.len() < text.len() { "…" } else { "" };
                if *quoted { format!("the text \"{shown}{cut}\"") } else { format!("`{shown}{cut}`") }
            }
            Tree::List(_) => "a list".into(),
            Tree::Map(_) => "a group of settings".into(),
        }
    }
}
