//! The number by which the evaluations of a task are compared.

use super::Task;

/// The number that evaluations are compared by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Criterion {
    /// The lowest loss is the best.
    Loss,
    /// The highest mean reward is the best.
    Reward,
}

impl Criterion {
    /// Returns the word for it in sentences.
    pub const fn name(self) -> &'static str {
        match self {
            Criterion::Loss => "loss",
            Criterion::Reward => "reward",
        }
    }

    /// Returns `lower` or `higher`, the direction of better numbers.
    pub const fn better(self) -> &'static str {
        match self {
            Criterion::Loss => "lower",
            Criterion::Reward => "higher",
        }
    }

    /// Returns the gain from one number to another; negative if the latter is worse.
    pub fn gain(self, from: f64, to: f64) -> f64 {
        match self {
            Criterion::Loss => from - to,
            Criterion::Reward => to - from,
        }
    }
}

impl Task {
    /// The number that evaluations are compared by.
    pub(crate) const fn criterion(self) -> Criterion {
        match self {
            Task::Grpo => Criterion::Reward,
            _ => Criterion::Loss,
        }
    }
}
