//! Text to token ids, through a trait, and the special tokens of a Hugging Face model folder.
//!
//! Knows no chat format and no labels.

mod bounds;

pub use bounds::MOST_IDS;

use crate::encoded_text::Encoded;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::{Map, Value};
use tokenizers::PostProcessorWrapper;

use crate::error::{DataError, RowError, RowReason};
use crate::fast_encoder::FastEncoder;
use crate::guard::guarded;
use crate::small_file;
use crate::tokenizer::bounds::Bounds;

/// The part of a tokenizer library that the data path needs.
pub trait Tokenize: Send + Sync {
    /// `special`: let the tokenizer add its own tokens (usually BOS). Special tokens inside the text are recognised.
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, RowError>;
    fn encode_with_offsets(&self, text: &str, special: bool) -> Result<Encoded, RowError>;
    /// The reason why texts are encoded by the library of record and not by the faster encoder; `None`: the faster one
    /// is used.
    fn slow_because(&self) -> Option<&str>;
    fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, RowError>;
    fn token_to_id(&self, token: &str) -> Option<u32>;
    fn id_to_token(&self, id: u32) -> Option<String>;
    /// Number of ids, added tokens included.
    fn vocab_size(&self) -> usize;
}

/// A special token: its text and its id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    pub text: String,
    pub id: u32,
}

/// A model folder's tokenizer with its special tokens and chat template texts.
pub struct Tokenizer {
    encoder: Box<dyn Tokenize>,
    bos: Option<SpecialToken>,
    eos: Option<SpecialToken>,
    pad: Option<SpecialToken>,
    special: Vec<SpecialToken>,
    names: Map<String, Value>,
    template: Option<String>,
    tool_template: Option<String>,
    digest: String,
}

/// The files of a folder that make its tokenizer.
const FILES: [&str; 6] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    TOOL_TEMPLATE,
];

/// The template for conversations with tools, next to `chat_template.jinja`.
const TOOL_TEMPLATE: &str = "additional_chat_templates/tool_use.jinja";

impl Tokenizer {
    /// Reads `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja` of a folder.
    pub fn from_folder(folder: &Path) -> Result<Self, DataError> {
        let path = folder.join("tokenizer.json");
        if !path.is_file() {
            return Err(DataError::invalid(folder.display(), "there is no tokenizer.json").hint(
                "a folder with only tokenizer.model must be converted: save it with transformers' fast tokenizer",
            ));
        }
        let library = Library::open(&path)?;
        let config = read_object(&folder.join("tokenizer_config.json"))?;
        let mut names = read_object(&folder.join("special_tokens_map.json"))?;
        names.extend(config.iter().filter(|(k, _)| k.ends_with("_token")).map(|(k, v)| (k.clone(), v.clone())));
        let names: Map<String, Value> =
            names.into_iter().filter_map(|(name, value)| Some((name, Value::String(token_text(&value)?)))).collect();
        let special = special_tokens(&library, &config, &names);
        let (template, tool_template) = template_texts(folder, &config)?;
        let find = |name: &str| {
            let text = names.get(name)?.as_str()?.to_owned();
            let id = library.token_to_id(&text)?;
            Some(SpecialToken { text, id })
        };
        Ok(Tokenizer {
            bos: find("bos_token"),
            eos: find("eos_token"),
            pad: find("pad_token"),
            special,
            encoder: Box::new(library),
            names,
            template,
            tool_template,
            digest: digest_of(folder)?,
        })
    }

