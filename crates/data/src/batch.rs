//! One micro-batch for the engine: labels already shifted, document boundaries explicit.
//!
//! Knows no datasets and no tokenizer.

use crate::document::IGNORE;
use crate::document::Mark;
use crate::error::DataError;
use crate::image_source::ImageRef;

/// One micro-batch; every vector is [B, T] row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Number of rows, the B of shapes.
    pub batch: usize,
    /// Tokens of a row, the T of shapes.
    pub seq_len: usize,
    pub input_ids: Vec<i32>,
    pub position_ids: Vec<i32>,
    /// Label of the next token inside the same document; -100 = not trained.
    pub targets: Vec<i32>,
    /// Weight of the target; 0 where the target is -100.
    pub weights: Vec<f32>,
    /// For every token the index in its row at which its document starts.
    pub document_start: Vec<i32>,
    /// 1 for tokens of documents, 0 for padding.
    pub present: Vec<f32>,
    /// The preferences among its documents, in the order of the tokens.
    pub marks: Vec<Placed>,
    /// For every target its log-probability under the reference; empty if there is no reference.
    pub reference_logps: Vec<f32>,
    /// For every target of samples its log-probability under the policy before its updates; empty: the policy as it is.
    pub old_logps: Vec<f32>,
    /// For every target of samples its log-probability when it was drawn; empty where it is not known.
    pub sampling_logps: Vec<f32>,
    /// The distributions of a teacher; empty if there is none.
    pub teacher: Taught,
    /// The estimate of the KL divergence from the reference that a loss of answers with verdicts subtracts; 0 without one.
    pub divergence: f32,
    /// Its images as the model reads them.
    pub patches: Patches,
    /// Its images, in the order of their tokens, until they are laid out; they stay where no reader lays them out.
    pub images: Vec<ImageRef>,
    /// Number of tokens whose logits are computed, with room for those that have a target; 0: all tokens.
    pub logits: usize,
    /// Tokens of its documents, where another node has the batch: then there are no vectors.
    pub remote: Option<usize>,
}

/// A teacher's distributions of the tokens of a micro-batch: of the whole vocabulary, or of the likeliest tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Taught {
    /// Logits, [B, T, V].
    pub logits: Vec<f32>,
    /// The likeliest tokens, [B, T, K]; -1 is none.
    pub ids: Vec<i32>,
    /// Their log-probabilities at the temperature of the loss, [B, T, K].
    pub logps: Vec<f32>,
}

impl Taught {
    pub fn is_empty(&self) -> bool {
        self.logits.is_empty() && self.ids.is_empty()
    }
}

/// A preference in a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Placed {
    /// Index of its first token in the vectors of the batch.
    pub begin: usize,
    /// Tokens, those of both sides of a pair.
    pub tokens: usize,
    pub mark: Mark,
}

impl Batch {
    /// The tokens that have a target.
    fn with_target(&self) -> impl Iterator<Item = usize> {
        self.targets.iter().enumerate().filter(|(_, target)| **target != IGNORE).map(|(at, _)| at)
    }

    /// The tokens whose logits are computed, by index among those of all rows, [logits]; −1 after the last.
    pub(crate) fn tokens_of_logits(&self) -> Vec<i32> {
        let mut tokens: Vec<i32> = self.with_target().map(|at| at as i32).collect();
        assert!(tokens.len() <= self.logits, "a batch has room for the logits of its targets");
        tokens.resize(self.logits, -1);
        tokens
    }

    /// The place of each token among those whose logits are computed; −1 for the others.
    pub(crate) fn places_of_logits(&self) -> Vec<i32> {
        let mut places = vec![-1; self.targets.len()];
        for (place, at) in self.with_target().enumerate() {
            places[at] = place as i32;
        }
        places
    }

    /// The targets of the tokens whose logits are computed, [logits]; −100 after the last.
    pub(crate) fn targets_of_logits(&self) -> Vec<i32> {
        let mut targets: Vec<i32> = self.with_target().map(|at| self.targets[at]).collect();
        targets.resize(self.logits, IGNORE);
        targets
    }

