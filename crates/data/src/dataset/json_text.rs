//! Values that stand in a row as texts of JSON.
//!
//! Knows no columns.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::columns::wrong;
use crate::error::RowError;
use crate::json_values::parsed;

/// True for messages as a text in the notation of a programming language, or cut off: it begins with a field of a message, names
/// a role, and is no JSON.
pub(crate) fn is_broken(value: &Value) -> bool {
    let Some(text) = value.as_str().map(str::trim_start) else { return false };
    let first = text.strip_prefix('[').unwrap_or(text).trim_start().strip_prefix('{').map(str::trim_start);
    let begins = |key: &str, mark: char| first.is_some_and(|first| first.starts_with(&format!("{mark}{key}{mark}:")));
    let has = |key: &str, mark: char| text.contains(&format!("{mark}{key}{mark}:"));
    let is_message = |mark: char| {
        ["role", "content", "from", "value"].iter().any(|key| begins(key, mark))
            && (has("role", mark) || has("from", mark))
            && (has("content", mark) || has("value", mark))
    };
    ['\'', '"'].into_iter().any(is_message) && parsed(text).is_none()
}

/// A value, or the list or object that it holds as a text of JSON. Other texts stay as they are.
pub(crate) fn opened(value: &Value) -> Cow<'_, Value> {
    match value.as_str().and_then(parsed) {
        Some(inner) => Cow::Owned(inner),
        None => Cow::Borrowed(value),
    }
}

/// The elements of a list, of a text of JSON that holds one, or of an object of lists (columns in place of rows). A single
/// message is a list of one.
pub(super) fn list<'a>(place: &str, expected: &str, value: &'a Value) -> Result<Cow<'a, [Value]>, RowError> {
    as_list(value).ok_or_else(|| match value.as_str() {
        Some(text) if text.trim_start().starts_with(['[', '{']) => {
            let problem = format!("column `{place}`: expected {expected}, found a text that is not valid JSON");
            RowError::new(crate::error::RowReason::WrongType, problem)
        }
        _ => wrong(place, expected, value),
    })
}

pub(crate) fn as_list(value: &Value) -> Option<Cow<'_, [Value]>> {
    match value {
        Value::Array(list) => Some(Cow::Borrowed(list)),
        Value::String(text) => match parsed(text)? {
            Value::Array(list) => Some(Cow::Owned(list)),
            other => listed(&other).map(Cow::Owned),
        },
        other => listed(other).map(Cow::Owned),
    }
}

/// An object as a list.
fn listed(value: &Value) -> Option<Vec<Value>> {
    let is_message = ["role", "from"].iter().any(|key| value.get(*key).is_some_and(Value::is_string));
    if is_message { Some(vec![value.clone()]) } else { transposed(value) }
}

/// The rows of an object of equally long lists.
fn transposed(value: &Value) -> Option<Vec<Value>> {
    let columns = value.as_object()?;
    let length = columns.values().next()?.as_array()?.len();
    let mut rows = vec![Map::new(); length];
    for (name, column) in columns {
        let column = column.as_array().filter(|column| column.len() == length)?;
        for (row, value) in rows.iter_mut().zip(column) {
            row.insert(name.clone(), value.clone());
        }
    }
    Some(rows.into_iter().map(Value::Object).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn lists_come_in_three_forms() {
        let rows = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
        let columns = json!({"role": ["user", "assistant"], "content": ["a", "b"]});
        let text = Value::String(format!(" {rows}\n"));
        let twice = Value::String(json!(text).to_string());
        for form in [&rows, &columns, &text, &twice, &Value::String(columns.to_string())] {
            assert_eq!(json!(list("m", "a list", form).unwrap()), rows, "{form}");
        }
        for other in [json!("hello"), json!("[1, 2"), json!({"role": ["a"], "content": []}), json!({}), json!(1)] {
            let error = list("m", "a list of messages", &other).unwrap_err();
            assert!(error.detail.starts_with("column `m`: expected a list of messages, found"), "{error}");
        }
        assert_eq!(json!(list("m", "a list", &rows[0]).unwrap()), json!([rows[0]]));
        assert_eq!(*opened(&json!("{\"a\": 1}")), json!({"a": 1}));
        assert_eq!(*opened(&json!("1")), json!("1"));
    }
}
