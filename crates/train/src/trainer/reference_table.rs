//! Log-probabilities of the reference for all documents of a run, computed before training (`precompute_ref_log_probs`) and
//! kept for later runs in the cache of encoded rows. They are known by what a document holds, so that any layout of rows
//! finds them. Knows no loss.

use std::collections::BTreeMap;
use std::ops::Range;

use data::{Batch, IGNORE, Placed};
use serde::{Deserialize, Serialize};

/// Log-probabilities of the trained tokens of documents, by the digest of a document.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct ReferenceTable(BTreeMap<String, Vec<f32>>);

impl ReferenceTable {
    /// Takes up the documents of a batch, whose targets have these log-probabilities.
    pub(crate) fn add(&mut self, batch: &Batch, logps: &[f32]) {
        for mark in &batch.marks {
            let targets = targets(batch, range(mark)).map(|at| logps[at]).collect();
            self.0.insert(key(batch, mark), targets);
        }
    }

    /// The log-probabilities of the targets of a batch, 0 where there is no target; None if one of its documents is not
    /// known.
    pub(crate) fn of(&self, batch: &Batch) -> Option<Vec<f32>> {
        let mut logps = vec![0.0; batch.targets.len()];
        for mark in &batch.marks {
            let known = self.0.get(&key(batch, mark))?;
            targets(batch, range(mark)).zip(known).for_each(|(at, logp)| logps[at] = *logp);
        }
        Some(logps)
    }
}

fn range(mark: &Placed) -> Range<usize> {
    mark.begin..mark.begin + mark.tokens
}

/// The places of the targets of a document, which has this range of the vectors of its batch.
pub(super) fn targets(batch: &Batch, document: Range<usize>) -> impl Iterator<Item = usize> {
    document.filter(|at| batch.targets[*at] != IGNORE)
}

/// The identity of a document: the digest of its tokens and its targets.
pub(super) fn identity(batch: &Batch, document: Range<usize>) -> [u8; 32] {
    let numbers = [&batch.input_ids[document.clone()], &batch.targets[document]].concat();
    let bytes: Vec<u8> = numbers.into_iter().flat_map(i32::to_le_bytes).collect();
    *blake3::hash(&bytes).as_bytes()
}

/// The identity of a document with a mark, in hexadecimal.
fn key(batch: &Batch, mark: &Placed) -> String {
    blake3::Hash::from_bytes(identity(batch, range(mark))).to_hex().to_string()
}
