//! Normalisations over the last axis.

mod rmsnorm;

pub use rmsnorm::{AddRmsNorm, RmsNorm, RmsNormBackward, RmsNormBackwardAdd, RmsNormWeightGradient};
