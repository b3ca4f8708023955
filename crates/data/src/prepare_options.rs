//! Settings of the preparation of data.

use crate::dialogue::DialogueOptions;
use crate::document::Truncation;
use crate::preference::PreferenceOptions;

/// Options that hold for all datasets of a run.
#[derive(Clone, Debug)]
pub struct PrepareOptions {
    /// Tokens a document may have; at most the row length.
    pub max_length: usize,
    pub truncation: Truncation,
    /// Rows of the model's embedding table: a larger token id is an error.
    pub vocab_size: usize,
    /// Threads that encode; 0 counts as 1.
    pub workers: usize,
    pub dialogue: DialogueOptions,
    pub preference: PreferenceOptions,
}
