//! Prompts as token ids: texts as they are, conversations by the model's own template. Also which tokens end an answer.
//! Does not know what follows a prompt.

use std::path::Path;
use std::sync::Arc;

use data::Tokenizer;
use data::template::{ChatTemplate, Conversation, clock_now};
use serde_json::{Map, Value};

use super::defaults::Defaults;
use crate::error::{Result, TrainError};

/// The file without which a folder has no tokenizer.
const TOKENIZER: &str = "tokenizer.json";

/// What an answer must satisfy.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Token ids.
    Ids(Vec<i32>),
    /// A text that is continued.
    Text(String),
    /// Messages with `role` and `content`, which are answered.
    Messages(Vec<Map<String, Value>>),
}

impl Prompt {
    /// A text, a list of messages, or a list of ids, as JSON.
    pub fn from_json(value: &Value) -> Result<Prompt> {
        let wrong = || TrainError::Usage(format!("a prompt is a text or a list of messages, not {value}"));
        match value {
            Value::String(text) => Ok(Prompt::Text(text.clone())),
            Value::Array(items) if !items.is_empty() && items.iter().all(Value::is_object) => {
                Ok(Prompt::Messages(items.iter().filter_map(Value::as_object).cloned().collect()))
            }
            Value::Array(items) => {
                let id = |item: &Value| item.as_i64().and_then(|id| i32::try_from(id).ok());
                items.iter().map(id).collect::<Option<Vec<i32>>>().map(Prompt::Ids).ok_or_else(wrong)
            }
            _ => Err(wrong()),
        }
    }
}

/// Encodes prompts as a model wants them.
pub struct PromptEncoder {
    tokenizer: Option<Arc<Tokenizer>>,
    template: Option<ChatTemplate>,
}

impl PromptEncoder {
    /// Of the first folder that has a tokenizer: an adapter's own before its model's.
    pub fn open(folders: &[&Path]) -> Result<PromptEncoder> {
        let Some(folder) = folders.iter().find(|folder| folder.join(TOKENIZER).is_file()) else {
            return Ok(PromptEncoder { tokenizer: None, template: None });
        };
        let tokenizer = Tokenizer::from_folder(folder).map_err(TrainError::model_file)?;
        let variables = tokenizer.template_variables().clone();
        let template = tokenizer.chat_template(false).map(|source| ChatTemplate::new(source, variables, clock_now()));
        let template = template.transpose().map_err(TrainError::model_file)?;
        Ok(PromptEncoder { tokenizer: Some(Arc::new(tokenizer)), template })
    }

