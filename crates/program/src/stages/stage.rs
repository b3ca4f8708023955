//! The tensors of an entry that cross between stages.

use crate::memory::TensorRef;

/// The stage of an entry, and the tensors that cross there. The tensors of both sides of a crossing are alike, one for
/// one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stage {
    /// Number of the stage from 0, in the order of the layers.
    pub number: usize,
    /// Inputs from the stage before.
    pub from_previous: Vec<TensorRef>,
    /// Outputs for the stage after.
    pub to_next: Vec<TensorRef>,
    /// Gradients of `to_next`, from the stage after.
    pub from_next: Vec<TensorRef>,
    /// Gradients of `from_previous`, for the stage before.
    pub to_previous: Vec<TensorRef>,
}

/// The direction of a send: to the next stage, or to the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendDirection {
    Forward,
    Backward,
}

impl Stage {
    /// Returns the tensors that are received before the entry begins.
    pub fn received(&self) -> [(SendDirection, &[TensorRef]); 2] {
        [(SendDirection::Forward, &self.from_previous), (SendDirection::Backward, &self.from_next)]
    }

    /// Returns the tensors that are sent when the entry has ended.
    pub fn sent(&self) -> [(SendDirection, &[TensorRef]); 2] {
        [(SendDirection::Forward, &self.to_next), (SendDirection::Backward, &self.to_previous)]
    }

    pub(crate) fn tensors_mut(&mut self) -> impl Iterator<Item = &mut TensorRef> {
        let Stage { number: _, from_previous, to_next, from_next, to_previous } = self;
        from_previous.iter_mut().chain(to_next).chain(from_next).chain(to_previous)
    }
}
