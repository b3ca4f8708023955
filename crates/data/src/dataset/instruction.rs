//! `type: instruction`: a question and an answer. The answer and the end token are trained.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::columns::{Open, optional, optional_text, required, text, unread, wrong};
use super::detect::{HISTORY, INPUTS, SYSTEM};
use super::json_text::list;
use super::message::messages_with;
use super::{EncodeRow, RowForm};
use crate::dialogue::{DialogueEncoder, label};
use crate::document::Document;
use crate::error::{RowError, RowReason};
use crate::json_values::parsed;
use crate::remarks::{Remark, Remarks};
use crate::spans::{Message, TrainedSpan};
use crate::summary::Expected;
use crate::tokenizer::Tokenizer;

/// The source of the system prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SystemPrompt {
    #[default]
    None,
    /// A column of the row.
    Field(String),
    /// The same for every row.
    Fixed(String),
}

/// The columns of an instruction dataset and how they are put together.
#[derive(Clone, Debug, Default)]
pub struct InstructionColumns {
    pub instruction: String,
    pub output: String,
    pub input: Option<String>,
    /// Earlier turns, written with the chat template: pairs of a question and its answer, or messages.
    pub history: Option<String>,
    pub system: SystemPrompt,
    /// Text with `{system}`, `{instruction}`, `{input}`, `{output}`; without `{output}` the output follows at the end.
    /// Unset: the chat template is used, with the input after the instruction and an empty line between.
    pub prompt_format: Option<String>,
    /// Takes the place of `prompt_format` where a row has no input.
    pub prompt_format_no_input: Option<String>,
    /// Usual names of columns that are read without being named, in each row that fills them.
    pub open: Open,
}

/// The way in which the text of a row is made.
pub(super) enum Form {
    /// A prompt format, and another for rows without input.
    Format(String, Option<String>),
    Chat(Box<DialogueEncoder>),
}

pub(super) struct InstructionRows {
    tokenizer: Arc<Tokenizer>,
    columns: InstructionColumns,
    form: Form,
}

struct Parts<'a> {
    system: &'a str,
    instruction: &'a str,
    input: &'a str,
    output: &'a str,
}

impl InstructionRows {
    pub(super) fn new(tokenizer: Arc<Tokenizer>, columns: InstructionColumns, form: Form) -> Self {
        InstructionRows { tokenizer, columns, form }
    }

    fn chat(
        &self,
        encoder: &DialogueEncoder,
        parts: &Parts<'_>,
        history: Vec<Message>,
        remarks: &mut Remarks,
    ) -> Result<Document, RowError> {
        let mut messages = Vec::new();
        if !parts.system.is_empty() {
            messages.push(Message::new("system", parts.system));
        }
        messages.extend(history);
        let question = match parts.input {
            "" => parts.instruction.to_owned(),
            input => format!("{}\n\n{input}", parts.instruction),
        };
        messages.push(Message::new("user", &question));
        messages.push(Message::new("assistant", parts.output));
        encoder.encode_remarking(&messages, None, remarks)
    }

    fn format(&self, format: &str, parts: &Parts<'_>) -> Result<Document, RowError> {
        let (mut text, output, tail) = fill(format, parts);
        let end = output + parts.output.len();
        // An end token that the format writes itself is the end; otherwise EOS follows.
        let eos = self.tokenizer.eos();
        let special = self.tokenizer.special_tokens().iter();
        let written = special.filter_map(|token| tail.find(&token.text).map(|at| end + at + token.text.len())).min();
        let trained_end = match (written, eos) {
            (Some(end), _) => end,
            (None, Some(eos)) => {
                text.push_str(&eos.text);
                text.len()
            }
            (None, None) => text.len(),
        };
        let encoded = self.tokenizer.encode_document(&text)?;
        Ok(label(encoded, &[TrainedSpan { range: output..trained_end, weight: 1.0 }]))
    }
}

/// The earlier turns of a column: pairs `[question, answer]`, of which either may be missing, or messages.
pub(crate) fn history(name: &str, row: &Map<String, Value>) -> Result<Vec<Message>, RowError> {
    let value = match row.get(name) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(Vec::new()),
        Some(value) => list(name, "a list of pairs", value)?,
    };
    let mut turns = Vec::new();
    for item in value.iter() {
        let Value::Array(pair) = item else {
            // The task and its answer are plain texts.
            turns.extend(messages_with(std::slice::from_ref(item), &BTreeMap::new(), false)?);
            continue;
        };
        if pair.len() > 2 {
            return Err(RowError::new(
                RowReason::WrongType,
                format!("column `{name}`: {} texts in a pair", pair.len()),
            ));
        }
        for (role, text) in ["user", "assistant"].into_iter().zip(pair) {
            match text {
                Value::Null => {}
                Value::String(text) => turns.push(Message::new(role, text)),
                other => return Err(wrong(name, "pairs of texts", other)),
            }
        }
    }
    Ok(turns)
}

