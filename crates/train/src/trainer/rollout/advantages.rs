//! Advantages of sampled answers: how much better each is than others to its prompt. Also the metrics of their rewards.
//! Knows neither models nor texts.

use crate::config::{Aggregation, Reinforcement, ScaleRewards};

/// The addend of a divisor that may be 0.
const SMALL: f64 = 1e-4;

/// Rewards of the answers of a step, group after group: of each answer one for each function; a missing one is none.
pub(super) struct Rewards<'a> {
    pub scores: &'a [Vec<Option<f64>>],
    /// The functions by their names in metrics, with their weights.
    pub functions: &'a [(String, f64)],
    /// The number of answers to each prompt.
    pub group: usize,
}

impl Rewards<'_> {
    /// Returns the advantage of each answer: 0 where no function judged it.
    pub fn advantages(&self, options: &Reinforcement) -> Vec<f32> {
        let found = match options.multi_objective_aggregation {
            Aggregation::SumThenNormalize => self.of_sums(options.scale_rewards),
            Aggregation::NormalizeThenSum => self.of_functions(),
        };
        found.into_iter().map(|advantage| if advantage.is_nan() { 0.0 } else { advantage as f32 }).collect()
    }

    /// The weighted sum of each answer's rewards; NaN where no function judged it.
    fn sums(&self) -> Vec<f64> {
        let sum = |of: &Vec<Option<f64>>| {
            let judged = of.iter().zip(self.functions).filter_map(|(score, (_, weight))| Some((*score)? * weight));
            if of.iter().all(Option::is_none) { f64::NAN } else { judged.sum() }
        };
        self.scores.iter().map(sum).collect()
    }

    fn of_sums(&self, scale: ScaleRewards) -> Vec<f64> {
        let sums = self.sums();
        let of_batch = deviation(&sums);
        let of_group = |group: &[f64]| {
            let (mean, own) = (mean(group), deviation(group));
            let divisor = match scale {
                ScaleRewards::Group => own + SMALL,
                ScaleRewards::Batch => of_batch + SMALL,
                ScaleRewards::None => 1.0,
            };
            group.iter().map(|reward| (reward - mean) / divisor).collect::<Vec<_>>()
        };
        sums.chunks(self.group).flat_map(of_group).collect()
    }

    /// Each function's rewards by themselves within a group, their weighted sum over the step (GDPO).
    fn of_functions(&self) -> Vec<f64> {
        let mut sums = vec![0.0; self.scores.len()];
        for (index, (_, weight)) in self.functions.iter().enumerate() {
            let own: Vec<f64> = self.column(index);
            for (group, sums) in own.chunks(self.group).zip(sums.chunks_mut(self.group)) {
                let (mean, divisor) = (mean(group), deviation(group) + SMALL);
                for (sum, reward) in sums.iter_mut().zip(group).filter(|(_, reward)| !reward.is_nan()) {
                    *sum += weight * (reward - mean) / divisor;
                }
            }
        }
        for (sum, of) in sums.iter_mut().zip(self.scores) {
            if of.iter().all(Option::is_none) {
                *sum = f64::NAN;
            }
        }
        let (mean, divisor) = (mean(&sums), deviation(&sums) + SMALL);
        sums.into_iter().map(|sum| (sum - mean) / divisor).collect()
    }

    fn column(&self, index: usize) -> Vec<f64> {
        self.scores.iter().map(|of| of[index].unwrap_or(f64::NAN)).collect()
    }

    /// Metrics of the rewards by TRL's names.
    pub fn metrics(&self) -> Vec<(String, f64)> {
        let sums = self.sums();
        let groups = sums.chunks(self.group);
        let alike = groups.clone().filter(|group| deviation(group) < 1e-8).count();
        let mut found = Vec::new();
        for (index, (name, _)) in self.functions.iter().enumerate() {
            let own = self.column(index);
            found.push((format!("rewards/{name}/mean"), mean(&own)));
            found.push((format!("rewards/{name}/std"), deviation(&own)));
        }
        found.push(("reward".to_owned(), mean(&sums)));
        found.push(("reward_std".to_owned(), deviation(&sums)));
        found.push(("frac_reward_zero_std".to_owned(), alike as f64 / groups.len().max(1) as f64));
        found.retain(|(_, value)| value.is_finite());
        found
    }
}

/// The values that are numbers.
fn numbers(values: &[f64]) -> impl Iterator<Item = f64> + Clone + '_ {
    values.iter().copied().filter(|value| !value.is_nan())
}

fn mean(values: &[f64]) -> f64 {
    numbers(values).sum::<f64>() / numbers(values).count() as f64
}

/// The sample standard deviation, with n − 1; 0 of fewer than two numbers.
fn deviation(values: &[f64]) -> f64 {
    let (mean, count) = (mean(values), numbers(values).count());
    if count < 2 {
        return 0.0;
    }
    (numbers(values).map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use options::OptionValue;

    use super::*;

    fn options(scale: ScaleRewards, aggregation: Aggregation) -> Reinforcement {
        Reinforcement { scale_rewards: scale, multi_objective_aggregation: aggregation, ..Reinforcement::placeholder() }
    }

    #[test]
    fn advantages_are_within_the_group_of_a_prompt() {
        let scores: Vec<Vec<Option<f64>>> = [1.0, 0.0, 5.0, 5.0].iter().map(|of| vec![Some(*of)]).collect();
        let functions = [("f".to_owned(), 2.0)];
        let of = Rewards { scores: &scores, functions: &functions, group: 2 };
        let own = of.advantages(&options(ScaleRewards::None, Aggregation::SumThenNormalize));
        assert_eq!(own, [1.0, -1.0, 0.0, 0.0]);
        let scaled = of.advantages(&options(ScaleRewards::Group, Aggregation::SumThenNormalize));
        assert!((f64::from(scaled[0]) - 1.0 / (2f64.sqrt() + SMALL)).abs() < 1e-7 && scaled[2] == 0.0, "{scaled:?}");
        let metrics = of.metrics();
        assert!(metrics.contains(&("rewards/f/mean".to_owned(), 2.75)));
        assert!(metrics.contains(&("reward".to_owned(), 5.5)));
        assert!(metrics.contains(&("frac_reward_zero_std".to_owned(), 0.5)));
    }

    #[test]
    fn answers_without_any_reward_have_no_advantage() {
        let scores = vec![vec![Some(1.0), None], vec![None, None], vec![Some(0.0), Some(2.0)], vec![None, Some(1.0)]];
        let functions = [("f".to_owned(), 1.0), ("g".to_owned(), 1.0)];
        let of = Rewards { scores: &scores, functions: &functions, group: 4 };
        for aggregation in [Aggregation::SumThenNormalize, Aggregation::NormalizeThenSum] {
            let found = of.advantages(&options(ScaleRewards::Group, aggregation));
            assert!(found[1] == 0.0 && found.iter().all(|of| of.is_finite()), "{found:?}");
            assert!(found[2] > found[3], "{found:?}");
        }
    }
}
