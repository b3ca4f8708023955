//! `.txt`: the whole file is one row with one column.

use std::path::Path;

use serde_json::{Map, Value};

use super::row::{Row, RowLocation, Rows, shared};
use super::{RowLimit, stream};
use crate::error::{DataError, RowError, RowReason};

pub(super) fn open(path: &Path, field: &str, limit: RowLimit) -> Result<Rows, DataError> {
    let fields = match stream::read(path, limit.0)?.map(String::from_utf8) {
        Some(Ok(text)) => Ok(Map::from_iter([(field.to_owned(), Value::String(text))])),
        Some(Err(e)) => Err(RowError::new(RowReason::Unreadable, e.utf8_error())),
        None => Err(limit.exceeded()),
    };
    Ok(Box::new(std::iter::once(Row { place: RowLocation { file: shared(path), row: 1 }, fields })))
}