    /// The index in its row of the last token of the image that each token belongs to, of text its own. `rows`: −1 for text.
    pub(crate) fn last_keys(&self, rows: &[i32]) -> Vec<i32> {
        let mut last: Vec<i32> = (0..rows.len()).map(|t| (t % self.seq_len) as i32).collect();
        for t in (0..rows.len().saturating_sub(1)).rev() {
            let follows = (t + 1) % self.seq_len != 0 && self.document_start[t] == self.document_start[t + 1];
            if follows && rows[t] >= 0 && rows[t + 1] >= 0 {
                last[t] = last[t + 1];
            }
        }
        last
    }

    /// A batch that another node has.
    pub(crate) fn elsewhere(batch: usize, seq_len: usize, tokens: usize) -> Batch {
        let (input_ids, position_ids, targets) = (Vec::new(), Vec::new(), Vec::new());
        let (weights, document_start, present, marks) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let remote = Some(tokens);
        let (reference_logps, old_logps, sampling_logps) = (Vec::new(), Vec::new(), Vec::new());
        Batch {
            batch,
            seq_len,
            input_ids,
            position_ids,
            targets,
            weights,
            document_start,
            present,
            marks,
            reference_logps,
            old_logps,
            sampling_logps,
            teacher: Taught::default(),
            divergence: 0.0,
            patches: Patches::default(),
            images: Vec::new(),
            logits: 0,
            remote,
        }
    }

    /// Returns the rows of batches of one row length, without images and distributions of a teacher, as one batch.
    pub fn joined(batches: &[Batch]) -> Batch {
        let mut joined = Batch { logits: 0, ..batches[0].clone() };
        for of in &batches[1..] {
            assert!(of.seq_len == joined.seq_len && of.patches.count() == 0, "rows of texts, of one length");
            assert!(of.teacher.is_empty(), "rows without a teacher");
            let begin = joined.input_ids.len();
            joined.batch += of.batch;
            joined.input_ids.extend(&of.input_ids);
            joined.position_ids.extend(&of.position_ids);
            joined.targets.extend(&of.targets);
            joined.weights.extend(&of.weights);
            joined.document_start.extend(&of.document_start);
            joined.present.extend(&of.present);
            joined.marks.extend(of.marks.iter().map(|mark| Placed { begin: begin + mark.begin, ..*mark }));
            joined.reference_logps.extend(&of.reference_logps);
            joined.old_logps.extend(&of.old_logps);
            joined.sampling_logps.extend(&of.sampling_logps);
        }
        joined
    }