    /// Identifies everything that was read of the folder.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    pub fn encoder(&self) -> &dyn Tokenize {
        &*self.encoder
    }

    pub fn bos(&self) -> Option<&SpecialToken> {
        self.bos.as_ref()
    }

    pub fn eos(&self) -> Option<&SpecialToken> {
        self.eos.as_ref()
    }

    /// The padding token's id; without one EOS serves, then 0: padding is never trained.
    pub fn pad_id(&self) -> u32 {
        self.pad.as_ref().or(self.eos.as_ref()).map_or(0, |token| token.id)
    }

    /// Every token that is marked special.
    pub fn special_tokens(&self) -> &[SpecialToken] {
        &self.special
    }

    /// `bos_token`, `eos_token`, … as chat templates see them.
    pub fn template_variables(&self) -> &Map<String, Value> {
        &self.names
    }

    /// The folder's chat template; the one for conversations with tools where the folder holds two.
    pub fn chat_template(&self, tools: bool) -> Option<&str> {
        let special = self.tool_template.as_deref().filter(|_| tools);
        special.or(self.template.as_deref())
    }

    /// Encodes text that may begin with BOS already: the tokenizer's own BOS is added only if it does not.
    pub fn encode_document(&self, text: &str) -> Result<Encoded, RowError> {
        let has_bos = self.bos.as_ref().is_some_and(|bos| text.starts_with(&bos.text));
        self.encoder.encode_with_offsets(text, !has_bos)
    }
}

fn digest_of(folder: &Path) -> Result<String, DataError> {
    let mut hasher = blake3::Hasher::new();
    for name in FILES {
        let path = folder.join(name);
        let content = match path.is_file() {
            true => small_file::read(&path).map_err(|e| DataError::io("read", &path, e))?,
            false => continue,
        };
        hasher.update(format!("{name} {}\n", content.len()).as_bytes());
        hasher.update(&content);
    }
    Ok(hasher.finalize().to_hex().to_string())
}

fn read_object(path: &Path) -> Result<Map<String, Value>, DataError> {
    if !path.is_file() {
        return Ok(Map::new());
    }
    let bytes = small_file::read(path).map_err(|e| DataError::io("read", path, e))?;
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(_) => Err(DataError::invalid(path.display(), "expected a JSON object")),
        Err(e) => Err(DataError::invalid(path.display(), format!("no JSON: {e}"))),
    }
}

/// A token is written as a string or as an object with `content`.
fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
}

fn special_tokens(library: &Library, config: &Map<String, Value>, names: &Map<String, Value>) -> Vec<SpecialToken> {
    let mut texts: Vec<String> = library.special_texts();
    texts.extend(names.values().filter_map(token_text));
    for value in config.get("added_tokens_decoder").and_then(Value::as_object).into_iter().flat_map(Map::values) {
        if value.get("special").and_then(Value::as_bool) == Some(true) {
            texts.extend(token_text(value));
        }
    }
    texts.sort();
    texts.dedup();
    texts
        .into_iter()
        .filter(|text| !text.is_empty())
        .filter_map(|text| library.token_to_id(&text).map(|id| SpecialToken { text, id }))
        .collect()
}

/// The template, and the one for conversations with tools. `chat_template.jinja` wins over the config, where the
/// template is a string or a list of named ones; further ones are in a folder next to it, each under its name.
fn template_texts(folder: &Path, config: &Map<String, Value>) -> Result<(Option<String>, Option<String>), DataError> {
    let read = |file: &str| -> Result<Option<String>, DataError> {
        let file = folder.join(file);
        let text = || small_file::read_text(&file).map_err(|e| DataError::io("read", &file, e));
        file.is_file().then(text).transpose()
    };
    let (own, tools) = (read("chat_template.jinja")?, read(TOOL_TEMPLATE)?);
    if own.is_some() || tools.is_some() {
        return Ok((own, tools));
    }
    let legacy = read_object(&folder.join("chat_template.json"))?;
    match config.get("chat_template").or_else(|| legacy.get("chat_template")) {
        Some(Value::String(text)) => Ok((Some(text.clone()), None)),
        Some(Value::Array(list)) => {
            let named = |wanted: &str| {
                let entry = list.iter().find(|entry| entry.get("name").and_then(Value::as_str) == Some(wanted))?;
                entry.get("template")?.as_str().map(str::to_owned)
            };
            Ok((named("default"), named("tool_use")))
        }
        _ => Ok((None, None)),
    }
}

/// The variable that chooses the encoder: `library` for that of record, to compare.
const ENCODER: &str = "SUROGATE_ENCODER";

