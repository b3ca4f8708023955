//! Losses: per token, and their weighted sum, where differentiation starts.

mod cross_entropy;
mod scaled_weights;
mod weighted_sum;

pub use cross_entropy::{CrossEntropy, CrossEntropyBackward, CrossEntropyWithGradient};
pub use scaled_weights::ScaledWeights;
pub use weighted_sum::WeightedSum;
