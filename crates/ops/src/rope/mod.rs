//! Rotary position embedding: the frequency tables of the scaling variants, and the rotation.

mod frequencies;
#[cfg(test)]
mod golden;
mod rotation;

pub use frequencies::RopeFrequencies;
pub use rotation::Rope;
