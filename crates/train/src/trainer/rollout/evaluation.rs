//! Evaluation by answers to prompts that are held out: sampled with random numbers that are the same at every evaluation,
//! and judged by the reward functions of training.

use std::time::Instant;

use super::advantages::Rewards;
use super::prompts::Row;
use super::rollouts::{Rollouts, seed_of};
use super::sample::{Judged, lengths, mean_turns};
use crate::error::Result;
use crate::trainer::Trainer;
use crate::trainer::metrics::EvaluationMetrics;
use crate::trainer::step::Evaluation;

/// Full batches of answers that are sampled between two looks at whether the run is to stop.
const BATCHES: usize = 4;

impl Trainer {
    /// Samples answers to all held-out prompts and judges them. `stops` is called before each batch of answers; the
    /// evaluation then counts as not begun.
    pub(crate) fn evaluate_answers(&mut self, stops: &mut dyn FnMut() -> bool) -> Result<Evaluation> {
        let mut rollouts = self.rollouts.take().expect("a run that samples has prompts");
        let done = self.evaluate_with(&mut rollouts, stops);
        self.rollouts = Some(rollouts);
        done
    }

    fn evaluate_with(&mut self, rollouts: &mut Rollouts, stops: &mut dyn FnMut() -> bool) -> Result<Evaluation> {
        let Some(prompts) = rollouts.held_out.clone() else { return Ok(Evaluation::NoData) };
        let begin = Instant::now();
        let config = self.config.clone();
        let of = &config.reinforcement;
        let group = of.num_generations_eval.unwrap_or(of.num_generations) as usize;
        let seed = config.data.eval_seed;
        let at_once = (BATCHES * rollouts.at_once).div_ceil(group);
        let rows: Vec<&Row> = prompts.rows.iter().collect();
        let mut all = Judged::default();
        for (batch, rows) in rows.chunks(at_once).enumerate() {
            if stops() {
                return Ok(Evaluation::Aborted);
            }
            let first = batch * at_once * group;
            let found =
                self.judged_answers(rollouts, rows, group, &|answer, turn| seed_of(seed, 0, first + answer, turn))?;
            all.extend(found);
        }
        let mut metrics = Rewards { scores: &all.scores, functions: &rollouts.judge.functions, group }.metrics();
        metrics.extend(lengths(&all.answers));
        if rollouts.encoder.is_some() {
            metrics.push(mean_turns(&all.answers));
        }
        let reward = metrics.iter().find(|(name, _)| name == "reward").map(|(_, reward)| *reward);
        let step = self.progress.step;
        self.progress.evaluated = Some(step);
        self.evaluated.clone_from(&metrics);
        self.add_evaluation(reward.unwrap_or(f64::NAN));
        let tokens = all.answers.iter().map(|of| of.sampled() as u64).sum();
        let seconds = begin.elapsed().as_secs_f64();
        Ok(Evaluation::Done(EvaluationMetrics { step, loss: None, tokens, seconds, task: metrics }))
    }
}
