//! Retired words: home-made terms for which the field has a usual one. A thing should have one name, and the usual one.
//!
//! Looks for whole words in every line of code, comments and pages. Knows the list, no grammar: a word that also has a
//! plain meaning is listed with the folders in which it was a term.

use super::functions::words;
use super::{File, Finding};

/// A word or phrase, in lower case.
struct Retired {
    word: &'static str,
    instead: &'static str,
    /// The folders in which it was a term; empty: everywhere.
    folders: &'static [&'static str],
    /// A plain word that is only out of use here: noted, not an error.
    soft: bool,
}

const fn retired(word: &'static str, instead: &'static str) -> Retired {
    Retired { word, instead, folders: &[], soft: false }
}

const fn retired_in(folders: &'static [&'static str], word: &'static str, instead: &'static str) -> Retired {
    Retired { word, instead, folders, soft: false }
}

const fn discouraged(word: &'static str, instead: &'static str) -> Retired {
    Retired { word, instead, folders: &[], soft: true }
}

/// The folders in which work is queued.
const QUEUES: &[&str] = &["crates/program/", "crates/compiler/", "crates/cpu/src/session", "crates/gpu/src/prepare/"];

/// The folders in which memory is planned.
const PLANS: &[&str] = &["crates/program/", "crates/compiler/"];

const RETIRED: &[Retired] = &[
    retired("kept rows", "cached rows"),
    retired("parted by", "separated by"),
    retired("put_off", "defer"),
    retired("taken_back", "what is done: savings are undone"),
    retired("given_up", "what is done: recomputed, chunked or offloaded"),
    retired_in(QUEUES, "lane", "stream"),
    retired_in(QUEUES, "lanes", "streams"),
    retired_in(PLANS, "trip", "offload or transfer"),
    retired_in(PLANS, "trips", "offloads or transfers"),
    retired_in(PLANS, "deposit", "store"),
    retired_in(PLANS, "deposits", "stores"),
    retired("computed again", "recomputed"),
    retired("computes again", "recomputes"),
    retired("computing again", "recomputation"),
    retired("computes it again", "recomputes it"),
    retired("anew", "again"),
    retired("beside", "next to, besides, together with or concurrently with"),
    retired("right behind", "right after"),
    discouraged("at hand", "available"),
    discouraged("told", "reported"),
    discouraged("asked for", "requested"),
];

pub(super) const WATCHED: &[&str] = &[".rs", ".cu", ".cuh", ".py", ".sh", ".md"];

/// This list, and texts of others.
pub(super) const EXEMPT: &[&str] = &["xtask/src/tidy/retired.rs", "examples/stories/", "tests/golden/"];

/// Checks every line of one file.
pub fn check(file: &File) -> Vec<Finding> {
    let watched = WATCHED.iter().any(|ending| file.path.ends_with(ending));
    if !watched || EXEMPT.iter().any(|start| file.path.starts_with(start)) {
        return Vec::new();
    }
    let here = |of: &&Retired| of.folders.is_empty() || of.folders.iter().any(|folder| file.path.starts_with(folder));
    let list: Vec<&Retired> = RETIRED.iter().filter(here).collect();
    let mut found = Vec::new();
    for (number, line) in file.text.lines().enumerate() {
        let line = line.to_lowercase();
        for of in list.iter().filter(|of| words(&line, of.word).next().is_some()) {
            let (place, message) = (format!("{}:{}", file.path, number + 1), format!("write {}", of.instead));
            found.push(match of.soft {
                true => Finding::soft(place, format!("`{}` is out of use here: {message}", of.word)),
                false => Finding::hard(place, format!("`{}` is retired: {message}", of.word)),
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(path: &str, text: &str) -> Vec<String> {
        check(&File { path: path.into(), text: text.into() }).iter().map(Finding::to_string).collect()
    }

    #[test]
    fn retired_words_are_found_in_code_comments_and_pages() {
        assert!(messages("docs/a.md", "Norms are computed again.\n")[0].starts_with("docs/a.md:1"));
        assert!(messages("crates/a/src/b.rs", "//! Told to no one.\n")[0].starts_with("note: "));
        assert!(messages("docs/a.md", "\nthe kept rows\n")[0].starts_with("docs/a.md:2: `kept rows` is retired"));
        assert!(messages("crates/a/src/b.rs", "fn put_off() {}\n")[0].contains("write defer"));
        assert!(messages("crates/a/src/b.rs", "fn besides() {} // untold\n").is_empty());
        assert!(messages("examples/stories/a.md", "once more, anew\n").is_empty());
    }

    #[test]
    fn a_word_with_a_plain_meaning_is_retired_only_where_it_was_a_term() {
        assert_eq!(messages("crates/program/src/order.rs", "let lane = 0;\n").len(), 1);
        assert!(messages("crates/ops/src/vector.rs", "let lane = 0;\n").is_empty());
    }
}
