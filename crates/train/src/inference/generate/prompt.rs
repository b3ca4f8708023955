//! Prompts as token ids: texts as they are, conversations by the model's own template. Also which tokens end an answer.
//! Does not know what follows a prompt.

use std::path::Path;
use std::sync::Arc;

use data::sequence_images::SequenceImages;
use data::template::{ChatTemplate, Conversation, clock_now};
use data::{Tokenizer, shows_tools};
use serde_json::{Map, Value, json};

use super::defaults::Defaults;
use super::images::PromptImages;
use super::request::{Messages, Prompt};
use crate::error::{Result, TrainError};

/// The file without which a folder has no tokenizer.
const TOKENIZER: &str = "tokenizer.json";

/// The end of a message that is continued, by which it is found in what a template makes of it.
const GOES_ON: &str = "SUROGATE-GOES-ON-HERE ";

/// Encodes prompts as a model wants them.
pub struct PromptEncoder {
    tokenizer: Option<Arc<Tokenizer>>,
    /// The template that is written in place of the tokenizer's own.
    own: Option<String>,
    /// The template, or why it is none: texts need none.
    template: Option<std::result::Result<ChatTemplate, String>>,
}

impl PromptEncoder {
    /// Opens the tokenizer of the first folder that has one: an adapter's own before its model's.
    pub fn open(folders: &[&Path]) -> Result<PromptEncoder> {
        let Some(folder) = folders.iter().find(|folder| folder.join(TOKENIZER).is_file()) else {
            return Ok(PromptEncoder { tokenizer: None, own: None, template: None });
        };
        let tokenizer = Tokenizer::from_folder(folder).map_err(TrainError::model_file)?;
        let source = tokenizer.chat_template(false);
        let template = source.map(|source| compiled(source, &tokenizer, &Map::new()).map_err(|e| e.to_string()));
        Ok(PromptEncoder { tokenizer: Some(Arc::new(tokenizer)), own: None, template })
    }

