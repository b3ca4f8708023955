//! Reading typed columns of a row, with errors that name the column.

use serde_json::{Map, Value};

use super::detect::{Columns, HISTORY, SYSTEM, TOOLS};
use super::json_text::as_list;
use crate::error::{RowError, RowReason};
use crate::json_values::kind;

/// A column that must be there.
pub(crate) fn required<'a>(row: &'a Map<String, Value>, name: &str) -> Result<&'a Value, RowError> {
    row.get(name).ok_or_else(|| {
        let present = match row.is_empty() {
            true => "no columns that can be read".to_owned(),
            false => row.keys().map(String::as_str).collect::<Vec<_>>().join(", "),
        };
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

/// Names of optional columns that are read without being named, in each row that fills them.
pub(crate) type Open = Vec<&'static str>;

/// Returns the names under which optional columns are read: of each, given its usual names, the one that was found, else those
/// that are no column of the `own` ones and that rows do not fill with values of another kind.
pub(crate) fn open(columns: &Columns<'_>, optional: &[(&'static [&'static str], Option<&str>)], own: &[&str]) -> Open {
    let is_free = |name: &&str| !own.contains(name) && columns.values(name).all(|value| fits(name, value));
    let names = optional
        .iter()
        .flat_map(|(usual, found)| usual.iter().copied().filter(move |name| found.is_none_or(|found| found == *name)));
    names.filter(is_free).collect()
}

/// The name of an optional column in a row: the given one, else the first of the usual names that is open and that the row
/// fills.
pub(crate) fn optional<'a>(
    row: &Map<String, Value>,
    given: Option<&'a str>,
    open: &Open,
    usual: &[&'static str],
) -> Option<&'a str> {
    let is_read = |name: &&&str| row.get(**name).is_some_and(|value| is_filled(value) && fits(name, value));
    given.or_else(|| open.iter().filter(|name| usual.contains(name)).find(is_read).copied())
}

/// The open columns that a row fills with values of another kind: they are not read.
pub(crate) fn unread<'a>(row: &Map<String, Value>, open: &'a Open) -> impl Iterator<Item = &'a &'static str> {
    let is_other = |name: &&&str| row.get(**name).is_some_and(|value| is_filled(value) && !fits(name, value));
    open.iter().filter(is_other)
}

fn is_filled(value: &Value) -> bool {
    !value.is_null() && *value != "" && value.as_array().is_none_or(|list| !list.is_empty())
}

/// True for a text that is meant as JSON, well formed or not, or that holds nothing.
fn is_json(text: &str) -> bool {
    let text = text.trim();
    text.is_empty() || text == "null" || text.starts_with(['[', '{', '"'])
}

/// True for a value of the kind that an optional column of this usual name has.
pub(crate) fn fits(name: &str, value: &Value) -> bool {
    let is_definition = |of: &Value| of.is_object() || of.as_str().is_some_and(is_json);
    match name {
        _ if SYSTEM.contains(&name) => value.is_string() || value.is_object(),
        _ if TOOLS.contains(&name) => match value {
            Value::Array(list) => list.iter().all(is_definition),
            other => is_definition(other),
        },
        HISTORY => {
            *value == "" || as_list(value).is_some_and(|of| of.iter().all(|turn| turn.is_array() || turn.is_object()))
        }
        _ => value.is_string(),
    }
}

pub(crate) fn wrong(name: &str, expected: &str, found: &Value) -> RowError {
    RowError::new(RowReason::WrongType, format!("column `{name}`: expected {expected}, found {}", kind(found)))
}
