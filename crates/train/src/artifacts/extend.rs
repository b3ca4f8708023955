//! A model with further special tokens, from folder to folder: the tokenizer knows them, and embedding and head have a row for
//! each, which begins as the mean of the rows of all tokens before. Nothing is compiled, one tensor is in memory at a time.
//!
//! Knows the files of tokenizers and the forms of tensors; no architecture. Rows that a table has beyond its tokens are
//! used first, then tables grow.

use std::collections::BTreeSet;
use std::path::Path;

use data::Stop;
use data::safetensors::{TensorInfo, TensorView};
use data::tokenizer::MOST_IDS;
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use tensor::HostTensor;

use crate::error::{Result, TrainError, go_on};
use crate::files::staged::{Staged, write_synced};
use crate::files::written::Written;
use crate::model::folder::{write_companions, write_weights};
use crate::model::hf_config;
use crate::model::json_files::{TOKENIZER, TOKENIZER_FILE, pretty, read_json, replace};
use crate::model::peft;
use crate::model::quantized_checkpoint;
use crate::model::source::config_of;

/// Files next to [`TOKENIZER_FILE`] that list special tokens.
const LISTS: [&str; 2] = [TOKENIZER, "special_tokens_map.json"];

/// The result of [`extend`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extended {
    /// The id of the first new token; the others follow it.
    pub first_id: usize,
    /// Rows of embedding and head, before and now.
    pub rows: (usize, usize),
    /// Names of the tensors that got rows.
    pub tensors: Vec<String>,
}

/// The part of a model that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extend {
    Whole,
    /// Without weights, for readers that need none or draw them.
    WithoutWeights,
}

/// Writes a model with further special tokens. Tables that must grow get a number of rows that is a multiple of `multiple`. The
/// folder appears whole; asked to stop, there is nothing.
///
/// Errors: a token that is there already, a tokenizer without `tokenizer.json`, a model whose tables are quantised, and
/// anything that stands at `output` already.
pub fn extend(
    model: &Path,
    tokens: &[String],
    multiple: usize,
    output: &Path,
    what: Extend,
    stop: Stop<'_>,
) -> Result<Extended> {
    let config = config_of(model)?;
    let rows = config.vocab_size().ok_or_else(|| {
        TrainError::Usage(format!("{}: there is no `vocab_size`", model.join(hf_config::FILE).display()))
    })?;
    let mut tokenizer = read_json(&model.join(TOKENIZER_FILE))?;
    let first_id = add_tokens(&mut tokenizer, tokens)
        .map_err(|problem| TrainError::Usage(format!("{}: {problem}", model.join(TOKENIZER_FILE).display())))?;
    let needed = first_id + tokens.len();
    let grown = if needed <= rows { Some(rows) } else { needed.checked_next_multiple_of(multiple.max(1)) };
    let Some(grown) = grown.filter(|&grown| grown <= MOST_IDS as usize) else {
        let text = format!("{needed} tokens in tables of a multiple of {multiple} rows, but {MOST_IDS} is the most");
        return Err(TrainError::Usage(text));
    };
    let mut written = Written::by("extend");
    Staged::clear_abandoned(&written.owner, output)?;
    let staged = Staged::begin(&written, output)?;
    let tables = match what {
        Extend::Whole => {
            write_tables(model, staged.path(), rows, Rows { first: first_id, end: needed, all: grown }, stop)?
        }
        Extend::WithoutWeights => Vec::new(),
    };
    let config = config.with_vocab_size(grown);
    write_synced(&staged.path().join(hf_config::FILE), pretty(&config.0).as_bytes())?;
    write_companions(model, None, staged.path())?;
    replace(staged.path(), TOKENIZER_FILE, &tokenizer)?;
    for name in LISTS {
        if staged.path().join(name).is_file() {
            let mut list = read_json(&staged.path().join(name))?;
            list_tokens(&mut list, tokens, first_id);
            replace(staged.path(), name, &list)?;
        }
    }
    staged.commit(&mut written)?;
    Ok(Extended { first_id, rows: (rows, grown), tensors: tables })
}

