//! Lengths and intervals of a run: option values in steps and in passes over the data.

use options::{Fault, Kind, Node, OptionValue, Reader, choices};
use serde_json::{Value, json};

/// Passes over the training data; not always a whole number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Epochs(pub f64);

impl Epochs {
    /// Number of passes that are begun.
    pub fn begun(self) -> u64 {
        self.0.ceil() as u64
    }

    /// The share of the last pass that is trained, above 0 and at most 1.
    pub fn of_last(self) -> f64 {
        if self.0.fract() == 0.0 { 1.0 } else { self.0.fract() }
    }
}

impl OptionValue for Epochs {
    const KIND: Kind = Kind::Number;

    fn read(node: &Node, reader: &mut Reader) -> Result<Self, Fault> {
        f64::read(node, reader).map(Epochs)
    }

    /// A whole number is written as one, as it was before there were others.
    fn write(&self) -> Value {
        if self.0.fract() == 0.0 { json!(self.0 as u64) } else { json!(self.0) }
    }

    fn placeholder() -> Self {
        Epochs(1.0)
    }
}

choices! {
    /// Times of checkpoints and of evaluations.
    pub enum Strategy {
        /// At a fixed interval of steps.
        Steps = "steps",
        /// After every pass over the training data, with the step that ends it.
        Epoch = "epoch",
        /// Never.
        No = "no",
    }
}
