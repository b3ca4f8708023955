//! What a tokenizer that someone wrote may ask for: numbers of tokens that tables can have, and texts that do not grow
//! without end before they are encoded.
//!
//! Knows the parts of a tokenizer, not what they do to any text.

use serde_json::Value;

/// The largest number of a token: vocabularies have less than a million, and tables are as long as the largest number.
const MOST_IDS: u32 = 1 << 24;

/// By how much the steps before the encoding may lengthen a text, all together. The known ones write three bytes for
/// one.
const MOST_GROWTH: f64 = 4096.0;

/// Errors: what is out of bounds.
pub(super) fn check(tokenizer: &tokenizers::Tokenizer) -> Result<(), String> {
    if let Some((token, id)) = tokenizer.get_vocab(true).into_iter().find(|(_, id)| *id >= MOST_IDS) {
        return Err(format!("the token {token:?} has the number {id}, more than the {MOST_IDS} that there may be"));
    }
    let parts = [serde_json::to_value(tokenizer.get_normalizer()), serde_json::to_value(tokenizer.get_pre_tokenizer())];
    let parts: Vec<Value> = parts.into_iter().collect::<Result<_, _>>().map_err(|e| e.to_string())?;
    match parts.iter().map(growth).product::<f64>() {
        most if most <= MOST_GROWTH => Ok(()),
        most => Err(format!("its normalizers may make a text {most:.0} times as long")),
    }
}

/// How many bytes one byte may become.
fn growth(of: &Value) -> f64 {
    let all = |list: &Value| list.as_array().into_iter().flatten().map(growth).product::<f64>();
    match of.get("type").and_then(Value::as_str).unwrap_or_default() {
        "Sequence" => ["normalizers", "pretokenizers"].iter().filter_map(|name| of.get(*name)).map(all).product(),
        "Replace" => {
            let content = of.get("content").and_then(Value::as_str).map_or(0, str::len);
            let pattern = of.pointer("/pattern/String").and_then(Value::as_str).map_or(0, str::len);
            // An expression may match nothing, before and behind each character.
            if pattern > 0 { (content as f64 / pattern as f64).max(1.0) } else { content as f64 + 1.0 }
        }
        "Prepend" => of.get("prepend").and_then(Value::as_str).map_or(1.0, |text| text.len() as f64 + 1.0),
        "ByteLevel" => 2.0,
        "Metaspace" => 3.0,
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn growth_is_that_of_all_steps() {
        let replace =
            |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let of = |steps: Vec<Value>| growth(&json!({"type": "Sequence", "normalizers": steps}));
        assert_eq!(growth(&Value::Null), 1.0);
        assert_eq!(of(vec![json!({"type": "NFC"}), replace(json!({"String": " "}), "\u{2581}")]), 3.0);
        assert_eq!(of(vec![replace(json!({"String": "aa"}), "a")]), 1.0);
        assert_eq!(of(vec![replace(json!({"Regex": "x*"}), "abc"); 2]), 16.0);
        assert!(of(vec![replace(json!({"String": "a"}), "aa"); 40]) > MOST_GROWTH);
    }
}
