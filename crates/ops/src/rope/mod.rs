//! Rotary position embedding: the frequency tables of the scaling variants, the rotation,
//! and the rotation joined with a norm of the heads.

mod frequencies;
#[cfg(test)]
mod golden;
mod normed;
mod of_batch;
mod rotation;

pub use frequencies::RopeFrequencies;
pub use normed::{RMSNORM_ROPE, ROPE_RMSNORM_BACKWARD, ROPE_RMSNORM_GRADIENTS};
pub use of_batch::RopeFrequenciesOfBatch;
pub use rotation::Rope;
