//! The class by which transformers opens a tokenizer. From version 5 on most classes build their own normalizer and
//! pre-tokenizer and take only vocabulary and merges out of `tokenizer.json`. Training reads the file as it is, so a result
//! names a class that reads it as it is, too.
//!
//! Knows what the classes of the supported families build; any other class is taken for one that may differ.

use std::path::Path;

use serde_json::{Value, json};

use crate::error::Result;
use crate::model::hf_config::FILE;
use crate::model::json_files::{TOKENIZER, TOKENIZER_FILE, read_json, replace};

/// The class that reads `tokenizer.json` as it is, in every version.
const AS_IT_IS: &str = "PreTrainedTokenizerFast";

/// The pattern that `Qwen2Tokenizer` cuts texts by.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The pattern that `Qwen3_5Tokenizer` cuts texts by.
const QWEN3_5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Architectures whose tokenizers transformers 5 opens by one class, whatever class the files name.
const BY_ARCHITECTURE: [(&str, &str); 4] = [
    ("qwen2", "Qwen2Tokenizer"),
    ("qwen3_5", "Qwen3_5Tokenizer"),
    ("qwen3_5_moe", "Qwen3_5Tokenizer"),
    ("qwen3_5_moe_text", "Qwen3_5Tokenizer"),
];

/// Returns a sentence on the class that results will name in place of the tokenizer's own, if they do, or on that which
/// transformers takes in any case, if it cuts otherwise. `folder` has the tokenizer, `model` the configuration.
pub fn note(folder: &Path, model: &Path) -> Option<String> {
    let tokenizer = read_json(&folder.join(TOKENIZER_FILE)).ok()?;
    let settings = read_json(&folder.join(TOKENIZER)).ok()?;
    let fields = read_json(&model.join(FILE)).unwrap_or_default();
    let forced =
        BY_ARCHITECTURE.iter().find(|(of, class)| fields["model_type"] == *of && !agrees(class, &settings, &tokenizer));
    if let Some((of, class)) = forced {
        return Some(format!(
            "transformers 5 opens the tokenizers of all {of} models as `{class}`, which cuts texts otherwise than \
             tokenizer.json, by which they are trained: open results by `{AS_IT_IS}.from_pretrained`"
        ));
    }
    let class = misleading(&settings, &tokenizer)?;
    Some(format!(
        "results carry `tokenizer_class: {AS_IT_IS}` instead of {class}: transformers 5 would cut texts otherwise than \
         tokenizer.json, by which they are trained"
    ))
}

/// Names another class in a result's `tokenizer_config.json` where its own would cut texts otherwise.
pub fn settle(folder: &Path) -> Result<()> {
    let [settings, tokenizer] = [TOKENIZER, TOKENIZER_FILE].map(|name| folder.join(name));
    if !settings.is_file() || !tokenizer.is_file() {
        return Ok(());
    }
    let mut settings = read_json(&settings)?;
    // What no program can read is handed on as it is.
    let Ok(tokenizer) = read_json(&tokenizer) else { return Ok(()) };
    if misleading(&settings, &tokenizer).is_none() {
        return Ok(());
    }
    let Some(fields) = settings.as_object_mut() else { return Ok(()) };
    fields.insert("tokenizer_class".into(), json!(AS_IT_IS));
    // Code of the model's own, which results do not carry.
    fields.remove("auto_map");
    // This class obeys them, whatever the file's post-processor does.
    for (name, adds) in [("add_bos_token", adds(&tokenizer, 0)), ("add_eos_token", adds(&tokenizer, usize::MAX))] {
        if let Some(value) = fields.get_mut(name) {
            *value = json!(adds);
        }
    }
    replace(folder, TOKENIZER, &settings)
}

/// Returns the class of the settings, in words, if transformers 5 would not read `tokenizer.json` as it is.
fn misleading(settings: &Value, tokenizer: &Value) -> Option<String> {
    match settings.get("tokenizer_class").and_then(Value::as_str) {
        Some(class) if agrees(class, settings, tokenizer) => None,
        Some(class) => Some(format!("`{class}`")),
        // The model's architecture decides. A class of its own may know special tokens that the settings leave out.
        None => settings.get("eos_token").is_some_and(|token| !token.is_null()).then(|| "none".to_owned()),
    }
}

/// True if a class builds the steps that the file has.
fn agrees(class: &str, settings: &Value, tokenizer: &Value) -> bool {
    let (normalizer, cut) = (&tokenizer["normalizer"], &tokenizer["pre_tokenizer"]);
    let is_nfc = normalizer["type"] == "NFC";
    let is_plain = is_byte_level(cut, true) && settings["add_prefix_space"] != true && is_pairs(tokenizer, false);
    match class.strip_suffix("Fast").unwrap_or(class) {
        "PreTrainedTokenizer" | "TokenizersBackend" => true,
        "GPT2Tokenizer" => normalizer.is_null() && is_plain,
        "GPTNeoXTokenizer" => is_nfc && is_plain,
        name @ ("Qwen2Tokenizer" | "Qwen3_5Tokenizer") => {
            let pattern = if name == "Qwen2Tokenizer" { QWEN2 } else { QWEN3_5 };
            let steps = cut["pretokenizers"].as_array().map_or(&[][..], Vec::as_slice);
            let is_cut = |split: &Value| {
                split["pattern"]["Regex"] == pattern && split["behavior"] == "Isolated" && split["invert"] != true
            };
            is_nfc
                && matches!(steps, [split, bytes] if is_cut(split) && is_byte_level(bytes, false))
                && is_pairs(tokenizer, false)
        }
        "GemmaTokenizer" => {
            let is_space = |step: &Value| step["pattern"]["String"] == " ";
            normalizer["type"] == "Replace"
                && is_space(normalizer)
                && normalizer["content"] == "\u{2581}"
                && cut["type"] == "Split"
                && is_space(cut)
                && cut["behavior"] == "MergedWithPrevious"
                && cut["invert"] != true
                && is_pairs(tokenizer, true)
        }
        _ => false,
    }
}

