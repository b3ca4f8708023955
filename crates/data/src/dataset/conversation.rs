//! `type: conversation`: lists of messages, in role/content or from/value form.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::calls::tools;
use super::columns::{Open, optional, required, unread, wrong};
use super::detect::{SYSTEM, TOOLS};
use super::json_text::{as_list, is_broken, list, opened};
use super::message::{messages, messages_with};
use super::padding;
use super::part_texts::PartTexts;
use super::roles::is_pair;
use super::{EncodeRow, RowForm};
use crate::boxes::{self, ImageObject, OBJECTS};
use crate::dialogue::DialogueEncoder;
use crate::document::Document;
use crate::error::{RowError, RowReason};
use crate::image_folders::ImageFolders;
use crate::image_source::ImageSource;
use crate::json_values::parsed;
use crate::remarks::{Remark, Remarks};
use crate::spans::Message;
use crate::summary::Expected;

/// Columns that hold the images of a row: a list, or one.
pub(crate) const IMAGES: [&str; 2] = ["images", "image"];

/// The columns of a conversation dataset.
#[derive(Clone, Debug, Default)]
pub struct ConversationColumns {
    /// The messages; where there is a completion, those before it.
    pub messages: String,
    /// Column of messages, or of the text of one, that follow and of which alone the answers are trained.
    pub completion: Option<String>,
    /// Column of a system prompt that is put first.
    pub system: Option<String>,
    /// Column of function definitions: a list, or a string of JSON.
    pub tools: Option<String>,
    /// Our name of a message's property (`role`, `content`, …) to the dataset's name.
    pub properties: BTreeMap<String, String>,
    /// Usual names of columns that are read without being named, in each row that fills them.
    pub open: Open,
}

pub(super) struct ConversationRows {
    encoder: DialogueEncoder,
    columns: ConversationColumns,
    /// Folders in which relative paths of images begin.
    folders: Arc<ImageFolders>,
}

/// The messages of a column, before they are read.
struct Listed<'a> {
    list: Cow<'a, [Value]>,
    /// They stood in a text of JSON, in which a columnar file cannot pad them.
    in_text: bool,
}

impl ConversationRows {
    pub(super) fn new(encoder: DialogueEncoder, columns: ConversationColumns, folders: Arc<ImageFolders>) -> Self {
        ConversationRows { encoder, columns, folders }
    }

    /// The images of a row's conversation, in their order, and the objects of each; none where the model reads none.
    fn images(
        &self,
        row: &Map<String, Value>,
        messages: &mut [Message],
        remarks: &mut Remarks,
    ) -> Result<(Vec<ImageSource>, Vec<Vec<ImageObject>>), RowError> {
        let found = IMAGES.iter().find_map(|name| row.get(*name).filter(|value| !value.is_null()));
        let Some(of) = self.encoder.images() else {
            let are_unread = found.is_some_and(|value| value.as_array().is_none_or(|list| !list.is_empty()));
            remarks.add(Remark::Images, usize::from(are_unread));
            return Ok((Vec::new(), Vec::new()));
        };
        let list = found.map(|found| match found {
            Value::Array(list) => list.as_slice(),
            one => std::slice::from_ref(one),
        });
        let images = of.place(messages, list, &self.folders)?;
        let objects = row.get(OBJECTS).map(opened);
        let objects = match objects.as_deref().and_then(Value::as_object) {
            Some(objects) if has_words(messages) => of.fill(messages, objects, &images)?,
            objects => {
                remarks.add(Remark::Objects, usize::from(objects.is_some_and(|of| !of.is_empty())));
                Vec::new()
            }
        };
        Ok((images, objects))
    }

