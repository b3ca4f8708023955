//! The student's own answers in the place of those of the data.

use std::time::Instant;

use data::{Batch, IGNORE};
use serde_json::Value;

use super::on_policy::OnPolicy;
use super::rollouts::seed_of;
use super::sample::{Turn, lengths};
use super::turns::Answer;
use crate::error::{Result, TrainError};
use crate::inference::generate::{Prompt, Request};
use crate::trainer::Trainer;

/// Answers of a step that the log has.
const SHOWN: usize = 4;

impl Trainer {
    /// Replaces the answers in the micro-batches of a step by samples of the model, where the step is one of those.
    pub(crate) fn with_own_answers(&mut self, batches: Vec<Batch>) -> Result<Vec<Batch>> {
        let step = self.progress.step;
        let Some(mut of) = self.on_policy.take() else { return Ok(batches) };
        (of.metrics, of.shown) = Default::default();
        let made = match of.samples(step) && !batches.is_empty() {
            true => self.own_answers(&mut of, &batches, step),
            false => Ok(batches),
        };
        self.on_policy = Some(of);
        made
    }

    fn own_answers(&mut self, of: &mut OnPolicy, batches: &[Batch], step: u64) -> Result<Vec<Batch>> {
        let row_tokens = self.plan.sequence_len;
        let prompts: Vec<Vec<i32>> = batches.iter().flat_map(prompts).collect();
        if let Some(short) = prompts.iter().find(|ids| ids.len() < 2) {
            let text = format!(
                "`lmbda` lets the model answer the prompts of the data, and a row has none (its answer begins after token \
                 {short:?}): give rows with prompts, or set `lmbda: 0`"
            );
            return Err(TrainError::Usage(text));
        }
        let continues_text = !of.encoder.has_template();
        let request = |(index, ids): (usize, &Vec<i32>)| Request {
            seed: Some(seed_of(of.seed, step, index, 0)),
            continues_text,
            max_new_tokens: Some(of.longest.min(row_tokens - ids.len()).max(1)),
            ..Prompt::Ids(ids.clone()).into()
        };
        let requests = prompts.iter().enumerate().map(request).collect();
        let begin = Instant::now();
        let turns = self.turns_of(requests, &of.options)?;
        let answer = |(prompt, turn): (Vec<i32>, Turn)| Answer {
            ids: turn.ids,
            turns: vec![(turn.text, Value::Null)],
            finish: turn.finish,
            ..Answer::to(prompt)
        };
        let answers: Vec<Answer> = prompts.into_iter().zip(turns).map(answer).collect();
        of.metrics = lengths(&answers);
        of.metrics.push(("sampling_seconds".to_owned(), begin.elapsed().as_secs_f64()));
        of.shown = answers.iter().take(SHOWN).map(|answer| of.shown(answer)).collect();
        let feed = self.feed.as_ref().expect("a run with data has a feed");
        let longest = answers.iter().map(|of| of.prompt.len() + of.ids.len()).max().unwrap_or(1);
        let lengths = feed.variants().into_iter().map(|variant| variant.seq_len).filter(|length| *length >= longest);
        let shape = (batches[0].batch, lengths.min().unwrap_or(row_tokens.max(longest)));
        laid_out(&answers, shape, feed.one_per_row, self.config.replicas())
    }
}

/// The tokens of each trained document up to its last answer.
fn prompts(batch: &Batch) -> Vec<Vec<i32>> {
    let mut found = Vec::new();
    let rows = batch.document_start.chunks(batch.seq_len).enumerate();
    for (row, starts) in rows {
        let mut begin = row * batch.seq_len;
        for document in starts.chunk_by(|a, b| a == b) {
            let end = begin + document.len();
            // A target stands at the token before.
            let is_trained = |at: &usize| batch.targets[*at] != IGNORE;
            if let Some(last) = (begin..end).rev().find(is_trained) {
                let first = (begin..=last).rev().take_while(is_trained).last().expect("the last one is trained");
                found.push(batch.input_ids[begin..=first].to_vec());
            }
            begin = end;
        }
    }
    found
}

