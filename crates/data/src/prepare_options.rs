//! Settings of the preparation of data.

use crate::dialogue::DialogueOptions;
use crate::document::Truncation;
use crate::preference::{Cut, PreferenceOptions, Purpose};
use crate::summary::LengthAdvice;

/// Options that hold for all datasets of a run.
#[derive(Clone, Debug)]
pub struct PrepareOptions {
    /// Tokens a document may have; at most the row length.
    pub max_length: usize,
    pub truncation: Truncation,
    /// Rows of the model's embedding table: a larger token id is an error.
    pub vocab_size: usize,
    /// Tokens that the model has positions for, where longer rows are refused; only advice depends on it.
    pub positions: Option<usize>,
    /// Threads that encode; 0 counts as 1.
    pub workers: usize,
    pub dialogue: DialogueOptions,
    pub preference: PreferenceOptions,
}

impl PrepareOptions {
    pub(crate) fn length_advice(&self) -> LengthAdvice {
        let is_text = matches!(self.preference.purpose, Purpose::Documents | Purpose::Prompts);
        let instead = match (self.truncation, self.preference.cut) {
            (Truncation::Delete, _) if is_text => "`truncation_strategy`: `split` or `right` cuts them instead",
            (Truncation::Left | Truncation::Right, _) if is_text => {
                "`truncation_strategy: split` makes several rows of each"
            }
            (_, Cut::End) if !is_text => "`truncation_mode: keep_end` keeps those whose prompt alone is too long",
            _ => "",
        };
        LengthAdvice { positions: self.positions, instead }
    }
}
