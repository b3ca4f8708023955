//! The decision of the plan for one shape.

use super::parts::Parts;

/// Everything that is decided for one shape.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Decision {
    /// The recomputed parts of each of the graph's layers.
    pub(super) recomputed: Vec<Parts>,
    pub(super) head_parts: usize,
    pub(super) attention_parts: usize,
    /// The residual stream waits on the host for the backward pass.
    pub(super) waiting: bool,
}