/// Micro-batches of `shape`, rows × tokens, with the answers in their order: one in a row, or all that find room. Their number is
/// a multiple of `replicas`.
fn laid_out(
    answers: &[Answer],
    (rows, tokens): (usize, usize),
    one_per_row: bool,
    replicas: usize,
) -> Result<Vec<Batch>> {
    let mut filled: Vec<Vec<&Answer>> = Vec::new();
    let mut room = 0;
    for answer in answers.iter().filter(|of| !of.ids.is_empty()) {
        let length = answer.prompt.len() + answer.ids.len();
        match filled.last_mut() {
            Some(row) if !one_per_row && length <= room => row.push(answer),
            _ => {
                filled.push(vec![answer]);
                room = tokens;
            }
        }
        room -= length;
    }
    let count = filled.len().div_ceil(rows).next_multiple_of(replicas).max(replicas);
    filled.resize(count * rows, Vec::new());
    filled.chunks(rows).map(|rows| micro_batch(rows, tokens)).collect()
}

fn micro_batch(rows: &[Vec<&Answer>], tokens: usize) -> Result<Batch> {
    let size = rows.len() * tokens;
    let (mut ids, mut labels, mut positions) = (vec![0; size], vec![IGNORE; size], vec![0; size]);
    let mut lengths = Vec::new();
    for (row, answers) in rows.iter().enumerate() {
        let mut at = row * tokens;
        for answer in answers {
            let (prompt, length) = (answer.prompt.len(), answer.prompt.len() + answer.ids.len());
            ids[at..at + prompt].copy_from_slice(&answer.prompt);
            ids[at + prompt..at + length].copy_from_slice(&answer.ids);
            labels[at + prompt..at + length].copy_from_slice(&answer.ids);
            positions[at..at + length].iter_mut().zip(0..).for_each(|(position, index)| *position = index);
            at += length;
        }
        // A row without answers is one token and padding.
        lengths.push((at - row * tokens).max(1));
    }
    let batch = Batch::from_labels(rows.len(), tokens, ids, &labels, Some(positions), None);
    Ok(batch.map_err(TrainError::Data)?.padded_from(&lengths))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(prompt: &[i32], ids: &[i32]) -> Answer {
        Answer { ids: ids.to_vec(), ..Answer::to(prompt.to_vec()) }
    }

    #[test]
    fn the_prompt_of_a_document_is_all_before_its_last_answer() {
        let ids: Vec<i32> = (10..26).collect();
        // Two documents in the first row: one of two answers, and one of one; nothing is trained in the second row.
        let mut labels = vec![IGNORE; 16];
        for at in [2, 4, 5, 7] {
            labels[at] = ids[at];
        }
        let positions = vec![0, 1, 2, 3, 4, 5, 0, 1, 0, 1, 2, 3, 4, 5, 6, 7];
        let batch = Batch::from_labels(2, 8, ids, &labels, Some(positions), None).unwrap();
        assert_eq!(prompts(&batch), [vec![10, 11, 12, 13], vec![16]]);
    }

    #[test]
    fn answers_share_rows_where_they_find_room() {
        let answers = [answer(&[1, 2], &[3, 4]), answer(&[5], &[6, 7]), answer(&[1, 2], &[8]), answer(&[1, 2], &[])];
        let packed = laid_out(&answers, (1, 8), false, 1).unwrap();
        assert_eq!(packed.len(), 2);
        assert_eq!(packed[0].input_ids, [1, 2, 3, 4, 5, 6, 7, 0]);
        assert_eq!(packed[0].position_ids, [0, 1, 2, 3, 0, 1, 2, 0]);
        assert_eq!(packed[0].targets, [IGNORE, 3, 4, IGNORE, 6, 7, IGNORE, IGNORE]);
        assert_eq!(packed[1].targets[..3], [IGNORE, 8, IGNORE]);
        let alone = laid_out(&answers, (2, 8), true, 2).unwrap();
        assert_eq!(alone.iter().map(Batch::trained_tokens).collect::<Vec<_>>(), [4, 1]);
        let for_four = laid_out(&answers, (2, 8), true, 4).unwrap();
        assert_eq!((for_four.len(), for_four[3].trained_tokens()), (4, 0));
    }
}
