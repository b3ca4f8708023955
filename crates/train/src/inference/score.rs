//! Log-likelihoods of continuations of given beginnings: sequences are packed into rows of one shape, whose losses are
//! read token by token. Step by step, so that a caller can show progress and stop.
//!
//! Knows token ids; no text, and nothing of what is asked with them.

use data::packing::best_fit;
use data::{Batch, IGNORE};

use crate::error::{Result, TrainError};
use crate::inference::model::Model;

/// Rows are at least so long where there is enough to fill them: short sequences share them.
const SHORTEST_ROW: usize = 1024;

/// Tokens of a batch where nothing else is said.
pub const BATCH_TOKENS: usize = 8192;

/// A request: the tokens of a beginning and of its continuation.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoreRequest {
    pub context: Vec<i32>,
    pub continuation: Vec<i32>,
}

/// The answer to a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// The number of the request.
    pub request: usize,
    /// Natural logarithm of the probability of the continuation.
    pub log_likelihood: f64,
    /// True if every token of the continuation is the likeliest at its position.
    pub greedy: bool,
}

/// Answers to some requests, while they are made.
#[derive(Debug)]
pub struct Scoring {
    sequences: Vec<Sequence>,
    /// Sequences by number; one batch each, and how many rows of how many tokens it has.
    batches: Vec<Rows>,
    next: usize,
}

/// One sequence as a model reads it: the last token is only a target.
#[derive(Debug)]
struct Sequence {
    ids: Vec<i32>,
    /// Tokens at the end that are scored.
    scored: usize,
}

impl Sequence {
    /// Keeps the last tokens that the model allows. Errors: nothing to score, nothing before it, or more to score than
    /// the model allows.
    fn new(index: usize, request: ScoreRequest, longest: Option<usize>) -> Result<Sequence> {
        let scored = request.continuation.len();
        let problem = match () {
            () if scored == 0 => "has an empty continuation, expected one or more tokens".to_owned(),
            () if request.context.is_empty() => "has no token before its continuation".to_owned(),
            () if longest.is_some_and(|longest| scored > longest) => {
                format!("scores {scored} tokens, and the model allows sequences of {}", longest.unwrap_or(0))
            }
            () => {
                let mut ids = [request.context, request.continuation].concat();
                ids.drain(..longest.map_or(0, |longest| ids.len().saturating_sub(longest + 1)));
                return Ok(Sequence { ids, scored });
            }
        };
        Err(TrainError::Usage(format!("request {index} {problem}")))
    }

    /// Tokens that the model reads.
    fn len(&self) -> usize {
        self.ids.len() - 1
    }
}

/// A batch of packed rows.
#[derive(Clone, Debug, PartialEq)]
struct Rows {
    rows: Vec<Vec<u32>>,
    /// Rows that the batch has, some of them perhaps empty.
    count: usize,
    length: usize,
}

impl Scoring {
    /// Lays the requests into rows. `batch_tokens`: tokens of a batch, about.
    pub fn start(model: &Model, requests: Vec<ScoreRequest>, batch_tokens: usize) -> Result<Scoring> {
        let longest = model.longest();
        let requests = requests.into_iter().enumerate();
        let sequences = requests.map(|(index, request)| Sequence::new(index, request, longest));
        let sequences = sequences.collect::<Result<Vec<_>>>()?;
        for sequence in &sequences {
            model.check_ids(&sequence.ids)?;
        }
        let lengths: Vec<usize> = sequences.iter().map(Sequence::len).collect();
        Ok(Scoring { batches: laid_out(&lengths, model.shares_rotation_to(), batch_tokens), sequences, next: 0 })
    }

    pub fn is_done(&self) -> bool {
        self.next == self.batches.len()
    }

    /// Scores the sequences of the next batch. Nothing happens when all is done.
    pub fn step(&mut self, model: &mut Model) -> Result<Vec<Score>> {
        let Some(rows) = self.batches.get(self.next).cloned() else { return Ok(Vec::new()) };
        let found = match model.token_scores(&self.batch(&rows)) {
            Err(TrainError::Memory(_)) if rows.count > 1 => {
                self.split();
                return Ok(Vec::new());
            }
            found => found?,
        };
        self.next += 1;
        let mut scores = Vec::new();
        for (row, sequences) in rows.rows.iter().enumerate() {
            let mut begin = row * rows.length;
            for index in sequences {
                let sequence = &self.sequences[*index as usize];
                let end = begin + sequence.len();
                let places = end - sequence.scored..end;
                let targets = &sequence.ids[sequence.ids.len() - sequence.scored..];
                scores.push(Score {
                    request: *index as usize,
                    log_likelihood: -found.losses[places.clone()].iter().map(|loss| f64::from(*loss)).sum::<f64>(),
                    greedy: found.likeliest[places].iter().zip(targets).all(|(likeliest, id)| likeliest == id),
                });
                begin = end;
            }
        }
        Ok(scores)
    }

