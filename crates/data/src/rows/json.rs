//! `.jsonl` (one object a line, streamed) and `.json` (one array of objects, or lines under the wrong name).

use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::{Place, Row, Rows, shared, stream};
use crate::error::{DataError, RowError, RowReason};

const BYTE_ORDER_MARK: &[u8] = &[0xef, 0xbb, 0xbf];

pub(super) fn open_lines(path: &Path) -> Result<Rows, DataError> {
    Ok(Box::new(Lines { reader: stream::open(path)?, file: shared(path), line: 0, ended: false }))
}

struct Lines {
    reader: Box<dyn BufRead + Send>,
    file: Arc<Path>,
    line: usize,
    ended: bool,
}

impl Iterator for Lines {
    type Item = Row;

    fn next(&mut self) -> Option<Row> {
        let mut bytes = Vec::new();
        while !self.ended {
            bytes.clear();
            self.line += 1;
            let place = Place { file: self.file.clone(), row: self.line };
            match self.reader.read_until(b'\n', &mut bytes) {
                Ok(0) => return None,
                Ok(_) => {}
                Err(e) => {
                    self.ended = true;
                    return Some(Row { place, fields: Err(RowError::new(RowReason::Unreadable, e)) });
                }
            }
            let text = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&bytes);
            if !text.trim_ascii().is_empty() {
                return Some(Row { place, fields: parse_object(text) });
            }
        }
        None
    }
}

fn parse_object(text: &[u8]) -> Result<Map<String, Value>, RowError> {
    let value = serde_json::from_slice(text).map_err(|e| RowError::new(RowReason::Unreadable, e))?;
    into_object(value)
}

fn into_object(value: Value) -> Result<Map<String, Value>, RowError> {
    match value {
        Value::Object(fields) => Ok(fields),
        other => Err(RowError::new(RowReason::WrongType, format!("expected an object, found {}", kind(&other)))),
    }
}

/// The word for a JSON value's type in messages.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// An array is held in memory whole; a file that starts with `{` is read as lines.
pub(super) fn open(path: &Path) -> Result<Rows, DataError> {
    let bytes = stream::read(path)?;
    let text = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&bytes);
    if text.trim_ascii_start().first() == Some(&b'{') && serde_json::from_slice::<Value>(text).is_err() {
        return open_lines(path);
    }
    let value: Value =
        serde_json::from_slice(text).map_err(|e| DataError::invalid(path.display(), format!("no JSON: {e}")))?;
    let rows = match value {
        Value::Array(rows) => rows,
        Value::Object(only) => vec![Value::Object(only)],
        other => {
            let problem = format!("expected a list of objects, found {}", kind(&other));
            return Err(DataError::invalid(path.display(), problem));
        }
    };
    let file = shared(path);
    Ok(Box::new(
        rows.into_iter()
            .enumerate()
            .map(move |(i, value)| Row { place: Place { file: file.clone(), row: i + 1 }, fields: into_object(value) }),
    ))
}