/// Tokens that an adapter's tokenizer has beyond its model's, and the rows of the tables that the adapter holds for them; none
/// where the model has as many rows.
///
/// Errors: an adapter whose tables are longer and whose tokenizer does not say what for.
pub fn tokens_of_adapter(model: &Path, adapter: &Path) -> Result<Option<(Vec<String>, usize)>> {
    let (config, files) = (config_of(model)?, peft::weights(adapter)?);
    let Some(before) = config.vocab_size() else { return Ok(None) };
    let is_table =
        |name: &&str| ["embed_tokens.weight", "wte.weight", "lm_head.weight"].iter().any(|end| name.ends_with(end));
    let mut rows = None;
    for name in files.names().into_iter().filter(is_table) {
        rows = rows.max(files.get(name).map_err(TrainError::model_file)?.shape.first().copied());
    }
    let Some(rows) = rows.filter(|rows| *rows > before) else { return Ok(None) };
    let read = |folder: &Path| -> Result<Vec<(String, usize)>> {
        let path = folder.join(TOKENIZER_FILE);
        known_tokens(&read_json(&path)?).map_err(|what| TrainError::Usage(format!("{}: {what}", path.display())))
    };
    let unknown = || {
        let text = format!(
            "{}: its embedding has {rows} rows, the model's {before}\n  hint: put the tokenizer.json that it was trained with \
             into its folder, so that the new tokens are known",
            adapter.display()
        );
        TrainError::Usage(text)
    };
    if !adapter.join(TOKENIZER_FILE).is_file() || !model.join(TOKENIZER_FILE).is_file() {
        return Err(unknown());
    }
    let first = read(model)?.iter().map(|(_, id)| id + 1).max().unwrap_or(0);
    let mut new: Vec<(usize, String)> =
        read(adapter)?.into_iter().filter(|(_, id)| *id >= first).map(|(token, id)| (id, token)).collect();
    new.sort_unstable();
    new.dedup();
    let follow_each_other = new.iter().enumerate().all(|(index, (id, _))| *id == first + index);
    match new.is_empty() || !follow_each_other {
        true => Err(unknown()),
        false => Ok(Some((new.into_iter().map(|(_, token)| token).collect(), rows))),
    }
}

/// The new rows of a table, and all that it has then.
#[derive(Clone, Copy)]
struct Rows {
    first: usize,
    end: usize,
    all: usize,
}

/// Writes the weights of a model, tables of `rows` rows with new ones. The names of the tables.
fn write_tables(model: &Path, to: &Path, rows: usize, new: Rows, stop: Stop<'_>) -> Result<Vec<String>> {
    let weights = quantized_checkpoint::weights(model)?;
    let mut tables = Vec::new();
    let mut infos = Vec::new();
    for name in weights.names() {
        let view = weights.get(name).map_err(TrainError::model_file)?;
        if view.is_dequantised() {
            let text = format!(
                "{}: `{name}` is quantised: only the weights of a plain model can be extended",
                model.display()
            );
            return Err(TrainError::Usage(text));
        }
        let mut shape = view.shape.to_vec();
        if is_table(name, &view, rows) {
            shape[0] = new.all;
            tables.push(name.to_owned());
        }
        infos.push(TensorInfo { name: name.to_owned(), dtype: view.dtype, shape });
    }
    if tables.is_empty() {
        let text =
            format!("{}: no tensor outside of the layers has {rows} rows, as `vocab_size` says", model.display());
        return Err(TrainError::Usage(text));
    }
    write_weights(to, infos, |tensor| {
        go_on(stop)?;
        let view = weights.get(&tensor.name).map_err(TrainError::model_file)?;
        let whole = view.to_host().map_err(TrainError::unreadable)?;
        match tables.contains(&tensor.name) {
            true => Ok(with_rows(&whole, new.first, new.end, new.all)),
            false => Ok(whole.bytes),
        }
    })?;
    Ok(tables)
}

/// A matrix or a bias with a row for each token: outside of the layers, whose names have numbers.
fn is_table(name: &str, view: &TensorView<'_>, rows: usize) -> bool {
    let in_layer = name.split('.').any(|part| part.parse::<usize>().is_ok());
    !in_layer && view.shape.first() == Some(&rows) && view.dtype.is_float()
}

