//! Answers of a round: sampled from the model as it is, judged by the reward functions. Knows no micro-batches.

use std::path::Path;
use std::time::Instant;

use serde_json::{Map, Value, json};

use super::advantages::Rewards;
use super::judge::Scores;
use super::prompts::Row;
use super::rollouts::{Kept, Rollouts, Sampled, seed_of};
use super::turns::{Answer, opened};
use crate::error::{Result, TrainError};
use crate::inference::generate::{Finish, Generation, GenerationOptions, Prompt, Request};
use crate::trainer::Trainer;

/// Answers of a round that the log has.
const SHOWN: usize = 4;

/// Answers that were sampled and judged: all of one prompt stand next to each other.
#[derive(Default)]
pub(super) struct Judged {
    /// The prompt of each answer, as reward functions see it.
    pub prompts: Vec<Value>,
    pub answers: Vec<Answer>,
    /// Rewards by answer, then by function.
    pub scores: Scores,
    /// Seconds of sampling, and of judging.
    pub seconds: [f64; 2],
}

impl Trainer {
    /// Samples the answers of a round and judges them.
    pub(super) fn sample(&mut self, rollouts: &mut Rollouts, round: u64) -> Result<Kept> {
        let config = self.config.clone();
        let of = &config.reinforcement;
        let group = of.num_generations as usize;
        let prompts = rollouts.prompts.clone();
        let rows: Vec<&Row> = rollouts.of_round(round).into_iter().map(|index| &prompts.rows[index]).collect();
        let seed = rollouts.seed;
        let judged = self.judged_answers(rollouts, &rows, group, &|answer, turn| seed_of(seed, round, answer, turn))?;
        let rewards = Rewards { scores: &judged.scores, functions: &rollouts.judge.functions, group };
        let advantages = rewards.advantages(of);
        let mut metrics = rewards.metrics();
        metrics.extend(lengths(&judged.answers));
        if rollouts.encoder.is_some() {
            metrics.push(mean_turns(&judged.answers));
        }
        metrics.extend(["sampling_seconds", "reward_seconds"].map(str::to_owned).into_iter().zip(judged.seconds));
        let shown = |index: usize| {
            let mut shown = judged.shown(index, &rollouts.judge.functions);
            shown["advantage"] = json!(advantages[index]);
            shown
        };
        rollouts.shown = (0..judged.answers.len().min(SHOWN)).map(shown).collect();
        let kept = judged.answers.into_iter().enumerate().map(|(index, answer)| Sampled {
            ids: answer.prompt.iter().chain(&answer.ids).copied().collect(),
            prompt: answer.prompt.len(),
            advantage: advantages[index],
            logps: answer.logps,
            old_logps: Vec::new(),
            given: answer.given,
            left_out: of.mask_truncated_completions && !is_whole(answer.finish),
        });
        let mut answers: Vec<Sampled> = kept.collect();
        if answers.iter().all(|of| of.left_out) {
            // A step of which nothing is left learns nothing, and the run goes on.
            answers.iter_mut().for_each(|of| (of.left_out, of.advantage) = (false, 0.0));
        }
        Ok(Kept { answers, metrics })
    }

    /// Samples `group` answers to each of these rows and judges them. `seed`: of an answer, counted over all rows, and a
    /// turn of it.
    pub(super) fn judged_answers(
        &mut self,
        rollouts: &mut Rollouts,
        rows: &[&Row],
        group: usize,
        seed: &dyn Fn(usize, u64) -> u64,
    ) -> Result<Judged> {
        let begin = Instant::now();
        let of_answers: Vec<&Row> = rows.iter().flat_map(|row| vec![*row; group]).collect();
        let prompts: Vec<Value> = of_answers.iter().map(|row| row.prompt.clone()).collect();
        let answers = self.answers_to(rollouts, &of_answers, &prompts, seed)?;
        let sampled = begin.elapsed().as_secs_f64();
        let begin = Instant::now();
        let completions: Vec<Value> = answers.iter().zip(&prompts).map(|(of, prompt)| of.completion(prompt)).collect();
        let scores = rollouts.judge.scores(&prompts, &completions, &columns(&of_answers, &answers))?;
        Ok(Judged { prompts, answers, scores, seconds: [sampled, begin.elapsed().as_secs_f64()] })
    }

