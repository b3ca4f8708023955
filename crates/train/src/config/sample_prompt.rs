//! A prompt of `sample_prompts`: a text, or a row with messages. Does not know how a prompt becomes tokens.

use options::{Fault, Kind, Node, OptionValue, Reader, Tree};
use serde_json::{Map, Value, json};

/// A prompt that is answered at every evaluation.
#[derive(Clone, Debug, PartialEq)]
pub enum SamplePrompt {
    Text(String),
    /// A row as `surogate generate --prompts` reads it.
    Row(Map<String, Value>),
}

impl SamplePrompt {
    /// Returns true if there is nothing to answer.
    pub fn is_empty(&self) -> bool {
        match self {
            SamplePrompt::Text(text) => text.is_empty(),
            SamplePrompt::Row(fields) => fields.is_empty(),
        }
    }
}

impl OptionValue for SamplePrompt {
    const KIND: Kind = Kind::Either(&[Kind::Text, Kind::Object("a row with `messages`")]);

    fn read(node: &Node, reader: &mut Reader) -> Result<Self, Fault> {
        match (&node.tree, node.to_json()) {
            (Tree::Map(_), Value::Object(fields)) => Ok(SamplePrompt::Row(fields)),
            _ => String::read(node, reader).map(SamplePrompt::Text),
        }
    }

    fn write(&self) -> Value {
        match self {
            SamplePrompt::Text(text) => json!(text),
            SamplePrompt::Row(fields) => Value::Object(fields.clone()),
        }
    }

    fn placeholder() -> Self {
        SamplePrompt::Text(String::new())
    }
}