    /// Builds a batch from unshifted labels, as users and `type: tokens` give them.
    ///
    /// `input_ids`, `labels`, `position_ids`, `weights`: [B, T]. A document starts at the beginning of each row and
    /// where `position_ids` does not continue (position ≠ previous + 1); without `position_ids` each row is one
    /// document. `weights[t]` belongs to `labels[t]` and moves with it; without weights each label counts 1. A label of
    /// weight 0 is not trained. Errors: a length that is not B·T, a negative id or position, a weight that is negative
    /// or not finite.
    pub fn from_labels(
        batch: usize,
        seq_len: usize,
        input_ids: Vec<i32>,
        labels: &[i32],
        position_ids: Option<Vec<i32>>,
        weights: Option<&[f32]>,
    ) -> Result<Batch, DataError> {
        let size = batch * seq_len;
        check_length("input_ids", input_ids.len(), batch, seq_len)?;
        check_length("labels", labels.len(), batch, seq_len)?;
        let positions = position_ids.unwrap_or_else(|| (0..size).map(|i| (i % seq_len.max(1)) as i32).collect());
        check_length("position_ids", positions.len(), batch, seq_len)?;
        if let Some(weights) = weights {
            check_length("weights", weights.len(), batch, seq_len)?;
            check_each("weights", weights, |w| w.is_finite(), "is not finite")?;
            check_each("weights", weights, |w| *w >= 0.0, "is negative: a weight says how much a token counts")?;
        }
        check_each("input_ids", &input_ids, |&id| id >= 0, "is negative")?;
        check_each("position_ids", &positions, |&p| p >= 0, "is negative")?;
        check_each("labels", labels, |&label| label >= 0 || label == IGNORE, "is neither a token id nor -100")?;

        let document_start = starts_of_rows(&positions, seq_len);
        let mut targets = vec![IGNORE; size];
        let mut target_weights = vec![0.0; size];
        for t in 0..size.saturating_sub(1) {
            let next = t + 1;
            // A document that starts at `next` (or a new row) has that index as its own start.
            if document_start[next] as usize == next % seq_len {
                continue;
            }
            let weight = weights.map_or(1.0, |w| w[next]);
            if labels[next] != IGNORE && weight != 0.0 {
                targets[t] = labels[next];
                target_weights[t] = weight;
            }
        }
        Ok(Batch {
            batch,
            seq_len,
            input_ids,
            position_ids: positions,
            targets,
            weights: target_weights,
            document_start,
            present: vec![1.0; size],
            marks: Vec::new(),
            reference_logps: Vec::new(),
            old_logps: Vec::new(),
            sampling_logps: Vec::new(),
            teacher: Taught::default(),
            divergence: 0.0,
            patches: Patches::default(),
            images: Vec::new(),
            logits: 0,
            remote: None,
        })
    }

    /// Tokens of its longest document; padding is none.
    pub fn longest_document(&self) -> usize {
        let length = |(at, start): (usize, &i32)| at % self.seq_len + 1 - *start as usize;
        let documents = self.document_start.iter().enumerate().filter(|(at, _)| self.present[*at] != 0.0);
        documents.map(length).max().unwrap_or(0)
    }

    /// The same with padding after the given number of tokens of each row, at least one: a document of its own, of which nothing is
    /// trained and nothing is counted.
    pub fn padded_from(mut self, lengths: &[usize]) -> Batch {
        for (row, length) in lengths.iter().enumerate() {
            for t in *length..self.seq_len {
                let at = row * self.seq_len + t;
                (self.position_ids[at], self.document_start[at]) = ((t - length) as i32, *length as i32);
                self.present[at] = 0.0;
                // The token before predicts none of it.
                (self.targets[at - 1], self.weights[at - 1]) = (IGNORE, 0.0);
                (self.targets[at], self.weights[at]) = (IGNORE, 0.0);
            }
        }
        self
    }

    /// The same with every two rows as a pair, the chosen side followed by the rejected one; how much better the former is, if
    /// that is known.
    pub fn with_margins(self, margins: &[Option<f32>]) -> Batch {
        let (tokens, chosen) = (2 * self.seq_len, self.seq_len);
        let pairs = margins.iter().take(self.batch / 2).enumerate();
        let mark = |margin: &Option<f32>| Mark::Pair { chosen, shared: 0, margin: *margin };
        let marks = pairs.map(|(pair, of)| Placed { begin: pair * tokens, tokens, mark: mark(of) }).collect();
        Batch { marks, ..self.without_ends() }
    }

    /// The same with every row as an answer with its verdict.
    pub fn of_answers(self, desirable: &[bool]) -> Batch {
        let seq_len = self.seq_len;
        let answers = self.answered().into_iter().zip(desirable).enumerate();
        let mark = |(row, ([prompt, tokens], desirable)): (usize, ([usize; 2], &bool))| Placed {
            begin: row * seq_len,
            tokens,
            mark: Mark::Answer { prompt, desirable: *desirable },
        };
        let marks = answers.map(mark).collect();
        Batch { marks, ..self.without_ends() }
    }

