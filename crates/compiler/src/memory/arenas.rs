//! The arenas of every program by number, and the step scalars in theirs.

use program::{TensorRef, scalar};
use tensor::DType;

/// The arenas in order.
pub(crate) mod arena {
    use program::ArenaId;

    pub const WEIGHTS: ArenaId = ArenaId(0);
    pub const ADAPTERS: ArenaId = ArenaId(1);
    pub const GRADIENTS: ArenaId = ArenaId(2);
    pub const OPTIMIZER: ArenaId = ArenaId(3);
    pub const BATCH: ArenaId = ArenaId(4);
    pub const SCALARS: ArenaId = ArenaId(5);
    pub const CONSTANTS: ArenaId = ArenaId(6);
    pub const ACTIVATIONS: ArenaId = ArenaId(7);
    /// From here on an arena is there only if it holds something, or one behind it does.
    pub const MASTERS: ArenaId = ArenaId(8);
    pub const WAITING: ArenaId = ArenaId(9);
    pub const STATES: ArenaId = ArenaId(10);
    pub const QUANTS: ArenaId = ArenaId(11);
    pub const CACHE: ArenaId = ArenaId(12);
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
    (scalar::LOSS_SUM, DType::F32),
    (scalar::WEIGHT_SUM, DType::F32),
    (scalar::GRADIENT_NORM, DType::F32),
    (scalar::GRADIENT_SCALE, DType::F32),
    (scalar::UPDATE_APPLIED, DType::F32),
    (SUM_SQUARES, DType::F32),
    (scalar::LOSS_SCALE, DType::F32),
    (scalar::LOSS_SCALE_COUNT, DType::I32),
    (scalar::LOSS_SCALE_USED, DType::F32),
    (scalar::FP8_CLIPPED, DType::F32),
];

/// Bytes from scalar to scalar.
const SCALAR_STRIDE: usize = 16;

/// Bytes of their arena.
pub(crate) const SCALAR_BYTES: usize = SCALARS.len() * SCALAR_STRIDE;

pub(crate) fn scalar_ref(name: &str) -> TensorRef {
    let index = SCALARS.iter().position(|(n, _)| *n == name).expect("the scalars are a fixed list");
    TensorRef::dense(arena::SCALARS, index * SCALAR_STRIDE, SCALARS[index].1, [1])
}
