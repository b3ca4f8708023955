//! A row as it is shown: its documents, their tokens and images. Does not know how they are written.

use super::shown_image::ShownImage;

/// One token of a shown row, or a run of the same ones of an image.
#[derive(Clone, Debug, PartialEq)]
pub struct ShownToken {
    pub id: i32,
    pub text: String,
    /// Weight in the loss; 0: not trained.
    pub weight: f32,
    pub times: usize,
}

/// One row of a batch.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct ShownRow {
    /// In their order, without padding.
    pub documents: Vec<Vec<ShownToken>>,
    /// The role of each document in a preference; empty for other data.
    pub verdicts: Vec<&'static str>,
    /// The images of each document; empty where the model reads none.
    pub images: Vec<Vec<ShownImage>>,
    /// Tokens that fill the row up.
    pub padding: usize,
}

impl ShownRow {
    /// Tokens of the row, padding included.
    pub fn len(&self) -> usize {
        self.documents.iter().map(|document| count(document)).sum::<usize>() + self.padding
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Returns the number of tokens, those of runs each.
pub(super) fn count(tokens: &[ShownToken]) -> usize {
    tokens.iter().map(|token| token.times).sum()
}

/// Tokens of which something is trained.
pub(super) fn trained(tokens: &[ShownToken]) -> usize {
    tokens.iter().filter(|token| token.weight != 0.0).count()
}

/// A character that would move a cursor or hide, as one that is seen.
pub(super) fn visible(c: char) -> char {
    match c {
        '\n' => '↵',
        '\t' => '⇥',
        '\u{7f}' => '␡',
        c if (c as u32) < 0x20 => char::from_u32(0x2400 + c as u32).expect("the control pictures begin there"),
        c if c.is_control() || ('\u{200b}'..='\u{200f}').contains(&c) || ('\u{202a}'..='\u{202e}').contains(&c) => '␦',
        '\u{2066}'..='\u{2069}' | '\u{feff}' => '␦',
        c => c,
    }
}
