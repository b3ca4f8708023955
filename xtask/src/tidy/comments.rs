//! Doc comments that begin with a relative clause or say next to nothing, and words that are going out of use: a
//! ratchet over the whole tree.
//!
//! Counts each kind and compares the count with the number recorded here, which only falls. Knows first words and
//! lengths, no grammar.

use super::functions::words;
use super::retired::{EXEMPT, WATCHED};
use super::{File, Finding};

const PLACE: &str = "xtask/src/tidy/comments.rs";

/// Largest number of doc comments that begin with a relative clause ("What …", "In which …").
const RELATIVE_CLAUSES: usize = 0;

/// Largest number of doc comments of at most [`FEW_WORDS`] words that hold no formula or name of code.
const SHORT_COMMENTS: usize = 58;

/// Largest number of lines with a word of [`LEAVING`].
const LEAVING_WORDS: usize = 0;

const FEW_WORDS: usize = 4;

/// First words of a relative clause.
const RELATIVE: &str =
    "What Whatever Whether Where Wherever Which Whichever When Whenever Who Whose Why How Of Those As That";

/// First words of a relative clause with "which" or "what" as its second word.
const PREPOSITIONS: &str = "In On At By To From For With Under Into Over After Before Through";

/// Words that still stand in the tree, with the usual one. At a count of 0 a word moves to `retired.rs`.
const LEAVING: &[(&str, &str)] = &[
    ("behind", "after"),
    ("in front of", "before"),
    ("so many", "n, or the number's name"),
    ("as many as", "enough for, or equal to"),
    ("in turn", "alternately"),
    ("tells", "reports or distinguishes"),
    ("under way", "in flight"),
    ("nobody", "nothing or no one"),
    ("somebody", "a user"),
    ("anybody", "anything or anyone"),
    ("giver", "sender"),
    ("taker", "receiver"),
    ("seat", "rank"),
];

/// Checks all files together: more of a kind than recorded is an error, with every place noted; fewer is noted.
pub fn check(files: &[File]) -> Vec<Finding> {
    let (mut relative, mut short, mut leaving) = (Vec::new(), Vec::new(), Vec::new());
    let exempt = |file: &&File| EXEMPT.iter().chain([&PLACE]).any(|start| file.path.starts_with(start));
    for file in files.iter().filter(|file| !exempt(file)) {
        let place = |line: usize| format!("{}:{}", file.path, line + 1);
        for (line, text) in doc_comments(file) {
            if is_relative(&text) {
                relative.push(Finding::soft(place(line), "begins with a relative clause, not a noun or a verb"));
            }
            if is_short(&text) {
                short.push(Finding::soft(place(line), "says next to nothing: write a sentence or leave it out"));
            }
        }
        let watched = WATCHED.iter().any(|ending| file.path.ends_with(ending));
        for (line, text) in file.text.lines().enumerate().filter(|_| watched) {
            let text = text.to_lowercase();
            let found = LEAVING.iter().find(|(word, _)| words(&text, word).next().is_some());
            leaving
                .extend(found.map(|(word, usual)| Finding::soft(place(line), format!("for `{word}` write {usual}"))));
        }
    }
    let kinds = [
        ("RELATIVE_CLAUSES", RELATIVE_CLAUSES, relative),
        ("SHORT_COMMENTS", SHORT_COMMENTS, short),
        ("LEAVING_WORDS", LEAVING_WORDS, leaving),
    ];
    kinds.into_iter().flat_map(|(name, most, found)| compared(name, most, found)).collect()
}

fn compared(name: &str, most: usize, mut found: Vec<Finding>) -> Vec<Finding> {
    let count = found.len();
    if count > most {
        let message =
            format!("{count} where {name} allows {most}: `cargo xtask tidy` notes each; rewrite the new ones");
        found.push(Finding::hard(PLACE, message));
        return found;
    }
    let lower = || Finding::soft(PLACE, format!("{name} is {most}, but {count} are left: set it to {count}"));
    (count < most).then(lower).into_iter().collect()
}

/// The doc comments of a Rust file: the number of the first line (from 0), and the text as one line.
fn doc_comments(file: &File) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut before = "";
    for (number, line) in file.text.lines().enumerate().filter(|_| file.path.ends_with(".rs")) {
        let line = line.trim_start();
        let marker = ["///", "//!"].into_iter().find(|marker| line.starts_with(marker)).unwrap_or("");
        match found.last_mut() {
            _ if marker.is_empty() => {}
            Some((_, text)) if marker == before => *text = format!("{text} {}", line[3..].trim()),
            _ => found.push((number, line[3..].trim().to_owned())),
        }
        before = marker;
    }
    found
}

fn is_relative(text: &str) -> bool {
    let mut words = text.split_whitespace().map(|word| word.trim_end_matches([',', ':', ';']));
    let (first, second) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    let is_of = |list: &str, word: &str| list.split(' ').any(|known| known == word);
    is_of(RELATIVE, first) || is_of(PREPOSITIONS, first) && is_of("what which whom whose", second)
}

fn is_short(text: &str) -> bool {
    let plain = |word: &str| word.trim_end_matches(['.', ',', ';', ':']).chars().all(|c| c.is_alphabetic() || c == '-');
    text.split_whitespace().count() <= FEW_WORDS && text.split_whitespace().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_that_begins_with_a_relative_clause_is_counted() {
        for text in ["What a node reads.", "Whether it fits.", "In which blocks it is sent.", "Of a rank: its piece."] {
            assert!(is_relative(text), "{text}");
        }
        for text in ["Returns what a node reads.", "The rank which sends.", "True if it fits.", "In blocks."] {
            assert!(!is_relative(text), "{text}");
        }
    }

    #[test]
    fn a_comment_of_few_words_is_counted_unless_it_is_a_formula() {
        assert!(is_short("Bytes of the arena.") && is_short("All."));
        assert!(!is_short("Bytes of the whole arena.") && !is_short("y = silu(x)") && !is_short("f32 [n]"));
    }

    #[test]
    fn lines_of_one_comment_are_one_text() {
        let text = "//! Files.\n\n/// Where\n/// it is.\nfn a() {}\n    /// Its name.\n";
        let found = doc_comments(&File { path: "a.rs".into(), text: text.into() });
        assert_eq!(found, [(0, "Files.".into()), (2, "Where it is.".into()), (5, "Its name.".into())]);
    }

    #[test]
    fn a_count_may_only_fall() {
        let found = |count: usize| (0..count).map(|_| Finding::soft("a.rs:1", "")).collect::<Vec<_>>();
        let hard = |count: usize| compared("KIND", 2, found(count)).iter().filter(|finding| !finding.soft).count();
        assert_eq!((hard(3), hard(2), hard(1)), (1, 0, 0));
        assert!(compared("KIND", 2, found(2)).is_empty());
        assert!(compared("KIND", 2, found(1))[0].message.contains("set it to 1"));
    }
}
