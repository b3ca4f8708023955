//! Operations on elements at the same place, all given by expressions: one evaluation on the CPU,
//! one generator of CUDA text, one way to fuse.

mod activation;
mod arithmetic;
mod clamp;
mod clamped_swiglu;
mod clip;
mod columns;
mod convert;
mod expression;
mod fused;
mod kernel;
mod log_complement;
mod pointwise;
mod scale_by;
mod standardize;
mod swiglu;
mod tape;
mod xielu;
mod zeros;

pub use activation::{ACTIVATION, ACTIVATION_BACKWARD};
pub use arithmetic::{ADD, DETACH, MUL, SCALE, SHIFT};
pub use clamp::{CLAMP, CLAMP_BACKWARD};
pub use clamped_swiglu::{CLAMPED_SWIGLU, CLAMPED_SWIGLU_BACKWARD};
pub use clip::{CLIP, CLIP_BACKWARD};
pub use columns::{SCALE_COLUMNS, SCALE_COLUMNS_GRADIENTS, SHIFT_COLUMNS};
pub(crate) use convert::element_named;
pub use convert::{CAST, FILL};
pub use expression::{Binary, Counted, Expr, Unary};
pub use fused::Elementwise;
pub(crate) use kernel::{
    LOGISTIC, Lines, binary as device_binary, collect_operands, kernel as device_kernel, unary as device_unary,
};
pub use log_complement::{LOG_COMPLEMENT, LOG_COMPLEMENT_BACKWARD};
pub use scale_by::SCALE_BY;
pub use standardize::STANDARDIZE;
pub use swiglu::{SWIGLU, SWIGLU_BACKWARD};
pub use tape::round_to;
pub(crate) use tape::unary as apply_unary;
pub use xielu::{XIELU, XIELU_BACKWARD, XIELU_GRADIENTS};
pub use zeros::Zeros;
