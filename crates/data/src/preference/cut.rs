//! Cutting the sides of a preference to a length.
//!
//! Knows neither rows nor text.

use super::{Cut, Preference, PreferenceOptions, common};
use crate::document::Document;
use crate::error::{RowError, RowReason};

/// One side before it is cut.
#[derive(Clone, Debug)]
pub(super) struct Side {
    pub document: Document,
    /// Tokens at its beginning that are the prompt's.
    pub prompt: usize,
}

impl Side {
    /// Brings the side under `limit` tokens; true if something was cut off its answer. Errors: it is too long, or
    /// nothing of the answer is left.
    pub(super) fn cut(&mut self, limit: usize, how: Cut) -> Result<bool, RowError> {
        let tokens = self.document.len();
        if tokens == 0 {
            return Err(RowError::new(RowReason::Empty, "no tokens"));
        }
        let too_long = |what: String| Err(RowError::new(RowReason::TooLong, what));
        // A prompt of this length leaves no room, whether or not the answer is empty.
        if how == Cut::End && self.prompt >= limit {
            return too_long(format!("the prompt alone has {} tokens, the limit is {limit}", self.prompt));
        }
        if tokens <= limit {
            return Ok(false);
        }
        match how {
            Cut::Beginning | Cut::End
                if !self.document.images.is_empty() && (how == Cut::Beginning || limit < self.document.images_end) =>
            {
                too_long(format!("{tokens} tokens, the limit is {limit}, and no image is cut"))
            }
            Cut::Nothing => too_long(format!("{tokens} tokens, the limit is {limit}")),
            Cut::End => {
                self.document = self.document.beginning(limit);
                Ok(true)
            }
            Cut::Beginning => {
                let off = tokens - limit;
                self.document = self.document.slice(off, tokens);
                let is_cut = off > self.prompt;
                self.prompt = self.prompt.saturating_sub(off);
                Ok(is_cut)
            }
        }
    }

    /// Errors: no token of the answer is trained.
    pub(super) fn check(&self) -> Result<(), RowError> {
        match self.document.trained_tokens() {
            0 => Err(RowError::new(RowReason::Untrained, "no token of the answer is trained")),
            _ => Ok(()),
        }
    }
}

/// Tokens that both sides share, if they are to.
pub(super) fn shared(sides: &[Side; 2], options: &PreferenceOptions) -> usize {
    if options.share_prompts { common(sides.each_ref().map(|side| &side.document)) } else { 0 }
}

/// Brings both sides of a pair under `limit` tokens each and under `pair_length` (0: any number) in all; returns how many
/// answers were cut.
pub(super) fn cut_pair(sides: &mut [Side; 2], limit: usize, options: &PreferenceOptions) -> Result<usize, RowError> {
    let how = options.cut;
    let mut cut = [false; 2];
    for (side, is_cut) in sides.iter_mut().zip(&mut cut) {
        *is_cut = side.cut(limit, how)?;
    }
    let lengths = sides.each_ref().map(|side| side.document.len());
    // Shared tokens count once. A cut at the beginning may leave fewer of them.
    let together = match options.pair_length {
        length if length == 0 || lengths.iter().sum::<usize>() <= length => return Ok(counted(cut)),
        length if how == Cut::Beginning && lengths.iter().sum::<usize>() > length + shared(sides, options) => length,
        length => length + shared(sides, options),
    };
    if lengths.iter().sum::<usize>() <= together {
        return Ok(counted(cut));
    }
    if how == Cut::Nothing {
        let tokens = lengths[0] + lengths[1] - shared(sides, options);
        let problem = format!("both sides have {tokens} tokens together, a row has {}", options.pair_length);
        return Err(RowError::new(RowReason::TooLong, problem));
    }
    let half = together / 2;
    for (i, side) in sides.iter_mut().enumerate() {
        let other = lengths[1 - i];
        cut[i] |= side.cut(if other <= half { together - other } else { half }, how)?;
    }
    Ok(counted(cut))
}

fn counted(cut: [bool; 2]) -> usize {
    cut.iter().filter(|is_cut| **is_cut).count()
}

/// The pair of two sides.
pub(super) fn pair([chosen, rejected]: [Side; 2], margin: Option<f32>) -> Preference {
    Preference { chosen: chosen.document, rejected: rejected.document, margin }
}
