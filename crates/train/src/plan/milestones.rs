//! Steps after which a run evaluates and saves: a function of the options and of where the passes over the data end, so
//! a resumed run does both where an uninterrupted one does.

use crate::config::{Config, Strategy};
use crate::error::Result;
use crate::input::feed::Feed;

/// The steps of a run after which something is done.
#[derive(Clone, Debug, PartialEq)]
pub struct Milestones {
    evaluations: When,
    checkpoints: When,
}

#[derive(Clone, Debug, PartialEq)]
enum When {
    Every(u64),
    /// After these numbers of steps, ascending.
    After(Vec<u64>),
    Never,
}

impl Milestones {
    /// The milestones of a run of `total` steps.
    pub fn new(config: &Config, data: &impl Passes, total: u64) -> Result<Milestones> {
        let when = |strategy, steps| match strategy {
            Strategy::Steps => Ok(When::Every(steps)),
            Strategy::Epoch => data.epoch_ends(config, total).map(When::After),
            Strategy::No => Ok(When::Never),
        };
        Ok(Milestones {
            evaluations: when(config.training.eval_strategy, config.training.eval_steps)?,
            checkpoints: when(config.run.save_strategy, config.run.save_steps)?,
        })
    }

    /// True if the validation data are evaluated after `done` steps; the end of the run has its own answer.
    pub fn evaluates(&self, done: u64) -> bool {
        self.evaluations.is_due(done)
    }

    /// True if the validation data are evaluated at all.
    pub fn ever_evaluates(&self) -> bool {
        self.evaluations != When::Never
    }

    /// Returns true if a checkpoint is written after this many steps.
    pub fn saves(&self, done: u64) -> bool {
        self.checkpoints.is_due(done)
    }

    /// Evaluations of a run of `total` steps, the one at its end included.
    pub fn count_of_evaluations(&self, total: u64) -> u64 {
        let last = u64::from(self.ever_evaluates() && !self.evaluates(total));
        self.evaluations.until(total) + last
    }

    /// Checkpoints of a run of `total` steps that are written after the first `from`, the one at its end included.
    pub fn count_of_checkpoints(&self, from: u64, total: u64) -> u64 {
        let last = u64::from(total > from && !self.saves(total));
        self.checkpoints.until(total) - self.checkpoints.until(from.min(total)) + last
    }
}

/// Data that a run goes over.
pub(crate) trait Passes {
    /// The steps that end a pass, of a run of `total` steps.
    fn epoch_ends(&self, config: &Config, total: u64) -> Result<Vec<u64>>;
}

impl Passes for Feed {
    fn epoch_ends(&self, config: &Config, total: u64) -> Result<Vec<u64>> {
        Feed::epoch_ends(self, config, total)
    }
}

impl When {
    fn is_due(&self, done: u64) -> bool {
        match self {
            When::Every(steps) => done.is_multiple_of(*steps),
            When::After(ends) => ends.binary_search(&done).is_ok(),
            When::Never => false,
        }
    }

    /// The number of milestones in the first `total` steps.
    fn until(&self, total: u64) -> u64 {
        match self {
            When::Every(steps) => total / steps,
            When::After(ends) => ends.iter().filter(|end| **end <= total).count() as u64,
            When::Never => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_strategy_has_its_steps() {
        let of = |evaluations, checkpoints| Milestones { evaluations, checkpoints };
        let ends = of(When::Every(3), When::After(vec![4, 9, 10]));
        let found: Vec<u64> = (1..=10).filter(|done| ends.evaluates(*done)).collect();
        assert_eq!(found, [3, 6, 9]);
        let found: Vec<u64> = (1..=10).filter(|done| ends.saves(*done)).collect();
        assert_eq!(found, [4, 9, 10]);
        assert_eq!((ends.count_of_evaluations(10), ends.count_of_evaluations(9)), (4, 3));
        assert_eq!((ends.count_of_checkpoints(0, 10), ends.count_of_checkpoints(4, 10)), (3, 2));
        assert_eq!(ends.count_of_checkpoints(10, 10), 0);
        let never = of(When::Never, When::Never);
        assert!(!never.ever_evaluates() && !never.evaluates(3) && !never.saves(3));
        assert_eq!((never.count_of_evaluations(10), never.count_of_checkpoints(0, 10)), (0, 1));
    }
}
