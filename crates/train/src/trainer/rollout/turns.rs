//! The turns of an answer: sampled ones, and what an environment says between them. What was sampled is never encoded again:
//! the ids of the next turn's prompt are those of the turns before, and of the environment's words.

use serde_json::{Value, json};

use super::prompts::Row;
use crate::error::{Result, TrainError};
use crate::inference::generate::{Finish, Messages, Prompt, PromptEncoder};

/// One answer as it was sampled, with all of its turns.
pub(super) struct Answer {
    pub prompt: Vec<i32>,
    /// The tokens after the prompt.
    pub ids: Vec<i32>,
    /// Log-probabilities of these; 0 for those of an environment.
    pub logps: Vec<f32>,
    /// Tokens that an environment said, from each first one up to the last, exclusive.
    pub given: Vec<(usize, usize)>,
    /// The texts of the turns, and what an environment said after each.
    pub turns: Vec<(String, Value)>,
    /// The end of the last turn.
    pub finish: Option<Finish>,
}

impl Answer {
    pub fn to(prompt: Vec<i32>) -> Answer {
        let (ids, logps, given, turns) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Answer { prompt, ids, logps, given, turns, finish: None }
    }

    /// The answer as reward functions see it: messages where the prompt is messages, else a text.
    pub fn completion(&self, prompt: &Value) -> Value {
        if !prompt.is_array() {
            return Value::String(self.text());
        }
        let messages = self.turns.iter().flat_map(|(text, reply)| {
            let said = reply.as_array().into_iter().flatten().cloned();
            std::iter::once(json!({"role": "assistant", "content": text})).chain(said)
        });
        messages.collect()
    }

    /// The texts of all turns and of what was said between them.
    pub fn text(&self) -> String {
        let said = |reply: &Value| match reply {
            Value::Array(messages) => {
                let line = |message: &Value| {
                    let content = message["content"].as_str().map_or(message["content"].to_string(), str::to_owned);
                    format!("\n[{}] {content}\n", message["role"].as_str().unwrap_or_default())
                };
                messages.iter().map(line).collect()
            }
            reply => reply.as_str().unwrap_or_default().to_owned(),
        };
        self.turns.iter().map(|(text, reply)| format!("{text}{}", said(reply))).collect()
    }

    /// Number of tokens that were sampled.
    pub fn sampled(&self) -> usize {
        self.ids.len() - self.given.iter().map(|(first, last)| last - first).sum::<usize>()
    }

    /// Adds what an environment said. Returns whether the answer goes on: something was said, and `most` tokens leave room
    /// for it and for another turn. Errors: words of another kind than the prompt, or that the template cannot put there.
    pub fn hear(&mut self, reply: Value, row: &Row, encoder: &PromptEncoder, most: usize) -> Result<bool> {
        if reply.is_null() {
            return Ok(false);
        }
        let mut words = following(&reply, row, encoder)?;
        if row.prompt.is_array() && self.finish == Some(Finish::Length) {
            // A turn that was cut off is ended.
            words.splice(0..0, encoder.end_of_turn().map(|id| id as i32));
        }
        if self.ids.len() + words.len() >= most {
            self.finish = Some(Finish::Length);
            return Ok(false);
        }
        let first = self.ids.len();
        self.ids.extend(&words);
        self.logps.resize(self.ids.len(), 0.0);
        self.given.push((first, self.ids.len()));
        if let Some((_, said)) = self.turns.last_mut() {
            *said = reply;
        }
        Ok(true)
    }
}

/// The ids of a prompt with what an environment puts after it before the first turn.
pub(super) fn opened(reply: &Value, row: &Row, encoder: &PromptEncoder) -> Result<Vec<i32>> {
    match (reply, &row.prompt) {
        (Value::Null, _) => Ok(row.ids.clone()),
        (Value::String(text), Value::String(prompt)) => encoder.encode(&Prompt::Text(format!("{prompt}{text}"))),
        (Value::Array(said), Value::Array(prompt)) => {
            encoder.encode(&Prompt::Messages(messages(&[&prompt[..], said].concat(), row)?))
        }
        _ => Err(other_kind(reply, row)),
    }
}

fn following(reply: &Value, row: &Row, encoder: &PromptEncoder) -> Result<Vec<i32>> {
    match (reply, &row.prompt) {
        (Value::String(text), Value::String(_)) => encoder.encode_after(text),
        (Value::Array(said), Value::Array(_)) => encoder.encode_following(&messages(said, row)?),
        _ => Err(other_kind(reply, row)),
    }
}

/// Messages with what the template of a row's prompt sees besides.
fn messages(said: &[Value], row: &Row) -> Result<Messages> {
    let objects: Option<Vec<_>> = said.iter().map(|message| message.as_object().cloned()).collect();
    let objects = objects.filter(|of| of.iter().all(|message| message.contains_key("role")) && !of.is_empty());
    let objects = objects.ok_or_else(|| {
        TrainError::Failed(format!("the environment said {}, expected messages with `role`", Value::from(said)))
    })?;
    let variables = row.columns.get("chat_template_kwargs").and_then(Value::as_object).cloned().unwrap_or_default();
    Ok(Messages { tools: row.tools.clone(), variables, ..Messages::of(objects) })
}

fn other_kind(reply: &Value, row: &Row) -> TrainError {
    let expected = if row.prompt.is_array() { "a list of messages" } else { "a text" };
    TrainError::Failed(format!("the environment said {reply}, expected {expected}, as the prompt is, or None"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Map;

    #[test]
    fn an_answer_of_several_turns_is_their_messages() {
        let turn = |text: &str, reply: Value| (text.to_owned(), reply);
        let mut answer = Answer::to(vec![1]);
        answer.turns = vec![turn("2 + 2?", json!([{"role": "tool", "content": "4"}])), turn("It is 4.", Value::Null)];
        answer.ids = vec![5, 6, 7, 8];
        answer.given = vec![(1, 3)];
        let all = answer.completion(&json!([{"role": "user", "content": "?"}]));
        let roles: Vec<&str> = all.as_array().unwrap().iter().map(|of| of["role"].as_str().unwrap()).collect();
        assert_eq!((roles, answer.sampled()), (vec!["assistant", "tool", "assistant"], 2));
        assert_eq!(answer.completion(&json!("?")), json!("2 + 2?\n[tool] 4\nIt is 4."));
    }

    #[test]
    fn words_of_another_kind_than_the_prompt_are_refused() {
        let encoder = PromptEncoder::open(&[]).unwrap();
        let row = Row { prompt: json!("text"), ids: vec![1], tools: None, columns: Map::new() };
        let mut answer = Answer::to(vec![1]);
        let error = answer.hear(json!([{"role": "user"}]), &row, &encoder, 9).unwrap_err().to_string();
        assert!(error.contains("expected a text, as the prompt is"), "{error}");
        assert!(!answer.hear(Value::Null, &row, &encoder, 9).unwrap());
    }
}