    /// The same with another template; `None` leaves it.
    pub fn with_template(mut self, text: Option<String>) -> Result<PromptEncoder> {
        if let (Some(text), Some(tokenizer)) = (text, &self.tokenizer) {
            let variables = tokenizer.template_variables().clone();
            let template = ChatTemplate::new(&text, variables, clock_now()).map_err(TrainError::model_file)?;
            self.template = Some(template);
        }
        Ok(self)
    }

    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.tokenizer.as_ref()
    }

    /// The ids of a prompt.
    pub fn encode(&self, prompt: &Prompt) -> Result<Vec<i32>> {
        let failed = |e: data::RowError| TrainError::Usage(format!("the prompt cannot be encoded: {e}"));
        let ids = match prompt {
            Prompt::Ids(ids) => return Ok(ids.clone()),
            Prompt::Text(text) => self.needed()?.encoder().encode(text, true).map_err(failed)?,
            Prompt::Messages(messages) => {
                let tokenizer = self.needed()?;
                let text = self.render(messages, true)?;
                tokenizer.encoder().encode(&text, false).map_err(failed)?
            }
        };
        Ok(ids.into_iter().map(|id| id as i32).collect())
    }

    /// The ids of a beginning and of its continuation, which are encoded as one text. A token over their border is the
    /// continuation's. Tokens that the tokenizer adds behind a text are left out.
    pub fn encode_pair(&self, beginning: &str, continuation: &str) -> Result<(Vec<i32>, Vec<i32>)> {
        let failed = |e: data::RowError| TrainError::Usage(format!("the texts cannot be encoded: {e}"));
        let encoded = self.needed()?.encode_document(&format!("{beginning}{continuation}")).map_err(failed)?;
        let is_text = |(start, end): &(usize, usize)| end > start;
        let behind = encoded.offsets.iter().rposition(is_text).map_or(encoded.ids.len(), |last| last + 1);
        let border = encoded.offsets[..behind].iter().position(|(_, end)| *end > beginning.len()).unwrap_or(behind);
        let ids = |part: &[u32]| part.iter().map(|id| *id as i32).collect();
        Ok((ids(&encoded.ids[..border]), ids(&encoded.ids[border..behind])))
    }

    /// Tokens that end an answer: those that the model names, the tokenizer's, and the one behind an answer in the template.
    pub fn end_tokens(&self, defaults: &Defaults) -> Vec<u32> {
        let mut ids = defaults.end_tokens.clone();
        ids.extend(self.tokenizer.as_ref().and_then(|tokenizer| tokenizer.eos()).map(|token| token.id));
        ids.extend(self.end_of_turn());
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    fn needed(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_deref().ok_or_else(|| {
            TrainError::Usage(format!(
                "the model has no {TOKENIZER}, which encodes texts (put the one of its base there)"
            ))
        })
    }

    fn render(&self, messages: &[Map<String, Value>], prompt: bool) -> Result<String> {
        let Some(template) = &self.template else {
            let hint = "give a text that is continued, or a model whose folder has a chat template";
            return Err(TrainError::Usage(format!("the model has no chat template for messages ({hint})")));
        };
        let rendered = template.render(Conversation { messages, tools: None }, prompt);
        rendered.map(|rendered| rendered.text).map_err(|e| TrainError::Usage(format!("chat template: {e}")))
    }

    /// The special token that the template puts behind an answer.
    fn end_of_turn(&self) -> Option<u32> {
        const ANSWER: &str = "surogate answers so";
        let message = |role: &str, content: &str| {
            let fields = [("role", role), ("content", content)];
            fields.map(|(name, value)| (name.to_owned(), Value::String(value.to_owned()))).into_iter().collect()
        };
        let text = self.render(&[message("user", "?"), message("assistant", ANSWER)], false).ok()?;
        let behind = text.rsplit_once(ANSWER)?.1.trim_start();
        let special = self.tokenizer.as_ref()?.special_tokens();
        let found = special.iter().filter(|token| behind.starts_with(&token.text));
        found.max_by_key(|token| token.text.len()).map(|token| token.id)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn prompts_are_texts_messages_or_ids() {
        assert_eq!(Prompt::from_json(&json!("a")).unwrap(), Prompt::Text("a".into()));
        assert_eq!(Prompt::from_json(&json!([1, 2])).unwrap(), Prompt::Ids(vec![1, 2]));
        let messages = Prompt::from_json(&json!([{"role": "user", "content": "a"}])).unwrap();
        assert!(matches!(messages, Prompt::Messages(list) if list.len() == 1));
        for wrong in [json!(3), json!(["a"]), json!([1, {"role": "user"}])] {
            let error = Prompt::from_json(&wrong).unwrap_err().to_string();
            assert!(error.contains("a text or a list of messages"), "{error}");
        }
    }

    #[test]
    fn without_a_tokenizer_only_ids_are_prompts() {
        let encoder = PromptEncoder::open(&[]).unwrap();
        assert_eq!(encoder.encode(&Prompt::Ids(vec![3])).unwrap(), [3]);
        let error = encoder.encode(&Prompt::Text("a".into())).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
        assert_eq!(encoder.end_tokens(&Defaults { end_tokens: vec![5, 2], ..Default::default() }), [2, 5]);
    }
}