    /// The same with every row as a sampled answer with its advantage.
    pub fn of_samples(self, advantages: &[f32]) -> Batch {
        let tokens = self.seq_len;
        let mark = |(row, advantage): (usize, &f32)| Placed {
            begin: row * tokens,
            tokens,
            mark: Mark::Sample { advantage: *advantage, own: 0 },
        };
        let marks = advantages.iter().take(self.batch).enumerate().map(mark).collect();
        Batch { marks, ..self.without_ends() }
    }

    /// Moves values of labels, [B, T], to the tokens before, at which the targets are; 0 where nothing is trained.
    pub fn at_targets(&self, of_labels: &[f32]) -> Vec<f32> {
        let next = of_labels.iter().skip(1).chain([&0.0]);
        self.targets.iter().zip(next).map(|(target, value)| if *target == IGNORE { 0.0 } else { *value }).collect()
    }

    /// Moves tokens of labels with their log-probabilities, [B, T, K], to the tokens before, at which the targets are; none
    /// where nothing is trained.
    pub fn taught(self, ids: &[i32], logps: &[f32]) -> Batch {
        let tokens = self.targets.len();
        let count = ids.len() / tokens.max(1);
        let mut teacher = Taught { logits: Vec::new(), ids: vec![-1; ids.len()], logps: vec![0.0; logps.len()] };
        for at in (0..tokens.saturating_sub(1)).filter(|at| self.targets[*at] != IGNORE) {
            let (to, from) = (at * count..(at + 1) * count, (at + 1) * count..(at + 2) * count);
            teacher.ids[to.clone()].copy_from_slice(&ids[from.clone()]);
            teacher.logps[to].copy_from_slice(&logps[from]);
        }
        Batch { teacher, ..self }
    }

    /// The tokens of each row before its answer, and up to its end.
    fn answered(&self) -> Vec<[usize; 2]> {
        let of_row = |row: &[i32]| {
            let is_target = |target: &i32| *target != IGNORE;
            // A target stands at the token before.
            let begin = row.iter().position(is_target).map_or(row.len(), |at| at + 1);
            [begin, row.iter().rposition(is_target).map_or(row.len(), |at| at + 2)]
        };
        self.targets.chunks(self.seq_len.max(1)).map(of_row).collect()
    }

    /// The same with everything after the answer of each row as padding.
    fn without_ends(self) -> Batch {
        let lengths: Vec<usize> = self.answered().into_iter().map(|[_, end]| end).collect();
        self.padded_from(&lengths)
    }

    /// The number of tokens that are trained.
    pub fn trained_tokens(&self) -> usize {
        self.with_target().count()
    }

    /// The sum by which the loss is divided.
    pub fn weight_sum(&self) -> f64 {
        self.weights.iter().map(|&w| f64::from(w)).sum()
    }
}

/// `document_start` of rows of `seq_len` tokens.
fn starts_of_rows(positions: &[i32], seq_len: usize) -> Vec<i32> {
    let mut starts = Vec::with_capacity(positions.len());
    for row in positions.chunks(seq_len.max(1)) {
        let mut start = 0;
        for t in 0..row.len() {
            if t > 0 && row[t] != row[t - 1].wrapping_add(1) {
                start = t;
            }
            starts.push(start as i32);
        }
    }
    starts
}

fn check_length(name: &str, found: usize, batch: usize, seq_len: usize) -> Result<(), DataError> {
    if found == batch * seq_len {
        return Ok(());
    }
    let problem = format!("{found} elements, expected {batch} x {seq_len} = {}", batch * seq_len);
    Err(DataError::invalid(format!("batch: {name}"), problem))
}

fn check_each<T: std::fmt::Display>(
    name: &str,
    values: &[T],
    good: impl Fn(&T) -> bool,
    complaint: &str,
) -> Result<(), DataError> {
    match values.iter().position(|value| !good(value)) {
        None => Ok(()),
        Some(i) => Err(DataError::invalid(format!("batch: {name}[{i}]"), format!("{} {complaint}", values[i]))),
    }
}

