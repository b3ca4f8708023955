//! Losses: per token, and their weighted sum, where differentiation starts.

mod cross_entropy;
mod weighted_sum;

pub use cross_entropy::{CrossEntropy, CrossEntropyBackward, CrossEntropyWithGradient};
pub use weighted_sum::WeightedSum;
