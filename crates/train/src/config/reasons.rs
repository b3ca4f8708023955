//! The reasons for values of options that were left open.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The choice of a later stage for an option that was left open.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reason {
    /// The value that was chosen.
    pub value: Value,
    /// The reason for it, in a few words on one line.
    pub because: String,
}

/// Choices and their reasons, by option name.
pub type Reasons = BTreeMap<String, Reason>;

pub(crate) fn reason(value: impl Into<Value>, because: &str) -> Reason {
    Reason { value: value.into(), because: because.to_owned() }
}