    /// Samples an answer to each of these rows from the weights as they are: one turn, or with an environment all of its turns.
    fn answers_to(
        &mut self,
        rollouts: &mut Rollouts,
        rows: &[&Row],
        prompts: &[Value],
        seed: &dyn Fn(usize, u64) -> u64,
    ) -> Result<Vec<Answer>> {
        let config = self.config.clone();
        let of = &config.reinforcement;
        let mut answers = self.opened_to(rollouts, rows, prompts)?;
        let most = of.max_completion_length as usize;
        let mut open: Vec<usize> = (0..answers.len()).collect();
        for turn in 0..of.max_turns {
            let request = |index: usize| {
                let (answer, row) = (&answers[index], rows[index]);
                let prompt = Prompt::Ids([&answer.prompt[..], &answer.ids].concat());
                let room = most - answer.ids.len();
                let max_new_tokens = Some(of.max_turn_length.map_or(room, |most| room.min(most as usize)));
                let continues_text = row.prompt.is_string();
                let seed = Some(seed(index, turn));
                Request { seed, keeps_logps: true, continues_text, max_new_tokens, ..prompt.into() }
            };
            let requests: Vec<Request> = open.iter().map(|index| request(*index)).collect();
            let turns = self.turns_of(requests, &rollouts.options)?;
            for (index, turn) in open.iter().zip(turns) {
                let answer = &mut answers[*index];
                answer.ids.extend(&turn.ids);
                answer.logps.extend(&turn.logps);
                answer.turns.push((turn.text, Value::Null));
                answer.finish = turn.finish;
            }
            let Some(encoder) = &rollouts.encoder else { break };
            let last = |index: usize| answers[index].turns.last().map_or("", |(text, _)| text.as_str());
            let said: Vec<(usize, &str)> = open.iter().map(|index| (*index, last(*index))).collect();
            let replies = rollouts.judge.step(&said)?;
            let mut further = Vec::new();
            for (index, reply) in open.into_iter().zip(replies) {
                if turn + 1 < of.max_turns && answers[index].hear(reply, rows[index], encoder, most)? {
                    further.push(index);
                }
            }
            open = further;
            if open.is_empty() {
                break;
            }
        }
        Ok(answers)
    }

    /// Returns answers that have no turn yet, to the prompts of these rows with what their environments put after them.
    fn opened_to(&self, rollouts: &mut Rollouts, rows: &[&Row], prompts: &[Value]) -> Result<Vec<Answer>> {
        let mut answers: Vec<Answer> = rows.iter().map(|row| Answer::to(row.ids.clone())).collect();
        let Some(encoder) = &rollouts.encoder else { return Ok(answers) };
        let (most, row_tokens) = (self.config.reinforcement.max_completion_length as usize, self.plan.sequence_len);
        let replies = rollouts.judge.reset(prompts, &columns(rows, &answers))?;
        for ((answer, reply), row) in answers.iter_mut().zip(&replies).zip(rows) {
            answer.prompt = opened(reply, row, encoder)?;
            if answer.prompt.len() + most > row_tokens {
                return Err(TrainError::Usage(format!(
                    "the environment makes a prompt of {} tokens, and `sequence_len: {row_tokens}` leaves {most} for the answer",
                    answer.prompt.len(),
                )));
            }
        }
        Ok(answers)
    }

    /// Samples one turn for each request.
    pub(super) fn turns_of(&mut self, requests: Vec<Request>, options: &GenerationOptions) -> Result<Vec<Turn>> {
        let count = requests.len();
        let requests = requests.into_iter().map(Ok).collect();
        self.with_generator(|generator| {
            let mut generation = Generation::begin(generator, requests, options, (false, Path::new("")))?;
            let mut texts = vec![(String::new(), None); count];
            while !generation.is_done() {
                for piece in generation.step(generator)? {
                    texts[piece.prompt].0.push_str(&piece.text);
                    texts[piece.prompt].1 = piece.finish;
                }
            }
            let turn = |(index, (text, finish)): (usize, (String, Option<Finish>))| {
                let (ids, logps) = (generation.answer(index).to_vec(), generation.logps(index).to_vec());
                Turn { ids, logps, text, finish }
            };
            Ok(texts.into_iter().enumerate().map(turn).collect())
        })
    }
}