/// The images of a micro-batch, P patches with padding and P/G tokens. Empty without images.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Patches {
    /// [P, width] bytes: red, green and blue of each pixel.
    pub pixels: Vec<u8>,
    /// The number that each value of a pixel is for the model, by channel [3, 256].
    pub values: Vec<f32>,
    /// Row and column of each patch in its picture, [P, 2].
    pub places: Vec<i32>,
    /// Number of the patch's entry in a table of positions [P].
    pub entries: Vec<i32>,
    /// The four entries of the table around the patch where the picture is stretched over the table [P, 4], and their
    /// weights in the mean.
    pub corners: Vec<i32>,
    pub corner_weights: Vec<f32>,
    /// First and last patch of the picture [P].
    pub picture: [Vec<i32>; 2],
    /// First and last patch of the window [P].
    pub window: [Vec<i32>; 2],
    /// Index of the token in the batch, −1 for padding [P/G].
    pub tokens: Vec<i32>,
    /// For each token of the batch the row of `tokens`, −1 for text [B, T].
    pub rows: Vec<i32>,
    /// 1 for text and 0 for tokens of images [B, T].
    pub text: Vec<f32>,
    /// The tokens, with `pad` in the place of those of images [B, T].
    pub text_ids: Vec<i32>,
    /// The last token of the image that a token belongs to, of text the token itself; index in its row [B, T].
    pub last_key: Vec<i32>,
    /// Time, row and column of each token [B, T, 3].
    pub axes: Vec<i32>,
}

impl Patches {
    /// Returns P, the number of patches with padding.
    pub fn count(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_weights_are_refused() {
        let error = Batch::from_labels(1, 2, vec![1, 2], &[1, 2], None, Some(&[1.0, -0.5])).unwrap_err().to_string();
        assert!(error.contains("weights[1]") && error.contains("-0.5 is negative"), "{error}");
    }

    #[test]
    fn labels_are_shifted_inside_documents() {
        let positions = vec![0, 1, 2, 0, 1, 0, 1, 2, 3, 4];
        let weights = [1.0, 1.0, 0.5, 9.0, 0.0, 1.0, 1.0, 1.0, 1.0, 2.0];
        let labels = [10, 11, 12, 13, 14, 20, -100, 22, 23, 24];
        let batch = Batch::from_labels(2, 5, (0..10).collect(), &labels, Some(positions), Some(&weights)).unwrap();
        assert_eq!(batch.targets, [11, 12, -100, -100, -100, -100, 22, 23, 24, -100]);
        assert_eq!(batch.weights, [1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 0.0]);
        assert_eq!(batch.document_start, [0, 0, 0, 3, 3, 0, 0, 0, 0, 0]);
        assert_eq!(batch.trained_tokens(), 5);
        assert_eq!(batch.weight_sum(), 5.5);
    }

    #[test]
    fn without_positions_each_row_is_one_document() {
        let batch = Batch::from_labels(2, 3, vec![1; 6], &[1, 2, 3, 4, 5, 6], None, None).unwrap();
        assert_eq!(batch.targets, [2, 3, -100, 5, 6, -100]);
        assert_eq!(batch.position_ids, [0, 1, 2, 0, 1, 2]);
        assert_eq!(batch.document_start, [0; 6]);
    }

    #[test]
    fn a_position_that_jumps_starts_a_document() {
        let batch = Batch::from_labels(1, 4, vec![1; 4], &[1, 2, 3, 4], Some(vec![5, 6, 8, 9]), None).unwrap();
        assert_eq!(batch.document_start, [0, 0, 2, 2]);
        assert_eq!(batch.targets, [2, -100, 4, -100]);
    }

    #[test]
    fn bad_batches_name_the_place() {
        let error = Batch::from_labels(1, 2, vec![1, 2], &[1, -7], None, None).unwrap_err();
        assert_eq!(error.to_string(), "batch: labels[1]: -7 is neither a token id nor -100");
        let error = Batch::from_labels(1, 2, vec![1, 2], &[1], None, None).unwrap_err();
        assert_eq!(error.to_string(), "batch: labels: 1 elements, expected 1 x 2 = 2");
    }
}