/// True for a step that spells bytes, by GPT-2's pattern or without one, and adds no space.
fn is_byte_level(step: &Value, by_pattern: bool) -> bool {
    step["type"] == "ByteLevel"
        && step["add_prefix_space"] == false
        && step.get("use_regex").and_then(Value::as_bool).unwrap_or(true) == by_pattern
}

/// True for byte-pair encoding that looks at merges alone, with or without bytes for what is unknown.
fn is_pairs(tokenizer: &Value, bytes: bool) -> bool {
    let model = &tokenizer["model"];
    model["type"] == "BPE" && (model["byte_fallback"] == true) == bytes && model["ignore_merges"] != true
}

/// True if the post-processor puts a special token at the first or the last place of a text.
fn adds(tokenizer: &Value, place: usize) -> bool {
    let steps = |of: &Value| of.as_array().cloned().unwrap_or_default();
    let post = &tokenizer["post_processor"];
    let all = if post["type"] == "Sequence" { steps(&post["processors"]) } else { vec![post.clone()] };
    all.iter().any(|step| {
        let single = steps(&step["single"]);
        single.get(place.min(single.len().saturating_sub(1))).is_some_and(|part| part.get("SpecialToken").is_some())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tokenizer with these steps.
    fn of(normalizer: Value, cut: Value) -> Value {
        json!({"normalizer": normalizer, "pre_tokenizer": cut, "model": {"type": "BPE", "byte_fallback": false}})
    }

    fn bytes(by_pattern: bool) -> Value {
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": by_pattern})
    }

    fn split(pattern: &str) -> Value {
        let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        json!({"type": "Sequence", "pretokenizers": [split, bytes(false)]})
    }

    #[test]
    fn a_class_that_builds_what_the_file_has_stays() {
        let nfc = || json!({"type": "NFC"});
        let digits = json!({"type": "Sequence", "pretokenizers": [{"type": "Digits"}, bytes(true)]});
        for (class, tokenizer, stays) in [
            ("GPT2Tokenizer", of(Value::Null, bytes(true)), true),
            ("GPT2TokenizerFast", of(Value::Null, bytes(true)), true),
            // SmolLM2; phi-4 and OLMo 2; R1-Distill-Llama.
            ("GPT2Tokenizer", of(Value::Null, digits), false),
            ("GPT2Tokenizer", of(Value::Null, split(r"\p{N}{1,3}|.")), false),
            ("LlamaTokenizerFast", of(Value::Null, split(r"\p{N}{1,3}|.")), false),
            ("GPTNeoXTokenizer", of(nfc(), bytes(true)), true),
            ("GPTNeoXTokenizer", of(Value::Null, bytes(true)), false),
            ("Qwen2Tokenizer", of(nfc(), split(QWEN2)), true),
            ("Qwen2Tokenizer", of(nfc(), split(&QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|"))), false),
            ("Qwen2Tokenizer", of(Value::Null, split(QWEN2)), false),
            ("Qwen3_5Tokenizer", of(nfc(), split(QWEN3_5)), true),
            ("Qwen3_5Tokenizer", of(nfc(), split(QWEN2)), false),
            ("PreTrainedTokenizerFast", of(Value::Null, split("x")), true),
            ("SomeTokenizer", of(Value::Null, bytes(true)), false),
        ] {
            assert_eq!(agrees(class, &json!({}), &tokenizer), stays, "{class} {tokenizer}");
        }
        let gemma = json!({
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
            "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false},
            "model": {"type": "BPE", "byte_fallback": true},
        });
        assert!(agrees("GemmaTokenizerFast", &json!({}), &gemma) && !agrees("LlamaTokenizer", &json!({}), &gemma));
        assert!(!agrees("GPT2Tokenizer", &json!({"add_prefix_space": true}), &of(Value::Null, bytes(true))));
    }

    #[test]
    fn another_class_obeys_the_file() {
        let place = tempfile::tempdir().unwrap();
        let mut tokenizer = of(Value::Null, split("x"));
        tokenizer["post_processor"] = json!({"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]});
        let settings = json!({"tokenizer_class": "LlamaTokenizer", "add_bos_token": false, "add_eos_token": true,
            "auto_map": {}, "eos_token": "</s>"});
        std::fs::write(place.path().join(TOKENIZER_FILE), tokenizer.to_string()).unwrap();
        std::fs::write(place.path().join(TOKENIZER), settings.to_string()).unwrap();
        assert!(note(place.path(), place.path()).unwrap().contains("instead of `LlamaTokenizer`"));
        settle(place.path()).unwrap();
        let expected = json!({"tokenizer_class": AS_IT_IS, "add_bos_token": true, "add_eos_token": false,
            "eos_token": "</s>"});
        assert_eq!(read_json(&place.path().join(TOKENIZER)).unwrap(), expected);
        assert_eq!(note(place.path(), place.path()), None);
        // No name in the files keeps this one from its own steps.
        std::fs::write(place.path().join(FILE), json!({"model_type": "qwen2"}).to_string()).unwrap();
        assert!(
            note(place.path(), place.path())
                .unwrap()
                .contains("opens the tokenizers of all qwen2 models as `Qwen2Tokenizer`")
        );
    }
}
