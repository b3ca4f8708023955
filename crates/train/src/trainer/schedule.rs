//! The learning-rate schedule: warm-up, main phase, cooldown. Numbers only; knows neither the optimizer nor the loop.

use crate::config::{Optimizer, Schedule};

/// A learning rate for every step of a run of known length.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    pub kind: Schedule,
    /// Rate at the end of the warm-up.
    pub base: f64,
    /// Rate at the end of the run.
    pub last: f64,
    pub warmup: u64,
    pub cooldown: u64,
    /// Waves of a cosine with restarts.
    pub cycles: u32,
    /// Number of steps of the run.
    pub total: u64,
}

impl LearningRate {
    /// The schedule of the options for a run of `total` steps. That warm-up and cool-down fit is
    /// checked with the options.
    pub fn new(options: &Optimizer, total: u64) -> LearningRate {
        LearningRate {
            kind: options.lr_scheduler_type,
            base: options.learning_rate,
            last: options.learning_rate * options.final_lr_fraction,
            warmup: options.warmup(total),
            cooldown: options.cooldown(total),
            cycles: options.lr_cycles,
            total,
        }
    }

    /// The rate of a step, counted from 0. After the end of the run the last value is held.
    pub fn at(&self, step: u64) -> f64 {
        let cooldown_start = self.total.saturating_sub(self.cooldown);
        if step < self.warmup {
            self.base * (step + 1) as f64 / self.warmup as f64
        } else if step < cooldown_start {
            let length = cooldown_start - self.warmup;
            self.main((step - self.warmup) as f64 / length as f64)
        } else if self.cooldown == 0 {
            self.main(1.0)
        } else {
            let start = self.main(1.0);
            let done = (step - cooldown_start + 1).min(self.cooldown);
            start + (self.last - start) * done as f64 / self.cooldown as f64
        }
    }

    /// The main phase at a progress from 0 to 1.
    fn main(&self, progress: f64) -> f64 {
        let (base, last) = (self.base, self.last);
        let wave = |progress: f64| last + (base - last) * (1.0 + (std::f64::consts::PI * progress).cos()) / 2.0;
        match self.kind {
            Schedule::Linear => base + (last - base) * progress,
            Schedule::Cosine => wave(progress),
            // The last wave ends with the phase, instead of beginning another.
            Schedule::CosineWithRestarts if progress >= 1.0 => last,
            Schedule::CosineWithRestarts => wave((progress * f64::from(self.cycles)).fract()),
            Schedule::Wsd | Schedule::Constant => base,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: Schedule, warmup: u64, cooldown: u64, total: u64, fraction: f64) -> Vec<f64> {
        let rate = LearningRate { kind, base: 1.0, last: fraction, warmup, cooldown, cycles: 2, total };
        (0..total).map(|step| rate.at(step)).collect()
    }

    fn assert_close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        assert!(found.iter().zip(expected).all(|(f, e)| (f - e).abs() < 1e-12), "{found:?} {expected:?}");
    }

    #[test]
    fn warmup_reaches_the_base_rate_at_its_last_step() {
        assert_close(&schedule(Schedule::Linear, 4, 0, 8, 0.0), &[0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]);
    }

    #[test]
    fn linear_falls_towards_the_final_rate() {
        assert_close(&schedule(Schedule::Linear, 0, 0, 4, 0.2), &[1.0, 0.8, 0.6, 0.4]);
        // The main phase ends at the final rate; a cool-down holds it.
        assert_close(&schedule(Schedule::Linear, 1, 2, 5, 0.5), &[1.0, 1.0, 0.75, 0.5, 0.5]);
    }

    #[test]
    fn cosine_is_half_a_wave() {
        let half = 0.5f64.sqrt() / 2.0;
        assert_close(&schedule(Schedule::Cosine, 0, 0, 4, 0.0), &[1.0, 0.5 + half, 0.5, 0.5 - half]);
        let rate =
            LearningRate { kind: Schedule::Cosine, base: 2.0, last: 1.0, warmup: 2, cooldown: 0, cycles: 1, total: 12 };
        assert_close(&[rate.at(0), rate.at(1), rate.at(2), rate.at(7), rate.at(12)], &[1.0, 2.0, 2.0, 1.5, 1.0]);
    }

    #[test]
    fn each_wave_begins_at_the_peak() {
        let kind = Schedule::CosineWithRestarts;
        let half = 0.5f64.sqrt() / 2.0;
        let wave = [1.0, 0.5 + half, 0.5, 0.5 - half];
        assert_close(&schedule(kind, 0, 0, 8, 0.0), &[wave, wave].concat());
        // The floor holds, and a cool-down begins where the last wave has ended.
        let floored = schedule(kind, 1, 2, 11, 0.2);
        let above: Vec<f64> = [wave, wave].concat().iter().map(|rate| 0.2 + 0.8 * rate).collect();
        assert_close(&floored[1..9], &above);
        assert_close(&floored[9..], &[0.2, 0.2]);
        let once = LearningRate { kind, base: 1.0, last: 0.0, warmup: 0, cooldown: 0, cycles: 1, total: 4 };
        assert_close(&[once.at(0), once.at(2), once.at(4), once.at(9)], &[1.0, 0.5, 0.0, 0.0]);
    }

    #[test]
    fn wsd_is_constant_and_falls_in_the_cooldown() {
        assert_close(&schedule(Schedule::Wsd, 2, 4, 8, 0.0), &[0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]);
        assert_close(&schedule(Schedule::Wsd, 0, 0, 3, 0.1), &[1.0, 1.0, 1.0]);
    }

    #[test]
    fn constant_is_constant_behind_the_warmup() {
        assert_close(&schedule(Schedule::Constant, 2, 0, 5, 0.0), &[0.5, 1.0, 1.0, 1.0, 1.0]);
        assert_close(&schedule(Schedule::Constant, 0, 2, 4, 0.0), &[1.0, 1.0, 0.5, 0.0]);
    }

    #[test]
    fn a_run_may_be_all_warmup_and_cooldown() {
        assert_close(&schedule(Schedule::Wsd, 2, 2, 4, 0.0), &[0.5, 1.0, 0.5, 0.0]);
    }

    #[test]
    fn the_last_rate_is_held_after_the_end() {
        let rate =
            LearningRate { kind: Schedule::Wsd, base: 1.0, last: 0.1, warmup: 0, cooldown: 2, cycles: 1, total: 4 };
        assert_close(&[rate.at(3), rate.at(4), rate.at(100)], &[0.1, 0.1, 0.1]);
    }
}
