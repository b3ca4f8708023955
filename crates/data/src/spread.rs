//! Documents of which each of several nodes holds some: node n reads the rows n, n + N, n + 2·N, … of every set. All nodes
//! know how long each document is and which row it is from, so they come to the same order, rows and number of steps by
//! themselves; the tokens are known to the node that holds them. Knows no connections.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::corpus::Corpus;
use crate::corpus::Spread;
use crate::error::DataError;
use crate::summary::{DatasetSummary, Summary};

/// A node's message to the others on the documents that it holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    pub summary: Summary,
    /// Digest of the documents' contents.
    pub digest: String,
    /// Tokens of each document here.
    #[serde(skip)]
    pub lengths: Vec<u32>,
}

impl Held {
    pub fn of(corpus: &Corpus, summary: &Summary) -> Held {
        let lengths = (0..corpus.len()).map(|i| corpus.length(i) as u32).collect();
        Held { summary: summary.clone(), digest: corpus.digest(), lengths }
    }

    /// Serializes it for another node.
    pub fn to_bytes(&self) -> Vec<u8> {
        let head = serde_json::to_vec(self).expect("a summary is always representable as JSON");
        let mut bytes = (head.len() as u64).to_le_bytes().to_vec();
        bytes.extend(head);
        bytes.extend(self.lengths.iter().flat_map(|length| length.to_le_bytes()));
        bytes
    }

    /// `None`: the bytes are not what was made of one.
    pub fn from_bytes(bytes: &[u8]) -> Option<Held> {
        let (length, rest) = bytes.split_first_chunk::<8>()?;
        let (head, lengths) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        let held: Held = serde_json::from_slice(head).ok()?;
        let (lengths, rest) = lengths.as_chunks::<4>();
        rest.is_empty().then(|| Held { lengths: lengths.iter().map(|of| u32::from_le_bytes(*of)).collect(), ..held })
    }
}

/// The row of its set that each document is from, by sets one after the other, from what became of the rows.
pub(crate) fn rows_of(summary: &Summary) -> Vec<u32> {
    let rows = summary.datasets.iter().flat_map(|set| (0u32..).zip(set.counts()));
    rows.flat_map(|(row, documents)| std::iter::repeat_n(row, documents as usize)).collect()
}

/// The documents of all parts as one corpus, in the order in which a single node would have read them, with what became of all
/// rows. `own` are those of part `number`. Errors: the parts are not of the same sets, or a set is unfit as a whole.
pub fn join(own: &Corpus, parts: &[Held], number: usize) -> Result<(Corpus, Summary), DataError> {
    let of = parts.len();
    let apart = || DataError::invalid("datasets", "the nodes did not read the same sets of rows");
    let sets = parts[number].summary.datasets.len();
    if parts.iter().any(|part| part.summary.datasets.len() != sets) || parts[number].lengths.len() != own.len() {
        return Err(apart());
    }
    let mut taken = vec![0usize; of];
    let (mut lengths, mut here, mut rows) = (Vec::new(), Vec::new(), Vec::new());
    let mut datasets = Vec::new();
    for set in 0..sets {
        let mut counts: Vec<_> = parts.iter().map(|part| part.summary.datasets[set].counts()).collect();
        let mut joined = DatasetSummary::named_like(&parts[number].summary.datasets[set]);
        for row in 0u32.. {
            let part = row as usize % of;
            let Some(count) = counts[part].next() else { break };
            joined.count_row(count as usize);
            for _ in 0..count {
                lengths.push(*parts[part].lengths.get(taken[part]).ok_or_else(apart)?);
                taken[part] += 1;
                here.push(if part == number { taken[part] as u32 } else { 0 });
                rows.push(row);
            }
        }
        if counts.iter_mut().any(|rest| rest.next().is_some()) {
            return Err(apart());
        }
        parts.iter().for_each(|part| joined.add(&part.summary.datasets[set]));
        joined.check()?;
        datasets.push(joined);
    }
    if taken.iter().zip(parts).any(|(taken, part)| *taken != part.lengths.len()) {
        return Err(apart());
    }
    let digests: Vec<&str> = parts.iter().map(|part| part.digest.as_str()).collect();
    let digest = blake3::hash(digests.join("\n").as_bytes()).to_hex().to_string();
    let spread = Spread { number, of, lengths, here, digest };
    Ok((own.spread(Arc::new(spread), rows), Summary { datasets }))
}