/// True for a text of JSON that is a list of messages.
fn is_messages(text: &str) -> bool {
    let is_message = |of: &Value| of.get("role").is_some_and(Value::is_string) && of.get("content").is_some();
    parsed(text).is_some_and(|of| of.as_array().is_some_and(|list| !list.is_empty() && list.iter().all(is_message)))
}

/// The filled text, the byte at which the output begins, and what follows the output. Placeholders inside the filled-in
/// values stay as they are.
fn fill(format: &str, parts: &Parts<'_>) -> (String, usize, String) {
    let mut text = String::new();
    let mut output = None;
    let mut rest = format;
    while let Some(brace) = rest.find('{') {
        text.push_str(&rest[..brace]);
        rest = &rest[brace..];
        let known = [
            ("{system}", parts.system),
            ("{instruction}", parts.instruction),
            ("{input}", parts.input),
            ("{output}", parts.output),
        ];
        match known.iter().find(|(name, _)| rest.starts_with(name)) {
            Some((name, value)) => {
                if *name == "{output}" && output.is_none() {
                    output = Some(text.len());
                }
                text.push_str(value);
                rest = &rest[name.len()..];
            }
            None => {
                text.push('{');
                rest = &rest[1..];
            }
        }
    }
    text.push_str(rest);
    let begin = output.unwrap_or_else(|| {
        text.push_str(parts.output);
        text.len() - parts.output.len()
    });
    let tail = text[begin + parts.output.len()..].to_owned();
    (text, begin, tail)
}

impl EncodeRow for InstructionRows {
    fn encode(&self, row: &Map<String, Value>, _: RowForm, remarks: &mut Remarks) -> Result<Document, RowError> {
        let columns = &self.columns;
        unread(row, &columns.open).for_each(|name| remarks.add(Remark::Column((*name).to_owned()), 1));
        let given = |name: Option<&str>| match name {
            Some(name) => Ok(optional_text(row, name)?.unwrap_or("")),
            None => Ok(""),
        };
        let system = match &columns.system {
            SystemPrompt::None => match optional(row, None, &columns.open, &SYSTEM) {
                Some(name) if !row[name].is_string() => {
                    remarks.add(Remark::Column(name.to_owned()), 1);
                    ""
                }
                name => given(name)?,
            },
            SystemPrompt::Fixed(prompt) => prompt,
            // Rows may be without a column that was found, and not named.
            SystemPrompt::Field(name) if columns.open.contains(&name.as_str()) => given(Some(name))?,
            SystemPrompt::Field(name) => required(row, name).and_then(|_| optional_text(row, name))?.unwrap_or(""),
        };
        let input = given(optional(row, columns.input.as_deref(), &columns.open, &INPUTS))?;
        let parts = Parts {
            system,
            instruction: text(row, &self.columns.instruction)?,
            input,
            output: text(row, &self.columns.output)?,
        };
        for (name, text) in [(&self.columns.instruction, parts.instruction), (&self.columns.output, parts.output)] {
            if is_messages(text) {
                let problem =
                    format!("column `{name}` holds messages as JSON, which `type: auto` and `conversation` read");
                return Err(RowError::new(RowReason::WrongType, problem));
            }
        }
        if parts.output.is_empty() {
            return Err(RowError::new(RowReason::Empty, format!("column `{}` is empty", self.columns.output)));
        }
        match &self.form {
            Form::Chat(encoder) => {
                let name = optional(row, self.columns.history.as_deref(), &self.columns.open, &[HISTORY]);
                let turns = name.map(|name| history(name, row)).transpose()?;
                self.chat(encoder, &parts, turns.unwrap_or_default(), remarks)
            }
            Form::Format(_, Some(without)) if parts.input.is_empty() => self.format(without, &parts),
            Form::Format(format, _) => self.format(format, &parts),
        }
    }

    fn expected(&self) -> Expected {
        match &self.form {
            Form::Chat(encoder) => encoder.expected(),
            Form::Format(..) => Expected { ends: None, bos: self.tokenizer.bos().map(|bos| bos.id as i32) },
        }
    }

    fn clock_readings(&self) -> BTreeMap<String, String> {
        match &self.form {
            Form::Chat(encoder) => encoder.clock_readings(),
            Form::Format(..) => BTreeMap::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_are_filled_once() {
        let parts = Parts { system: "S", instruction: "{output}", input: "{x}", output: "{input}" };
        let (text, output, tail) = fill("{system}|{instruction}|{input}|{\"a\": 1}|{output}!", &parts);
        assert_eq!(text, "S|{output}|{x}|{\"a\": 1}|{input}!");
        assert_eq!((&text[output..output + 7], tail.as_str()), ("{input}", "!"));
        let (text, output, tail) = fill("Q: {instruction}\nA: ", &parts);
        assert_eq!((text.as_str(), output, tail.as_str()), ("Q: {output}\nA: {input}", 15, ""));
    }
}
