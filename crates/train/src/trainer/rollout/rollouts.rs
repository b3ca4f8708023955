//! Answers that a run samples to train on: prompts of the data, answers of the model as it is, rewards, advantages,
//! micro-batches. Samples follow from the seed, the number of the step and the weights, so that a resumed run draws the same.

use std::sync::Arc;

use program::Variant;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::judge::Judge;
use super::prompts::Prompts;
use crate::config::{Config, Reinforcement};
use crate::engine::device::Device;
use crate::error::{Result, TrainError};
use crate::inference::generate::{GenerationOptions, PromptEncoder};
use crate::input::conversation::dialogue_options;
use crate::input::data_digest::DataDigest;
use crate::input::feed::{CheckedData, note_on_judges};
use crate::model::source::ModelSource;
use crate::plan::Plan;
use crate::plan::milestones::Passes;
use crate::plan::sampled_shapes::{AT_ONCE, Most, Shapes, answers_of_step};

/// The prompts of a run and what judges its answers.
pub(crate) struct Rollouts {
    pub(super) prompts: Arc<Prompts>,
    /// Prompts of evaluations; None without.
    pub(super) held_out: Option<Arc<Prompts>>,
    pub(super) judge: Judge,
    pub(super) shapes: Shapes,
    pub(super) options: GenerationOptions,
    /// Encodes what an environment says; None without one.
    pub(super) encoder: Option<PromptEncoder>,
    /// Number of answers that are sampled at a time, at most.
    pub(super) at_once: usize,
    /// Number of prompts to which one step has answers.
    pub(super) of_step: usize,
    pub(super) seed: u64,
    pub(super) shuffle: bool,
    /// Answers of the last step that were sampled, for the log.
    pub(super) shown: Vec<Value>,
    /// Metrics of the answers that the next step trains on.
    pub(super) metrics: Vec<(String, f64)>,
}

/// An answer with what the loss knows of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sampled {
    /// The prompt, then the answer.
    pub ids: Vec<i32>,
    /// Number of tokens of the prompt.
    pub prompt: usize,
    pub advantage: f32,
    /// Log-probabilities of the answer's tokens when they were drawn.
    pub logps: Vec<f32>,
    /// The same under the policy before its updates; empty: as it is.
    pub old_logps: Vec<f32>,
    /// Tokens of the answer, counted from its first, that an environment said: from each first one up to the last, exclusive.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub given: Vec<(usize, usize)>,
    /// Not in the loss: it was cut off.
    pub left_out: bool,
}

/// The answers that several steps train on, with their metrics.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Kept {
    pub answers: Vec<Sampled>,
    pub metrics: Vec<(String, f64)>,
}

impl Kept {
    /// Errors: answers that cannot be those of a run, in words.
    pub fn check(&self) -> std::result::Result<(), String> {
        let is_possible = |of: &Sampled| {
            let tokens = of.ids.len().checked_sub(of.prompt).filter(|tokens| *tokens > 0 && of.prompt > 0);
            let numbers = of.logps.iter().chain(&of.old_logps).chain([&of.advantage]);
            tokens == Some(of.logps.len())
                && of.given.iter().all(|(first, last)| first <= last && *last <= of.logps.len())
                && (of.old_logps.is_empty() || of.old_logps.len() == of.logps.len())
                && numbers.into_iter().all(|number| number.is_finite())
        };
        match self.answers.iter().position(|of| !is_possible(of)) {
            None => Ok(()),
            Some(index) => {
                Err(format!("has `samples` of which number {index} has other tokens than log-probabilities"))
            }
        }
    }
}

