//! Attributes of operations: small named values, ordered, printable, and representable in JSON.

use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

/// The attributes of one operation, in the order in which they were written: a map that clones share until one of them
/// is changed. Reading one that is missing or ill-typed is an error that names it.
#[derive(Clone, Default)]
pub struct Attrs(Arc<Shared>);

#[derive(Default)]
struct Shared {
    map: Map<String, Value>,
    parsed: OnceLock<Arc<dyn Any + Send + Sync>>,
}

/// A value that is read of attributes.
pub trait Parsed: Any + Send + Sync + Sized {
    /// Reads it; the error says what is wrong.
    fn parse(attrs: &Attrs) -> Result<Self, String>;
}

impl Clone for Shared {
    /// The copy is about to be changed: what was parsed stays with the original.
    fn clone(&self) -> Self {
        Shared { map: self.map.clone(), parsed: OnceLock::new() }
    }
}

impl Deref for Attrs {
    type Target = Map<String, Value>;

    fn deref(&self) -> &Self::Target {
        &self.0.map
    }
}

impl DerefMut for Attrs {
    fn deref_mut(&mut self) -> &mut Self::Target {
        let shared = Arc::make_mut(&mut self.0);
        shared.parsed = OnceLock::new();
        &mut shared.map
    }
}

impl From<Map<String, Value>> for Attrs {
    fn from(map: Map<String, Value>) -> Self {
        Attrs(Arc::new(Shared { map, parsed: OnceLock::new() }))
    }
}

impl FromIterator<(String, Value)> for Attrs {
    fn from_iter<I: IntoIterator<Item = (String, Value)>>(attributes: I) -> Self {
        Map::from_iter(attributes).into()
    }
}

impl fmt::Debug for Attrs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map.fmt(f)
    }
}

impl PartialEq for Attrs {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0.map == other.0.map
    }
}

impl Serialize for Attrs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.map.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Attrs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Map::deserialize(deserializer).map(Self::from)
    }
}

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
        self.insert(name.to_owned(), value.into());
        self
    }

    /// Returns the attributes as a value of this type. It is kept for the next call, of clones too, until they are changed;
    /// a second type is read each time.
    pub fn parsed<T: Parsed>(&self) -> Result<Arc<T>, String> {
        if let Some(kept) = self.0.parsed.get().and_then(|kept| kept.clone().downcast().ok()) {
            return Ok(kept);
        }
        let parsed = Arc::new(T::parse(self)?);
        let _ = self.0.parsed.set(parsed.clone());
        Ok(parsed)
    }

    pub fn is_empty(&self) -> bool {
        self.0.map.is_empty()
    }

    /// Returns an attribute; absent and `null` are the same.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.map.get(name).filter(|v| !v.is_null())
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
        if self.is_empty() {
            return Ok(());
        }
        let parts: Vec<String> = self.iter().map(|(k, v)| format!("{k}={v}")).collect();
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

    #[derive(Debug, PartialEq)]
    struct Epsilon(i64);

    impl Parsed for Epsilon {
        fn parse(attrs: &Attrs) -> Result<Self, String> {
            Ok(Epsilon(attrs.int("eps")?))
        }
    }

    #[test]
    fn parsed_attributes_are_kept_until_they_change() {
        let attrs = Attrs::new().with("eps", 1);
        let first = attrs.parsed::<Epsilon>().unwrap();
        let mut changed = attrs.clone();
        assert!(Arc::ptr_eq(&first, &changed.parsed().unwrap()), "a clone keeps what was read");
        changed.insert("eps".into(), 2.into());
        assert_eq!((attrs.parsed(), changed.parsed()), (Ok(Arc::new(Epsilon(1))), Ok(Arc::new(Epsilon(2)))));
        changed.insert("eps".into(), 3.into());
        assert_eq!(changed.parsed(), Ok(Arc::new(Epsilon(3))));
        changed.remove("eps");
        assert!(changed.parsed::<Epsilon>().unwrap_err().contains("`eps` is missing"));
        assert_ne!(attrs, changed);
    }
}
