//! The best evaluation of a run: which it was, how long ago, and what follows from that. Part of a checkpoint, so a resumed
//! run stops where an uninterrupted one does.
//!
//! Knows numbers and counts; `early_stopping.rs` and `run/` act on them.

use serde::{Deserialize, Serialize};

use crate::config::Criterion;

/// The best and the last evaluation of a run so far, and the number of evaluations since the best.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BestTracker {
    /// The evaluation with the lowest loss, or with the highest reward.
    pub best: Option<Best>,
    /// Evaluations since the last one that was better than the best by more than the threshold.
    pub stale: u64,
    /// Loss or reward of the last evaluation.
    pub last: Option<f64>,
}

/// The step and the number of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Steps that were done before.
    pub step: u64,
    /// The loss or the reward.
    #[serde(rename = "loss")]
    pub value: f64,
}

impl BestTracker {
    /// Takes in the number of one more evaluation. One that is not finite is no improvement.
    pub fn add(&mut self, step: u64, value: f64, threshold: f64, criterion: Criterion) {
        let is_better =
            |by: f64| value.is_finite() && self.best.is_none_or(|best| criterion.gain(best.value, value) > by);
        self.stale = if is_better(threshold) { 0 } else { self.stale + 1 };
        if is_better(0.0) {
            self.best = Some(Best { step, value });
        }
        self.last = value.is_finite().then_some(value);
    }

    /// True if the evaluation after `step` steps is the best so far.
    pub fn is_best(&self, step: u64) -> bool {
        self.best.is_some_and(|best| best.step == step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_improvement_below_the_threshold_is_the_best_and_does_not_count() {
        let mut tracker = BestTracker::default();
        let mut after = Vec::new();
        for (step, loss) in [(1, 3.0), (2, 2.0), (3, 1.95), (4, f64::NAN), (5, 1.9), (6, 1.5)] {
            tracker.add(step, loss, 0.1, Criterion::Loss);
            after.push((tracker.best.unwrap().step, tracker.stale));
        }
        assert_eq!(after, [(1, 0), (2, 0), (3, 1), (3, 2), (5, 3), (6, 0)]);
        assert!(tracker.is_best(6) && !tracker.is_best(5));
        let mut without = BestTracker::default();
        without.add(1, f64::NAN, 0.0, Criterion::Loss);
        assert_eq!((without.best, without.stale, without.last), (None, 1, None));
    }

    #[test]
    fn the_highest_reward_is_the_best() {
        let mut tracker = BestTracker::default();
        let mut after = Vec::new();
        for (step, reward) in [(1, -1.0), (2, 0.5), (3, 0.55), (4, 0.2), (5, 0.7)] {
            tracker.add(step, reward, 0.1, Criterion::Reward);
            after.push((tracker.best.unwrap().step, tracker.stale));
        }
        assert_eq!(after, [(1, 0), (2, 0), (3, 1), (3, 2), (5, 0)]);
    }
}