/// One turn as it was sampled.
pub(super) struct Turn {
    pub ids: Vec<i32>,
    pub logps: Vec<f32>,
    pub text: String,
    pub finish: Option<Finish>,
}

/// The text of a prompt: of messages that of the last one.
fn asked(prompt: &Value) -> &str {
    let last = prompt.as_array().and_then(|messages| messages.last());
    last.map_or(prompt, |message| &message["content"]).as_str().unwrap_or_default()
}

/// The columns of the answers' rows by name, a value for each answer, and the ids of the answers.
fn columns(rows: &[&Row], answers: &[Answer]) -> Value {
    let mut columns: Map<String, Value> = Map::new();
    for name in rows.iter().flat_map(|row| row.columns.keys()) {
        if !columns.contains_key(name) {
            let values = rows.iter().map(|row| row.columns.get(name).cloned().unwrap_or_default());
            columns.insert(name.clone(), values.collect());
        }
    }
    columns.insert("completion_ids".to_owned(), answers.iter().map(|of| json!(of.ids)).collect());
    Value::Object(columns)
}

impl Judged {
    /// Adds the answers to further prompts.
    pub fn extend(&mut self, other: Judged) {
        self.prompts.extend(other.prompts);
        self.answers.extend(other.answers);
        self.scores.extend(other.scores);
        self.seconds.iter_mut().zip(other.seconds).for_each(|(sum, seconds)| *sum += seconds);
    }

    /// An answer as the log has it.
    pub fn shown(&self, index: usize, functions: &[(String, f64)]) -> Value {
        let answer = &self.answers[index];
        let names = functions.iter().map(|(name, _)| name.clone());
        let rewards: Map<String, Value> =
            names.zip(&self.scores[index]).map(|(name, score)| (name, json!(score))).collect();
        json!({"prompt": asked(&self.prompts[index]), "text": answer.text(), "rewards": rewards,
            "tokens": answer.ids.len(), "turns": answer.turns.len(), "finish": answer.finish.map_or("", Finish::name)})
    }
}

/// The metric of the turns of answers.
pub(super) fn mean_turns(answers: &[Answer]) -> (String, f64) {
    let turns: usize = answers.iter().map(|of| of.turns.len()).sum();
    ("completions/mean_turns".to_owned(), turns as f64 / answers.len() as f64)
}

/// Says whether an answer came to its end.
fn is_whole(finish: Option<Finish>) -> bool {
    matches!(finish, Some(Finish::EndToken | Finish::Stop))
}

/// Metrics of the lengths of answers by TRL's names.
pub(super) fn lengths(answers: &[Answer]) -> Vec<(String, f64)> {
    let of = |answers: Vec<&Answer>| -> Option<[f64; 3]> {
        let lengths: Vec<f64> = answers.iter().map(|of| of.sampled() as f64).collect();
        let mean = lengths.iter().sum::<f64>() / lengths.len() as f64;
        let (least, most) =
            (lengths.iter().copied().fold(f64::MAX, f64::min), lengths.iter().copied().fold(0.0, f64::max));
        (!lengths.is_empty()).then_some([mean, least, most])
    };
    let whole: Vec<&Answer> = answers.iter().filter(|answer| is_whole(answer.finish)).collect();
    let clipped = 1.0 - whole.len() as f64 / answers.len() as f64;
    let mut found = vec![("completions/clipped_ratio".to_owned(), clipped)];
    for (kind, values) in [("", of(answers.iter().collect())), ("terminated_", of(whole))] {
        for (name, value) in ["mean", "min", "max"].into_iter().zip(values.into_iter().flatten()) {
            found.push((format!("completions/{name}_{kind}length"), value));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_distinguish_answers_that_were_cut_off() {
        let answer =
            |tokens: usize, finish| Answer { ids: vec![0; tokens], finish: Some(finish), ..Answer::to(vec![1]) };
        let found = lengths(&[answer(2, Finish::EndToken), answer(8, Finish::Length)]);
        for expected in [
            ("completions/clipped_ratio", 0.5),
            ("completions/mean_length", 5.0),
            ("completions/max_terminated_length", 2.0),
        ] {
            assert!(found.contains(&(expected.0.to_owned(), expected.1)), "{expected:?} {found:?}");
        }
    }
}