impl Rollouts {
    /// Reads the prompts and starts the reward functions. Errors: options that do not go together, data without prompts, a
    /// reward function that cannot be loaded.
    pub fn new(config: &Config, source: &ModelSource, device: &Device, plan: &Plan) -> Result<Rollouts> {
        let (sequence_len, share) = (plan.sequence_len, plan.compile.branches.is_some());
        let of = &config.reinforcement;
        let problem = |path: &str, text: String, hint: &str| {
            TrainError::Config(vec![config.mistake(path, text, Some(hint.to_owned()))])
        };
        let functions = of.rewards.as_deref().filter(|of| !of.is_empty()).ok_or_else(|| {
            let text = "`task: grpo` needs `rewards`, the functions that judge answers".to_owned();
            problem(
                "rewards",
                text,
                "add `rewards: [{function: my_rewards:is_right}]`, or a built-in one such as `number`",
            )
        })?;
        let rows = config.training.per_device_train_batch_size as usize;
        let answers = answers_of_step(config);
        let group = of.num_generations as usize;
        if !answers.is_multiple_of(group) {
            let text = format!(
                "`num_generations: {group}` does not divide the {answers} answers of a step, \
                 `per_device_train_batch_size` × `gradient_accumulation_steps`{}",
                if config.replicas() > 1 { " × `gpus`" } else { "" }
            );
            return Err(problem("num_generations", text, "change one of the three"));
        }
        let most = of.max_completion_length as usize;
        let longest = longest_prompt(config, sequence_len)?;
        let encoder = encoder(config, source)?;
        let (mut prompts, held_out) = Prompts::read(config, &encoder, longest)?;
        let few = held_out.as_ref().and_then(|of| note_on_judges(config, of.rows.len(), "prompt"));
        prompts.notes.extend(few);
        let of_prompts = prompts.rows.iter().map(|row| row.ids.len()).max().unwrap_or(1);
        let judge = Judge::start(device.python.as_deref(), functions, of.environment.as_deref(), of.reward_timeout)?;
        let at_once = answers.min(AT_ONCE * config.replicas());
        let both = (of_prompts + most).min(sequence_len);
        // An environment may open each answer in its own way.
        let alike = if of.environment.is_some() { 1 } else { group };
        let extents = Most { prompt: of_prompts, answer: most, both, group: alike };
        Ok(Rollouts {
            prompts: Arc::new(prompts),
            held_out: held_out.map(Arc::new),
            judge,
            shapes: Shapes::new((rows, config.replicas()), extents, share),
            options: generation_options(of, of.temperature, at_once)?,
            at_once,
            encoder: of.environment.is_some().then_some(encoder),
            of_step: answers / group,
            seed: config.data.train_seed,
            shuffle: config.data.shuffle,
            shown: Vec::new(),
            metrics: Vec::new(),
        })
    }

    /// Returns notes for the user, a sentence each.
    pub fn notes(&self) -> &[String] {
        &self.prompts.notes
    }

    /// Returns the line of the data check.
    pub fn summary(&self, config: &Config) -> String {
        let of = &config.reinforcement;
        format!(
            "{} prompts{}; {} with {} answers each in a step, of at most {} tokens; rewards: {}",
            self.prompts.rows.len(),
            self.held_out.as_ref().map(|held_out| format!(", {} held out", held_out.rows.len())).unwrap_or_default(),
            self.of_step,
            of.num_generations,
            of.max_completion_length,
            self.judge
                .functions
                .iter()
                .map(|(name, weight)| format!("{weight} × {name}"))
                .collect::<Vec<_>>()
                .join(" + ")
        )
    }

    /// Returns the shapes in which micro-batches are compiled.
    pub fn variants(&self) -> Vec<Variant> {
        self.shapes.variants()
    }

    /// Returns the number of optimizer steps of the run.
    pub fn total_steps(&self, config: &Config) -> u64 {
        let prompts = config.run.num_epochs.0 * self.prompts.rows.len() as f64;
        let rounds = (prompts / self.of_step as f64).ceil().max(1.0) as u64;
        config.training.fixed_steps().unwrap_or(rounds * config.reinforcement.num_iterations)
    }

    /// Passes over the prompts after a number of steps.
    pub fn epochs(&self, config: &Config, steps: u64) -> f64 {
        let rounds = steps.div_ceil(config.reinforcement.num_iterations);
        (rounds * self.of_step as u64) as f64 / self.prompts.rows.len() as f64
    }

    /// The steps up to `total` that end a pass over the prompts.
    pub fn epoch_ends(&self, config: &Config, total: u64) -> Vec<u64> {
        let whole = |step: &u64| self.epochs(config, *step).floor() > self.epochs(config, *step - 1).floor();
        (1..=total).filter(whole).collect()
    }

    /// The identity of the prompts.
    pub fn digest(&self) -> DataDigest {
        let mut text = String::new();
        for row in &self.prompts.rows {
            text.push_str(&format!("{:?} {}\n", row.ids, Value::Object(row.columns.clone())));
        }
        let digest = crate::files::digest::of_bytes(text.as_bytes());
        DataDigest { documents: self.prompts.rows.len(), digest, parts: 1, outline: None }
    }

