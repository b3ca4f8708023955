//! Amounts of memory: `22GiB`, `500 MB`, or a bare number of bytes.

use crate::kind::Kind;
use crate::reader::Reader;
use crate::tree::Node;
use crate::value::{Fault, OptionValue};
use serde_json::Value;
use std::fmt;

/// An amount of memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// Powers of 1024 come before powers of 1000, so that printing prefers them.
const UNITS: &[(&str, u64)] = &[
    ("tib", 1 << 40),
    ("gib", 1 << 30),
    ("mib", 1 << 20),
    ("kib", 1 << 10),
    ("tb", 1_000_000_000_000),
    ("gb", 1_000_000_000),
    ("mb", 1_000_000),
    ("kb", 1_000),
    ("b", 1),
    ("", 1),
];

impl ByteSize {
    /// Reads `22GiB`, `1.5 TB`, `1000`. `None` if it is not an amount, negative, or past 2⁶⁴ bytes.
    pub fn parse(text: &str) -> Option<ByteSize> {
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let unit = text[digits..].trim().to_ascii_lowercase();
        let (_, factor) = UNITS.iter().find(|(name, _)| *name == unit)?;
        if let Ok(whole) = text[..digits].parse::<u64>() {
            return whole.checked_mul(*factor).map(ByteSize);
        }
        let bytes = text[..digits].parse::<f64>().ok()? * *factor as f64;
        (bytes < 2f64.powi(64)).then_some(ByteSize(bytes as u64))
    }
}

impl fmt::Display for ByteSize {
    /// Prints it exactly: in the greatest unit of 1024 that divides the amount.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, unit) in [("TiB", 1u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)] {
            if self.0 >= unit && self.0.is_multiple_of(unit) {
                return write!(out, "{}{name}", self.0 / unit);
            }
        }
        write!(out, "{}", self.0)
    }
}

impl OptionValue for ByteSize {
    const KIND: Kind = Kind::Bytes;

    fn read(node: &Node, _: &mut Reader) -> Result<Self, Fault> {
        ByteSize::parse(node.word()?).ok_or(Fault::Mismatch {
            hint: Some("units are KB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024)".into()),
        })
    }

    fn write(&self) -> Value {
        Value::String(self.to_string())
    }

    fn placeholder() -> Self {
        ByteSize(0)
    }
}

#[cfg(test)]
mod tests {
    use super::ByteSize;

    #[test]
    fn units_of_1000_and_of_1024_differ() {
        assert_eq!(ByteSize::parse("22GiB"), Some(ByteSize(22 << 30)));
        assert_eq!(ByteSize::parse("22 gb"), Some(ByteSize(22_000_000_000)));
        assert_eq!(ByteSize::parse("1.5KiB"), Some(ByteSize(1536)));
        assert_eq!(ByteSize::parse("4096"), Some(ByteSize(4096)));
        for wrong in ["", "GiB", "-1GiB", "3 parsecs", "1.2.3", "99999999999TiB"] {
            assert_eq!(ByteSize::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn printing_is_exact() {
        assert_eq!(ByteSize(22 << 30).to_string(), "22GiB");
        assert_eq!(ByteSize(1025).to_string(), "1025");
    }
}
