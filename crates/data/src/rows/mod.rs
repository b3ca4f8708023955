//! Rows: JSON objects read one by one from local files, each with its place.
//!
//! Knows file formats, but not what a row means. Adding a format is one file here and one line in [`open_file`].

pub(crate) mod json;
mod parquet;
mod text;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::error::{DataError, RowError};

/// Where a row lies: `row` counts from 1 (for JSON lines it is the line of the file).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub file: Arc<Path>,
    pub row: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, row {}", self.file.display(), self.row)
    }
}

/// One row; a broken one keeps its place and says why.
#[derive(Clone, Debug)]
pub struct Row {
    pub place: Place,
    pub fields: Result<Map<String, Value>, RowError>,
}

/// A stream of rows in the order of the file.
pub type Rows = Box<dyn Iterator<Item = Row> + Send>;

const EXTENSIONS: [&str; 4] = ["jsonl", "json", "parquet", "txt"];

/// Opens a file, or every data file of a directory in order of name. `text_field` is the column under which the whole
/// content of a `.txt` file appears.
pub fn open(path: &Path, text_field: &str) -> Result<Rows, DataError> {
    if !path.is_dir() {
        return open_file(path, text_field);
    }
    let entries = std::fs::read_dir(path).map_err(|e| DataError::io("list", path, e))?;
    let mut files = Vec::new();
    for entry in entries {
        let file = entry.map_err(|e| DataError::io("list", path, e))?.path();
        if file.is_file() && extension(&file).is_some_and(|e| EXTENSIONS.contains(&e.as_str())) {
            files.push(file);
        }
    }
    if files.is_empty() {
        return Err(DataError::invalid(path.display(), "the directory holds no data files")
            .hint(format!("known are .{}", EXTENSIONS.join(", ."))));
    }
    files.sort();
    let readers = files.iter().map(|file| open_file(file, text_field)).collect::<Result<Vec<_>, _>>()?;
    Ok(Box::new(readers.into_iter().flatten()))
}

fn open_file(path: &Path, text_field: &str) -> Result<Rows, DataError> {
    if !path.exists() {
        return Err(DataError::invalid(path.display(), "there is no such file or directory")
            .hint("datasets are local paths; a hub name must be downloaded first"));
    }
    match extension(path).as_deref() {
        Some("jsonl") => json::open_lines(path),
        Some("json") => json::open(path),
        Some("parquet") => parquet::open(path),
        Some("txt") => text::open(path, text_field),
        other => Err(DataError::invalid(
            path.display(),
            match other {
                Some(name) => format!("files of type .{name} are not available yet"),
                None => "a file without extension has no known format".to_owned(),
            },
        )
        .hint(format!("known are .{}", EXTENSIONS.join(", .")))),
    }
}

fn extension(path: &Path) -> Option<String> {
    Some(path.extension()?.to_str()?.to_ascii_lowercase())
}

fn shared(path: &Path) -> Arc<Path> {
    Arc::from(PathBuf::from(path))
}
