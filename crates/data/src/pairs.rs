//! Inputs of a loss of pairs, made from a micro-batch: which side of which pair each token belongs to. Values of pairs lie in the
//! first entries of a tensor that is shaped like the batch. Knows no loss.

use std::ops::Range;

use crate::batch::{Batch, IGNORE};
use crate::document::Mark;

/// The tokens of both sides of each pair, chosen first, as ranges of the vectors of a batch.
fn sides(batch: &Batch) -> impl Iterator<Item = [Range<usize>; 2]> + '_ {
    batch.marks.iter().filter_map(|of| match of.mark {
        Mark::Pair { chosen, .. } => {
            let (split, end) = (of.begin + chosen, of.begin + of.tokens);
            Some([of.begin..split, split..end])
        }
        Mark::Answer { .. } => None,
    })
}

/// For each token 2p in the chosen side of pair p, 2p + 1 in the rejected one, -1 elsewhere.
pub(crate) fn documents(batch: &Batch) -> Vec<i32> {
    let mut numbers = vec![-1; batch.batch * batch.seq_len];
    for (number, side) in sides(batch).flatten().enumerate() {
        numbers[side].fill(number as i32);
    }
    numbers
}

/// 1 in the first entries, one for each pair.
pub(crate) fn weights(batch: &Batch) -> Vec<f32> {
    let mut weights = vec![0.0; batch.batch * batch.seq_len];
    weights[..sides(batch).count()].fill(1.0);
    weights
}

/// 1 for the targets of each answer that lie within the length of the shorter answer of its pair.
pub(crate) fn common(batch: &Batch) -> Vec<f32> {
    let mut common = vec![0.0; batch.batch * batch.seq_len];
    for pair in sides(batch) {
        let targets = |side: &Range<usize>| side.clone().filter(|t| batch.targets[*t] != IGNORE);
        let shorter = pair.iter().map(|side| targets(side).count()).min().unwrap_or(0);
        for t in pair.iter().flat_map(|side| targets(side).take(shorter)) {
            common[t] = 1.0;
        }
    }
    common
}

/// The reference's log-probabilities; 0 where there is no reference.
pub(crate) fn reference(batch: &Batch) -> Vec<f32> {
    match batch.reference_logps.is_empty() {
        true => vec![0.0; batch.batch * batch.seq_len],
        false => batch.reference_logps.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_know_the_side_of_their_pair() {
        let labels = [-100, 5, 6, 7, -100, 5, -100, -100, -100, 1, 1, -100, -100, 1, 1, 1];
        let batch = Batch::from_labels(4, 4, vec![1; 16], &labels, None, None).unwrap().of_pairs();
        assert_eq!(documents(&batch), [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]);
        assert_eq!(weights(&batch)[..3], [1.0, 1.0, 0.0]);
        assert_eq!(common(&batch), [1., 0., 0., 0., 1., 0., 0., 0., 1., 1., 0., 0., 1., 1., 0., 0.]);
        assert_eq!(reference(&batch), [0.0; 16]);
    }

    #[test]
    fn tokens_outside_of_pairs_belong_to_none() {
        let batch = Batch::from_labels(1, 3, vec![1; 3], &[1; 3], None, None).unwrap();
        assert_eq!((documents(&batch), weights(&batch)), (vec![-1; 3], vec![0.0; 3]));
    }
}
