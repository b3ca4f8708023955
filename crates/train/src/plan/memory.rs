//! Lines of a plan's memory as JSON, for logs, manifests and scripts.

use std::fmt::Display;

use program::MemoryLine;
use serde_json::{Value, json};

/// Lines of the plan as JSON.
pub fn lines_json<C: Display>(lines: &[MemoryLine<C>]) -> Vec<Value> {
    let row = |of: &MemoryLine<C>| json!({"class": of.class.to_string(), "bytes": of.bytes, "note": of.note});
    lines.iter().map(row).collect()
}
