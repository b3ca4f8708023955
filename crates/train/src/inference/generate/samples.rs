//! Prompts that are answered at every evaluation of a run, with the weights as they are: `sample_prompts`. Says what that
//! takes of the program, so that it is planned with the rest, and answers them. Knows no log.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use compiler::EntryOptions;
use data::image_texts::in_words;
use data::show::ShownImage;
use serde_json::{Map, Value, json};

use super::capacity::Capacity;
use super::defaults::Defaults;
use super::generation::Asked;
use super::prompt::PromptEncoder;
use super::reader::{LOGITS, Reader};
use super::request::{Messages, Prompt, Request};
use super::settings::GenerationOptions;
use crate::config::{Config, DatasetType, SamplePrompt};
use crate::engine::Engine;
use crate::error::{Result, TrainError};
use crate::input::conversation::dialogue_options;
use crate::model::source::ModelSource;

/// Prompts that are answered at a time, at most: what they keep of their tokens is memory that training has not.
const ROWS: usize = 8;

/// The prompts of a run.
#[derive(Clone)]
pub(crate) struct Samples {
    shown: Vec<Shown>,
    asked: Asked,
    capacity: Capacity,
}

/// A prompt as people see it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shown {
    text: String,
    images: Vec<SampleImage>,
}

/// An image of a prompt.
#[derive(Clone, Debug, PartialEq)]
struct SampleImage {
    name: String,
    /// Height and width in pixels.
    size: [usize; 2],
    tokens: usize,
    /// A small copy as a `data:` URI.
    copy: String,
}

/// An answer to one of the prompts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sample {
    prompt: Shown,
    text: String,
    finish: &'static str,
    tokens: usize,
}

impl Sample {
    /// Prompt and answer as JSON, so that both are one line.
    pub fn line(&self) -> String {
        let Shown { text, images } = &self.prompt;
        let names: Vec<&str> = images.iter().map(|image| image.name.as_str()).collect();
        let names = if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
        format!("{}{names} → {}", json!(text), json!(self.text))
    }

    /// `with_copies`: small copies of the images, too.
    pub fn to_json(&self, with_copies: bool) -> Value {
        let (prompt, text) = (&self.prompt.text, &self.text);
        let mut of = json!({"prompt": prompt, "text": text, "finish": self.finish, "tokens": self.tokens});
        let image = |image: &SampleImage| {
            let SampleImage { name, size: [height, width], tokens, copy } = image;
            let mut of = json!({"name": name, "width": width, "height": height, "tokens": tokens});
            if with_copies {
                of["copy"] = json!(copy);
            }
            of
        };
        if !self.prompt.images.is_empty() {
            of["images"] = self.prompt.images.iter().map(image).collect();
        }
        of
    }
}

impl Samples {
    /// The sample prompts of the options; None if there are none. Errors: a prompt that the model does not take.
    pub fn new(config: &Config, source: &ModelSource) -> Result<Option<Samples>> {
        let prompts = &config.logging.sample_prompts;
        if prompts.is_empty() {
            return Ok(None);
        }
        let refused = |error: TrainError| {
            let hint = "change `sample_prompts`, or remove it".to_owned();
            TrainError::Config(vec![config.mistake("sample_prompts", format!("`sample_prompts`: {error}"), Some(hint))])
        };
        let encoder = PromptEncoder::open(&[&source.folder])?;
        let (dialogue, _) = dialogue_options(config, source, encoder.tokenizer().map(|of| &**of))?;
        let encoder = encoder.with_template(dialogue.template)?;
        let defaults = Defaults::read(&source.folder, &source.config.0)?;
        let answers = encoder.has_template() && is_of_conversations(config);
        let numbered = |(number, prompt): (usize, &SamplePrompt)| {
            let wrong = |error| TrainError::Usage(format!("prompt {} of {}: {error}", number + 1, prompts.len()));
            request(config, prompt, answers).map_err(wrong)
        };
        let requests = prompts.iter().enumerate().map(numbered).collect::<Result<Vec<_>>>().map_err(refused)?;
        let options = GenerationOptions::read(&settings(config, &requests))?;
        let all = requests.iter().cloned().map(Ok).collect();
        let asked =
            Asked::new(source, (&encoder, &defaults), all, &options, (false, Path::new("."))).map_err(refused)?;
        let images = asked.images().map(|of| of.iter().map(image).collect::<Result<_>>());
        let images = images.collect::<Result<Vec<Vec<SampleImage>>>>().map_err(refused)?;
        let asked = asked.in_memory().map_err(refused)?;
        let capacity = Capacity::of(&asked.needs(), ROWS, source.position_limit(), false).in_one_shape();
        let capacity = Capacity { images: asked.image_shapes(&capacity)?, ..capacity };
        let texts = prompts.iter().zip(&requests).map(|(prompt, request)| text_of(prompt, request));
        let shown = texts.zip(images).map(|(text, images)| Shown { text, images }).collect();
        Ok(Some(Samples { shown, asked, capacity }))
    }

