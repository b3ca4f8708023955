//! The arenas of every program by number, and the step scalars in theirs.

use program::{TensorRef, scalar};
use tensor::DType;

/// The arenas' numbers, as the program has them.
pub(crate) mod arena {
    use program::{ArenaId, ArenaKind};

    pub const WEIGHTS: ArenaId = ArenaKind::Weights.id();
    pub const ADAPTERS: ArenaId = ArenaKind::Adapters.id();
    pub const GRADIENTS: ArenaId = ArenaKind::Gradients.id();
    pub const OPTIMIZER: ArenaId = ArenaKind::Optimizer.id();
    pub const BATCH: ArenaId = ArenaKind::Batch.id();
    pub const SCALARS: ArenaId = ArenaKind::Scalars.id();
    pub const CONSTANTS: ArenaId = ArenaKind::Constants.id();
    pub const ACTIVATIONS: ArenaId = ArenaKind::Activations.id();
    pub const MASTERS: ArenaId = ArenaKind::Masters.id();
    pub const WAITING: ArenaId = ArenaKind::Waiting.id();
    pub const STATES: ArenaId = ArenaKind::States.id();
    pub const QUANTS: ArenaId = ArenaKind::Quants.id();
    pub const CACHE: ArenaId = ArenaKind::Cache.id();
    pub const ERRORS: ArenaId = ArenaKind::Errors.id();
}

/// f32: Σ gradient², before the division by the weight sum.
pub(crate) const SUM_SQUARES: &str = "sum_squares";

/// Step scalars with their types. Each has a slot of its own.
pub(crate) const SCALARS: &[(&str, DType)] = &[
    (scalar::LEARNING_RATE, DType::F32),
    (scalar::BIAS_CORRECTION_1, DType::F32),
    (scalar::BIAS_CORRECTION_2, DType::F32),
    (scalar::STEP, DType::I32),
    (scalar::MICRO_STEP, DType::I32),
    (scalar::GRADIENT_NORM, DType::F32),
    (scalar::GRADIENT_SCALE, DType::F32),
    (scalar::UPDATE_APPLIED, DType::F32),
    (SUM_SQUARES, DType::F32),
    (scalar::LOSS_SCALE, DType::F32),
    (scalar::LOSS_SCALE_COUNT, DType::I32),
    (scalar::LOSS_SCALE_USED, DType::F32),
    (scalar::FP8_CLIPPED, DType::F32),
    // Last: what is summed over ranks lies together, followed by the reports.
    (scalar::LOSS_SUM, DType::F32),
    (scalar::WEIGHT_SUM, DType::F32),
];

/// Bytes from scalar to scalar.
const SCALAR_STRIDE: usize = 16;

/// Bytes of the step scalars in their arena.
pub(crate) const SCALAR_BYTES: usize = SCALARS.len() * SCALAR_STRIDE;

pub(crate) fn scalar_ref(name: &str) -> TensorRef {
    let index = SCALARS.iter().position(|(n, _)| *n == name).expect("the scalars are a fixed list");
    TensorRef::dense(arena::SCALARS, index * SCALAR_STRIDE, SCALARS[index].1, [1])
}
