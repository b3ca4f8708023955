//! The prompts of a run that samples answers: rows of its datasets, as they are for reward functions, and what the model is
//! asked. Knows no rewards.

use std::path::Path;

use data::{DataError, rows};
use serde_json::{Map, Value, json};

use crate::config::{Config, Dataset, DatasetType, SystemPromptType};
use crate::error::{Result, TrainError};
use crate::inference::generate::{Prompt, PromptEncoder, Request, read_messages};
use crate::input::dataset_spec;
use crate::words::count;

/// Columns with a question, which becomes a message of the user.
const QUESTIONS: [&str; 4] = ["question", "problem", "instruction", "query"];

/// The column whose text is continued, or whose messages are answered.
const PROMPT: &str = "prompt";

/// A prompt, and the row that it stands in.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    /// A text or messages, as reward functions see it.
    pub prompt: Value,
    pub ids: Vec<i32>,
    /// The tools that the template shows.
    pub tools: Option<Value>,
    /// The columns of its row other than the prompt.
    pub columns: Map<String, Value>,
}

/// The prompts of a run, in the order of the files.
#[derive(Default)]
pub(super) struct Prompts {
    pub rows: Vec<Row>,
    /// Notes for the user, a sentence each.
    pub notes: Vec<String>,
}

impl Prompts {
    /// Reads the prompts of training and those that are held out, if any are: `validation_datasets`, or a share of the rows.
    /// `longest`: tokens that a prompt may have. Rows without a prompt, and those that are too long, are left out and
    /// counted. All notes are with the former. Errors: nothing is left of a dataset.
    pub fn read(config: &Config, encoder: &PromptEncoder, longest: usize) -> Result<(Prompts, Option<Prompts>)> {
        let read = |list: Option<&Vec<Dataset>>, option: &str| {
            let mut found = Prompts::default();
            for (index, of) in list.into_iter().flatten().enumerate() {
                found.add(config, of, &format!("{option}[{index}]"), encoder, longest)?;
            }
            Ok::<_, TrainError>(found)
        };
        let data = &config.data;
        let mut found = read(data.datasets.as_ref(), "datasets")?;
        let held_out = match &data.validation_datasets {
            Some(list) => {
                let mut held_out = read(Some(list), "validation_datasets")?;
                found.notes.append(&mut held_out.notes);
                held_out
            }
            None => found.split(data.validation_split_ratio, data.train_seed),
        };
        Ok((found, Some(held_out).filter(|of| !of.rows.is_empty())))
    }

    /// Takes a share of the rows away.
    fn split(&mut self, ratio: f64, seed: u64) -> Prompts {
        let (train, held_out) = data::order::split(self.rows.len(), ratio, seed);
        let mut rows: Vec<Option<Row>> = std::mem::take(&mut self.rows).into_iter().map(Some).collect();
        let mut part = |of: Vec<u32>| of.into_iter().filter_map(|index| rows[index as usize].take()).collect();
        self.rows = part(train);
        Prompts { rows: part(held_out), notes: Vec::new() }
    }

