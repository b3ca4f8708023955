//! The number of tokens of a micro-batch whose logits are computed: those with a target are often the smaller part. Found by
//! the first batches.

use std::collections::BTreeMap;
use std::sync::Arc;

use data::{Batch, DocumentSet, LoaderSpec, Stream};

use crate::error::{Result, TrainError};
use crate::input::first_batches::{COUNTED_BATCHES, first_batches};

/// Tokens of the batches that are looked at, at most; those of a few batches in any case.
const COUNTED_TOKENS: usize = 1 << 24;
/// Batches that are looked at, at most.
const MOST_BATCHES: usize = 1024;
/// Tokens beyond those of the first batches, as a share of them.
const MARGIN: f64 = 0.03;
/// The share of all tokens above which the logits of all are computed.
const WORTHWHILE: f64 = 0.9;

/// The note on a batch with more trained tokens than the plan has room for.
pub(super) const OVERFLOW: &str = "a batch has more trained tokens than the first ones: a program with the logits of all was \
    compiled for it, which is in no plan (`trained_logits_only: false` computes those of all from the start)";

/// Documents, the stream that they come from, and their layout in batches.
type Set<'a> = (&'a DocumentSet, Option<&'a Arc<Stream>>, &'a LoaderSpec);

/// Returns, by tokens of a row, the tokens whose logits are computed; none for lengths of which all or nearly all have a
/// target. `sets`: the documents of training and those that are held out, with their layout; `tokens` of a batch.
pub(super) fn of(sets: [Set<'_>; 2], tokens: usize) -> Result<Vec<(usize, usize)>> {
    let count = (COUNTED_TOKENS / tokens.max(1)).clamp(COUNTED_BATCHES, MOST_BATCHES);
    let counted = |batch: Batch| (batch.seq_len, batch.batch * batch.seq_len, batch.trained_tokens());
    let mut batches = Vec::new();
    for (documents, stream, spec) in sets {
        if stream.is_some() || !documents.is_empty() {
            let first = first_batches(documents, stream, spec)?.take(count);
            let counts = first.map(|batch| batch.map(counted).map_err(TrainError::Data));
            batches.extend(counts.collect::<Result<Vec<_>>>()?);
        }
    }
    Ok(rooms(&batches))
}

/// The same from the tokens of a row, of the batch, and those with a target.
fn rooms(batches: &[(usize, usize, usize)]) -> Vec<(usize, usize)> {
    let mut most: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
    for (length, tokens, targets) in batches {
        let of = most.entry(*length).or_insert((*tokens, 0));
        of.1 = of.1.max(*targets);
    }
    let room = |(length, (tokens, targets)): (usize, (usize, usize))| {
        let unit = (tokens / 32).next_multiple_of(16).max(16);
        let room = ((targets as f64 * (1.0 + MARGIN)).ceil() as usize).max(1).next_multiple_of(unit);
        ((room as f64) < WORTHWHILE * tokens as f64).then_some((length, room))
    };
    most.into_iter().filter_map(room).collect()
}

/// Returns the note on logits that are not computed. `rooms`: as of [`of`]; `rows`: those of a micro-batch.
pub(super) fn note(rooms: &[(usize, usize)], rows: usize) -> Option<String> {
    let shares = rooms.iter().map(|(length, logits)| *logits as f64 / (rows * length) as f64);
    let share = shares.max_by(f64::total_cmp)?;
    Some(format!(
        "logits are computed for the tokens that are trained, with room for up to {:.0} % of all (`trained_logits_only: false` \
         computes those of all)",
        100.0 * share
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rooms_hold_the_targets_of_the_first_batches_and_some_more() {
        assert_eq!(rooms(&[(2048, 16384, 5000), (2048, 16384, 6200)]), [(2048, 6656)]);
        assert_eq!(rooms(&[(64, 128, 10), (128, 256, 250), (256, 512, 0)]), [(64, 16), (256, 16)]);
        assert_eq!(rooms(&[(2048, 16384, 15000)]), []);
        assert_eq!(rooms(&[]), []);
    }
}
