//! `.jsonl` (one object per line, streamed) and `.json` (one array of objects), either with the other's content.

use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;

use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use super::elements::Elements;
use super::row::{Row, RowLocation, Rows, shared};
use super::{RowLimit, stream};
use crate::error::{DataError, RowError, RowReason};
use crate::json_values::kind;

const BYTE_ORDER_MARK: &[u8] = &[0xef, 0xbb, 0xbf];

/// The rows of lines; of a list, where the whole file is one.
pub(super) fn open_lines_or_list(path: &Path, limit: RowLimit) -> Result<Rows, DataError> {
    let (mut reader, first) = at_first(path)?;
    if first == Some(b'[') && serde_json::from_reader::<_, IgnoredAny>(&mut reader).is_ok() {
        return open(path, limit);
    }
    open_lines(path, limit)
}

fn open_lines(path: &Path, limit: RowLimit) -> Result<Rows, DataError> {
    Ok(Box::new(Lines { reader: stream::open(path)?, limit, file: shared(path), line: 0, ended: false }))
}

struct Lines {
    reader: Box<dyn BufRead + Send>,
    limit: RowLimit,
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
            let place = RowLocation { file: self.file.clone(), row: self.line };
            match self.limit.read_line(&mut self.reader, &mut bytes) {
                Ok(false) => return Some(Row { place, fields: Err(self.limit.exceeded()) }),
                Ok(true) if bytes.is_empty() => return None,
                Ok(true) => {}
                Err(e) => {
                    self.ended = true;
                    return Some(Row { place, fields: Err(RowError::new(RowReason::Unreadable, e)) });
                }
            }
            let text = without_mark(&bytes);
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

/// The rows of a list, each parsed when it is reached; the whole file is examined first, so that damage shows before
/// any row is used. A file that starts with `{` is read as lines, or is a single row.
pub(super) fn open(path: &Path, limit: RowLimit) -> Result<Rows, DataError> {
    let (reader, first) = at_first(path)?;
    let outcome = serde_json::from_reader::<_, IgnoredAny>(after_mark(path)?);
    if first == Some(b'{') && outcome.is_err() {
        return open_lines(path, limit);
    }
    outcome.map_err(|e| DataError::invalid(path.display(), format!("no JSON: {e}")))?;
    let file = shared(path);
    let row = move |(i, element): (usize, Result<Vec<u8>, RowError>)| Row {
        place: RowLocation { file: file.clone(), row: i + 1 },
        fields: element.and_then(|text| parse_object(&text)),
    };
    match first {
        Some(b'[') => Ok(Box::new(Elements::new(reader, limit).enumerate().map(row))),
        Some(b'{') => {
            let text = stream::read(path, limit.0)?.map(|bytes| without_mark(&bytes).to_vec());
            Ok(Box::new(std::iter::once((0, text.ok_or_else(|| limit.exceeded()))).map(row)))
        }
        other => {
            let found = match other {
                Some(b'"') => "a string",
                Some(b't' | b'f') => "a boolean",
                Some(b'n') => "null",
                _ => "a number",
            };
            Err(DataError::invalid(path.display(), format!("expected a list of objects, found {found}")))
        }
    }
}

fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes)
}

/// The content from its first byte that is no white space on, and that byte.
fn at_first(path: &Path) -> Result<(Box<dyn BufRead + Send>, Option<u8>), DataError> {
    let mut reader = after_mark(path)?;
    loop {
        match reader.fill_buf().map_err(|e| DataError::io("read", path, e))?.first().copied() {
            Some(byte) if byte.is_ascii_whitespace() => reader.consume(1),
            byte => return Ok((reader, byte)),
        }
    }
}

/// The content after a byte order mark.
fn after_mark(path: &Path) -> Result<Box<dyn BufRead + Send>, DataError> {
    let mut reader = stream::open(path)?;
    let has_mark = reader.fill_buf().map_err(|e| DataError::io("read", path, e))?.starts_with(BYTE_ORDER_MARK);
    reader.consume(if has_mark { BYTE_ORDER_MARK.len() } else { 0 });
    Ok(reader)
}
