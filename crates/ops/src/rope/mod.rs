//! Rotary position embedding: the frequency tables of the scaling variants, the rotation,
//! the rotation joined with a norm of the heads, and queries that grow with their position.

mod frequencies;
#[cfg(test)]
mod golden;
mod normed;
mod of_batch;
mod position_scale;
mod rotation;

pub use frequencies::RopeFrequencies;
pub use normed::{RMSNORM_ROPE, ROPE_RMSNORM_BACKWARD, ROPE_RMSNORM_GRADIENTS};
pub use of_batch::RopeFrequenciesOfBatch;
pub use position_scale::PositionScale;
pub use rotation::Rope;
