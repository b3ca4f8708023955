//! The list of all operations: the one line that a new operation adds here.

use graph::OpId;

use crate::attention;
use crate::compensation;
use crate::delta;
use crate::dequantise;
use crate::dropout;
use crate::elementwise;
use crate::embedding;
use crate::experts;
use crate::heads;
use crate::loss;
use crate::magnitude;
use crate::matmul;
use crate::norm;
use crate::op::Op;
use crate::optimizer;
use crate::pixels;
use crate::quantise;
use crate::rope;
use crate::rows;
use crate::rowwise;
use crate::sequence;
use crate::transpose;
use crate::view;

/// Makes the list and the ids from one row for each operation: its constant in [`id`], its name, its implementation.
macro_rules! operations {
    ($($id:ident = $name:literal: $op:expr,)*) => {
        /// The operations' indices into the list.
        #[expect(non_camel_case_types, clippy::upper_case_acronyms, reason = "named like the constants that they number")]
        enum Index {
            $($id),*
        }

        /// The ids of the operations, for comparing and for building nodes.
        pub mod id {
            use graph::OpId;

            use super::Index;

            $(pub const $id: OpId = OpId::new(Index::$id as u16, $name);)*
        }

        static OPS: &[&dyn Op] = &[$(&$op),*];
    };
}

