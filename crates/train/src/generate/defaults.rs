//! What a model's folder says about generation: `generation_config.json`, with the names that transformers gives things.

use std::path::Path;

use serde_json::Value;

use crate::error::{Result, TrainError};

/// The name of the file.
const FILE: &str = "generation_config.json";

/// What the file says; nothing where it does not.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Defaults {
    /// Whether tokens are drawn at all.
    pub draws: bool,
    pub temperature: Option<f64>,
    pub top_k: Option<usize>,
    pub top_p: Option<f64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    /// Tokens that end an answer, of this file or of the model's configuration.
    pub end_tokens: Vec<u32>,
}

impl Defaults {
    /// Of a model's folder, whose configuration is `config`.
    pub fn read(folder: &Path, config: &Value) -> Result<Defaults> {
        let path = folder.join(FILE);
        let fields: Value = match data::small_file::read_text(&path) {
            Ok(text) => serde_json::from_str(&text)
                .map_err(|e| TrainError::Usage(format!("{}: this is not valid JSON: {e}", path.display())))?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Value::Null,
            Err(e) => return Err(TrainError::io("read", &path, e)),
        };
        let number = |name: &str, allowed: &dyn Fn(f64) -> bool, expected: &str| {
            let value = fields.get(name).and_then(Value::as_f64);
            match value.filter(|value| !allowed(*value)) {
                Some(wrong) => Err(TrainError::Usage(format!(
                    "{}: `{name}` is {wrong}, expected a number {expected}\n  hint: correct the file, or remove the field",
                    path.display()
                ))),
                None => Ok(value),
            }
        };
        let ends = |of: &Value| of.get("eos_token_id").map(ids).filter(|ids| !ids.is_empty());
        let text = config.get("text_config").unwrap_or(config);
        Ok(Defaults {
            draws: fields.get("do_sample").and_then(Value::as_bool).unwrap_or(false),
            temperature: number("temperature", &|x| x >= 0.0, "from 0")?,
            top_k: fields.get("top_k").and_then(Value::as_u64).map(|k| k as usize),
            top_p: number("top_p", &|x| 0.0 < x && x <= 1.0, "above 0, up to 1")?,
            min_p: number("min_p", &|x| (0.0..=1.0).contains(&x), "from 0 to 1")?,
            repetition_penalty: number("repetition_penalty", &|x| x > 0.0, "above 0")?,
            end_tokens: ends(&fields).or_else(|| ends(config)).or_else(|| ends(text)).unwrap_or_default(),
        })
    }
}

/// One id or a list of them.
fn ids(value: &Value) -> Vec<u32> {
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    list.iter().filter_map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
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
        std::fs::write(folder.path().join(FILE), "{").unwrap();
        let error = Defaults::read(folder.path(), &nested).unwrap_err().to_string();
        assert!(error.contains(FILE) && error.contains("not valid JSON"), "{error}");
    }
}
