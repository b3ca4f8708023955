//! Dimensions that may still be symbols, and element types that may still be the recipe's choice.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use tensor::DType;

/// One extent: known, or a batch symbol (`B` rows, `T` tokens of a row) bound at compile time.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Dim {
    Fixed(usize),
    Symbol(String),
}

/// What the symbols stand for in one shape variant.
pub type Bindings = BTreeMap<String, usize>;

impl Dim {
    pub fn fixed(&self) -> Option<usize> {
        match self {
            Dim::Fixed(n) => Some(*n),
            Dim::Symbol(_) => None,
        }
    }

    /// The extent under `bindings`; `None` for an unbound symbol.
    pub fn bind(&self, bindings: &Bindings) -> Option<usize> {
        match self {
            Dim::Fixed(n) => Some(*n),
            Dim::Symbol(name) => bindings.get(name).copied(),
        }
    }
}

impl From<usize> for Dim {
    fn from(n: usize) -> Self {
        Dim::Fixed(n)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Fixed(n) => write!(f, "{n}"),
            Dim::Symbol(name) => f.write_str(name),
        }
    }
}

/// An element type. `Float` is the activation type, which the precision recipe decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    Float,
    Fixed(DType),
}

impl Element {
    pub const F32: Element = Element::Fixed(DType::F32);
    pub const I32: Element = Element::Fixed(DType::I32);

    pub fn is_float(self) -> bool {
        match self {
            Element::Float => true,
            Element::Fixed(dtype) => dtype.is_float(),
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Element::Float => f.write_str("float"),
            Element::Fixed(dtype) => write!(f, "{dtype}"),
        }
    }
}

impl Serialize for Element {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        if name == "float" {
            return Ok(Element::Float);
        }
        name.parse().map(Element::Fixed).map_err(serde::de::Error::custom)
    }
}

/// Type and shape of a value, as the shape rules of the operations see it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ValueType {
    pub dtype: Element,
    pub shape: Vec<Dim>,
}

impl ValueType {
    pub fn new(dtype: Element, shape: impl Into<Vec<Dim>>) -> Self {
        ValueType { dtype, shape: shape.into() }
    }

    /// The extent of the last axis, if there is one and it is known.
    pub fn last(&self) -> Option<usize> {
        self.shape.last().and_then(Dim::fixed)
    }
}

impl fmt::Display for ValueType {
    /// `float[B, T, 64]`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> = self.shape.iter().map(Dim::to_string).collect();
        write!(f, "{}[{}]", self.dtype, dims.join(", "))
    }
}