operations! {
    ADD = "add": elementwise::ADD,
    MUL = "mul": elementwise::MUL,
    SCALE = "scale": elementwise::SCALE,
    SCALE_BY = "scale_by": elementwise::SCALE_BY,
    STANDARDIZE = "standardize": elementwise::STANDARDIZE,
    SCALE_COLUMNS = "scale_columns": elementwise::SCALE_COLUMNS,
    SCALE_COLUMNS_GRADIENTS = "scale_columns_gradients": elementwise::SCALE_COLUMNS_GRADIENTS,
    SHIFT_COLUMNS = "shift_columns": elementwise::SHIFT_COLUMNS,
    SHIFT = "shift": elementwise::SHIFT,
    DETACH = "detach": elementwise::DETACH,
    LOG_COMPLEMENT = "log_complement": elementwise::LOG_COMPLEMENT,
    LOG_COMPLEMENT_BACKWARD = "log_complement_backward": elementwise::LOG_COMPLEMENT_BACKWARD,
    CAST = "cast": elementwise::CAST,
    FILL = "fill": elementwise::FILL,
    ZEROS = "zeros": elementwise::Zeros,
    ACTIVATION = "activation": elementwise::ACTIVATION,
    ACTIVATION_BACKWARD = "activation_backward": elementwise::ACTIVATION_BACKWARD,
    SWIGLU = "swiglu": elementwise::SWIGLU,
    SWIGLU_BACKWARD = "swiglu_backward": elementwise::SWIGLU_BACKWARD,
    CLAMP = "clamp": elementwise::CLAMP,
    CLAMP_BACKWARD = "clamp_backward": elementwise::CLAMP_BACKWARD,
    CLIP = "clip": elementwise::CLIP,
    CLIP_BACKWARD = "clip_backward": elementwise::CLIP_BACKWARD,
    CLAMPED_SWIGLU = "clamped_swiglu": elementwise::CLAMPED_SWIGLU,
    CLAMPED_SWIGLU_BACKWARD = "clamped_swiglu_backward": elementwise::CLAMPED_SWIGLU_BACKWARD,
    XIELU = "xielu": elementwise::XIELU,
    XIELU_BACKWARD = "xielu_backward": elementwise::XIELU_BACKWARD,
    XIELU_GRADIENTS = "xielu_gradients": elementwise::XIELU_GRADIENTS,
    ELEMENTWISE = "elementwise": elementwise::Elementwise,
    DROPOUT = "dropout": dropout::Dropout,
    DEAL_HEADS = "deal_heads": sequence::DealHeads,
    COLLECT_HEADS = "collect_heads": sequence::CollectHeads,
    EXCHANGE = "exchange": sequence::Exchange,
    OWN_PART = "own_part": sequence::OwnPart,
    OWN_PART_BACKWARD = "own_part_backward": sequence::OwnPartBackward,
    CROSS_ENTROPY = "cross_entropy": loss::CrossEntropy,
    CROSS_ENTROPY_BACKWARD = "cross_entropy_backward": loss::CrossEntropyBackward,
    CROSS_ENTROPY_WITH_GRADIENT = "cross_entropy_with_gradient": loss::CrossEntropyWithGradient,
    DISTILLATION = "distillation": loss::Distillation,
    DISTILLATION_BACKWARD = "distillation_backward": loss::DistillationBackward,
    DISTILLATION_TOP = "distillation_top": loss::TopDistillation,
    DISTILLATION_TOP_BACKWARD = "distillation_top_backward": loss::TopDistillationBackward,
    TOP_LOGPS = "top_logps": loss::TopLogps,
    SCALED_WEIGHTS = "scaled_weights": loss::ScaledWeights,
    WEIGHTED_SUM = "weighted_sum": loss::WeightedSum,
    DOCUMENT_SUM = "document_sum": loss::DocumentSum,
    DOCUMENT_SPREAD = "document_spread": loss::DocumentSpread,
    BATCH_SUM = "batch_sum": loss::BatchSum,
    SORTED = "sorted": loss::Sorted,
    UNSORTED = "unsorted": loss::Unsorted,
    TOKEN_STATISTICS = "token_statistics": loss::TokenStatistics,
    TASK_REPORT = "task_report": loss::TaskReport,
    SUM_PIECES = "sum_pieces": optimizer::SumPieces,
    MAX_PIECES = "max_pieces": optimizer::MaxPieces,
    COMPRESS = "compress": optimizer::Compress,
    SUM_COMPRESSED = "sum_compressed": optimizer::SumCompressed,
    BLOCK_SQUARES = "block_squares": optimizer::BlockSquares,
    TOTAL_SQUARES = "total_squares": optimizer::TotalSquares,
    GRADIENT_SCALE = "gradient_scale": optimizer::GradientScale,
    NEXT_LOSS_SCALE = "next_loss_scale": optimizer::NextLossScale,
    ADAMW = "adamw": optimizer::AdamW,
    EVEN_BIAS = "even_bias": optimizer::EvenBias,
    ADAMW_8BIT = "adamw_8bit": optimizer::AdamW8bit,
    DYNAMIC_MAP = "dynamic_map": optimizer::DynamicMap,
    MOMENTUM = "momentum": optimizer::Momentum,
    MOMENTUM_PART = "momentum_part": optimizer::MomentumPart,
    UNIT_MATRICES = "unit_matrices": optimizer::UnitMatrices,
    NEWTON_SCHULZ_POLYNOMIAL = "newton_schulz_polynomial": optimizer::NewtonSchulzPolynomial,
    NORMUON = "normuon": optimizer::NorMuon,
    RMSNORM = "rmsnorm": norm::RMSNORM,
    RMSNORM_BACKWARD = "rmsnorm_backward": norm::RMSNORM_BACKWARD,
    RMSNORM_WEIGHT_GRADIENT = "rmsnorm_weight_gradient": norm::RMSNORM_WEIGHT_GRADIENT,
    RMSNORM_GRADIENTS = "rmsnorm_gradients": norm::RMSNORM_GRADIENTS,
    LAYERNORM = "layernorm": norm::LAYERNORM,
    LAYERNORM_BACKWARD = "layernorm_backward": norm::LAYERNORM_BACKWARD,
    LAYERNORM_WEIGHT_GRADIENT = "layernorm_weight_gradient": norm::LAYERNORM_WEIGHT_GRADIENT,
    UNIT_NORM = "unit_norm": norm::UNIT_NORM,
    UNIT_NORM_BACKWARD = "unit_norm_backward": norm::UNIT_NORM_BACKWARD,
    MAGNITUDE = "magnitude": magnitude::MAGNITUDE,
    MAGNITUDE_GRADIENTS = "magnitude_gradients": magnitude::MAGNITUDE_GRADIENTS,
    ADAPTED_NORMS = "adapted_norms": magnitude::AdaptedNorms,
    ROWWISE = "rowwise": rowwise::Composed,
    STACK = "stack": rows::Stack,
    UNSTACK = "unstack": rows::Unstack,
    LIKELIEST = "likeliest": rows::Likeliest,
    SAMPLE_TOKEN = "sample_token": rows::SampleToken,
    PICK_TOKEN = "pick_token": rows::PickToken,
    TAKE_ROWS = "take_rows": rows::TakeRows,
    PIXELS = "pixels": pixels::Pixels,
    SPLIT = "split": view::Split,
    CONCAT = "concat": view::Concat,
    SPLIT_HEADS = "split_heads": view::SplitHeads,
    MERGE_HEADS = "merge_heads": view::MergeHeads,
    FOLD_ROWS = "fold_rows": view::FoldRows,
    UNFOLD_ROWS = "unfold_rows": view::UnfoldRows,
    REPEAT_HEADS = "repeat_heads": heads::RepeatHeads,
    SUM_HEADS = "sum_heads": heads::SumHeads,
    LINEAR = "linear": matmul::Linear,
    MATMUL = "matmul": matmul::Matmul,
    MATMUL_SUM = "matmul_sum": matmul::MatmulSum,
    BATCHED_MATMUL = "batched_matmul": matmul::BatchedMatmul,
    SUM_ROWS = "sum_rows": matmul::SumRows,
    LOW_RANK_BACKWARD = "low_rank_backward": matmul::LowRankBackward,
    DROPOUT_LINEAR = "dropout_linear": matmul::DropoutLinear,
    DROPOUT_LINEAR_BACKWARD = "dropout_linear_backward": matmul::DropoutLinearBackward,
    DEQUANTISE = "dequantise": dequantise::Dequantise,
    OWN_AMAX = "own_amax": quantise::OwnAmax,
    QUANTISE = "quantise": quantise::Quantise,
    QUANTISE_BLOCKS = "quantise_blocks": quantise::QuantiseBlocks,
    FAKE_QUANTISE = "fake_quantise": quantise::FakeQuantise,
    ROTATE = "rotate": quantise::Rotate,
    DECODE = "decode": quantise::Decode,
    TRANSPOSE_CODES = "transpose_codes": quantise::TransposeCodes,
    MATMUL_CODES = "matmul_codes": quantise::MatmulCodes,
    AMAX_HISTORY = "amax_history": quantise::AmaxHistory,
    INVERSE_CHOLESKY = "inverse_cholesky": compensation::InverseCholesky,
    COMPENSATE = "compensate": compensation::Compensate,
    EMBEDDING = "embedding": embedding::Embedding,
    EMBEDDING_BACKWARD = "embedding_backward": embedding::EmbeddingBackward,
    EMBEDDING_NOISE = "embedding_noise": embedding::EmbeddingNoise,
    ROPE_FREQUENCIES = "rope_frequencies": rope::RopeFrequencies,
    ROPE_FREQUENCIES_OF_BATCH = "rope_frequencies_of_batch": rope::RopeFrequenciesOfBatch,
    ROPE = "rope": rope::Rope,
    RMSNORM_ROPE = "rmsnorm_rope": rope::RMSNORM_ROPE,
    ROPE_RMSNORM_BACKWARD = "rope_rmsnorm_backward": rope::ROPE_RMSNORM_BACKWARD,
    ROPE_RMSNORM_GRADIENTS = "rope_rmsnorm_gradients": rope::ROPE_RMSNORM_GRADIENTS,
    POSITION_SCALE = "position_scale": rope::PositionScale,
    ROUTE = "route": experts::Route,
    ROUTE_BACKWARD = "route_backward": experts::RouteBackward,
    GROUP_ROWS = "group_rows": experts::GroupRows,
    TO_GROUPS = "to_groups": experts::ToGroups,
    FROM_GROUPS = "from_groups": experts::FromGroups,
    GROUP_WEIGHT_GRADIENT = "group_weight_gradient": experts::GroupWeightGradient,
    GROUPED_LINEAR = "grouped_linear": experts::GroupedLinear,
    GROUPED_WEIGHT_GRADIENT = "grouped_weight_gradient": experts::GroupedWeightGradient,
    GROUPED_CODES = "grouped_codes": experts::GroupedCodes,
    EXPERT_LOAD = "expert_load": experts::ExpertLoad,
    LOAD_EXCESS = "load_excess": experts::LoadExcess,
    EXPERT_LOAD_BACKWARD = "expert_load_backward": experts::ExpertLoadBackward,
    BALANCED_LOSS = "balanced_loss": experts::BalancedLoss,
    BALANCED_LOSS_BACKWARD = "balanced_loss_backward": experts::BalancedLossBackward,
    ROUTER_REPORT = "router_report": experts::RouterReport,
    TRANSPOSE = "transpose": transpose::Transpose,
    GROUPED_BIAS = "grouped_bias": experts::GroupedBias,
    GROUPED_ROW_SUMS = "grouped_row_sums": experts::GroupedRowSums,
    ATTENTION = "attention": attention::Attention,
    ATTENTION_BACKWARD = "attention_backward": attention::AttentionBackward,
    ATTENTION_SINK_GRADIENT = "attention_sink_gradient": attention::AttentionSinkGradient,
    CACHE_WRITE = "cache_write": attention::CacheWrite,
    CACHED_ATTENTION = "cached_attention": attention::CachedAttention,
    CACHED_CONV = "cached_conv": delta::CachedConv,
    CACHED_DELTA = "cached_delta": delta::CachedDelta,
    CAUSAL_CONV = "causal_conv": delta::CausalConv,
    CAUSAL_CONV_BACKWARD = "causal_conv_backward": delta::CausalConvBackward,
    CAUSAL_CONV_WEIGHT_GRADIENT = "causal_conv_weight_gradient": delta::CausalConvWeightGradient,
    DELTA_DECAY = "delta_decay": delta::DELTA_DECAY,
    DELTA_DECAY_BACKWARD = "delta_decay_backward": delta::DELTA_DECAY_BACKWARD,
    DELTA_DECAY_GRADIENTS = "delta_decay_gradients": delta::DELTA_DECAY_GRADIENTS,
    GATED_DELTA = "gated_delta": delta::GatedDelta,
    GATED_DELTA_BACKWARD = "gated_delta_backward": delta::GatedDeltaBackward,
}

/// Every operation, in the order of the list.
pub fn all() -> &'static [&'static dyn Op] {
    OPS
}

/// The operation of this id.
pub fn get(id: OpId) -> &'static dyn Op {
    OPS[id.index()]
}

/// The operation of this name, for texts from outside: a model's JSON, Python, a program.
pub fn find(name: &str) -> Result<&'static dyn Op, String> {
    OPS.iter().copied().find(|op| op.name() == name).ok_or_else(|| format!("there is no operation `{name}`"))
}
