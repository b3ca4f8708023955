//! Defaults of generation from a model's folder: `generation_config.json`, with the names that transformers gives
//! things.

use std::path::Path;

use serde_json::{Map, Value};

use super::masks::Masks;
use crate::error::{Result, TrainError};

/// The name of the file.
pub const FILE: &str = "generation_config.json";

/// Fields that change no text here: records, tokens that are no ends, ways to compute, and what only searches along beams read.
const NO_TEXT: &[&str] = &[
    "_from_model_config",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "continuous_batching_config",
    "decoder_start_token_id",
    "disable_compile",
    "early_stopping",
    "is_assistant",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "renormalize_logits",
    "return_dict_in_generate",
    "return_legacy_cache",
    "speculation_type",
    "target_lookbehind",
    "token_healing",
    "transformers_version",
    "use_cache",
    "use_mtp",
    "use_model_defaults",
];

/// Numbers by which a field says that it does nothing; of all others 0 does.
const NEUTRAL: &[(&str, f64)] = &[
    ("encoder_repetition_penalty", 1.0),
    ("guidance_scale", 1.0),
    ("num_beam_groups", 1.0),
    ("num_beams", 1.0),
    ("num_return_sequences", 1.0),
    ("top_h", 1.0),
    ("typical_p", 1.0),
];

/// The values in the file; None if it does not have them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Defaults {
    /// True if tokens are sampled, false for greedy decoding.
    pub draws: bool,
    pub temperature: Option<f64>,
    pub top_k: Option<usize>,
    pub top_p: Option<f64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    /// Tokens that end an answer, of this file or of the model's configuration.
    pub end_tokens: Vec<u32>,
    /// Tokens of an answer at most, and of the whole sequence.
    pub max_new_tokens: Option<usize>,
    pub max_length: Option<usize>,
    /// Texts that end an answer.
    pub stop: Vec<String>,
    pub masks: Masks,
    /// Fields that would change the text and are not applied, with their values.
    pub unused: Vec<String>,
}

impl Defaults {
    /// Reads the defaults of a model's folder, whose configuration is `config`.
    pub fn read(folder: &Path, config: &Value) -> Result<Defaults> {
        let path = folder.join(FILE);
        let file: Value = match data::small_file::read_text(&path) {
            Ok(text) => serde_json::from_str(&text)
                .map_err(|e| TrainError::Usage(format!("{}: this is not valid JSON: {e}", path.display())))?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Value::Null,
            Err(e) => return Err(TrainError::io("read", &path, e)),
        };
        let fields = match file {
            Value::Object(fields) => fields,
            Value::Null => Map::new(),
            _ => return Err(TrainError::Usage(format!("{}: expected an object of settings", path.display()))),
        };
        let mut fields = Fields { of: fields, path: &path };
        let ends = |of: &Value| of.get("eos_token_id").and_then(ids);
        let text = config.get("text_config").unwrap_or(config);
        Ok(Defaults {
            draws: fields.take("do_sample", Value::as_bool).unwrap_or(false),
            temperature: fields.number("temperature", |x| x >= 0.0, "from 0")?,
            top_k: fields.count("top_k"),
            top_p: fields.number("top_p", |x| 0.0 < x && x <= 1.0, "above 0, up to 1")?,
            min_p: fields.number("min_p", |x| (0.0..=1.0).contains(&x), "from 0 to 1")?,
            repetition_penalty: fields.number("repetition_penalty", |x| x > 0.0, "above 0")?,
            end_tokens: fields
                .take("eos_token_id", ids)
                .or_else(|| ends(config))
                .or_else(|| ends(text))
                .unwrap_or_default(),
            max_new_tokens: fields.count("max_new_tokens"),
            max_length: fields.count("max_length"),
            stop: fields.texts("stop_strings"),
            masks: Masks {
                never: fields.tokens("suppress_tokens"),
                not_first: fields.tokens("begin_suppress_tokens"),
                words: fields.words("bad_words_ids"),
                ngram: fields.count("no_repeat_ngram_size").unwrap_or(0),
                least_new: fields.count("min_new_tokens").unwrap_or(0),
                least: fields.count("min_length").unwrap_or(0),
                last: fields.tokens("forced_eos_token_id"),
            },
            unused: fields.unused(),
        })
    }
}

