//! Attributes of operations: small named values, ordered, printable, and representable in JSON.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The attributes of one operation, in the order in which they were written. Reading one that is
/// missing or ill-typed is an error that names it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Attrs(pub Map<String, Value>);

/// An attribute that is absent or has the wrong type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttrError(pub String);

impl fmt::Display for AttrError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for AttrError {}

/// Converts to the text that rules of operations give as errors.
impl From<AttrError> for String {
    fn from(error: AttrError) -> String {
        error.0
    }
}

impl Attrs {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds or replaces one attribute; chains.
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.0.insert(name.to_owned(), value.into());
        self
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns an attribute; absent and `null` are the same.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|v| !v.is_null())
    }

    fn typed<'a, T>(
        &'a self,
        name: &str,
        what: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, AttrError> {
        match self.get(name) {
            None => Ok(None),
            Some(v) => {
                read(v).map(Some).ok_or_else(|| AttrError(format!("attribute `{name}` is {v}, expected {what}")))
            }
        }
    }

    pub fn optional_int(&self, name: &str) -> Result<Option<i64>, AttrError> {
        self.typed(name, "an integer", Value::as_i64)
    }

    pub fn optional_float(&self, name: &str) -> Result<Option<f64>, AttrError> {
        self.typed(name, "a number", Value::as_f64)
    }

    pub fn optional_text(&self, name: &str) -> Result<Option<&str>, AttrError> {
        self.typed(name, "a string", Value::as_str)
    }

    /// A flag; absent means false.
    pub fn flag(&self, name: &str) -> Result<bool, AttrError> {
        Ok(self.typed(name, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    pub fn int(&self, name: &str) -> Result<i64, AttrError> {
        self.optional_int(name)?.ok_or_else(|| missing(name))
    }

    /// Returns a non-negative integer; an error if the attribute is absent, negative or of another type.
    pub fn size(&self, name: &str) -> Result<usize, AttrError> {
        let value = self.int(name)?;
        usize::try_from(value).map_err(|_| AttrError(format!("attribute `{name}` is {value}, expected 0 or more")))
    }

    pub fn float(&self, name: &str) -> Result<f64, AttrError> {
        self.optional_float(name)?.ok_or_else(|| missing(name))
    }

    pub fn text(&self, name: &str) -> Result<&str, AttrError> {
        self.optional_text(name)?.ok_or_else(|| missing(name))
    }

    /// A list of non-negative integers.
    pub fn sizes(&self, name: &str) -> Result<Vec<usize>, AttrError> {
        let list = self.typed(name, "a list of integers", |v| {
            v.as_array()?.iter().map(|x| x.as_u64().map(|x| x as usize)).collect::<Option<Vec<_>>>()
        })?;
        list.ok_or_else(|| missing(name))
    }

    /// Returns a list of numbers; an error if the attribute is absent or holds anything else.
    pub fn floats(&self, name: &str) -> Result<Vec<f64>, AttrError> {
        let list = self.typed(name, "a list of numbers", |v| {
            v.as_array()?.iter().map(Value::as_f64).collect::<Option<Vec<_>>>()
        })?;
        list.ok_or_else(|| missing(name))
    }
}

fn missing(name: &str) -> AttrError {
    AttrError(format!("attribute `{name}` is missing"))
}

impl fmt::Display for Attrs {
    /// Writes `{eps=1e-6, causal=true}`; nothing for no attributes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return Ok(());
        }
        let parts: Vec<String> = self.0.iter().map(|(k, v)| format!("{k}={v}")).collect();
        write!(f, "{{{}}}", parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_attribute() {
        let attrs = Attrs::new().with("eps", 1e-6).with("sizes", vec![1, 2]);
        assert_eq!(attrs.float("eps"), Ok(1e-6));
        assert_eq!(attrs.sizes("sizes"), Ok(vec![1, 2]));
        assert_eq!(attrs.int("eps").unwrap_err().0, "attribute `eps` is 1e-6, expected an integer");
        assert_eq!(attrs.text("mode").unwrap_err().0, "attribute `mode` is missing");
        assert_eq!(attrs.to_string(), "{eps=1e-6, sizes=[1,2]}");
    }
}
