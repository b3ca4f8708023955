//! Reads the prompt and the answers of a row of preferences, in any of the forms of other tools.
//!
//! Knows columns; no templates and no tokens.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::columns::{PreferenceColumns, Question, UnpairedColumns, VARIABLES, messages_in};
use super::text::{common, prompt_of};
use super::{PreferenceCounts, Split};
use crate::dataset::{
    PartTexts, RowForm, history, is_broken, messages_with, optional_text, padding, required, tools, unread, wrong,
};
use crate::error::{RowError, RowReason};
use crate::json_values::parsed;
use crate::remarks::{Remark, Remarks};
use crate::spans::Message;

/// The content of a side: plain text, or turns that the chat template writes.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Said {
    Text(String),
    Turns(Vec<Message>),
}

/// A prompt and its answers: two, or one with a verdict. All are text, or all are turns.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub prompt: Said,
    pub answers: Vec<Said>,
    pub tools: Option<Value>,
    /// Further variables of the template, from this row.
    pub variables: Option<Map<String, Value>>,
}

/// A row, and what is noticed of it.
pub(super) struct RowReader<'a> {
    pub row: &'a Map<String, Value>,
    pub form: RowForm,
    pub split: Split,
    pub remarks: &'a mut Remarks,
}

/// A column before its messages are read.
enum Raw<'a> {
    Text(&'a str),
    List { list: Cow<'a, [Value]>, in_text: bool },
}

/// The finite number that a value is, or that its text says.
fn number(value: &Value) -> Option<f64> {
    let number = value.as_f64().or_else(|| value.as_str()?.trim().parse().ok());
    number.filter(|number| number.is_finite())
}

pub(super) fn is_number(value: &Value) -> bool {
    number(value).is_some()
}

/// The verdict that a value stands for.
pub(super) fn verdict(value: &Value) -> Option<bool> {
    const GOOD: [&str; 8] = ["desirable", "true", "good", "chosen", "positive", "yes", "1", "preferred"];
    const BAD: [&str; 9] = ["undesirable", "false", "bad", "rejected", "negative", "no", "0", "-1", "dispreferred"];
    match value {
        Value::Bool(is_good) => Some(*is_good),
        Value::Number(number) if number.as_f64() == Some(1.0) => Some(true),
        Value::Number(number) if [Some(0.0), Some(-1.0)].contains(&number.as_f64()) => Some(false),
        Value::String(text) => {
            let text = text.trim().to_ascii_lowercase();
            let is = |words: &[&str]| words.contains(&text.as_str());
            is(&GOOD).then_some(true).or(is(&BAD).then_some(false))
        }
        _ => None,
    }
}

impl RowReader<'_> {
    /// The prompt and both answers of a pair.
    pub(super) fn pair(
        &mut self,
        columns: &PreferenceColumns,
        counts: &mut PreferenceCounts,
    ) -> Result<(Asked, Option<f32>), RowError> {
        let margin = columns.margin.as_ref().map(|name| self.number(name)).transpose()?.flatten();
        if let Some([chosen, rejected]) = &columns.scores {
            let scores = [self.number(chosen)?, self.number(rejected)?];
            counts.inverted += usize::from(matches!(scores, [Some(good), Some(bad)] if good < bad));
        }
        let sides: Vec<&str> = columns.chosen.iter().chain([&columns.rejected]).map(String::as_str).collect();
        let asked = self.asked(&columns.question, &sides, columns.chosen.is_none())?;
        if let [Said::Turns(chosen), Said::Turns(rejected)] = &asked.answers[..] {
            let is_answer = |turns: &[Message]| turns.first().is_none_or(Message::is_assistant);
            counts.other_prompts += usize::from(!is_answer(chosen) || !is_answer(rejected));
        }
        Ok((asked, margin))
    }

    /// The prompt and the answer of a row with a verdict.
    pub(super) fn unpaired(&mut self, columns: &UnpairedColumns) -> Result<(Asked, bool), RowError> {
        let label = required(self.row, &columns.label)?;
        let desirable =
            verdict(label).ok_or_else(|| wrong(&columns.label, "true or false (or 1, 0, \"desirable\", …)", label))?;
        let answer: Vec<&str> = columns.completion.iter().map(String::as_str).collect();
        Ok((self.asked(&columns.question, &answer, columns.completion.is_none())?, desirable))
    }

    fn number(&self, name: &str) -> Result<Option<f32>, RowError> {
        match self.row.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match number(value) {
                Some(number) => Ok(Some(number as f32)),
                None => Err(wrong(name, "a finite number", value)),
            },
        }
    }

    fn raw<'v>(name: &str, value: &'v Value) -> Result<Raw<'v>, RowError> {
        let is_message = |value: &Value| ["role", "from", "human"].iter().any(|key| value.get(*key).is_some());
        let holds = |list: &[Value]| {
            list.iter().all(|one| is_message(one) || one.as_str().is_some_and(|text| parsed(text).is_some()))
        };
        match value {
            Value::String(text) => Ok(match messages_in(value).filter(|list| !list.is_empty() && holds(list)) {
                Some(list) => Raw::List { list: Cow::Owned(list), in_text: true },
                None if text.trim_start().starts_with('[') && is_broken(value) => {
                    let problem = format!("column `{name}` holds messages as a text that is not valid JSON");
                    return Err(RowError::new(RowReason::WrongType, problem));
                }
                None => Raw::Text(text),
            }),
            Value::Array(list) => Ok(Raw::List { list: Cow::Borrowed(list), in_text: false }),
            other => match messages_in(other) {
                Some(list) => Ok(Raw::List { list: Cow::Owned(list), in_text: false }),
                None => Err(wrong(name, "a text or messages", other)),
            },
        }
    }

    /// Returns the prompt and the answers; `answers` are columns. `from_prompt`: the prompt's last turn is the first answer.
    fn asked(&mut self, question: &Question, answers: &[&str], from_prompt: bool) -> Result<Asked, RowError> {
        let row = self.row;
        let prompt = match &question.prompt {
            Some(name) => Some((name.as_str(), Self::raw(name, required(row, name)?)?)),
            None => None,
        };
        let mut sides: Vec<(&str, Raw<'_>)> = Vec::new();
        for name in answers {
            sides.push((name, Self::raw(name, required(row, name)?)?));
        }
        unread(row, &question.open).for_each(|name| self.remarks.add(Remark::Column((*name).to_owned()), 1));
        let [_, tools_name] = question.of_row(row);
        let tools_value = tools_name.and_then(|name| row.get(name));
        let tools = tools_name.map(|name| tools(name, tools_value)).transpose()?.flatten();
        let lists = prompt.iter().chain(&sides).filter_map(|(_, raw)| match raw {
            Raw::List { list, .. } => Some(list),
            Raw::Text(_) => None,
        });
        let is_padded = self.form == RowForm::Columnar;
        let shows = lists.into_iter().any(|list| padding::shows(list, tools.as_ref()));
        let tools = match tools {
            Some(tools) if shows || (is_padded && !tools_value.is_some_and(Value::is_string)) => {
                Some(padding::stripped(&tools))
            }
            other => other,
        };
        let mut texts = PartTexts::default();
        for (_, raw) in prompt.iter().chain(&sides) {
            match raw {
                Raw::List { list, .. } => texts.add(list, &question.properties),
                Raw::Text(_) => texts.add_text(),
            }
        }
        texts.note(self.remarks);
        let mut read = |(name, raw): &(&str, Raw<'_>)| -> Result<Said, RowError> {
            let (list, in_text) = match raw {
                Raw::Text(text) => return Ok(Said::Text((*text).to_owned())),
                Raw::List { list, in_text } => (list, *in_text),
            };
            let in_column =
                |error: RowError| RowError { detail: format!("column `{name}`: {}", error.detail), ..error };
            if !(shows || (is_padded && !in_text)) {
                let turns = messages_with(list, &question.properties, texts.are_read());
                return turns.map(Said::Turns).map_err(in_column);
            }
            self.remarks.add(Remark::Padding, list.iter().map(padding::null_arguments).sum());
            let stripped: Vec<Value> = list.iter().map(padding::stripped).collect();
            messages_with(&stripped, &question.properties, texts.are_read()).map(Said::Turns).map_err(in_column)
        };
        let sides: Vec<Said> = sides.iter().map(&mut read).collect::<Result<_, _>>()?;
        let prompt_said = prompt.as_ref().map(&mut read).transpose()?;
        let variables = match row.get(VARIABLES) {
            None | Some(Value::Null) => None,
            Some(value) => match value.as_str().and_then(parsed).as_ref().unwrap_or(value) {
                Value::Object(fields) => {
                    Some(fields.iter().filter(|(_, v)| !v.is_null()).map(|(k, v)| (k.clone(), v.clone())).collect())
                }
                other => return Err(wrong(VARIABLES, "an object", other)),
            },
        };
        let has_turns = sides.iter().chain(&prompt_said).any(|said| matches!(said, Said::Turns(_)));
        let (prompt, answers) = match (question.is_chat || has_turns, prompt_said) {
            (true, said) => self.turns(question, said, sides, from_prompt)?,
            (false, said) => self.texts(said, sides)?,
        };
        Ok(Asked { prompt, answers, tools, variables })
    }

    /// Plain texts. A side of turns does not come here.
    fn texts(&self, prompt: Option<Said>, sides: Vec<Said>) -> Result<(Said, Vec<Said>), RowError> {
        let texts: Vec<String> =
            sides.into_iter().filter_map(|said| if let Said::Text(text) = said { Some(text) } else { None }).collect();
        if let Some(prompt) = prompt {
            if texts.iter().any(String::is_empty) {
                return Err(RowError::new(RowReason::Empty, "an answer is empty"));
            }
            return Ok((prompt, texts.into_iter().map(Said::Text).collect()));
        }
        let [chosen, rejected] = &texts[..] else {
            return Err(RowError::new(RowReason::MissingField, "there is no prompt"));
        };
        let at = prompt_of(chosen, rejected, self.split);
        if chosen.len() == at || rejected.len() == at {
            return Err(RowError::new(RowReason::Empty, "an answer is empty"));
        }
        let answers = [chosen, rejected].map(|text| Said::Text(text[at..].to_owned()));
        Ok((Said::Text(chosen[..at].to_owned()), answers.into()))
    }

    fn turns(
        &mut self,
        question: &Question,
        prompt: Option<Said>,
        sides: Vec<Said>,
        from_prompt: bool,
    ) -> Result<(Said, Vec<Said>), RowError> {
        let asked = match &prompt {
            Some(Said::Text(text)) => Some(text.clone()),
            _ => None,
        };
        let mut before = match prompt {
            Some(Said::Turns(turns)) => turns,
            Some(Said::Text(text)) => question_turns(self, question, &text)?,
            None => Vec::new(),
        };
        let mut answers: Vec<Vec<Message>> = sides.into_iter().map(answer).collect();
        let is_whole = |turns: &Vec<Message>| turns.first().is_some_and(|first| !first.is_assistant());
        if from_prompt && !answers.is_empty() && answers.iter().all(is_whole) {
            // The messages are a whole conversation as the rejected ones are.
            answers.insert(0, std::mem::take(&mut before));
        } else if from_prompt {
            let last = before.pop().filter(Message::is_assistant);
            let last = last.ok_or_else(|| {
                RowError::new(RowReason::MissingField, "the last message is not the assistant's: there is no answer")
            })?;
            answers.insert(0, vec![last]);
        }
        if answers.len() == 2 && answers.iter().all(is_whole) {
            before = self.split_whole(question, asked.as_deref(), before, &mut answers)?;
        }
        if let Some(system) = self.system(question)?
            && before.first().is_none_or(|first| first.role() != "system")
        {
            before.insert(0, system);
        }
        if before.is_empty() {
            let problem = "the sides begin with different messages: there is no prompt";
            return Err(RowError::new(RowReason::MissingField, problem));
        }
        if answers.iter().any(Vec::is_empty) {
            return Err(RowError::new(RowReason::Empty, "an answer is empty"));
        }
        Ok((Said::Turns(before), answers.into_iter().map(Said::Turns).collect()))
    }

    /// Takes the prompt out of both sides where each is a whole conversation. `before`: the prompt's own column, `asked` its
    /// text if it is one.
    fn split_whole(
        &self,
        question: &Question,
        asked: Option<&str>,
        before: Vec<Message>,
        sides: &mut [Vec<Message>],
    ) -> Result<Vec<Message>, RowError> {
        let name = question.prompt.as_deref().unwrap_or_default();
        let is_refused = asked.is_some() && self.split == Split::CommonPrefix;
        let is_prompt = !before.is_empty() && !is_refused && sides.iter().all(|turns| turns.starts_with(&before));
        let count = if is_prompt { before.len() } else { common(&sides[0], &sides[1]) };
        let holds =
            |text: &str| sides[0][..count].iter().any(|turn| turn.fields.get("content").is_some_and(|of| of == text));
        let is_known = before.is_empty() || is_prompt;
        let is_repeated = self.split == Split::Spans && asked.is_some_and(holds);
        if !is_known && !is_repeated {
            let problem =
                format!("column `{name}` asks something else than the conversations of both sides begin with");
            return Err(RowError::new(RowReason::WrongType, problem));
        }
        let prompt = sides[0][..count].to_vec();
        sides.iter_mut().for_each(|turns| drop(turns.drain(..count)));
        Ok(prompt)
    }

    /// The system prompt of the row's own column.
    fn system(&mut self, question: &Question) -> Result<Option<Message>, RowError> {
        let [Some(name), _] = question.of_row(self.row) else { return Ok(None) };
        if question.system.is_none() && !self.row[name].is_string() {
            self.remarks.add(Remark::Column(name.to_owned()), 1);
            return Ok(None);
        }
        let text = optional_text(self.row, name)?.filter(|text| !text.is_empty());
        Ok(text.map(|text| Message::new("system", text)))
    }
}

/// The turn that a text column asks with, and what the row puts before it.
fn question_turns(reader: &RowReader<'_>, question: &Question, text: &str) -> Result<Vec<Message>, RowError> {
    let mut turns = match &question.history {
        Some(name) => history(name, reader.row)?,
        None => Vec::new(),
    };
    let input = question.input.as_ref().map(|name| optional_text(reader.row, name)).transpose()?.flatten();
    let text = match input.unwrap_or_default() {
        "" => text.to_owned(),
        input => format!("{text}\n\n{input}"),
    };
    turns.push(Message::new("user", &text));
    Ok(turns)
}

/// The turns of an answer; a text is one of the assistant's.
fn answer(said: Said) -> Vec<Message> {
    match said {
        Said::Turns(turns) => turns,
        Said::Text(text) => vec![Message::new("assistant", &text)],
    }
}
