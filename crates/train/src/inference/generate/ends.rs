//! The tokens that end answers, in the files of a result: what generation knows of a folder, its files name, so that other
//! programs stop where this one does.
//!
//! Knows the files of a folder and the tokens of its tokenizer; not which token a run trained on what.

use std::path::Path;

use serde_json::{Value, json};

use super::defaults::{self, Defaults};
use super::prompt::PromptEncoder;
use crate::error::Result;
use crate::model::hf_config::{self, HfConfig};
use crate::model::json_files::{TOKENIZER, read_json, replace};

/// The older list of special tokens next to the settings of a tokenizer.
const SPECIAL: &str = "special_tokens_map.json";

/// The tokens that end answers of a folder's model.
#[derive(Clone, Debug, PartialEq)]
pub struct EndTokens {
    /// All of them: that after answers, those that the configuration names, the tokenizer's own.
    pub ids: Vec<u32>,
    /// The special token that the chat template puts after an answer.
    pub of_turn: Option<u32>,
    /// The tokenizer's own end of a text.
    pub of_text: Option<u32>,
    /// True if prompts begin with the tokenizer's BOS: conversations where there is a chat template, else texts.
    pub begins: bool,
}

impl EndTokens {
    /// Returns those of a folder; an adapter's has no `config.json`. Errors: a tokenizer or a configuration that cannot be read.
    pub fn of(folder: &Path) -> Result<EndTokens> {
        let config = if folder.join(hf_config::FILE).is_file() { HfConfig::read(folder)?.0 } else { Value::Null };
        let encoder = PromptEncoder::open(&[folder])?;
        Ok(EndTokens::known(&encoder, &Defaults::read(folder, &config)?))
    }

    fn known(encoder: &PromptEncoder, defaults: &Defaults) -> EndTokens {
        let of_text = encoder.tokenizer().and_then(|tokenizer| tokenizer.eos()).map(|token| token.id);
        let (ids, of_turn) = (encoder.end_tokens(defaults), encoder.end_of_turn());
        EndTokens { ids, of_turn, of_text, begins: encoder.begins_with_bos() }
    }
}

/// Makes the files of a result name the tokens that end its answers. `config` is the model's configuration, which is written
/// too where the folder has one; `conversations`: answers to messages were trained, not texts. A folder without a tokenizer stays
/// as it is.
pub(crate) fn write(folder: &Path, config: &HfConfig, conversations: bool) -> Result<()> {
    // One that cannot be read has trained nothing.
    let Ok(encoder) = PromptEncoder::open(&[folder]) else { return Ok(()) };
    let Some(tokenizer) = encoder.tokenizer() else { return Ok(()) };
    let named = Defaults::read(folder, &config.0)?.end_tokens;
    let (of_turn, of_text) = (encoder.end_of_turn(), tokenizer.eos().map(|token| token.id));
    let Some(trained) = of_turn.filter(|_| conversations).or(of_text) else { return Ok(()) };
    let mut ids = named.clone();
    if !named.contains(&trained) {
        ids.insert(0, trained);
    }
    ids.extend(of_text.filter(|id| !ids.contains(id)));
    if ids != named {
        name_in_generation(folder, config, &ids)?;
    }
    if named.contains(&trained) {
        return Ok(());
    }
    if folder.join(hf_config::FILE).is_file() {
        replace(folder, hf_config::FILE, &HfConfig::read(folder)?.with_end_token(trained).0)?;
    }
    // A template that writes the tokenizer's own end would write another text.
    let is_written = tokenizer.chat_template(false).is_some_and(|template| template.contains("eos_token"));
    match tokenizer.special_tokens().iter().find(|token| token.id == trained) {
        Some(token) if Some(trained) != of_text && !is_written => name_in_tokenizer(folder, &token.text),
        _ => Ok(()),
    }
}

/// Makes `config.json` of a merged model name the end token that its adapter brought along in `generation_config.json`.
/// `before`: the model without the adapter.
pub(crate) fn follow(folder: &Path, before: &Path) -> Result<()> {
    let config = HfConfig::read(folder)?;
    let known = Defaults::read(before, &config.0)?.end_tokens;
    let brought = Defaults::read(folder, &config.0)?.end_tokens;
    match brought.first().filter(|id| !known.contains(id)) {
        Some(id) => replace(folder, hf_config::FILE, &config.with_end_token(*id).0),
        None => Ok(()),
    }
}

/// Writes the list into `generation_config.json`; where there is none, with the other tokens of the configuration.
fn name_in_generation(folder: &Path, config: &HfConfig, ids: &[u32]) -> Result<()> {
    let mut fields =
        if folder.join(defaults::FILE).is_file() { read_json(&folder.join(defaults::FILE))? } else { json!({}) };
    let is_new = fields.as_object().is_some_and(serde_json::Map::is_empty);
    for name in ["bos_token_id", "pad_token_id"].iter().filter(|_| is_new) {
        if let Some(id) = config.0.get(name).filter(|id| !id.is_null()) {
            fields[*name] = id.clone();
        }
    }
    fields["eos_token_id"] = if let [id] = ids { json!(id) } else { json!(ids) };
    replace(folder, defaults::FILE, &fields)
}

/// Writes the token into the files that tell the tokenizer's own end.
fn name_in_tokenizer(folder: &Path, token: &str) -> Result<()> {
    for name in [TOKENIZER, SPECIAL].iter().filter(|name| folder.join(name).is_file()) {
        let mut fields = read_json(&folder.join(name))?;
        if *name == TOKENIZER || fields.get("eos_token").is_some() {
            fields["eos_token"] = json!(token);
            replace(folder, name, &fields)?;
        }
    }
    Ok(())
}
