//! A text as token ids with places.

/// Token ids with the bytes of the text that each stands for. Tokens that the tokenizer adds itself have an empty
/// range.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    pub ids: Vec<u32>,
    pub offsets: Vec<(usize, usize)>,
}