    /// The same with another template; `None` leaves it.
    pub fn with_template(mut self, text: Option<String>) -> Result<PromptEncoder> {
        if let (Some(text), Some(tokenizer)) = (text, &self.tokenizer) {
            self.template = Some(Ok(compiled(&text, tokenizer, &Map::new())?));
            self.own = Some(text);
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
                tokenizer.encoder().encode(&self.text(messages)?, false).map_err(failed)?
            }
        };
        Ok(ids.into_iter().map(|id| id as i32).collect())
    }

    /// The ids of a prompt, and its images, which `images` reads.
    pub(super) fn encode_with_images(
        &self,
        prompt: &Prompt,
        images: Option<&PromptImages>,
    ) -> Result<(Vec<i32>, Option<SequenceImages>)> {
        match (prompt, images) {
            (Prompt::Messages(of), Some(images)) if of.has_images() => {
                let marked = images.mark(of)?;
                let text = self.text(&marked.messages)?;
                images.encode(&text, marked, self.needed()?)
            }
            _ => Ok((self.encode(prompt)?, None)),
        }
    }

    /// The ids of a beginning and of its continuation, which are encoded as one text. A token over their border is the
    /// continuation's. Tokens that the tokenizer adds after a text are left out.
    pub fn encode_pair(&self, beginning: &str, continuation: &str) -> Result<(Vec<i32>, Vec<i32>)> {
        let failed = |e: data::RowError| TrainError::Usage(format!("the texts cannot be encoded: {e}"));
        let encoded = self.needed()?.encode_document(&format!("{beginning}{continuation}")).map_err(failed)?;
        let is_text = |(start, end): &(usize, usize)| end > start;
        let after = encoded.offsets.iter().rposition(is_text).map_or(encoded.ids.len(), |last| last + 1);
        let border = encoded.offsets[..after].iter().position(|(_, end)| *end > beginning.len()).unwrap_or(after);
        let ids = |part: &[u32]| part.iter().map(|id| *id as i32).collect();
        Ok((ids(&encoded.ids[..border]), ids(&encoded.ids[border..after])))
    }

    /// The ids of messages after an answer, from the token that ended it, exclusive, to where the next answer begins. Errors: the
    /// template has no token after an answer, or leaves an answer out.
    pub fn encode_following(&self, messages: &Messages) -> Result<Vec<i32>> {
        const ANSWER: &str = "surogate answers so";
        let wrong = |text: &str| TrainError::Usage(format!("chat template: {text}, so that no messages can follow it"));
        let end = self.end_of_turn().ok_or_else(|| wrong("it has no special token after an answer"))?;
        let special = self.needed()?.special_tokens();
        let end = special.iter().find(|token| token.id == end).expect("the end of a turn is a special token");
        let mut answer = message("assistant", ANSWER);
        if messages.messages.first().and_then(|message| message.get("role")) == Some(&"tool".into()) {
            // Some templates refuse a tool's message where none was called.
            let call = json!([{"id": "000000000", "type": "function", "function": {"name": "f", "arguments": {}}}]);
            answer.insert("tool_calls".to_owned(), call);
        }
        let all = [message("user", "?"), answer].into_iter().chain(messages.messages.iter().cloned()).collect();
        let text = self.render(&Messages { messages: all, ..messages.clone() }, true)?;
        let after = text.split_once(ANSWER).and_then(|(_, after)| after.split_once(&end.text));
        let (_, after) = after.ok_or_else(|| wrong("it leaves an earlier answer out"))?;
        self.encode_after(after)
    }

    /// The ids of a text that goes on from another.
    pub fn encode_after(&self, text: &str) -> Result<Vec<i32>> {
        let failed = |e: data::RowError| TrainError::Usage(format!("the text cannot be encoded: {e}"));
        let ids = self.needed()?.encoder().encode(text, false).map_err(failed)?;
        Ok(ids.into_iter().map(|id| id as i32).collect())
    }

    /// Tokens that end an answer: the one after an answer in the template, those that the model names, the tokenizer's.
    pub fn end_tokens(&self, defaults: &Defaults) -> Vec<u32> {
        let of_text = self.tokenizer.as_ref().and_then(|tokenizer| tokenizer.eos()).map(|token| token.id);
        let mut ids = Vec::new();
        for id in self.end_of_turn().into_iter().chain(defaults.end_tokens.iter().copied()).chain(of_text) {
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        ids
    }

    /// The special token that the template puts after an answer.
    pub fn end_of_turn(&self) -> Option<u32> {
        const ANSWER: &str = "surogate answers so";
        let messages = [message("user", "?"), message("assistant", ANSWER)];
        let text = self.render(&Messages::of(messages.to_vec()), false).ok()?;
        let after = text.rsplit_once(ANSWER)?.1.trim_start();
        let special = self.tokenizer.as_ref()?.special_tokens();
        let found = special.iter().filter(|token| after.starts_with(&token.text));
        found.max_by_key(|token| token.text.len()).map(|token| token.id)
    }

    /// True if prompts begin with the tokenizer's BOS: conversations where there is a template, else texts. A token that the
    /// template also puts before answers is the beginning of a turn, and not of the prompt.
    pub fn begins_with_bos(&self) -> bool {
        let Some((tokenizer, bos)) = self.tokenizer.as_ref().and_then(|of| Some((of, of.bos()?))) else { return false };
        let turns = [("user", "?"), ("assistant", "."), ("user", "?")].map(|(role, text)| message(role, text));
        match self.render(&Messages::of(turns.to_vec()), true) {
            Ok(text) if self.template.is_some() => text.starts_with(&bos.text) && text.matches(&bos.text).count() <= 2,
            _ => tokenizer.encoder().encode("a", true).is_ok_and(|ids| ids.first() == Some(&bos.id)),
        }
    }

    /// Returns true if the template of conversations with tools shows these.
    pub fn shows_tools(&self) -> bool {
        let of_tokenizer = || self.tokenizer.as_ref().and_then(|of| of.chat_template(true).or(of.chat_template(false)));
        self.own.as_deref().or_else(of_tokenizer).is_some_and(shows_tools)
    }

    fn needed(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_deref().ok_or_else(|| {
            TrainError::Usage(format!(
                "the model has no {TOKENIZER}, which encodes texts (put the one of its base there)"
            ))
        })
    }

    /// The text of a conversation up to where it goes on: with the assistant's turn opened, or inside the last message where
    /// that is the assistant's.
    fn text(&self, of: &Messages) -> Result<String> {
        let Some(marked) = of.marked(GOES_ON) else { return self.render(of, true) };
        let text = self.render(&marked, false)?;
        let (mark, lost) = (GOES_ON.trim_end(), "the chat template leaves out the message that is to be continued");
        let at = text.rfind(mark).ok_or_else(|| TrainError::Usage(lost.into()))?;
        // A template that cuts white space off a message cuts it off here, too.
        let is_kept = text[at..].starts_with(GOES_ON);
        Ok(if is_kept { &text[..at] } else { text[..at].trim_end() }.to_owned())
    }

    fn render(&self, of: &Messages, prompt: bool) -> Result<String> {
        let (Some(template), Some(tokenizer)) = (&self.template, &self.tokenizer) else {
            let hint = "give a text that is continued, or a model whose folder has a chat template";
            return Err(TrainError::Usage(format!("the model has no chat template for messages ({hint})")));
        };
        let for_tools = tokenizer.chat_template(true).filter(|_| of.tools.is_some() && self.own.is_none());
        let is_other = for_tools.is_some_and(|text| Some(text) != tokenizer.chat_template(false));
        let source = self.own.as_deref().or(for_tools).or(tokenizer.chat_template(false)).unwrap_or_default();
        if of.tools.is_some() && !shows_tools(source) {
            let hint = "write their definitions into the system prompt, as the model was trained to see them";
            return Err(TrainError::Usage(format!(
                "the chat template has no place for tools, which are given ({hint})"
            )));
        }
        let other =
            if is_other || !of.variables.is_empty() { Some(compiled(source, tokenizer, &of.variables)?) } else { None };
        let template = template.as_ref().map_err(|fault| TrainError::Usage(fault.clone()))?;
        let conversation = Conversation { messages: &of.messages, tools: of.tools.as_ref() };
        let rendered = other.as_ref().unwrap_or(template).render(conversation, prompt);
        rendered.map(|rendered| rendered.text).map_err(|e| TrainError::Usage(format!("chat template: {e}")))
    }
}

/// A template with the tokenizer's variables and others.
fn compiled(source: &str, tokenizer: &Tokenizer, more: &Map<String, Value>) -> Result<ChatTemplate> {
    let mut variables = tokenizer.template_variables().clone();
    variables.extend(more.clone());
    ChatTemplate::new(source, variables, clock_now()).map_err(|e| TrainError::Usage(e.to_string()))
}

fn message(role: &str, content: &str) -> Map<String, Value> {
    let fields = [("role", role), ("content", content)];
    fields.map(|(name, value)| (name.to_owned(), Value::String(value.to_owned()))).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_tokenizer_only_ids_are_prompts() {
        let encoder = PromptEncoder::open(&[]).unwrap();
        assert_eq!(encoder.encode(&Prompt::Ids(vec![3])).unwrap(), [3]);
        let error = encoder.encode(&Prompt::Text("a".into())).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
        assert_eq!(encoder.end_tokens(&Defaults { end_tokens: vec![5, 2, 5], ..Default::default() }), [5, 2]);
        assert!(!encoder.begins_with_bos());
    }
}
