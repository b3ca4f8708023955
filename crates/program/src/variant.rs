//! The kinds of entries of a program, and the shapes of batches that they are compiled for.

use crate::instruction::Documents;

/// The purpose of an entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EntryKind {
    /// Forward and backward; gradients and sums are written.
    FirstMicroStep,
    /// Forward and backward; gradients and sums are added to.
    NextMicroStep,
    /// Gradient norm, clipping, optimizer.
    Update,
    /// Forward and loss; the sums are added to, gradients are untouched.
    Evaluate,
    /// Forward only; the named outputs are kept.
    Forward,
    /// State that is computed from the weights alone, again whenever they were written from outside.
    Prepare,
}

impl EntryKind {
    pub const fn name(self) -> &'static str {
        match self {
            EntryKind::FirstMicroStep => "first_micro_step",
            EntryKind::NextMicroStep => "next_micro_step",
            EntryKind::Update => "update",
            EntryKind::Evaluate => "evaluate",
            EntryKind::Forward => "forward",
            EntryKind::Prepare => "prepare",
        }
    }
}

/// The shape of the batches that an entry takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    pub batch: usize,
    pub seq_len: usize,
    pub documents: Documents,
    /// Patches of all images of a batch; 0 where it has no images.
    pub patches: usize,
    /// Tokens of a batch whose logits the loss reads; 0: all tokens.
    pub logits: usize,
}
