//! Sampled answers as micro-batches, padded to one of a few lengths: a row each, or one after another in one row, where
//! answers to one prompt share it. Knows no rewards.

use data::{Batch, IGNORE, Mark, Placed};

use super::rollouts::Sampled;
use crate::error::{Result, TrainError};
use crate::plan::sampled_shapes::{Shapes, UNIT};

impl Shapes {
    /// Returns micro-batches of the answers, in their order.
    pub fn batches(&self, answers: &[Sampled]) -> Result<Vec<Batch>> {
        let round = |answers: &[Sampled]| {
            let all: Vec<Layout> = answers.chunks(self.answers).map(|answers| self.layout(answers)).collect();
            let longest = all.iter().map(|layout| layout.longest).max().unwrap_or(1);
            let length = self.lengths.iter().copied().find(|length| *length >= longest);
            let length = length.unwrap_or(longest.next_multiple_of(UNIT));
            let batches = answers.chunks(self.answers).zip(&all);
            batches.map(|(answers, layout)| layout.batch(answers, length)).collect::<Result<Vec<_>>>()
        };
        Ok(answers.chunks(self.answers * self.ranks).map(round).collect::<Result<Vec<_>>>()?.concat())
    }

    /// The places of the answers of a micro-batch.
    fn layout(&self, answers: &[Sampled]) -> Layout {
        let mut layout = Layout { rows: if self.share { 1 } else { answers.len() }, ..Layout::default() };
        for (index, of) in answers.iter().enumerate() {
            if !self.share {
                layout.longest = layout.longest.max(of.ids.len());
                layout.places.push(Place { row: index, at: 0, document: 0, own: 0, common: 0 });
                continue;
            }
            let (at, prompt) = (layout.longest, &of.ids[..of.prompt]);
            let is_same = |other: &Sampled| prompt.len() > 1 && other.ids[..other.prompt] == *prompt;
            let before = answers[..index].last().filter(|before| is_same(before));
            let has_next = answers.get(index + 1).is_some_and(is_same);
            // The last token of the prompt is repeated, to predict the first of the answer.
            let own = if before.is_some() || has_next { of.ids.len() - of.prompt + 1 } else { 0 };
            let (document, common) = match (before, layout.places.last()) {
                (Some(_), Some(last)) => (last.document, of.prompt - 1),
                _ => (at, 0),
            };
            layout.places.push(Place { row: 0, at, document, own, common });
            layout.longest += of.ids.len() - common;
        }
        layout
    }

    /// Gives the answers the log-probabilities of the targets of their micro-batches.
    pub fn take_logps(&self, answers: &mut [Sampled], batches: &[Batch], logps: &[Vec<f32>]) {
        for ((answers, batch), logps) in answers.chunks_mut(self.answers).zip(batches).zip(logps) {
            let layout = self.layout(answers);
            for (of, place) in answers.iter_mut().zip(&layout.places) {
                // A target stands at the token before.
                let first = place.row * batch.seq_len + place.at + of.prompt - place.common - 1;
                of.old_logps = logps[first..first + of.ids.len() - of.prompt].to_vec();
            }
        }
    }
}

/// The places of the answers of a micro-batch.
#[derive(Default)]
struct Layout {
    rows: usize,
    /// Tokens of the longest row, without padding.
    longest: usize,
    places: Vec<Place>,
}

/// The place of an answer.
struct Place {
    row: usize,
    /// The first of its tokens in the row, and that of its prompt.
    at: usize,
    document: usize,
    /// Tokens at its end that other answers to its prompt do not see; 0 where there are none.
    own: usize,
    /// Tokens of its prompt that stand before other answers.
    common: usize,
}