    /// The prompts of a round of answers: passes over the data in an order of their own, without an end.
    pub(super) fn of_round(&self, round: u64) -> Vec<usize> {
        let count = self.prompts.rows.len();
        let first = round * self.of_step as u64;
        let mut found = Vec::with_capacity(self.of_step);
        let mut order: Option<(u64, Vec<u32>)> = None;
        for place in first..first + self.of_step as u64 {
            let (epoch, index) = (place / count as u64, (place % count as u64) as usize);
            if !self.shuffle {
                found.push(index);
                continue;
            }
            let (_, rows) = match order.take_if(|(of, _)| *of == epoch) {
                Some(known) => order.insert(known),
                None => order.insert((epoch, data::order::permutation(count, self.seed, epoch))),
            };
            found.push(rows[index] as usize);
        }
        found
    }
}

/// Reads the prompts of a run without training.
pub(crate) fn check_data(config: &Config, source: &ModelSource, sequence_len: usize) -> Result<CheckedData> {
    let longest = longest_prompt(config, sequence_len)?;
    let (prompts, held_out) = Prompts::read(config, &encoder(config, source)?, longest)?;
    let lengths = || prompts.rows.iter().map(|row| row.ids.len());
    let (least, most) = (lengths().min().unwrap_or(0), lengths().max().unwrap_or(0));
    let notes: String = prompts.notes.iter().map(|note| format!("Note: {note}\n")).collect();
    let count = prompts.rows.len();
    let held_out = held_out.map_or(0, |of| of.rows.len());
    let of_evaluation = if held_out > 0 { format!("; {held_out} held out") } else { String::new() };
    let table = format!("{notes}{count} prompts of {least} to {most} tokens{of_evaluation}\n");
    let columns = prompts.columns();
    let with_numbers: Vec<&str> = columns.iter().copied().filter(|name| prompts.all_have_number(name)).collect();
    let counts = json!({"prompts": count, "held_out": held_out, "shortest": least, "longest": most, "columns": columns,
        "columns_with_numbers": with_numbers});
    Ok(CheckedData { table, rows: Vec::new(), counts })
}

/// The tokens that a row leaves for a prompt. Errors: none.
fn longest_prompt(config: &Config, sequence_len: usize) -> Result<usize> {
    let most = config.reinforcement.max_completion_length as usize;
    sequence_len.checked_sub(most).filter(|n| *n > 0).ok_or_else(|| {
        let text =
            format!("`max_completion_length: {most}` leaves no token of `sequence_len: {sequence_len}` for a prompt");
        let hint = "take a smaller number, or a larger `sequence_len`".to_owned();
        TrainError::Config(vec![config.mistake("max_completion_length", text, Some(hint))])
    })
}

/// The encoder of prompts, with the template of the run.
pub(super) fn encoder(config: &Config, source: &ModelSource) -> Result<PromptEncoder> {
    let encoder = PromptEncoder::open(&[&source.folder])?;
    let (dialogue, _) = dialogue_options(config, source, encoder.tokenizer().map(|of| &**of))?;
    encoder.with_template(dialogue.template)
}

/// The options of samples. The model's own defaults do not count: the loss takes plain probabilities.
pub(super) fn generation_options(of: &Reinforcement, temperature: f64, at_once: usize) -> Result<GenerationOptions> {
    let given = [
        ("max_new_tokens", of.max_completion_length.to_string()),
        ("temperature", temperature.to_string()),
        ("top_p", of.top_p.to_string()),
        ("top_k", of.top_k.to_string()),
        ("min_p", of.min_p.unwrap_or(0.0).to_string()),
        ("repetition_penalty", "1.0".to_owned()),
        ("batch_size", at_once.to_string()),
    ];
    GenerationOptions::read(&given.map(|(name, value)| (name.to_owned(), value)))
}

/// A number of its own for each turn of an answer of a run.
pub(super) fn seed_of(seed: u64, round: u64, answer: usize, turn: u64) -> u64 {
    let turn = if turn == 0 { String::new() } else { format!(" {turn}") };
    let digest = crate::files::digest::of_bytes(format!("{seed} {round} {answer}{turn}").as_bytes());
    u64::from_str_radix(&digest[..16], 16).expect("a digest is hexadecimal")
}

impl Passes for Rollouts {
    fn epoch_ends(&self, config: &Config, total: u64) -> Result<Vec<u64>> {
        Ok(Rollouts::epoch_ends(self, config, total))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_have_numbers_of_their_own() {
        assert_eq!(seed_of(1, 2, 3, 0), seed_of(1, 2, 3, 0));
        assert_ne!(seed_of(1, 2, 3, 0), seed_of(1, 2, 3, 1));
        let all: std::collections::BTreeSet<u64> =
            (0..100).map(|answer| seed_of(7, answer as u64 / 10, answer % 10, 0)).collect();
        assert_eq!(all.len(), 100);
    }
}
