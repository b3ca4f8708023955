//! The prompt of two texts, or of two lists of messages, that begin alike.
//!
//! Knows no templates and no tokens.

use std::ops::Range;

use super::Split;

/// The text that opens a turn in a transcript of the form of Anthropic's HH data.
const ASKED: &str = "\n\nHuman:";
const ANSWERED: &str = "\n\nAssistant:";

/// The elements that both lists begin with, of which each keeps at least its last one.
pub(super) fn common<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    let most = a.len().min(b.len());
    let differs = a.iter().zip(b).position(|(a, b)| a != b);
    differs.unwrap_or(most.saturating_sub(1))
}

/// Bytes of the prompt of two texts. A blank before their difference goes to the answers, as models write it. Of
/// transcripts the prompt ends where the assistant begins to speak, if `split` goes by messages.
pub(super) fn prompt_of(chosen: &str, rejected: &str, split: Split) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (chosen.chars().collect(), rejected.chars().collect());
    let mut count = common(&a, &b);
    let is_difference = a.get(count) != b.get(count) && count < a.len().min(b.len());
    if is_difference && count > 0 && a[count - 1] == ' ' {
        count -= 1;
    }
    let prompt = &chosen[..a[..count].iter().map(|c| c.len_utf8()).sum()];
    match split {
        Split::Spans if is_transcript(chosen) && is_transcript(rejected) => {
            prompt.rfind(ANSWERED).map_or(prompt.len(), |at| at + ANSWERED.len())
        }
        _ => prompt.len(),
    }
}

/// Returns true if a text is a transcript of `Human:` and `Assistant:`.
pub(super) fn is_transcript(text: &str) -> bool {
    let is_opened = text.starts_with(ASKED) || text.starts_with(ASKED.trim_start());
    is_opened && text.contains(ANSWERED)
}

/// The bytes of an answer in a transcript that the assistant says. It is the first to speak.
pub(super) fn said(answer: &str) -> Vec<Range<usize>> {
    let mut said = Vec::new();
    let mut begin = Some(0);
    while let Some(from) = begin {
        let end = answer[from..].find(ASKED).map(|at| from + at);
        said.push(from..end.unwrap_or(answer.len()));
        begin = end.and_then(|end| answer[end..].find(ANSWERED).map(|at| end + at + ANSWERED.len()));
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_part_where_they_differ_and_a_blank_goes_to_the_answers() {
        let of = |a: &str, b: &str| a[..prompt_of(a, b, Split::Spans)].to_owned();
        assert_eq!(of("2+2? Four", "2+2? five"), "2+2?");
        assert_eq!(of("2+2?\nFour", "2+2?\nfive"), "2+2?\n");
        // The last character of the shorter one stays an answer.
        assert_eq!(of("Go on. Yes", "Go on. Yes, gladly"), "Go on. Ye");
        assert_eq!(of("same", "same"), "sam");
        // Nothing in common, and a blank at the end.
        assert_eq!(of("yes ", "no"), "");
        assert_eq!(of("für a", "für ä"), "für");
        assert_eq!(of("", "a"), "");
    }

    #[test]
    fn a_transcript_is_split_where_the_assistant_begins_to_speak() {
        let chosen = "\n\nHuman: hi\n\nAssistant: I am well";
        let rejected = "\n\nHuman: hi\n\nAssistant: I am ill";
        let of = |split| &chosen[..prompt_of(chosen, rejected, split)];
        assert_eq!(of(Split::Spans), "\n\nHuman: hi\n\nAssistant:");
        assert_eq!(of(Split::CommonPrefix), "\n\nHuman: hi\n\nAssistant: I am");
        let answer = " a\n\nHuman: q\n\nAssistant: b";
        let texts: Vec<&str> = said(answer).into_iter().map(|range| &answer[range]).collect();
        assert_eq!(texts, [" a", " b"]);
        assert!(!is_transcript("Human: one line. Assistant: no"));
    }
}