    /// Halves the batches that are left: memory does not take them as they are.
    fn split(&mut self) {
        let left = self.batches.split_off(self.next);
        for of in left {
            let count = of.count.div_ceil(2);
            self.batches.extend(of.rows.chunks(count).map(|rows| Rows { rows: rows.to_vec(), count, ..of.clone() }));
        }
    }

    fn batch(&self, of: &Rows) -> Batch {
        let size = of.count * of.length;
        let mut batch = Batch {
            batch: of.count,
            seq_len: of.length,
            input_ids: Vec::with_capacity(size),
            patches: data::Patches::default(),
            images: Vec::new(),
            logits: 0,
            remote: None,
            marks: Vec::new(),
            reference_logps: Vec::new(),
            old_logps: Vec::new(),
            sampling_logps: Vec::new(),
            teacher: Default::default(),
            divergence: 0.0,
            position_ids: Vec::with_capacity(size),
            targets: Vec::with_capacity(size),
            weights: Vec::with_capacity(size),
            document_start: Vec::with_capacity(size),
            present: Vec::with_capacity(size),
        };
        for row in 0..of.count {
            let sequences = of.rows.get(row).map_or(&[][..], Vec::as_slice);
            let begin = batch.input_ids.len();
            let mut most = 1;
            for index in sequences {
                let sequence = &self.sequences[*index as usize];
                most = most.max(sequence.len());
                put(&mut batch, begin, &sequence.ids[..sequence.len()], &sequence.ids[1..], sequence.scored);
            }
            // Padding is sequences that are no longer than the others, so that no position is new.
            while batch.input_ids.len() < begin + of.length {
                let length = most.min(begin + of.length - batch.input_ids.len());
                put(&mut batch, begin, &vec![0; length], &[], 0);
                batch.present.truncate(batch.input_ids.len() - length);
                batch.present.resize(batch.input_ids.len(), 0.0);
            }
        }
        batch
    }
}

/// Adds one sequence to the row that begins at `row`; of its targets the last ones are scored.
fn put(batch: &mut Batch, row: usize, ids: &[i32], targets: &[i32], scored: usize) {
    let start = batch.input_ids.len() - row;
    let ignored = ids.len() - scored;
    batch.input_ids.extend(ids);
    batch.position_ids.extend(0..ids.len() as i32);
    batch.document_start.extend(std::iter::repeat_n(start as i32, ids.len()));
    batch.present.extend(std::iter::repeat_n(1.0, ids.len()));
    batch.targets.extend(std::iter::repeat_n(IGNORE, ignored));
    batch.targets.extend(&targets[targets.len().saturating_sub(scored)..]);
    batch.weights.extend(std::iter::repeat_n(0.0, ignored));
    batch.weights.extend(std::iter::repeat_n(1.0, scored));
}

/// Distributes sequences over batches of one shape; those longer than `together` are alone in theirs.
fn laid_out(lengths: &[usize], together: Option<usize>, batch_tokens: usize) -> Vec<Rows> {
    let alone = |length: usize| together.is_some_and(|together| length > together);
    let (single, shared): (Vec<u32>, Vec<u32>) = (0..lengths.len() as u32).partition(|i| alone(lengths[*i as usize]));
    let mut batches = Vec::new();
    let of_shared: Vec<usize> = shared.iter().map(|i| lengths[*i as usize]).collect();
    if let Some(longest) = of_shared.iter().max() {
        let enough = SHORTEST_ROW.min(rounded(of_shared.iter().sum()));
        let length = rounded(*longest).max(enough);
        let rows = best_fit(&of_shared, length).into_iter();
        let rows: Vec<Vec<u32>> = rows.map(|row| row.into_iter().map(|i| shared[i as usize]).collect()).collect();
        let most = (batch_tokens / length).max(1);
        let count = rows.len().div_ceil(rows.len().div_ceil(most));
        batches.extend(rows.chunks(count).map(|rows| Rows { rows: rows.to_vec(), count, length }));
    }
    let of_single = |index| Rows { rows: vec![vec![index]], count: 1, length: rounded(lengths[index as usize]) };
    batches.extend(single.into_iter().map(of_single));
    batches
}

/// Lengths of rows: 2ⁿ and 1.5·2ⁿ from 16 on, so that few shapes are compiled.
fn rounded(length: usize) -> usize {
    let power = length.next_power_of_two().max(16);
    if length <= power / 4 * 3 && power > 16 { power / 4 * 3 } else { power }
}

