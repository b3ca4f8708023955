//! The contract of an option's type (read from the tree, write back as JSON) and the scalar types. Limits of numbers
//! are checked by the row's reader, not here.

use crate::kind::Kind;
use crate::reader::Reader;
use crate::tree::{Node, Tree};
use serde_json::{Value, json};

/// The reason why a value could not be read.
#[derive(Debug)]
pub enum Fault {
    /// The value is not of this type. The caller knows the row and words the problem.
    Mismatch {
        /// Advice, if there is something better to say than the expectation.
        hint: Option<String>,
    },
    /// Problems were recorded where they are, inside the value.
    Reported,
}

impl Fault {
    /// A mismatch without a hint.
    pub const MISMATCH: Fault = Fault::Mismatch { hint: None };
}

/// A type that an option can have.
pub trait OptionValue: Sized + Clone + PartialEq {
    /// The type's description as data.
    const KIND: Kind;

    /// Reads the value; problems inside of it are recorded in `reader`.
    fn read(node: &Node, reader: &mut Reader) -> Result<Self, Fault>;

    /// The value in its canonical spelling.
    fn write(&self) -> Value;

    /// Any value, used only to continue collecting problems after this option's own problem is recorded.
    fn placeholder() -> Self;
}

impl Node {
    /// The text of an unquoted scalar. A quoted one is a mismatch whose hint is to remove the quotes, if `is_meant`
    /// says that the text would be right without them.
    pub fn plain(&self, is_meant: impl Fn(&str) -> bool) -> Result<&str, Fault> {
        match &self.tree {
            Tree::Scalar { text, quoted: false } => Ok(text),
            Tree::Scalar { text, quoted: true } if is_meant(text) => {
                Err(Fault::Mismatch { hint: Some("remove the quotes".into()) })
            }
            _ => Err(Fault::MISMATCH),
        }
    }

    /// Returns the text of any scalar, quoted or not.
    pub fn word(&self) -> Result<&str, Fault> {
        match &self.tree {
            Tree::Scalar { text, .. } => Ok(text),
            _ => Err(Fault::MISMATCH),
        }
    }
}

fn parse_bool(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" => Some(true),
        "false" | "no" | "off" => Some(false),
        _ => None,
    }
}

impl OptionValue for bool {
    const KIND: Kind = Kind::Bool;

    fn read(node: &Node, _: &mut Reader) -> Result<Self, Fault> {
        parse_bool(node.plain(|text| parse_bool(text).is_some())?).ok_or(Fault::MISMATCH)
    }

    fn write(&self) -> Value {
        json!(self)
    }

    fn placeholder() -> Self {
        false
    }
}

/// Parses a decimal number in YAML's spelling, which is narrower than Rust's: no `inf`, no `nan`.
fn parse_number(text: &str) -> Option<f64> {
    let is_decimal = text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
    if is_decimal { text.parse().ok().filter(|number: &f64| number.is_finite()) } else { None }
}

fn parse_integer(text: &str) -> Option<i128> {
    match text.strip_prefix("0x") {
        Some(digits) => i128::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Returns a hint for `1e3`, `1_000` and `16.0`, where a whole number is expected: the spelling that works.
fn whole_number_hint(text: &str) -> Option<String> {
    let number = parse_number(&text.replace('_', ""))?;
    (number.fract() == 0.0 && number.abs() < 1e15).then(|| format!("write `{}`", number as i64))
}

macro_rules! integers {
    ($($type:ty, unsigned: $unsigned:literal;)*) => {$(
        impl OptionValue for $type {
            const KIND: Kind = Kind::Integer { unsigned: $unsigned };

            fn read(node: &Node, _: &mut Reader) -> Result<Self, Fault> {
                let text = node.plain(|text| parse_integer(text).is_some())?;
                match parse_integer(text) {
                    Some(number) => number.try_into().map_err(|_| Fault::MISMATCH),
                    None => Err(Fault::Mismatch { hint: whole_number_hint(text) }),
                }
            }

            fn write(&self) -> Value {
                json!(self)
            }

            fn placeholder() -> Self {
                1
            }
        }
    )*};
}

integers! {
    u32, unsigned: true;
    u64, unsigned: true;
    i64, unsigned: false;
}

impl OptionValue for f64 {
    const KIND: Kind = Kind::Number;

    fn read(node: &Node, _: &mut Reader) -> Result<Self, Fault> {
        parse_number(node.plain(|text| parse_number(text).is_some())?).ok_or(Fault::MISMATCH)
    }

    fn write(&self) -> Value {
        json!(self)
    }

    fn placeholder() -> Self {
        1.0
    }
}

impl OptionValue for String {
    const KIND: Kind = Kind::Text;

    /// Reads every scalar as a text: `model: no` and `run_name: 7` mean what they say.
    fn read(node: &Node, _: &mut Reader) -> Result<Self, Fault> {
        node.word().map(str::to_string)
    }

    fn write(&self) -> Value {
        json!(self)
    }

    fn placeholder() -> Self {
        String::new()
    }
}