    /// The entries of a program, each knowing what is kept for the answers, and the one that answers.
    pub fn with_cache(&self, entries: Vec<EntryOptions>) -> Vec<EntryOptions> {
        let entries = entries.into_iter().map(|entry| entry.keeping_cache(self.capacity.cache));
        let own = self.capacity.entry().keeping([LOGITS]).in_shapes(self.capacity.variants());
        entries.chain([own]).collect()
    }

    /// The answers of a model in training.
    pub fn answers(&self, engine: &mut Engine) -> Result<Vec<Sample>> {
        let mut reader = Reader { engine, capacity: &self.capacity };
        let mut generation = self.asked.clone().begin(&reader, 0);
        let sample = |prompt: &Shown| Sample { prompt: prompt.clone(), text: String::new(), finish: "", tokens: 0 };
        let mut found: Vec<Sample> = self.shown.iter().map(sample).collect();
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
        f.debug_struct("Samples").field("shown", &self.shown).field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

/// A prompt as a request. `answers`: a text is a user's message, else it is continued. Errors: a row that is no prompt.
fn request(config: &Config, prompt: &SamplePrompt, answers: bool) -> Result<Request> {
    match prompt {
        SamplePrompt::Text(text) if answers => {
            Ok(Prompt::Messages(Messages::of(with_system(config, vec![message("user", text)]))).into())
        }
        SamplePrompt::Text(text) => Ok(Prompt::Text(text.clone()).into()),
        SamplePrompt::Row(fields) => {
            let mut request = Request::from_json(&Value::Object(fields.clone()))?;
            if let Prompt::Messages(of) = &mut request.prompt {
                of.messages = with_system(config, std::mem::take(&mut of.messages));
            }
            Ok(request)
        }
    }
}

/// The options of the answers, with the run's bounds of images where a prompt has one.
fn settings(config: &Config, requests: &[Request]) -> Vec<(String, String)> {
    let has_images = |of: &Request| matches!(&of.prompt, Prompt::Messages(of) if of.has_images());
    let (most, least) = match requests.iter().any(has_images) {
        true => (config.template.max_pixels, config.template.min_pixels),
        false => (None, None),
    };
    let all = [
        ("max_new_tokens", Some(config.logging.sample_tokens)),
        ("batch_size", Some(ROWS as u64)),
        ("max_pixels", most),
        ("min_pixels", least),
    ];
    all.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.to_string()))).collect()
}

/// An image with its small copy.
fn image(of: &ShownImage) -> Result<SampleImage> {
    let copy = of.thumbnail().map_err(TrainError::Data)?.uri;
    Ok(SampleImage { name: of.name(), size: of.size, tokens: of.tokens, copy })
}

/// A prompt as people see it: the texts of its messages, with a word in the place of each image.
fn text_of(prompt: &SamplePrompt, request: &Request) -> String {
    let messages = match (prompt, &request.prompt) {
        (SamplePrompt::Text(text), _) | (_, Prompt::Text(text)) => return text.clone(),
        (_, Prompt::Ids(ids)) => return format!("{ids:?}"),
        (_, Prompt::Messages(of)) => &of.messages,
    };
    let list: Vec<Value> = messages.iter().cloned().map(Value::Object).collect();
    let read = data::dataset::messages(&list, &BTreeMap::new()).unwrap_or_default();
    let content = |of: &data::Message| Some((of.role().to_owned(), in_words(of.fields.get("content")?.as_str()?)));
    let asked: Vec<(String, String)> = read.iter().filter(|of| of.role() != "system").filter_map(content).collect();
    match &asked[..] {
        [(_, only)] => only.clone(),
        _ => asked.iter().map(|(role, text)| format!("{role}: {text}")).collect::<Vec<_>>().join("\n"),
    }
}

/// True if the run trains on answers to messages, so that a prompt is a message.
pub(crate) fn is_of_conversations(config: &Config) -> bool {
    let is_plain = |of: DatasetType| matches!(of, DatasetType::Text | DatasetType::Tokens);
    let datasets = config.data.datasets.as_deref().unwrap_or_default();
    config.template.use_chat_template && !datasets.iter().all(|dataset| is_plain(dataset.r#type))
}

/// Messages after the system prompt of the run, unless they have one.
fn with_system(config: &Config, messages: Vec<Map<String, Value>>) -> Vec<Map<String, Value>> {
    let role =
        |of: &Map<String, Value>| ["role", "from"].iter().find_map(|name| of.get(*name)?.as_str().map(str::to_owned));
    let is_system = |of: &Map<String, Value>| role(of).is_some_and(|role| role == "system" || role == "developer");
    let own = config.template.system.as_ref().filter(|_| !messages.iter().any(is_system));
    own.map(|system| message("system", system)).into_iter().chain(messages).collect()
}

fn message(role: &str, content: &str) -> Map<String, Value> {
    let fields = [("role", role), ("content", content)];
    fields.map(|(name, value)| (name.to_owned(), Value::String(value.to_owned()))).into_iter().collect()
}
