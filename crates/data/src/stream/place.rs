//! Places in a stream, as checkpoints keep them.

use serde::{Deserialize, Serialize};

/// The row of a set that is taken next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SetPlace {
    /// Passes over the set that are done.
    pub epoch: u64,
    /// Number of the file in the order of the pass.
    pub file: u64,
    /// Rows of the file that are taken.
    pub row: u64,
}

/// The place in all sets at which a window begins.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StreamPlace {
    /// Number of the windows before this place.
    pub window: u64,
    /// Rows of all sets before it.
    pub drawn: u64,
    pub sets: Vec<SetPlace>,
}

impl StreamPlace {
    /// The beginning of a stream of some sets.
    pub(crate) fn begin(sets: usize) -> StreamPlace {
        StreamPlace { window: 0, drawn: 0, sets: vec![SetPlace::default(); sets] }
    }

    /// The largest of its numbers.
    pub(crate) fn largest(&self) -> u64 {
        let of_sets = self.sets.iter().map(|set| set.epoch.max(set.file).max(set.row));
        of_sets.fold(self.window.max(self.drawn), u64::max)
    }
}
