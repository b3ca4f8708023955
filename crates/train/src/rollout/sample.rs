//! Answers of a round: sampled from the model as it is, judged by the reward functions. Knows no micro-batches.

use std::path::Path;
use std::time::Instant;

use serde_json::{Map, Value, json};

use super::advantages::Rewards;
use super::prompts::Row;
use super::turns::{Answer, opened};
use super::{Kept, Rollouts, Sampled, seed_of};
use crate::error::{Result, TrainError};
use crate::generate::{Finish, Generation, GenerationOptions, Prompt, Request};
use crate::trainer::Trainer;

/// Answers of a round that the log has.
const SHOWN: usize = 4;

impl Trainer {
    /// Samples the answers of a round and judges them.
    pub(super) fn sample(&mut self, rollouts: &mut Rollouts, round: u64) -> Result<Kept> {
        let begin = Instant::now();
        let config = self.config.clone();
        let of = &config.reinforcement;
        let group = of.num_generations as usize;
        let indices = rollouts.of_round(round);
        let rows: Vec<&Row> = indices.iter().map(|index| &rollouts.prompts.rows[*index]).collect();
        let prompts: Vec<Value> = (0..rows.len() * group).map(|answer| rows[answer / group].prompt.clone()).collect();
        let indices: Vec<usize> = indices.iter().flat_map(|index| vec![*index; group]).collect();
        let answers = self.answers_to(rollouts, &indices, &prompts, round)?;
        let rows: Vec<&Row> = indices.iter().step_by(group).map(|index| &rollouts.prompts.rows[*index]).collect();
        let sampled = begin.elapsed().as_secs_f64();
        let begin = Instant::now();
        let completions: Vec<Value> = answers.iter().zip(&prompts).map(|(of, prompt)| of.completion(prompt)).collect();
        let columns = columns(&rows, &answers, group);
        let scores = rollouts.judge.scores(&prompts, &completions, &columns)?;
        let rewards = Rewards { scores: &scores, functions: &rollouts.judge.functions, group };
        let advantages = rewards.advantages(of);
        let mut metrics = rewards.metrics();
        metrics.extend(lengths(&answers));
        if rollouts.encoder.is_some() {
            let turns: usize = answers.iter().map(|of| of.turns.len()).sum();
            metrics.push(("completions/mean_turns".to_owned(), turns as f64 / answers.len() as f64));
        }
        metrics.push(("sampling_seconds".to_owned(), sampled));
        metrics.push(("reward_seconds".to_owned(), begin.elapsed().as_secs_f64()));
        let names: Vec<&str> = rollouts.judge.functions.iter().map(|(name, _)| name.as_str()).collect();
        let shown = |(index, answer): (usize, &Answer)| {
            let rewards: Map<String, Value> =
                names.iter().zip(&scores[index]).map(|(name, score)| ((*name).to_owned(), json!(score))).collect();
            json!({"prompt": asked(&prompts[index]), "text": answer.text(), "rewards": rewards,
                "advantage": advantages[index], "tokens": answer.ids.len(), "turns": answer.turns.len(),
                "finish": answer.finish.map_or("", Finish::name)})
        };
        let shown = answers.iter().enumerate().take(SHOWN).map(shown).collect();
        let kept = answers.into_iter().enumerate().map(|(index, answer)| Sampled {
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
        rollouts.shown = shown;
        Ok(Kept { answers, metrics })
    }

    /// Samples an answer to each of these rows from the weights as they are: one turn, or with an environment all of its turns.
    fn answers_to(
        &mut self,
        rollouts: &mut Rollouts,
        indices: &[usize],
        prompts: &[Value],
        round: u64,
    ) -> Result<Vec<Answer>> {
        let config = self.config.clone();
        let of = &config.reinforcement;
        let mut answers = self.opened_to(rollouts, indices, prompts)?;
        let rows: Vec<&Row> = indices.iter().map(|index| &rollouts.prompts.rows[*index]).collect();
        let most = of.max_completion_length as usize;
        let mut open: Vec<usize> = (0..answers.len()).collect();
        for turn in 0..of.max_turns {
            let request = |index: usize| {
                let (answer, row) = (&answers[index], rows[index]);
                let seed = Some(seed_of(rollouts.seed, round, index, turn));
                let prompt = Prompt::Ids([&answer.prompt[..], &answer.ids].concat());
                let room = most - answer.ids.len();
                let max_new_tokens = Some(of.max_turn_length.map_or(room, |most| room.min(most as usize)));
                let continues_text = row.prompt.is_string();
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
    fn opened_to(&self, rollouts: &mut Rollouts, indices: &[usize], prompts: &[Value]) -> Result<Vec<Answer>> {
        let rows: Vec<&Row> = indices.iter().map(|index| &rollouts.prompts.rows[*index]).collect();
        let mut answers: Vec<Answer> = rows.iter().map(|row| Answer::to(row.ids.clone())).collect();
        let Some(encoder) = &rollouts.encoder else { return Ok(answers) };
        let (most, row_tokens) = (self.config.reinforcement.max_completion_length as usize, self.plan.sequence_len);
        let replies = rollouts.judge.reset(prompts, &columns(&rows, &answers, 1))?;
        for ((answer, reply), row) in answers.iter_mut().zip(&replies).zip(&rows) {
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
    fn turns_of(&mut self, requests: Vec<Request>, options: &GenerationOptions) -> Result<Vec<Turn>> {
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
struct Turn {
    ids: Vec<i32>,
    logps: Vec<f32>,
    text: String,
    finish: Option<Finish>,
}

/// The text of a prompt: of messages that of the last one.
fn asked(prompt: &Value) -> &str {
    let last = prompt.as_array().and_then(|messages| messages.last());
    last.map_or(prompt, |message| &message["content"]).as_str().unwrap_or_default()
}

/// The columns of the rows by name, a value for each answer, and the ids of the answers.
fn columns(rows: &[&Row], answers: &[Answer], group: usize) -> Value {
    let mut columns: Map<String, Value> = Map::new();
    for name in rows.iter().flat_map(|row| row.columns.keys()) {
        if !columns.contains_key(name) {
            let value = |answer: usize| rows[answer / group].columns.get(name).cloned().unwrap_or_default();
            columns.insert(name.clone(), (0..answers.len()).map(value).collect());
        }
    }
    columns.insert("completion_ids".to_owned(), answers.iter().map(|of| json!(of.ids)).collect());
    Value::Object(columns)
}

/// Says whether an answer came to its end.
fn is_whole(finish: Option<Finish>) -> bool {
    matches!(finish, Some(Finish::EndToken | Finish::Stop))
}

/// Metrics of the lengths of answers by TRL's names.
fn lengths(answers: &[Answer]) -> Vec<(String, f64)> {
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