    /// The names of the columns besides the prompts, in the order in which they come up.
    pub fn columns(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for name in self.rows.iter().flat_map(|row| row.columns.keys()) {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        names
    }

    /// True if every row has a number in a column, or a text with digits.
    pub fn all_have_number(&self, column: &str) -> bool {
        self.rows.iter().all(|row| match row.columns.get(column) {
            Some(Value::Number(_)) => true,
            Some(Value::String(text)) => text.contains(|c: char| c.is_ascii_digit()),
            _ => false,
        })
    }

    fn add(
        &mut self,
        config: &Config,
        of: &Dataset,
        place: &str,
        encoder: &PromptEncoder,
        longest: usize,
    ) -> Result<()> {
        let spec = dataset_spec::spec(config, of, place)?;
        let files = match spec.files {
            Some(files) => files,
            None => {
                rows::files::find(Path::new(&of.path), of.subset.as_deref(), &of.split).map_err(TrainError::Data)?.0
            }
        };
        let stream = rows::open_within(&files, &of.text_field, spec.row_limit).map_err(TrainError::Data)?;
        let (mut kept, mut wrong, mut long, mut lengths) = (0, Vec::new(), Vec::new(), Vec::new());
        for row in stream.take(spec.samples.unwrap_or(usize::MAX)) {
            let place = row.place.to_string();
            let fields = row.fields.map_err(|error| error.to_string());
            if let Some(column) = fields.as_ref().ok().and_then(with_images) {
                let problem = format!("{place}: `{column}` has images, and answers to images are not sampled yet");
                let hint = "give prompts of text, or train on recorded answers with `task: sft` or `dpo`";
                return Err(TrainError::Data(DataError::invalid(&of.path, problem).hint(hint.to_owned())));
            }
            let row = fields.and_then(|fields| Row::of(fields, of, encoder));
            lengths.extend(row.as_ref().map(|row| row.ids.len()));
            match row {
                Ok(row) if row.ids.len() > longest => long.push(place),
                Ok(row) => {
                    kept += 1;
                    self.rows.push(row);
                }
                Err(fault) => wrong.push(format!("{place}: {fault}")),
            }
        }
        let has_tools =
            |row: &&Row| data::dataset::tools("tools", row.columns.get("tools")).is_ok_and(|of| of.is_some());
        let hidden =
            self.rows[self.rows.len() - kept..].iter().filter(|row| row.tools.is_none()).filter(has_tools).count();
        if hidden > 0 && !encoder.shows_tools() {
            let rows = count(hidden as u64, "row");
            self.notes.push(format!("{}: the chat template does not show the `tools` of {rows}", of.path));
        }
        if kept == 0 {
            let why = wrong.first().cloned().unwrap_or_else(|| match long.first() {
                Some(place) => format!("{place}: its prompt has more than {longest} tokens"),
                None => "it has no rows".to_owned(),
            });
            return Err(TrainError::Usage(format!("{}: no row has a prompt ({why})", of.path)));
        }
        let rows = kept + wrong.len() + long.len();
        let help = || {
            let most = config.reinforcement.max_completion_length as usize;
            format!("`sequence_len` of at least {} keeps 99 % of them", nearly_all(&mut lengths.clone()) + most)
        };
        if 2 * (wrong.len() + long.len()) > rows {
            let first = wrong.first().or(long.first()).expect("some are left out");
            let problem = format!(
                "{} of {rows} rows have no prompt that can be answered: {} too long, {} otherwise; the first: {first}",
                wrong.len() + long.len(),
                long.len(),
                wrong.len(),
            );
            let hint = if long.len() > wrong.len() { help() } else { "check the columns of the dataset".to_owned() };
            return Err(TrainError::Data(DataError::invalid(&of.path, problem).hint(hint)));
        }
        if let Some(first) = wrong.first() {
            self.notes.push(format!("{}: {} left out, the first: {first}", of.path, count(wrong.len() as u64, "row")));
        }
        if let Some(first) = long.first() {
            self.notes.push(format!(
                "{}: {} left out whose prompts have more than {longest} tokens, `sequence_len` less \
                 `max_completion_length`: {}; the first: {first}",
                of.path,
                count(long.len() as u64, "row"),
                help(),
            ));
        }
        Ok(())
    }
}

impl Row {
    fn of(mut fields: Map<String, Value>, of: &Dataset, encoder: &PromptEncoder) -> std::result::Result<Row, String> {
        let (name, is_question) = column(&fields, of)?;
        let value = fields.remove(&name).unwrap_or_default();
        let system = system(&fields, of)?;
        let prompt = match opened(value, is_question)? {
            Value::Array(messages) => {
                let asked = asked(messages, name == PROMPT)?;
                let has_system = asked.first().is_some_and(|of| of["role"] == "system");
                let system = system.filter(|_| !has_system).map(|text| json!({"role": "system", "content": text}));
                Value::Array(system.into_iter().chain(asked).collect())
            }
            Value::String(text) if is_question && encoder.has_template() => {
                // Rows in the form of Alpaca.
                let usual = || (name == "instruction").then_some("input");
                let input = of.input_field.as_deref().or_else(usual).and_then(|name| fields.get(name)?.as_str());
                let text = input.filter(|input| !input.is_empty()).map_or(text.clone(), |of| format!("{text}\n\n{of}"));
                let system = system.map(|text| json!({"role": "system", "content": text}));
                Value::Array(system.into_iter().chain([json!({"role": "user", "content": text})]).collect())
            }
            Value::String(text) if system.is_none() || of.system_prompt_type.is_none() => Value::String(text),
            Value::String(_) => return Err(format!("`{name}` is a text, and `system_prompt` goes before messages")),
            other => return Err(format!("`{name}` is {other}, expected a text or a list of messages")),
        };
        let mut request = Map::from_iter([(PROMPT.to_owned(), prompt.clone())]);
        for name in ["tools", "chat_template_kwargs"] {
            request.extend(fields.get(name).filter(|_| prompt.is_array()).map(|of| (name.to_owned(), of.clone())));
        }
        let Request { prompt: mut asked, .. } =
            Request::from_json(&Value::Object(request)).map_err(|e| e.to_string())?;
        let tools = match &mut asked {
            // Tools that only an environment reads are a column like others.
            Prompt::Messages(of) if !encoder.shows_tools() => of.tools.take().and(None),
            Prompt::Messages(of) => of.tools.clone(),
            Prompt::Text(_) | Prompt::Ids(_) => None,
        };
        let ids = encoder.encode(&asked).map_err(|e| e.to_string())?;
        if ids.is_empty() {
            return Err(format!("`{name}` has no tokens"));
        }
        Ok(Row { prompt, ids, tools, columns: fields })
    }
}

/// The length that 99 of 100 do not exceed.
fn nearly_all(lengths: &mut [usize]) -> usize {
    lengths.sort_unstable();
    lengths.get((99 * lengths.len()).div_ceil(100).saturating_sub(1)).copied().unwrap_or(0)
}

/// The text that goes before the messages of a row: that of the dataset, or of a column of the row. Errors: a named column that
/// the row does not have.
fn system(fields: &Map<String, Value>, of: &Dataset) -> std::result::Result<Option<String>, String> {
    let column = |name: &str| fields.get(name)?.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    match (of.system_prompt_type, &of.system_prompt_field) {
        (Some(SystemPromptType::Fixed), _) => Ok(of.system_prompt.clone()),
        (Some(SystemPromptType::Field), Some(name)) if !fields.contains_key(name) => {
            Err(format!("there is no `{name}`"))
        }
        (Some(SystemPromptType::Field), name) => Ok(name.as_deref().and_then(column)),
        (None, _) => Ok(data::dataset::SYSTEM.into_iter().find_map(column)),
    }
}

/// The column of a row that has images: parts of messages, or images next to them.
fn with_images(fields: &Map<String, Value>) -> Option<&str> {
    let is_part = |part: &Value| part["type"].as_str().is_some_and(|of| ["image", "image_url"].contains(&of));
    let has_part = |message: &Value| message["content"].as_array().is_some_and(|parts| parts.iter().any(is_part));
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.iter().all(Value::is_null),
        _ => false,
    };
    let has = |name: &str, value: &Value| match name {
        "image" | "images" => !is_empty(value),
        _ => data::dataset::messages_in(value).is_some_and(|list| list.iter().any(has_part)),
    };
    fields.iter().find(|(name, value)| has(name, value)).map(|(name, _)| name.as_str())
}

