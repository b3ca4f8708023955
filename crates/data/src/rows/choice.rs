//! The choice of the files of a split, or the reason why there is none.

/// The split that is meant where none is named.
pub const TRAIN: &str = "train";

/// The files that were chosen among the names of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// In the order in which they are read.
    pub names: Vec<String>,
    /// Data files that belong to no split, although others belong to the one that is wanted.
    pub left_out: Vec<String>,
}

/// The reason why nothing could be chosen, with a hint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoChoice {
    pub problem: String,
    pub hint: String,
}

pub(super) fn no(problem: impl Into<String>, hint: impl Into<String>) -> NoChoice {
    NoChoice { problem: problem.into(), hint: hint.into() }
}

/// The distinct words of a list, for a message.
pub(super) fn listed<'a>(words: impl Iterator<Item = &'a str>) -> String {
    let mut words: Vec<&str> = words.collect();
    words.sort_unstable();
    words.dedup();
    if words.is_empty() { "none".to_owned() } else { words.join(", ") }
}
