//! Counters of the work that a run has done.

use serde::{Deserialize, Serialize};

use crate::trainer::best::BestTracker;
use crate::trainer::rollout::Kept;

/// The progress of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Optimizer steps that are done.
    pub step: u64,
    /// Updates that were applied: those of steps with a norm that is not finite were suppressed. The
    /// optimizer's bias corrections follow it.
    pub updates: u64,
    /// The number of updates in 1-bit Adam's second moments, which are frozen after its warm-up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<u64>,
    /// Micro-steps that are done, over all steps: part of every dropout counter.
    pub micro_step: u64,
    /// Steps in a row, up to the last, whose update was suppressed.
    pub suppressed: u64,
    /// Steps that were done at the last evaluation.
    pub evaluated: Option<u64>,
    /// The loss of the last step.
    #[serde(default)]
    pub loss: Option<f64>,
    /// The best and the last evaluation so far.
    #[serde(default)]
    #[serde(rename = "judged")]
    pub best_tracker: BestTracker,
    /// Sampled answers that further steps train on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) samples: Option<Box<Kept>>,
}
