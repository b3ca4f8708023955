//! JSON files of a model folder.

use std::path::Path;

use serde_json::Value;

use crate::error::{Result, TrainError};
use crate::files::staged::write_synced;

/// The settings of the tokenizer, in which older readers look for the chat template.
pub const TOKENIZER: &str = "tokenizer_config.json";

/// The file of the tokenizer.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Reads a file of JSON.
pub fn read_json(path: &Path) -> Result<Value> {
    let text = data::small_file::read_text(path).map_err(|e| TrainError::io("read", path, e))?;
    serde_json::from_str(&text)
        .map_err(|e| TrainError::Usage(format!("{}: this is not valid JSON: {e}", path.display())))
}

/// Writes another text in the place of a file of a result, if it is there.
pub fn replace(folder: &Path, name: &str, value: &Value) -> Result<()> {
    let path = folder.join(name);
    if path.is_file() {
        std::fs::remove_file(&path).map_err(|e| TrainError::io("replace", &path, e))?;
    }
    write_synced(&path, pretty(value).as_bytes())
}

/// Returns a value as the text of a file.
pub fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).expect("a value is always representable as JSON") + "\n"
}