/// A table with `rows` rows. Rows from `first` to `end`, and those that are added, are the mean of the rows before `first`, in
/// f32, rounded once.
fn with_rows(table: &HostTensor, first: usize, end: usize, rows: usize) -> Vec<u8> {
    let before = table.shape[0];
    let columns: usize = table.shape[1..].iter().product();
    let values = table.to_f32();
    let known = first.min(before);
    let means: Vec<f32> = (0..columns)
        .into_par_iter()
        .map(|column| {
            let sum: f64 = (0..known).map(|row| f64::from(values[row * columns + column])).sum();
            (sum / known.max(1) as f64) as f32
        })
        .collect();
    let mean = HostTensor::from_f32([columns], &means).cast(table.dtype).bytes;
    let mut bytes = table.bytes.clone();
    bytes.resize(rows * mean.len(), 0);
    let of_tokens = known..end.min(rows);
    for row in of_tokens.chain(before..rows) {
        bytes[row * mean.len()..(row + 1) * mean.len()].copy_from_slice(&mean);
    }
    bytes
}

/// Every token of a tokenizer with its id.
fn known_tokens(tokenizer: &Value) -> std::result::Result<Vec<(String, usize)>, String> {
    let mut known = Vec::new();
    match &tokenizer["model"]["vocab"] {
        Value::Object(words) => {
            for (word, id) in words {
                let id = id.as_u64().ok_or_else(|| format!("the id of `{word}` is {id}, expected a whole number"))?;
                known.push((word.clone(), id as usize));
            }
        }
        Value::Array(pieces) => {
            let word = |piece: &Value| piece.get(0).and_then(Value::as_str).unwrap_or_default().to_owned();
            known.extend(pieces.iter().enumerate().map(|(id, piece)| (word(piece), id)));
        }
        _ => return Err("there is no vocabulary in `model`".into()),
    }
    for token in tokenizer["added_tokens"].as_array().into_iter().flatten() {
        let (Some(content), Some(id)) = (token["content"].as_str(), token["id"].as_u64()) else {
            return Err(format!("`added_tokens` has {token}, expected an object with `content` and `id`"));
        };
        known.push((content.to_owned(), id as usize));
    }
    Ok(known)
}

/// The entry of a special token in `tokenizer.json`.
fn described(content: &str) -> Map<String, Value> {
    let mut entry = Map::new();
    entry.insert("content".into(), json!(content));
    for (name, value) in [("single_word", false), ("lstrip", false), ("rstrip", false), ("normalized", false)] {
        entry.insert(name.into(), json!(value));
    }
    entry.insert("special".into(), json!(true));
    entry
}

/// Adds special tokens after all that there are. The id of the first.
fn add_tokens(tokenizer: &mut Value, tokens: &[String]) -> std::result::Result<usize, String> {
    let known = known_tokens(tokenizer)?;
    let mut names = BTreeSet::new();
    for token in tokens {
        if let Some((_, id)) = known.iter().find(|(name, _)| name == token) {
            return Err(format!("`{token}` is a token already, {id}"));
        }
        if token.trim().is_empty() || !names.insert(token) {
            return Err(format!("`{token}` cannot be a new token: it is empty, or given twice"));
        }
    }
    if tokens.is_empty() {
        return Err("no token is given".into());
    }
    let most = MOST_IDS as usize;
    if let Some((token, id)) = known.iter().find(|(_, id)| *id >= most) {
        return Err(format!("the token {token:?} has the number {id}, more than the {most} that there may be"));
    }
    let first = known.iter().map(|(_, id)| id + 1).max().unwrap_or(0);
    if first + tokens.len() > most {
        return Err(format!("{} tokens after the {first} there are would be more than {most}", tokens.len()));
    }
    if !tokenizer["added_tokens"].is_array() {
        tokenizer["added_tokens"] = json!([]);
    }
    let list = tokenizer["added_tokens"].as_array_mut().expect("it was just made one");
    for (index, token) in tokens.iter().enumerate() {
        let mut entry = described(token);
        entry.insert("id".into(), json!(first + index));
        list.push(Value::Object(entry));
    }
    Ok(first)
}

