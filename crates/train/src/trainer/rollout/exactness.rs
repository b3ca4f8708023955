//! The check of exact sampling in each step.

use options::Setting;

use crate::error::{Result, TrainError};
use crate::trainer::Trainer;

/// The largest distance of the log-probabilities of sampler and training over a step's tokens.
const DISTANCE: &str = "sampling/sampling_logp_difference/max";

impl Trainer {
    /// Errors: with `exact_sampling: true` a step whose sampler and training differ, by its metrics. A step that trains no token
    /// has no such metric.
    pub(in crate::trainer) fn check_exactness(&self, step: u64, metrics: &[(String, f64)]) -> Result<()> {
        let distance = metrics.iter().find(|(name, _)| name == DISTANCE).map_or(0.0, |(_, distance)| *distance);
        if distance == 0.0 || self.config.reinforcement.exact_sampling != Setting::Value(true) {
            return Ok(());
        }
        Err(TrainError::Failed(format!(
            "step {step}: the log-probabilities of sampler and training differ by up to {distance:.1e}, and `exact_sampling: \
             true` is set\n  hint: `exact_sampling: auto` goes on; the metric shows the distance of each step"
        )))
    }
}
