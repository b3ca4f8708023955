//! Normalisations over the last axis.

mod rmsnorm;

pub use rmsnorm::{RmsNorm, RmsNormBackward, RmsNormWeightGradient};