    /// The values of a column that holds messages. A plain text is the message of a role, if one is given.
    fn listed<'a>(&self, name: &str, value: &'a Value, role: Option<&str>) -> Result<Listed<'a>, RowError> {
        let in_text = value.is_string();
        // An answer may be JSON.
        let plain = value.as_str().filter(|_| !is_broken(value) && !holds_messages(value, &self.columns.properties));
        let list = match plain.zip(role) {
            Some((text, role)) => Cow::Owned(vec![Value::Object(Message::new(role, text).fields)]),
            None => list(name, "a list of messages", value)?,
        };
        Ok(Listed { list, in_text })
    }

    /// The messages of a row as they are read, with their tools and the padding of columnar files taken out.
    fn read(
        &self,
        row: &Map<String, Value>,
        form: RowForm,
        remarks: &mut Remarks,
    ) -> Result<(Vec<Message>, Option<Value>), RowError> {
        let ConversationColumns { messages: name, completion, properties, .. } = &self.columns;
        let value = required(row, name).map_err(|error| suggesting(row, error))?;
        let prompt = self.listed(name, value, completion.as_ref().map(|_| "user"))?;
        let completion = match completion {
            Some(name) => Some(self.listed(name, required(row, name)?, Some("assistant"))?),
            None => None,
        };
        unread(row, &self.columns.open).for_each(|name| remarks.add(Remark::Column((*name).to_owned()), 1));
        let tools_name = self.optional(row, self.columns.tools.as_deref(), &TOOLS);
        let tools_value = tools_name.and_then(|name| row.get(name));
        let tools = tools_name.map(|name| tools(name, tools_value)).transpose()?.flatten();
        let is_padded = form == RowForm::Columnar;
        let shows = padding::shows(&prompt.list, tools.as_ref())
            || completion.as_ref().is_some_and(|of| padding::shows(&of.list, tools.as_ref()));
        let tools = match tools {
            Some(tools) if shows || (is_padded && !tools_value.is_some_and(Value::is_string)) => {
                Some(padding::stripped(&tools))
            }
            other => other,
        };
        let mut texts = PartTexts::default();
        [Some(&prompt), completion.as_ref()].into_iter().flatten().for_each(|of| texts.add(&of.list, properties));
        texts.note(remarks);
        let mut read = |of: &Listed<'_>| -> Result<Vec<Message>, RowError> {
            if !(shows || (is_padded && !of.in_text)) {
                return messages_with(&of.list, properties, texts.are_read());
            }
            remarks.add(Remark::Padding, of.list.iter().map(padding::null_arguments).sum());
            let stripped: Vec<Value> = of.list.iter().map(padding::stripped).collect();
            messages_with(&stripped, properties, texts.are_read())
        };
        let mut all = read(&prompt)?;
        if let Some(completion) = &completion {
            // What the prompt holds of answers is given, unless the run trains on everything.
            if !self.encoder.trains_everything() {
                let given = all.iter_mut().filter(|message| message.is_assistant());
                given.for_each(|message| message.weight = message.weight.or(Some(0.0)));
            }
            all.extend(read(completion)?);
        }
        if let Some(system) = self.system(row)? {
            match all.first().filter(|first| ["system", "developer"].contains(&first.role())) {
                None => all.insert(0, system),
                Some(first) => {
                    let is_same = first.fields.get("content") == system.fields.get("content");
                    remarks.add(Remark::System, usize::from(!is_same));
                }
            }
        }
        Ok((all, tools))
    }

    /// The name of a column that a row may have.
    fn optional<'a>(
        &'a self,
        row: &Map<String, Value>,
        given: Option<&'a str>,
        usual: &[&'static str],
    ) -> Option<&'a str> {
        optional(row, given, &self.columns.open, usual)
    }

    /// The system prompt of the row's own column: a text, or a message.
    fn system(&self, row: &Map<String, Value>) -> Result<Option<Message>, RowError> {
        let Some(name) = self.optional(row, self.columns.system.as_deref(), &SYSTEM) else { return Ok(None) };
        match row.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) if text.is_empty() => Ok(None),
            Some(Value::String(text)) if message_in(text).is_none() => Ok(Some(Message::new("system", text))),
            Some(value @ (Value::String(_) | Value::Object(_))) => {
                let mut fields = value.as_str().and_then(message_in).or(value.as_object().cloned()).unwrap_or_default();
                fields.insert("role".to_owned(), Value::String("system".to_owned()));
                Ok(messages(&[Value::Object(fields)], &self.columns.properties)?.pop())
            }
            Some(other) => Err(wrong(name, "a string", other)),
        }
    }
}

impl EncodeRow for ConversationRows {
    fn encode(&self, row: &Map<String, Value>, form: RowForm, remarks: &mut Remarks) -> Result<Document, RowError> {
        let (mut messages, tools) = self.read(row, form, remarks)?;
        let (images, objects) = self.images(row, &mut messages, remarks)?;
        let mut document = self.encoder.encode_all(&messages, images, tools.as_ref(), remarks)?;
        document.images.iter_mut().zip(objects).for_each(|(image, of)| image.objects = of);
        match document.trained_tokens() {
            0 => Err(untrained(&messages)),
            _ => Ok(document),
        }
    }

    fn expected(&self) -> Expected {
        self.encoder.expected()
    }

    fn clock_readings(&self) -> BTreeMap<String, String> {
        self.encoder.clock_readings()
    }
}

/// The error of a conversation of which nothing is trained, with its roles.
fn untrained(messages: &[Message]) -> RowError {
    let mut roles: Vec<&str> = messages.iter().map(Message::role).collect();
    roles.sort_unstable();
    roles.dedup();
    let roles = roles.iter().map(|role| format!("`{role}`")).collect::<Vec<_>>().join(", ");
    RowError::new(
        RowReason::Untrained,
        format!("no token of the row is trained; its messages are of the roles {roles}"),
    )
}

/// Returns true if messages have a word that stands for an object of an image.
fn has_words(messages: &[Message]) -> bool {
    let content = |message: &Message| message.fields.get("content").and_then(Value::as_str).map(boxes::has_words);
    messages.iter().filter_map(content).any(|found| found)
}

/// True for messages, or one, also as a text of JSON.
fn holds_messages(value: &Value, properties: &BTreeMap<String, String>) -> bool {
    let role = properties.get("role").map_or("role", String::as_str);
    let is_message = |value: &Value| {
        let value = opened(value);
        [role, "role", "from"].iter().any(|key| value.get(*key).is_some_and(Value::is_string)) || is_pair(&value)
    };
    as_list(value).is_some_and(|list| !list.is_empty() && list.iter().all(is_message))
}

/// The message that a text holds as JSON.
fn message_in(text: &str) -> Option<Map<String, Value>> {
    match parsed(text)? {
        Value::Object(fields) if fields.contains_key("role") && fields.contains_key("content") => Some(fields),
        _ => None,
    }
}

/// An error of a missing column, with the option that names the one that holds messages by its looks.
fn suggesting(row: &Map<String, Value>, error: RowError) -> RowError {
    let is_message = |value: &Value| value.get("role").or(value.get("from")).is_some_and(Value::is_string);
    let holds = |value: &Value| as_list(value).is_some_and(|list| list.first().is_some_and(is_message));
    match row.iter().find(|(_, value)| holds(value)) {
        Some((name, _)) => RowError { detail: format!("{}: set `messages_field: {name}`", error.detail), ..error },
        None => error,
    }
}
