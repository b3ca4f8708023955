//! Log-probabilities of the reference for all documents of a run, computed before training (`precompute_ref_log_probs`) and
//! kept for later runs in the cache of encoded rows. They are known by what a document holds, so that any layout of rows
//! finds them. Knows no loss.

use std::collections::BTreeMap;

use data::{Batch, IGNORE, Placed};
use serde::{Deserialize, Serialize};

use crate::files::digest;

/// Log-probabilities of the trained tokens of documents, by the digest of a document.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct ReferenceTable(BTreeMap<String, Vec<f32>>);

impl ReferenceTable {
    /// Takes up the documents of a batch, whose targets have these log-probabilities.
    pub(crate) fn add(&mut self, batch: &Batch, logps: &[f32]) {
        for mark in &batch.marks {
            let targets = places(batch, mark).map(|at| logps[at]).collect();
            self.0.insert(key(batch, mark), targets);
        }
    }

    /// The log-probabilities of the targets of a batch, 0 where there is no target; None if one of its documents is not
    /// known.
    pub(crate) fn of(&self, batch: &Batch) -> Option<Vec<f32>> {
        let mut logps = vec![0.0; batch.targets.len()];
        for mark in &batch.marks {
            let known = self.0.get(&key(batch, mark))?;
            places(batch, mark).zip(known).for_each(|(at, logp)| logps[at] = *logp);
        }
        Some(logps)
    }
}

/// The places of a document's targets in the vectors of its batch.
fn places<'a>(batch: &'a Batch, mark: &Placed) -> impl Iterator<Item = usize> + 'a {
    (mark.begin..mark.begin + mark.tokens).filter(|at| batch.targets[*at] != IGNORE)
}

/// The identity of a document: its tokens and its targets.
fn key(batch: &Batch, mark: &Placed) -> String {
    let range = mark.begin..mark.begin + mark.tokens;
    let numbers = [&batch.input_ids[range.clone()], &batch.targets[range]].concat();
    let bytes: Vec<u8> = numbers.into_iter().flat_map(i32::to_le_bytes).collect();
    digest::of_bytes(&bytes)
}
