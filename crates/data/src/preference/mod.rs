//! Preferences: rows that say which of two answers is better, or whether one is good.
//!
//! ```text
//! row ──columns──▶ what is asked and answered (`reading`) ──encode──▶ sides of ids and labels ──cut──▶ documents
//! ```
//!
//! A pair is one [`Document`]: its chosen side, followed by the rejected one, so that both are kept, dealt and packed
//! together. Knows no loss.

mod columns;
mod counts;
mod cut;
mod encode;
mod reading;
mod text;

pub(crate) use columns::{Found, found_pair, found_unpaired};
pub use columns::{PreferenceColumns, Question, UnpairedColumns};
pub use counts::PreferenceCounts;
pub(crate) use encode::{PairRows, UnpairedRows};

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::dataset::{DatasetKind, Refused};
use crate::document::IGNORE;
use crate::document::{Document, Mark};

/// Two answers to a prompt, each with it a sequence of its own. Labels are -100 outside of the answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Preference {
    pub chosen: Document,
    pub rejected: Document,
    /// By how much the chosen answer is better, where the data say so.
    pub margin: Option<f32>,
}

impl Preference {
    /// The pair that a document holds, if it holds one.
    pub fn of(document: Document) -> Option<Preference> {
        let Some(Mark::Pair { chosen, shared, margin }) = document.mark else { return None };
        let n = document.len();
        let mut rejected = document.slice(0, shared);
        rejected.append(document.slice(chosen, n));
        // Both sides show the images of their prompt.
        let of_side = if shared > 0 { document.images.len() } else { document.images.len() / 2 };
        rejected.images = document.images[document.images.len() - of_side..].to_vec();
        let images = document.images[..of_side].to_vec();
        Some(Preference { chosen: Document { images, ..document.slice(0, chosen) }, rejected, margin })
    }

    /// The pair as one document, in which the rejected side stands without the first `shared` tokens.
    pub fn into_document(self, shared: usize) -> Document {
        let Preference { chosen: mut document, rejected, margin } = self;
        document.mark = Some(Mark::Pair { chosen: document.len(), shared, margin });
        if shared == 0 {
            document.images.extend_from_slice(&rejected.images);
        }
        document.append(rejected.slice(shared, rejected.len()));
        document
    }
}

/// Tokens at the beginning that two sides can share: those that they have in common and of which nothing is trained, but for
/// the last, which each repeats to predict its own next token. None where they end before the images do.
fn common([chosen, rejected]: [&Document; 2]) -> usize {
    let is_untrained = |of: &Document, t: usize| of.labels[t] == IGNORE;
    let n = chosen.len().min(rejected.len());
    let is_common =
        |t: &usize| chosen.ids[*t] == rejected.ids[*t] && is_untrained(chosen, *t) && is_untrained(rejected, *t);
    let count = (0..n).take_while(is_common).count().saturating_sub(1);
    let holds_images = chosen.images == rejected.images && count >= chosen.images_end.max(rejected.images_end);
    if holds_images { count } else { 0 }
}

/// An answer to a prompt, and whether it is good. Labels are -100 outside of the answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Unpaired {
    /// The prompt, followed by the answer.
    pub document: Document,
    /// Tokens at its beginning that are the prompt's.
    pub prompt: usize,
    pub desirable: bool,
}

impl Unpaired {
    /// The answer that a document holds, if it holds one with a verdict.
    pub fn of(mut document: Document) -> Option<Unpaired> {
        let Some(Mark::Answer { prompt, desirable }) = document.mark.take() else { return None };
        Some(Unpaired { document, prompt, desirable })
    }

    /// The answer as a document.
    pub fn into_document(self) -> Document {
        let Unpaired { document, prompt, desirable } = self;
        Document { mark: Some(Mark::Answer { prompt, desirable }), ..document }
    }
}

/// The form of rows that a task trains on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Purpose {
    /// Text is trained on; preferences are refused.
    #[default]
    Documents,
    /// Pairs are compared by the log-probabilities of their answers; nothing else is taken.
    Pairs,
    /// Answers have a verdict each. A pair gives two.
    Answers,
    /// Pairs get a score a side. They are not cut: what is too long is dropped.
    Scores,
    /// Prompts to which answers are sampled. Nothing of a row is trained as it is.
    Prompts,
}

