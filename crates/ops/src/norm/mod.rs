//! Normalisations over the last axis.

mod rmsnorm;

pub use rmsnorm::{
    AddRmsNorm, RmsNorm, RmsNormBackward, RmsNormBackwardAdd, RmsNormGradients, RmsNormGradientsAdd,
    RmsNormWeightGradient,
};
pub(crate) use rmsnorm::{backward_row, forward_row, sum_partials, write_weight_gradient};
