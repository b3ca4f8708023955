//! `.txt`: the whole file is one row with one column.

use std::path::Path;

use serde_json::{Map, Value};

use super::{Place, Row, Rows, shared, stream};
use crate::error::{DataError, RowError, RowReason};

pub(super) fn open(path: &Path, field: &str) -> Result<Rows, DataError> {
    let bytes = stream::read(path)?;
    let fields = match String::from_utf8(bytes) {
        Ok(text) => Ok(Map::from_iter([(field.to_owned(), Value::String(text))])),
        Err(e) => Err(RowError::new(RowReason::Unreadable, e.utf8_error())),
    };
    Ok(Box::new(std::iter::once(Row { place: Place { file: shared(path), row: 1 }, fields })))
}
