//! The list of all operations: the one line that a new operation adds here.

use crate::attention;
use crate::dropout;
use crate::elementwise;
use crate::embedding;
use crate::loss;
use crate::matmul;
use crate::norm;
use crate::op::Op;
use crate::optimizer;
use crate::rope;
use crate::rows;
use crate::rowwise;
use crate::view;

static OPS: &[&dyn Op] = &[
    &elementwise::ADD,
    &elementwise::MUL,
    &elementwise::SCALE,
    &elementwise::CAST,
    &elementwise::FILL,
    &elementwise::ACTIVATION,
    &elementwise::ACTIVATION_BACKWARD,
    &elementwise::SWIGLU,
    &elementwise::SWIGLU_BACKWARD,
    &elementwise::Elementwise,
    &dropout::Dropout,
    &loss::CrossEntropy,
    &loss::CrossEntropyBackward,
    &loss::CrossEntropyWithGradient,
    &loss::WeightedSum,
    &optimizer::BlockSquares,
    &optimizer::TotalSquares,
    &optimizer::GradientScale,
    &optimizer::AdamW,
    &optimizer::AdamW8bit,
    &optimizer::DynamicMap,
    &optimizer::Momentum,
    &optimizer::UnitMatrices,
    &optimizer::NewtonSchulzPolynomial,
    &optimizer::NorMuon,
    &norm::RMSNORM,
    &norm::RMSNORM_BACKWARD,
    &norm::RMSNORM_WEIGHT_GRADIENT,
    &norm::RMSNORM_GRADIENTS,
    &norm::LAYERNORM,
    &norm::LAYERNORM_BACKWARD,
    &norm::LAYERNORM_WEIGHT_GRADIENT,
    &rowwise::Composed,
    &rows::Stack,
    &rows::Unstack,
    &view::Split,
    &view::Concat,
    &view::SplitHeads,
    &view::MergeHeads,
    &matmul::Linear,
    &matmul::Matmul,
    &matmul::MatmulSum,
    &matmul::BatchedMatmul,
    &matmul::SumRows,
    &matmul::LowRankBackward,
    &matmul::DropoutLinear,
    &matmul::DropoutLinearBackward,
    &embedding::Embedding,
    &embedding::EmbeddingBackward,
    &rope::RopeFrequencies,
    &rope::RopeFrequenciesOfBatch,
    &rope::Rope,
    &rope::RmsNormRope,
    &rope::RopeRmsNormBackward,
    &rope::RopeRmsNormGradients,
    &rope::RMSNORM_ROPE_BOTH,
    &rope::ROPE_RMSNORM_BACKWARD_BOTH,
    &rope::ROPE_RMSNORM_GRADIENTS_BOTH,
    &attention::Attention,
    &attention::AttentionBackward,
    &attention::AttentionSinkGradient,
];

/// Every operation, in the order of the list.
pub fn all() -> &'static [&'static dyn Op] {
    OPS
}

/// The operation of this name.
pub fn find(name: &str) -> Option<&'static dyn Op> {
    OPS.iter().copied().find(|op| op.name() == name)
}
