//! Sampled answers as micro-batches: a row each, padded to one of a few lengths. Knows no rewards.

use data::{Batch, IGNORE};

use super::Sampled;
use crate::error::{Result, TrainError};

/// Row lengths, as parts of the longest, so that few shapes are compiled.
const PARTS: [f64; 3] = [0.25, 0.5, 1.0];

/// Rows have a multiple of this many tokens.
const UNIT: usize = 16;

/// The shapes in which micro-batches of sampled answers come.
pub(super) struct Shapes {
    pub rows: usize,
    /// Micro-batches that devices take at once, all of one shape.
    ranks: usize,
    /// Tokens of a row, in rising order.
    pub lengths: Vec<usize>,
}

impl Shapes {
    /// Shapes of micro-batches of `rows` rows of at most `longest` tokens, for a number of ranks.
    pub fn new((rows, ranks): (usize, usize), longest: usize) -> Shapes {
        let mut lengths: Vec<usize> =
            PARTS.iter().map(|part| ((longest as f64 * part).ceil() as usize).next_multiple_of(UNIT)).collect();
        lengths.dedup();
        Shapes { rows, ranks, lengths }
    }

    /// Returns micro-batches of the answers, in their order.
    pub fn batches(&self, answers: &[Sampled]) -> Result<Vec<Batch>> {
        let round = |answers: &[Sampled]| {
            let longest = answers.iter().map(|of| of.ids.len()).max().unwrap_or(1);
            let length = self.lengths.iter().copied().find(|length| *length >= longest).unwrap_or(longest);
            answers.chunks(self.rows).map(|answers| Shapes::batch(answers, length)).collect::<Result<Vec<_>>>()
        };
        Ok(answers.chunks(self.rows * self.ranks).map(round).collect::<Result<Vec<_>>>()?.concat())
    }

    fn batch(answers: &[Sampled], length: usize) -> Result<Batch> {
        let size = answers.len() * length;
        let (mut ids, mut labels) = (vec![0; size], vec![IGNORE; size]);
        let (mut sampling, mut old) = (vec![0.0; size], vec![0.0; size]);
        for (row, of) in answers.iter().enumerate() {
            let (begin, answer) = (row * length, row * length + of.prompt);
            let end = begin + of.ids.len();
            ids[begin..end].copy_from_slice(&of.ids);
            if !of.left_out {
                labels[answer..end].copy_from_slice(&of.ids[of.prompt..]);
                // What an environment said is read, and not learned.
                of.given.iter().for_each(|(first, last)| labels[answer + first..answer + last].fill(IGNORE));
            }
            sampling[answer..end].copy_from_slice(&of.logps);
            old[answer..answer + of.old_logps.len()].copy_from_slice(&of.old_logps);
        }
        let batch = Batch::from_labels(answers.len(), length, ids, &labels, None, None).map_err(TrainError::Data)?;
        let advantages: Vec<f32> = answers.iter().map(|of| of.advantage).collect();
        let batch = batch.of_samples(&advantages);
        let knows_old = answers.iter().any(|of| !of.old_logps.is_empty());
        let old_logps = if knows_old { batch.at_targets(&old) } else { Vec::new() };
        let sampling_logps = batch.at_targets(&sampling);
        Ok(Batch { old_logps, sampling_logps, ..batch })
    }

    /// Gives the answers the log-probabilities of the targets of their micro-batches.
    pub fn take_logps(&self, answers: &mut [Sampled], batches: &[Batch], logps: &[Vec<f32>]) {
        for ((answers, batch), logps) in answers.chunks_mut(self.rows).zip(batches).zip(logps) {
            for (row, of) in answers.iter_mut().enumerate() {
                // A target stands at the token before.
                let first = row * batch.seq_len + of.prompt - 1;
                of.old_logps = logps[first..first + of.ids.len() - of.prompt].to_vec();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_rows_with_the_values_of_their_tokens() {
        let of = |left_out| Sampled {
            ids: vec![5, 6, 7, 8],
            prompt: 2,
            advantage: -0.5,
            logps: vec![-1.0, -2.0],
            old_logps: Vec::new(),
            given: Vec::new(),
            left_out,
        };
        let shapes = Shapes::new((2, 1), 40);
        assert_eq!(shapes.lengths, [16, 32, 48]);
        let mut answers = vec![of(false), of(true), of(false)];
        let batches = shapes.batches(&answers).unwrap();
        assert_eq!((batches.len(), batches[0].batch, batches[1].batch), (2, 2, 1));
        let first = &batches[0];
        assert_eq!((first.seq_len, &first.targets[..4]), (16, &[IGNORE, 7, 8, IGNORE][..]));
        assert_eq!(first.sampling_logps[..4], [0.0, -1.0, -2.0, 0.0]);
        assert!(first.targets[16..].iter().all(|target| *target == IGNORE) && first.old_logps.is_empty());
        let logps: Vec<Vec<f32>> =
            batches.iter().map(|batch| (0..batch.targets.len()).map(|i| i as f32).collect()).collect();
        shapes.take_logps(&mut answers, &batches, &logps);
        assert_eq!((&answers[0].old_logps[..], &answers[1].old_logps[..]), (&[1.0, 2.0][..], &[17.0, 18.0][..]));
        assert_eq!(shapes.batches(&answers).unwrap()[0].old_logps[..4], [0.0, 1.0, 2.0, 0.0]);
    }

    #[test]
    fn what_an_environment_said_is_no_target() {
        let answer = Sampled {
            ids: vec![1, 2, 3, 4, 5, 6, 7],
            prompt: 2,
            advantage: 1.0,
            logps: vec![-1.0, 0.0, 0.0, -2.0, -3.0],
            old_logps: Vec::new(),
            given: vec![(1, 3)],
            left_out: false,
        };
        let batch = &Shapes::new((1, 1), 16).batches(&[answer]).unwrap()[0];
        assert_eq!(batch.targets[..7], [IGNORE, 3, IGNORE, IGNORE, 6, 7, IGNORE]);
        assert_eq!(batch.sampling_logps[..7], [0.0, -1.0, 0.0, 0.0, -2.0, -3.0, 0.0]);
        assert_eq!(batch.input_ids[..7], [1, 2, 3, 4, 5, 6, 7]);
    }
}
