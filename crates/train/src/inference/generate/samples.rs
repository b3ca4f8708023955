//! Prompts that are answered at every evaluation of a run, with the weights as they are: `sample_prompts`. Says what that
//! takes of the program, so that it is planned with the rest, and answers them. Knows no log.

use std::fmt;
use std::path::Path;

use compiler::EntryOptions;
use serde_json::{Map, Value, json};

use super::capacity::Capacity;
use super::defaults::Defaults;
use super::generation::Asked;
use super::prompt::PromptEncoder;
use super::reader::{LOGITS, Reader};
use super::request::{Messages, Prompt, Request};
use super::settings::GenerationOptions;
use crate::config::{Config, DatasetType};
use crate::engine::Engine;
use crate::error::{Result, TrainError};
use crate::input::conversation::dialogue_options;
use crate::model::source::ModelSource;

/// Prompts that are answered at a time, at most: what they keep of their tokens is memory that training has not.
const ROWS: usize = 8;

/// The prompts of a run.
pub(crate) struct Samples {
    texts: Vec<String>,
    prompts: Vec<Request>,
    options: GenerationOptions,
    encoder: PromptEncoder,
    defaults: Defaults,
    capacity: Capacity,
}

/// An answer to one of the prompts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sample {
    pub prompt: String,
    pub text: String,
    pub finish: &'static str,
    pub tokens: usize,
}

impl Sample {
    /// Prompt and answer as JSON, so that both are one line.
    pub fn line(&self) -> String {
        format!("{} → {}", json!(self.prompt), json!(self.text))
    }

    pub fn to_json(&self) -> Value {
        json!({"prompt": self.prompt, "text": self.text, "finish": self.finish, "tokens": self.tokens})
    }
}

impl Samples {
    /// The sample prompts of the options; None if there are none. Errors: a prompt that the model does not take.
    pub fn new(config: &Config, source: &ModelSource) -> Result<Option<Samples>> {
        let texts = config.logging.sample_prompts.clone();
        if texts.is_empty() {
            return Ok(None);
        }
        let encoder = PromptEncoder::open(&[&source.folder])?;
        let (dialogue, _) = dialogue_options(config, source, encoder.tokenizer().map(|of| &**of))?;
        let encoder = encoder.with_template(dialogue.template)?;
        let defaults = Defaults::read(&source.folder, &source.config.0)?;
        let answers = encoder.has_template() && is_of_conversations(config);
        let prompt = |text: &String| match answers {
            true => Prompt::Messages(Messages::of(messages(config, text))),
            false => Prompt::Text(text.clone()),
        };
        let prompts: Vec<Request> = texts.iter().map(|text| prompt(text).into()).collect();
        let most = config.logging.sample_tokens.to_string();
        let options =
            GenerationOptions::read(&[("max_new_tokens".into(), most), ("batch_size".into(), ROWS.to_string())])?;
        let refused = |error: TrainError| {
            let hint = "change `sample_prompts`, or remove it".to_owned();
            TrainError::Config(vec![config.mistake("sample_prompts", format!("`sample_prompts`: {error}"), Some(hint))])
        };
        let asked = Asked::new(source, (&encoder, &defaults), asked(&prompts), &options, (false, Path::new(".")))
            .map_err(refused)?;
        let capacity = Capacity::of(&asked.needs(), ROWS, source.position_limit(), false).in_one_shape();
        Ok(Some(Samples { texts, prompts, options, encoder, defaults, capacity }))
    }

    /// The entries of a program, each knowing what is kept for the answers, and the one that answers.
    pub fn with_cache(&self, entries: Vec<EntryOptions>) -> Vec<EntryOptions> {
        let entries = entries.into_iter().map(|entry| entry.keeping_cache(self.capacity.cache));
        let own = self.capacity.entry().keeping([LOGITS]).in_shapes(self.capacity.variants());
        entries.chain([own]).collect()
    }

    /// The answers of a model in training.
    pub fn answers(&self, source: &ModelSource, engine: &mut Engine) -> Result<Vec<Sample>> {
        let asked = Asked::new(
            source,
            (&self.encoder, &self.defaults),
            asked(&self.prompts),
            &self.options,
            (false, Path::new(".")),
        )?;
        let mut reader = Reader { engine, capacity: &self.capacity };
        let mut generation = asked.begin(&reader, 0);
        let sample = |prompt: &String| Sample { prompt: prompt.clone(), text: String::new(), finish: "", tokens: 0 };
        let mut found: Vec<Sample> = self.texts.iter().map(sample).collect();
        while !generation.is_done() {
            for piece in generation.advance(&mut reader)? {
                let of = &mut found[piece.prompt];
                of.text.push_str(&piece.text);
                of.finish = piece.finish.map_or(of.finish, super::Finish::name);
                of.tokens = generation.answer(piece.prompt).len();
            }
        }
        Ok(found)
    }
}

impl fmt::Debug for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Samples").field("texts", &self.texts).field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

/// The prompts, all of which could be read.
fn asked(prompts: &[Request]) -> Vec<Result<Request>> {
    prompts.iter().cloned().map(Ok).collect()
}

/// True if the run trains on answers to messages, so that a prompt is a message.
pub(crate) fn is_of_conversations(config: &Config) -> bool {
    let is_plain = |of: DatasetType| matches!(of, DatasetType::Text | DatasetType::Tokens);
    let datasets = config.data.datasets.as_deref().unwrap_or_default();
    config.template.use_chat_template && !datasets.iter().all(|dataset| is_plain(dataset.r#type))
}

/// A prompt as a user's message, after the system prompt of the run.
fn messages(config: &Config, text: &str) -> Vec<Map<String, Value>> {
    let message = |role: &str, content: &str| {
        let fields = [("role", role), ("content", content)];
        fields.map(|(name, value)| (name.to_owned(), Value::String(value.to_owned()))).into_iter().collect()
    };
    let system = config.template.system.iter().map(|system| message("system", system));
    system.chain([message("user", text)]).collect()
}
