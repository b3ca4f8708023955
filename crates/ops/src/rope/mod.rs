//! Rotary position embedding: the frequency tables of the scaling variants, and the rotation.

mod frequencies;
#[cfg(test)]
mod golden;
mod of_batch;
mod rotation;

pub use frequencies::RopeFrequencies;
pub use of_batch::RopeFrequenciesOfBatch;
pub use rotation::Rope;