impl Layout {
    /// The micro-batch of the answers in rows of `length` tokens.
    fn batch(&self, answers: &[Sampled], length: usize) -> Result<Batch> {
        let size = self.rows * length;
        let (mut ids, mut labels) = (vec![0; size], vec![IGNORE; size]);
        let (mut sampling, mut old) = (vec![0.0; size], vec![0.0; size]);
        let mut positions: Vec<i32> = (0..size).map(|at| (at % length) as i32).collect();
        let (mut marks, mut used) = (Vec::new(), vec![1; self.rows]);
        for (of, place) in answers.iter().zip(&self.places) {
            let begin = place.row * length + place.at;
            let (answer, end) = (begin + of.prompt - place.common, begin + of.ids.len() - place.common);
            ids[begin..end].copy_from_slice(&of.ids[place.common..]);
            positions[begin..end].iter_mut().zip(place.common as i32..).for_each(|(to, position)| *to = position);
            if !of.left_out {
                labels[answer..end].copy_from_slice(&of.ids[of.prompt..]);
                // What an environment said is read, and not learned.
                of.given.iter().for_each(|(first, last)| labels[answer + first..answer + last].fill(IGNORE));
            }
            sampling[answer..end].copy_from_slice(&of.logps);
            old[answer..answer + of.old_logps.len()].copy_from_slice(&of.old_logps);
            let mark = Mark::Sample { advantage: of.advantage, own: place.own };
            marks.push(Placed { begin, tokens: end - begin, mark });
            used[place.row] = end - place.row * length;
        }
        let batch =
            Batch::from_labels(self.rows, length, ids, &labels, Some(positions), None).map_err(TrainError::Data)?;
        let mut batch = Batch { marks, ..batch.padded_from(&used) };
        for (of, place) in batch.marks.iter().zip(&self.places) {
            batch.document_start[of.begin..of.begin + of.tokens].fill(place.document as i32);
        }
        let knows_old = answers.iter().any(|of| !of.old_logps.is_empty());
        let old_logps = if knows_old { batch.at_targets(&old) } else { Vec::new() };
        let sampling_logps = batch.at_targets(&sampling);
        Ok(Batch { old_logps, sampling_logps, ..batch })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::sampled_shapes::Most;

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
        let most = Most { prompt: 20, answer: 20, both: 40, group: 2 };
        let shapes = Shapes::new((2, 1), most, false);
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
        let most = Most { prompt: 8, answer: 8, both: 16, group: 1 };
        let batch = &Shapes::new((1, 1), most, false).batches(&[answer]).unwrap()[0];
        assert_eq!(batch.targets[..7], [IGNORE, 3, IGNORE, IGNORE, 6, 7, IGNORE]);
        assert_eq!(batch.sampling_logps[..7], [0.0, -1.0, 0.0, 0.0, -2.0, -3.0, 0.0]);
        assert_eq!(batch.input_ids[..7], [1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn answers_to_one_prompt_follow_it_in_one_row() {
        let of = |prompt: &[i32], answer: &[i32]| Sampled {
            ids: [prompt, answer].concat(),
            prompt: prompt.len(),
            advantage: answer.len() as f32,
            logps: answer.iter().map(|id| -*id as f32).collect(),
            old_logps: Vec::new(),
            given: Vec::new(),
            left_out: false,
        };
        // Two answers to one prompt, one to another, and one to a prompt of a token, which nothing can stand before.
        let mut answers =
            vec![of(&[5, 6, 7], &[10, 11]), of(&[5, 6, 7], &[12]), of(&[5, 6], &[13, 14]), of(&[9], &[15])];
        let most = Most { prompt: 3, answer: 2, both: 5, group: 2 };
        let shapes = Shapes::new((4, 1), most, true);
        assert_eq!(shapes.variants().last().map(|of| (of.batch, of.seq_len)), Some((1, 32)));
        let batches = shapes.batches(&answers).unwrap();
        let [batch] = &batches[..] else { panic!("one micro-batch") };
        assert_eq!((batch.batch, batch.seq_len), (1, 16));
        assert_eq!(batch.input_ids[..13], [5, 6, 7, 10, 11, 7, 12, 5, 6, 13, 14, 9, 15]);
        assert_eq!(batch.position_ids[..13], [0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 3, 0, 1]);
        assert_eq!(batch.document_start[..13], [0, 0, 0, 0, 0, 0, 0, 7, 7, 7, 7, 11, 11]);
        let none = IGNORE;
        assert_eq!(batch.targets[..13], [none, none, 10, 11, none, 12, none, none, 13, 14, none, 15, none]);
        assert_eq!(batch.sampling_logps[2..6], [-10.0, -11.0, 0.0, -12.0]);
        let own: Vec<usize> = batch
            .marks
            .iter()
            .map(|of| match of.mark {
                Mark::Sample { own, .. } => own,
                _ => unreachable!("all are samples"),
            })
            .collect();
        assert_eq!(own, [3, 2, 0, 0]);
        assert!(batch.present[..13].iter().all(|of| *of == 1.0) && batch.present[13..].iter().all(|of| *of == 0.0));
        let logps: Vec<f32> = (0..16).map(|at| at as f32).collect();
        shapes.take_logps(&mut answers, &batches, &[logps]);
        let old: Vec<&[f32]> = answers.iter().map(|of| &of.old_logps[..]).collect();
        assert_eq!(old, [&[2.0, 3.0][..], &[5.0], &[8.0, 9.0], &[11.0]]);
    }
}
