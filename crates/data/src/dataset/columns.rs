//! Reading typed columns of a row, with errors that name the column.

use serde_json::{Map, Value};

use crate::error::{RowError, RowReason};
use crate::rows::json::kind;

/// A column that must be there.
pub(crate) fn required<'a>(row: &'a Map<String, Value>, name: &str) -> Result<&'a Value, RowError> {
    row.get(name).ok_or_else(|| {
        let present = row.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        RowError::new(RowReason::MissingField, format!("no column `{name}`; the row has {present}"))
    })
}

/// A column that must hold text.
pub(super) fn text<'a>(row: &'a Map<String, Value>, name: &str) -> Result<&'a str, RowError> {
    let value = required(row, name)?;
    value.as_str().ok_or_else(|| wrong(name, "a string", value))
}

/// A column that may be missing or null; otherwise it must hold text.
pub(crate) fn optional_text<'a>(row: &'a Map<String, Value>, name: &str) -> Result<Option<&'a str>, RowError> {
    match row.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(_) => text(row, name).map(Some),
    }
}

/// The name of an optional column in a row: the given one, else the first of the usual names that the row fills.
pub(crate) fn optional<'a>(row: &Map<String, Value>, given: Option<&'a str>, usual: &[&'a str]) -> Option<&'a str> {
    let is_filled =
        |value: &Value| !value.is_null() && *value != "" && value.as_array().is_none_or(|list| !list.is_empty());
    given.or_else(|| usual.iter().copied().find(|name| row.get(*name).is_some_and(is_filled)))
}

pub(crate) fn wrong(name: &str, expected: &str, found: &Value) -> RowError {
    RowError::new(RowReason::WrongType, format!("column `{name}`: expected {expected}, found {}", kind(found)))
}