/// The fields of the file that nothing has taken yet.
struct Fields<'a> {
    of: Map<String, Value>,
    path: &'a Path,
}

impl Fields<'_> {
    /// The value of a field in this form; one of another form stays, and is named with those that are not applied.
    fn take<T>(&mut self, name: &str, read: impl FnOnce(&Value) -> Option<T>) -> Option<T> {
        let value = self.of.get(name).and_then(read)?;
        self.of.remove(name);
        Some(value)
    }

    fn number(&mut self, name: &str, allowed: impl Fn(f64) -> bool, expected: &str) -> Result<Option<f64>> {
        match self.take(name, Value::as_f64) {
            Some(wrong) if !allowed(wrong) => Err(TrainError::Usage(format!(
                "{}: `{name}` is {wrong}, expected a number {expected}\n  hint: correct the file, or remove the field",
                self.path.display()
            ))),
            value => Ok(value),
        }
    }

    fn count(&mut self, name: &str) -> Option<usize> {
        self.take(name, |value| value.as_u64().map(|n| n as usize))
    }

    fn tokens(&mut self, name: &str) -> Vec<u32> {
        self.take(name, ids).unwrap_or_default()
    }

    fn words(&mut self, name: &str) -> Vec<Vec<u32>> {
        self.take(name, |value| value.as_array()?.iter().map(ids).collect()).unwrap_or_default()
    }

    fn texts(&mut self, name: &str) -> Vec<String> {
        let of = |value: &Value| value.as_str().map(|text| vec![text.to_owned()]);
        let list = |value: &Value| value.as_array()?.iter().map(|text| text.as_str().map(str::to_owned)).collect();
        self.take(name, |value| of(value).or_else(|| list(value))).unwrap_or_default()
    }

    /// Returns the fields that are left and would change the text, each with its value.
    fn unused(self) -> Vec<String> {
        let neutral = |name: &str| NEUTRAL.iter().find(|(known, _)| *known == name).map_or(0.0, |(_, value)| *value);
        let does_nothing = |name: &str, value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Number(number) => number.as_f64() == Some(neutral(name)),
            Value::Array(items) => items.is_empty(),
            Value::Object(entries) => entries.is_empty(),
            Value::Bool(true) | Value::String(_) => false,
        };
        let counts = |(name, value): &(String, Value)| !NO_TEXT.contains(&name.as_str()) && !does_nothing(name, value);
        let mut unused: Vec<String> =
            self.of.into_iter().filter(counts).map(|(name, value)| format!("{name}: {value}")).collect();
        unused.sort();
        unused
    }
}