/// The tokenizers crate, and the faster encoder where it gives the same.
pub(crate) struct Library {
    tokenizer: tokenizers::Tokenizer,
    path: PathBuf,
    bounds: Bounds,
    /// Made at the first text, or why there is none.
    fast: OnceLock<Result<FastEncoder, String>>,
}

impl Library {
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        let invalid = |e: tokenizers::Error| DataError::invalid(path.display(), e);
        let damaged = |e: String| DataError::invalid(path.display(), format!("no readable tokenizer: {e}"));
        small_file::open(path).map_err(|e| DataError::io("read", path, e))?;
        let opened = guarded(|| tokenizers::Tokenizer::from_file(path)).map_err(damaged)?;
        let mut tokenizer = opened.map_err(invalid)?;
        let bounds = Bounds::of(&tokenizer).map_err(damaged)?;
        tokenizer.with_truncation(None).map_err(invalid)?;
        tokenizer.with_padding(None);
        if let Some(mut processor) = tokenizer.get_post_processor().cloned() {
            keep_white_space(&mut processor);
            tokenizer.with_post_processor(Some(processor));
        }
        Ok(Library { tokenizer, path: path.to_owned(), bounds, fast: OnceLock::new() })
    }

    pub(crate) fn fast(&self) -> &Result<FastEncoder, String> {
        let reference = |text: &str, special| self.encode_slowly(text, special).ok();
        self.fast.get_or_init(|| match std::env::var(ENCODER) {
            Ok(name) if name == "library" => Err(format!("{ENCODER} names the library")),
            _ => FastEncoder::open(&self.path, &self.tokenizer, &reference),
        })
    }

    /// By the library of record.
    pub(crate) fn encode_slowly(&self, text: &str, special: bool) -> Result<Encoded, RowError> {
        let gave_up = |e: String| RowError::new(RowReason::Tokenizer, format!("the tokenizer gave up: {e}"));
        let encoding = guarded(|| self.tokenizer.encode(text, special)).map_err(gave_up)?.map_err(row_error)?;
        Ok(Encoded { ids: encoding.get_ids().to_vec(), offsets: encoding.get_offsets().to_vec() })
    }

    fn special_texts(&self) -> Vec<String> {
        let added = self.tokenizer.get_added_tokens_decoder();
        added.values().filter(|token| token.special).map(|token| token.content.clone()).collect()
    }
}

/// Byte-level tokenizers trim white space off their offsets by default; labels need every byte. The ids do not change.
fn keep_white_space(processor: &mut PostProcessorWrapper) {
    match processor {
        PostProcessorWrapper::ByteLevel(byte_level) => byte_level.trim_offsets = false,
        PostProcessorWrapper::Roberta(roberta) => roberta.trim_offsets = false,
        PostProcessorWrapper::Sequence(sequence) => sequence.as_mut().iter_mut().for_each(keep_white_space),
        PostProcessorWrapper::Bert(_) | PostProcessorWrapper::Template(_) => {}
    }
}

fn row_error(error: tokenizers::Error) -> RowError {
    RowError::new(RowReason::Tokenizer, error)
}

impl Tokenize for Library {
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, RowError> {
        Ok(self.encode_with_offsets(text, special)?.ids)
    }

    fn encode_with_offsets(&self, text: &str, special: bool) -> Result<Encoded, RowError> {
        self.bounds.check_text(text)?;
        let fast = self.fast().as_ref().ok().and_then(|fast| fast.encode(text, special));
        fast.map_or_else(|| self.encode_slowly(text, special), Ok)
    }

    fn slow_because(&self) -> Option<&str> {
        self.fast().as_ref().err().map(String::as_str)
    }

    fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, RowError> {
        let gave_up = |e: String| RowError::new(RowReason::Tokenizer, format!("the tokenizer gave up: {e}"));
        self.bounds.check_ids(ids, |id| self.tokenizer.id_to_token(id).map_or(0, |token| token.len()))?;
        guarded(|| self.tokenizer.decode(ids, skip_special)).map_err(gave_up)?.map_err(row_error)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }

    fn vocab_size(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }
}