/// Names the tokens where a file next to the tokenizer lists special ones.
fn list_tokens(settings: &mut Value, tokens: &[String], first: usize) {
    if let Some(decoder) = settings.get_mut("added_tokens_decoder").and_then(Value::as_object_mut) {
        for (index, token) in tokens.iter().enumerate() {
            decoder.insert((first + index).to_string(), Value::Object(described(token)));
        }
    }
    if let Some(list) = settings.get_mut("additional_special_tokens").and_then(Value::as_array_mut) {
        list.extend(tokens.iter().map(|token| json!(token)));
    }
}

#[cfg(test)]
mod tests {
    use tensor::DType;

    use super::*;

    #[test]
    fn rows_beyond_the_tokens_are_used_first_and_new_ones_are_the_mean() {
        // Three tokens, one spare row.
        let table = HostTensor::from_f32([4, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 9.0, 0.0, 0.0]);
        let read = |bytes: Vec<u8>| HostTensor::new(DType::F32, vec![bytes.len() / 8, 2], bytes).to_f32();
        let one = read(with_rows(&table, 3, 4, 4));
        assert_eq!(one, [1.0, 2.0, 3.0, 4.0, 5.0, 9.0, 3.0, 5.0]);
        let more = read(with_rows(&table, 3, 5, 6));
        assert_eq!((more.len(), &more[6..]), (12, [3.0, 5.0, 3.0, 5.0, 3.0, 5.0].as_slice()));
        let bias = HostTensor::from_f32([2], &[2.0, 4.0]);
        assert_eq!(HostTensor::new(DType::F32, vec![3], with_rows(&bias, 2, 3, 3)).to_f32(), [2.0, 4.0, 3.0]);
    }

    #[test]
    fn tokens_go_behind_all_others() {
        let mut tokenizer = json!({
            "added_tokens": [{"id": 9, "content": "<s>"}], "model": {"vocab": {"a": 0, "b": 1}}
        });
        let of = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(add_tokens(&mut tokenizer, &of(&["<x>", "<y>"])), Ok(10));
        assert_eq!(
            tokenizer["added_tokens"][2],
            json!({
                "id": 11, "content": "<y>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": true
            })
        );
        let wrong = |names: &[&str]| add_tokens(&mut tokenizer.clone(), &of(names)).unwrap_err();
        assert!(wrong(&["<x>"]).contains("is a token already, 10") && wrong(&["b"]).contains("already, 1"));
        assert!(wrong(&["<z>", "<z>"]).contains("twice") && wrong(&[]).contains("no token"));
        for id in [u64::MAX, 1 << 63, 1 << 40, 1_000_000_000, u64::from(MOST_IDS)] {
            let mut huge = json!({"added_tokens": [{"id": id, "content": "<huge>"}], "model": {"vocab": {"a": 0}}});
            let error = add_tokens(&mut huge, &of(&["<x>"])).unwrap_err();
            assert!(error.contains("\"<huge>\" has the number"), "{error}");
            huge = json!({"model": {"vocab": {"<huge>": id}}});
            assert!(add_tokens(&mut huge, &of(&["<x>"])).is_err(), "{id}");
        }
        let mut last = json!({"model": {"vocab": {"a": MOST_IDS - 2}}});
        assert!(add_tokens(&mut last.clone(), &of(&["<x>", "<y>"])).unwrap_err().contains("would be more than"));
        assert_eq!(add_tokens(&mut last, &of(&["<x>"])), Ok(MOST_IDS as usize - 1));
        let mut pieces = json!({"model": {"vocab": [["<unk>", 0.0], ["a", -1.0]]}});
        assert_eq!(add_tokens(&mut pieces, &of(&["<x>"])), Ok(2));
        let mut settings =
            json!({"added_tokens_decoder": {}, "additional_special_tokens": ["<s>"], "eos_token": "<s>"});
        list_tokens(&mut settings, &of(&["<x>"]), 7);
        assert_eq!(settings["additional_special_tokens"], json!(["<s>", "<x>"]));
        assert_eq!(settings["added_tokens_decoder"]["7"]["content"], "<x>");
    }
}