/// The messages of a prompt as requests read them, also where they stand there as a text of JSON; other values as they are.
fn opened(value: Value, is_question: bool) -> std::result::Result<Value, String> {
    let found = if is_question && value.is_string() { None } else { data::dataset::messages_in(&value) };
    let Some(list) = found else { return Ok(value) };
    let messages = read_messages(&list).map_err(|error| error.to_string())?;
    Ok(messages.into_iter().map(Value::Object).collect())
}

/// The column with the prompt, and whether it is a question to be answered by the template.
fn column(fields: &Map<String, Value>, of: &Dataset) -> std::result::Result<(String, bool), String> {
    let given = |name: &str| fields.get(name).is_some_and(|value| !value.is_null());
    let named = |name: &str| match given(name) {
        true => Ok(name.to_owned()),
        false => Err(format!("there is no `{name}`")),
    };
    match of.r#type {
        DatasetType::Instruction => {
            named(of.instruction_field.as_deref().unwrap_or("instruction")).map(|name| (name, true))
        }
        DatasetType::Conversation => named(&of.messages_field).map(|name| (name, false)),
        _ => {
            let own = [PROMPT, "messages"].into_iter().find(|name| given(name)).map(|name| (name.to_owned(), false));
            let asked = || QUESTIONS.into_iter().find(|name| given(name)).map(|name| (name.to_owned(), true));
            own.or_else(asked).ok_or_else(|| {
                let known = [&[PROMPT, "messages"], &QUESTIONS[..]].concat().join(", ");
                format!("there is none of {known}")
            })
        }
    }
}

/// The messages up to the one that is to be answered. A prompt is taken as it is; a conversation ends before the last
/// answers.
fn asked(mut messages: Vec<Value>, is_prompt: bool) -> std::result::Result<Vec<Value>, String> {
    if !is_prompt {
        while messages.last().is_some_and(|message| message["role"] == "assistant") {
            messages.pop();
        }
    }
    if messages.is_empty() { Err("there is no message to answer".to_owned()) } else { Ok(messages) }
}
