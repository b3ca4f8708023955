//! The step that the device works on while the next one is prepared.

use std::time::Instant;

use data::Batch;
use program::Reading;

/// The step that was started and not read yet, and the state after the step before.
#[derive(Default)]
pub(crate) struct InFlight {
    pub(super) started: Option<Started>,
    /// The batches of the step that was read last: what a look for the first value that is not finite needs.
    pub(super) last: Option<Fed>,
    /// The time at which the step before was read.
    pub(super) read: Option<Instant>,
}

/// The batches of a step.
pub(super) struct Fed {
    pub(super) batches: Vec<Batch>,
    pub(super) one_per_row: bool,
    pub(super) first_micro_step: u64,
}

/// A step that the device works on.
pub(super) struct Started {
    pub(super) fed: Fed,
    pub(super) results: Reading,
    pub(super) step: u64,
    pub(super) learning_rate: f64,
    pub(super) begin: Instant,
}