impl Model {
    /// The request for a continuation of a text: both are encoded as one text.
    pub fn score_request(&self, beginning: &str, continuation: &str) -> Result<ScoreRequest> {
        let (context, continuation) = self.encoder()?.encode_pair(beginning, continuation)?;
        Ok(ScoreRequest { context, continuation })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(context: &[i32], continuation: &[i32]) -> ScoreRequest {
        ScoreRequest { context: context.to_vec(), continuation: continuation.to_vec() }
    }

    #[test]
    fn sequences_keep_the_end_that_the_model_allows() {
        let whole = Sequence::new(0, request(&[1, 2, 3], &[4, 5]), Some(4)).unwrap();
        assert_eq!((whole.ids, whole.scored), (vec![1, 2, 3, 4, 5], 2));
        let cut = Sequence::new(0, request(&[1, 2, 3], &[4, 5]), Some(2)).unwrap();
        assert_eq!((cut.len(), cut.ids), (2, vec![3, 4, 5]));
        for (context, continuation, said) in [
            (&[1][..], &[][..], "an empty continuation"),
            (&[], &[1], "no token before"),
            (&[1], &[1, 2, 3], "scores 3 tokens, and the model allows sequences of 2"),
        ] {
            let error = Sequence::new(7, request(context, continuation), Some(2)).unwrap_err().to_string();
            assert!(error.contains("request 7") && error.contains(said), "{error}");
        }
    }

    #[test]
    fn a_batch_scores_the_ends_of_its_sequences() {
        let sequences = [request(&[1, 2, 3], &[4, 5]), request(&[6], &[7])];
        let sequences = sequences.into_iter().enumerate().map(|(i, of)| Sequence::new(i, of, None).unwrap()).collect();
        let rows = Rows { rows: vec![vec![0, 1]], count: 2, length: 8 };
        let scoring = Scoring { sequences, batches: vec![rows.clone()], next: 0 };
        let batch = scoring.batch(&rows);
        assert_eq!(batch.input_ids, [1, 2, 3, 4, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(batch.position_ids, [0, 1, 2, 3, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(batch.document_start, [0, 0, 0, 0, 4, 5, 5, 5, 0, 1, 2, 3, 4, 5, 6, 7]);
        let ignored = [IGNORE; 3];
        assert_eq!(batch.targets[..8], [&[IGNORE, IGNORE, 4, 5, 7], &ignored[..]].concat());
        assert_eq!(batch.weights[..8], [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]);
        assert!(batch.targets[8..].iter().all(|target| *target == IGNORE));
    }

    #[test]
    fn rows_are_of_one_shape_and_hold_every_sequence_once() {
        let lengths: Vec<usize> = (0..500).map(|i| 1 + i * 37 % 300).collect();
        let batches = laid_out(&lengths, Some(250), 4096);
        let (shared, single): (Vec<&Rows>, Vec<&Rows>) = batches.iter().partition(|of| of.length == 1024);
        assert!(shared.iter().all(|of| of.count == shared[0].count && of.count <= 4 && of.rows.len() <= of.count));
        assert!(single.iter().all(|of| of.count == 1 && of.rows[0].len() == 1 && of.length >= 256));
        let mut seen: Vec<u32> = batches.iter().flat_map(|of| of.rows.iter().flatten().copied()).collect();
        seen.sort_unstable();
        assert!(seen.iter().copied().eq(0..500));
        assert_eq!(laid_out(&[3, 4], None, 4096), [Rows { rows: vec![vec![0, 1]], count: 1, length: 16 }]);
        assert_eq!(laid_out(&[], None, 4096), []);
    }

    #[test]
    fn what_does_not_fit_is_done_in_smaller_batches() {
        let sequences = (0..5).map(|i| Sequence::new(i, request(&[1], &[2]), None).unwrap()).collect();
        let rows = Rows { rows: (0..5).map(|i| vec![i]).collect(), count: 5, length: 16 };
        let mut scoring = Scoring { sequences, batches: vec![rows.clone(), rows], next: 1 };
        scoring.split();
        assert_eq!(
            scoring.batches.iter().map(|of| (of.rows.len(), of.count)).collect::<Vec<_>>(),
            [(5, 5), (3, 3), (2, 3)]
        );
    }

    #[test]
    fn lengths_are_rounded_to_few() {
        assert_eq!([1, 16, 17, 24, 25, 33, 49, 700, 800].map(rounded), [16, 16, 24, 24, 32, 48, 64, 768, 1024]);
    }
}