/// The rule for the place at which a prompt ends and its answer begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Split {
    /// At the borders of messages and texts. Of conversations the assistant's text and the token that ends it is
    /// trained, as for supervised training.
    #[default]
    Spans,
    /// After the tokens that the prompt alone has in common with each side, as TRL does it. Everything after them is
    /// trained, the template's text too.
    CommonPrefix,
}

/// The end that is cut off a side that is too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cut {
    /// Its end. A row whose prompt alone reaches the limit is dropped.
    #[default]
    End,
    /// Its beginning, be it the whole prompt.
    Beginning,
    /// Nothing is cut off: the row is dropped.
    Nothing,
}

/// Options that decide how rows of preferences become tokens.
#[derive(Clone, Debug, Default)]
pub struct PreferenceOptions {
    pub purpose: Purpose,
    pub split: Split,
    pub cut: Cut,
    /// Tokens that both sides of a pair may have together; 0: no limit. The longer side is cut first.
    pub pair_length: usize,
    /// True if both sides of a pair share the beginning that they have in common.
    pub share_prompts: bool,
}

impl PreferenceOptions {
    /// Tokens that a document may have, given those of a side; of pairs both sides are one.
    pub(crate) fn longest(&self, side: usize, kind: &DatasetKind) -> usize {
        match (kind, self.purpose, self.pair_length) {
            (DatasetKind::Preference(_), Purpose::Pairs | Purpose::Scores, 0) => 2 * side,
            (DatasetKind::Preference(_), Purpose::Pairs | Purpose::Scores, together) => together.min(2 * side),
            _ => side,
        }
    }
}

/// A kind with the columns that its rows show, and words on them where it was looked for any.
pub(crate) fn resolved(
    kind: &DatasetKind,
    rows: &[&Map<String, Value>],
) -> Result<(DatasetKind, Option<String>), Refused> {
    let columns = || {
        let names: BTreeSet<&str> = rows.iter().flat_map(|row| row.keys()).map(String::as_str).collect();
        names.into_iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
    };
    match kind {
        DatasetKind::Preference(hints) => match found_pair(rows, hints) {
            Some(found) => found.map(|of| (DatasetKind::Preference(of.columns), Some(of.words))),
            None => Err((
                format!("no pairs of a better and a worse answer are found in the columns {}", columns()),
                "set `chosen_field`, `rejected_field` and `prompt_field` to the names of the columns".to_owned(),
            )),
        },
        DatasetKind::Unpaired(hints) => match found_unpaired(rows, hints, true) {
            Some(of) => Ok((DatasetKind::Unpaired(of.columns), Some(of.words))),
            None => Err((
                format!("no answers with a verdict are found in the columns {}", columns()),
                "set `prompt_field`, `completion_field` and `label_field` to the names of the columns".to_owned(),
            )),
        },
        other => Ok((other.clone(), None)),
    }
}

/// Errors: rows of this kind are not for this purpose.
pub(crate) fn check_purpose(kind: &DatasetKind, purpose: Purpose) -> Result<(), Refused> {
    let (problem, hint) = match (kind, purpose) {
        (DatasetKind::Preference(of), Purpose::Documents) => {
            let chosen = of.chosen.as_deref().unwrap_or("messages");
            (
                format!("these are preference pairs (`{chosen}` and `{}`), and the task trains on text", of.rejected),
                "set `task: dpo`; to train on one of the answers, set `type` and name its column",
            )
        }
        (DatasetKind::Unpaired(of), Purpose::Documents) => (
            format!("these are answers with a verdict in `{}`, and the task trains on text", of.label),
            "set `task: kto`; to train on every answer, set `type: instruction` or `type: conversation`",
        ),
        (DatasetKind::Unpaired(of), Purpose::Pairs | Purpose::Scores) => (
            format!("these are answers with a verdict in `{}`, and the task compares pairs", of.label),
            "set `task: kto`, or give rows with a better and a worse answer",
        ),
        (DatasetKind::Preference(_), _)
        | (DatasetKind::Unpaired(_), Purpose::Answers)
        | (_, Purpose::Documents | Purpose::Prompts) => {
            return Ok(());
        }
        (_, Purpose::Answers) => (
            "these rows hold no verdicts, and the task learns from answers that are good or bad".to_owned(),
            "set `task: sft` to train on text, or `type: unpaired` with the names of the columns",
        ),
        (_, Purpose::Pairs | Purpose::Scores) => (
            "these rows hold no pairs, and the task compares a better with a worse answer".to_owned(),
            "set `task: sft` to train on text, or `type: preference` with the names of the columns",
        ),
    };
    Err((problem, hint.to_owned()))
}