/// Returns the tokens of a number or a list of numbers; `None` if there are none, or if one is no token.
fn ids(value: &Value) -> Option<Vec<u32>> {
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    let ids: Option<Vec<u32>> = list.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect();
    ids.filter(|ids| !ids.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_file_wins_over_the_configuration() {
        let folder = tempfile::tempdir().unwrap();
        let config = json!({"eos_token_id": 7, "text_config": {"eos_token_id": 8}});
        assert_eq!(
            Defaults::read(folder.path(), &config).unwrap(),
            Defaults { end_tokens: vec![7], ..Default::default() }
        );
        let text = json!({"eos_token_id": [3, 4], "do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95});
        std::fs::write(folder.path().join(FILE), text.to_string()).unwrap();
        let found = Defaults::read(folder.path(), &config).unwrap();
        assert_eq!((found.end_tokens, found.draws, found.top_k), (vec![3, 4], true, Some(20)));
        assert_eq!((found.temperature, found.top_p, found.min_p), (Some(0.6), Some(0.95), None));
        assert!(found.unused.is_empty(), "{:?}", found.unused);
        let nested = json!({"text_config": {"eos_token_id": 8}});
        std::fs::write(folder.path().join(FILE), "{}").unwrap();
        assert_eq!(Defaults::read(folder.path(), &nested).unwrap().end_tokens, [8]);
        for (field, value) in [("temperature", -1.0), ("top_p", -1.0), ("top_p", 0.0), ("top_p", 2.0), ("min_p", 1.5)] {
            std::fs::write(folder.path().join(FILE), json!({field: value}).to_string()).unwrap();
            let error = Defaults::read(folder.path(), &nested).unwrap_err().to_string();
            assert!(error.contains(&format!("`{field}` is {value}, expected a number")), "{error}");
        }
        std::fs::remove_file(folder.path().join(FILE)).unwrap();
        std::os::unix::fs::symlink("/dev/zero", folder.path().join(FILE)).unwrap();
        let error = Defaults::read(folder.path(), &nested).unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
        std::fs::remove_file(folder.path().join(FILE)).unwrap();
        std::fs::write(folder.path().join(FILE), "[1]").unwrap();
        let error = Defaults::read(folder.path(), &nested).unwrap_err().to_string();
        assert!(error.contains(FILE) && error.contains("expected an object of settings"), "{error}");
        std::fs::write(folder.path().join(FILE), "{").unwrap();
        let error = Defaults::read(folder.path(), &nested).unwrap_err().to_string();
        assert!(error.contains(FILE) && error.contains("not valid JSON"), "{error}");
    }

    #[test]
    fn every_field_that_changes_the_text_is_taken_or_named() {
        let folder = tempfile::tempdir().unwrap();
        let text = json!({
            "transformers_version": "5", "use_cache": true, "num_beams": 1, "typical_p": 1.0, "bos_token_id": 1,
            "suppress_tokens": [5], "begin_suppress_tokens": 6, "bad_words_ids": [[7], [8, 9]], "no_repeat_ngram_size": 3,
            "min_new_tokens": 4, "min_length": 2, "forced_eos_token_id": 2, "stop_strings": "END", "max_new_tokens": 12,
            "max_length": 40, "guidance_scale": null, "epsilon_cutoff": 0.0, "use_mtp": true, "max_cache_len": 64,
            "speculation_type": "mtp", "do_sample": false,
        });
        let read = |text: &Value| {
            std::fs::write(folder.path().join(FILE), text.to_string()).unwrap();
            Defaults::read(folder.path(), &Value::Null).unwrap()
        };
        let found = read(&text);
        assert_eq!(found.unused, Vec::<String>::new());
        let masks = Masks {
            never: vec![5],
            not_first: vec![6],
            words: vec![vec![7], vec![8, 9]],
            ngram: 3,
            least_new: 4,
            least: 2,
            last: vec![2],
        };
        assert_eq!((found.masks, found.stop), (masks, vec!["END".to_owned()]));
        assert_eq!((found.max_new_tokens, found.max_length), (Some(12), Some(40)));
        let other = json!({"typical_p": 0.9, "num_beams": 4, "penalty_alpha": 0.6, "sequence_bias": [[[1], 2.0]],
            "suppress_tokens": [], "stop_strings": 3, "a_later_one": "x", "eos_token_id": [2, "x"],
            "bad_words_ids": [[7], [-1]], "do_sample": "true"});
        let named = [
            "a_later_one: \"x\"",
            "bad_words_ids: [[7],[-1]]",
            "do_sample: \"true\"",
            "eos_token_id: [2,\"x\"]",
            "num_beams: 4",
            "penalty_alpha: 0.6",
            "sequence_bias: [[[1],2.0]]",
            "stop_strings: 3",
            "typical_p: 0.9",
        ];
        assert_eq!(read(&other).unused, named);
    }
}
