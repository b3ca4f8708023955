//! The metadata of a cache entry, as text: what it was made from, what became of the rows, and its segments.
//!
//! Two lines: the digest of the second line, and JSON. Knows no folder.

use serde::{Deserialize, Serialize};

use crate::summary::DatasetSummary;

/// A segment's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SegmentFile {
    pub name: String,
    pub bytes: u64,
    /// BLAKE3 digest of the file's content.
    pub digest: String,
}

/// The file name of segment `n`.
pub(super) fn segment_name(n: usize) -> String {
    format!("{n}.rows")
}

/// True for the plain name of a segment, which cannot lead to another folder.
pub(super) fn is_segment_name(name: &str) -> bool {
    let number = name.strip_suffix(".rows").and_then(|number| number.parse::<u32>().ok());
    number.is_some_and(|number| segment_name(number as usize) == name)
}

/// The content of an entry.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Entry {
    /// Everything that the rows depend on, as text.
    pub key: String,
    pub summary: DatasetSummary,
    pub segments: Vec<SegmentFile>,
    /// Values that templates read from the clock: pairs of format and reading.
    pub clock: Vec<(String, String)>,
    /// True if a list of the files of images stands next to it.
    #[serde(default)]
    pub has_images: bool,
}

impl Entry {
    pub(super) fn to_text(&self) -> String {
        let body = serde_json::to_string(self).expect("an entry is always representable as JSON");
        format!("{}\n{body}\n", blake3::hash(body.as_bytes()).to_hex())
    }

    /// `None`: the text is not what was written.
    pub(super) fn of_text(text: &str) -> Option<Entry> {
        let (digest, body) = text.strip_suffix('\n')?.split_once('\n')?;
        if blake3::hash(body.as_bytes()).to_hex().as_str() != digest {
            return None;
        }
        serde_json::from_str(body)
            .ok()
            .filter(|entry: &Entry| entry.segments.iter().all(|of| is_segment_name(&of.name)))
    }
}
