//! The shapes in which micro-batches of sampled answers are compiled: their rows are padded to one of a few lengths.

use program::{Documents, Variant};

use crate::config::Config;

/// Answers that a device samples at a time, at most.
pub(crate) const AT_ONCE: usize = 512;

/// Row lengths, as parts of the longest, so that few shapes are compiled.
const PARTS: [f64; 3] = [0.25, 0.5, 1.0];

/// Rows have a multiple of this many tokens.
pub(crate) const UNIT: usize = 16;

/// The shapes in which micro-batches of sampled answers come.
pub(crate) struct Shapes {
    /// The number of answers that a micro-batch has.
    pub answers: usize,
    /// Micro-batches that devices take at once, all of one shape.
    pub ranks: usize,
    /// Tokens of a row, in rising order.
    pub lengths: Vec<usize>,
    /// True if answers to one prompt follow it in one row.
    pub share: bool,
}

/// The extents that decide the shapes.
#[derive(Clone, Copy)]
pub(crate) struct Most {
    /// Tokens of a prompt and of an answer, and of both.
    pub prompt: usize,
    pub answer: usize,
    pub both: usize,
    /// The number of answers that each prompt gets.
    pub group: usize,
}

impl Most {
    /// Tokens of consecutive answers that share their prompts, at most.
    fn shared(&self, answers: usize) -> usize {
        let prompts = match () {
            () if answers.is_multiple_of(self.group) => answers / self.group,
            () if self.group.is_multiple_of(answers) => 1,
            () => (answers - 1).div_ceil(self.group) + 1,
        };
        // Each answer repeats the last token of its prompt.
        (prompts * self.prompt + answers * (self.answer + 1)).min(answers * self.both)
    }

    /// The share of the pairs of a token and one up to it that see each other, where the answers of a full row share their prompts.
    pub fn seen(&self, answers: usize) -> f64 {
        let (tokens, prompt, answer) = (self.shared(answers) as f64, self.prompt as f64, self.answer as f64);
        let prompts = answers.div_ceil(self.group) as f64;
        let seen = prompts * prompt * prompt / 2.0 + answers as f64 * (answer * prompt + answer * answer / 2.0);
        (seen / (tokens * tokens / 2.0)).min(1.0)
    }
}

impl Shapes {
    /// Shapes of micro-batches of a number of answers, for a number of ranks.
    pub fn new((answers, ranks): (usize, usize), most: Most, share: bool) -> Shapes {
        let longest = if share { most.shared(answers) } else { most.both };
        let mut lengths: Vec<usize> =
            PARTS.iter().map(|part| ((longest as f64 * part).ceil() as usize).next_multiple_of(UNIT)).collect();
        lengths.dedup();
        Shapes { answers, ranks, lengths, share }
    }

    /// Returns the shapes, those of long rows last.
    pub fn variants(&self) -> Vec<Variant> {
        let (batch, documents) = if self.share { (1, Documents::Packed) } else { (self.answers, Documents::Rows) };
        self.lengths
            .iter()
            .map(|seq_len| Variant { batch, seq_len: *seq_len, documents, patches: 0, logits: 0 })
            .collect()
    }
}

/// Answers of a step on all devices.
pub(crate) fn answers_of_step(config: &Config) -> usize {
    config.device_rows() as usize * config.replicas()
}

/// The largest shape of micro-batches whose answers share their prompts, of prompts and answers of these lengths, and the share
/// of its pairs of tokens that see each other.
pub(crate) fn shared_shape(config: &Config, prompt: usize, answer: usize) -> (Variant, f64) {
    let group = config.reinforcement.num_generations as usize;
    let answers = config.training.per_device_train_batch_size as usize;
    let most = Most { prompt, answer, both: prompt + answer, group };
    let variants = Shapes::new((answers, 1), most, true).variants();
    (*variants.last().expect("there are several lengths"), most.seen(answers))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_row_has_room_for_the_longest_answers() {
        let most = |group: usize| Most { prompt: 100, answer: 20, both: 120, group };
        assert_eq!(most(8).shared(8), 100 + 8 * 21);
        assert_eq!(most(8).shared(4), 100 + 4 * 21);
        assert_eq!(most(4).shared(8), 200 + 8 * 21);
        // Three in a row of groups of four meet two prompts.
        assert_eq!(most(4).shared(3), 200 + 3 * 21);
        assert_eq!(most(1).shared(2), 240);
        assert!((most(1).seen(1) - 1.0).abs() < 0.02 && most(8).seen(8) < 0.8);
    }
}
