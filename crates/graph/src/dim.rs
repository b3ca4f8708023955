//! Dimensions that may still be symbols, the names of axes, and element types that may still be the recipe's choice.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use tensor::{DType, Shape};

/// The quantity that an axis of a value counts, where that is not the features. Rewrites ask for the name, never for an
/// extent: a matrix may have the same number of rows as a batch. Axes whose extents are those of weights need no name:
/// no rewrite takes one for the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// The rows of the batch.
    Rows,
    /// The tokens of a row.
    Tokens,
    /// The patches of all images of the batch.
    Patches,
}

impl Axis {
    pub const ALL: [Axis; 3] = [Axis::Rows, Axis::Tokens, Axis::Patches];

    /// The symbol in the IR.
    pub const fn symbol(self) -> &'static str {
        match self {
            Axis::Rows => "B",
            Axis::Tokens => "T",
            Axis::Patches => "P",
        }
    }

    /// Returns the axis of a symbol, be it whole (`P`) or in groups (`P/4`).
    pub fn of_symbol(symbol: &str) -> Option<Axis> {
        groups_of(symbol).map(|(axis, _)| axis)
    }
}

/// Returns the axis of a symbol, and how many of its elements make one here: `P/4` are groups of 4 patches.
fn groups_of(symbol: &str) -> Option<(Axis, usize)> {
    let (name, size) = match symbol.split_once('/') {
        Some((name, size)) => (name, size.parse().ok().filter(|n| *n > 1)?),
        None => (symbol, 1),
    };
    Some((Axis::ALL.into_iter().find(|axis| axis.symbol() == name)?, size))
}

/// One extent: known, or a symbol of an [`Axis`] bound at compile time. The shape rules of the operations hand on what
/// they are given, so that an axis keeps its name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Dim {
    Fixed(usize),
    Symbol(String),
    /// A named axis with its extent: in flat graphs only.
    #[serde(skip)]
    Named(Axis, usize),
}

/// The extents of named axes in one shape variant.
pub type Bindings = BTreeMap<Axis, usize>;

impl Dim {
    /// The extent where it is known.
    pub fn fixed(&self) -> Option<usize> {
        match self {
            Dim::Fixed(n) | Dim::Named(_, n) => Some(*n),
            Dim::Symbol(_) => None,
        }
    }

    pub fn axis(&self) -> Option<Axis> {
        match self {
            Dim::Named(axis, _) => Some(*axis),
            Dim::Symbol(symbol) => Axis::of_symbol(symbol),
            Dim::Fixed(_) => None,
        }
    }

    /// The same axis with another extent: a part of it, or several together.
    pub fn with_extent(&self, n: usize) -> Dim {
        self.axis().map_or(Dim::Fixed(n), |axis| Dim::Named(axis, n))
    }

    /// Returns the axis with `size` elements in one: `None` where they leave a rest, or where the axis is in groups already
    /// and unbound.
    pub fn grouped(&self, size: usize) -> Option<Dim> {
        match self {
            Dim::Symbol(symbol) => match groups_of(symbol)? {
                (axis, 1) if size > 1 => Some(Dim::Symbol(format!("{}/{size}", axis.symbol()))),
                _ => (size == 1).then(|| self.clone()),
            },
            known => known.fixed().filter(|n| size > 0 && n % size == 0).map(|n| known.with_extent(n / size)),
        }
    }

    /// Returns the axis with each element taken apart into `size`: the inverse of [`Dim::grouped`].
    pub fn ungrouped(&self, size: usize) -> Option<Dim> {
        match self {
            Dim::Symbol(symbol) => match groups_of(symbol)? {
                (axis, of) if of == size => Some(Dim::Symbol(axis.symbol().to_owned())),
                _ => None,
            },
            known => known.fixed().map(|n| known.with_extent(n * size)),
        }
    }

    /// The extent under `bindings`; `None` for an unbound symbol, or for groups that leave a rest.
    pub fn bind(&self, bindings: &Bindings) -> Option<Dim> {
        match self {
            Dim::Symbol(symbol) => {
                let (axis, size) = groups_of(symbol)?;
                let extent = *bindings.get(&axis)?;
                (extent % size == 0).then_some(Dim::Named(axis, extent / size))
            }
            known => Some(known.clone()),
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
            Dim::Named(axis, n) => write!(f, "{}={n}", axis.symbol()),
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

    /// Returns the extents, if all are known.
    pub fn extents(&self) -> Option<Shape> {
        self.shape.iter().map(Dim::fixed).collect()
    }

    /// The extent of the last axis, if there is one and it is known.
    pub fn last(&self) -> Option<usize> {
        self.shape.last().and_then(Dim::fixed)
    }
}

impl fmt::Display for ValueType {
    /// Writes the form of `float[B, T, 64]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> = self.shape.iter().map(Dim::to_string).collect();
        write!(f, "{}[{}]", self.dtype, dims.join(", "))
    }
}
