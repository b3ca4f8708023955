//! Normalisations over the last axis.

mod layernorm;
mod rmsnorm;

pub use layernorm::{AddLayerNorm, LayerNorm, LayerNormBackward, LayerNormBackwardAdd, LayerNormWeightGradient};
pub use rmsnorm::{
    AddRmsNorm, RmsNorm, RmsNormAndBackwardAdd, RmsNormBackward, RmsNormBackwardAdd, RmsNormGradients,
    RmsNormGradientsAdd, RmsNormWeightGradient,
};
pub(crate) use rmsnorm::{backward_row, forward_row, sum_partials, write_weight_gradient};
