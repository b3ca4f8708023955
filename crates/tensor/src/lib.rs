//! Element types, shapes, strides, host tensors and the counter-based random generator.
//!
//! Invariant: this crate knows no operation, no device and no file format.

mod attrs;
pub mod compressed;
mod convert;
pub mod draw;
mod dtype;
mod host;
pub mod packed;
pub mod philox;
mod shape;
pub mod small;
pub mod storage;

pub use attrs::{AttrError, Attrs, Parsed};
pub use convert::convert;
pub use dtype::{DType, UnknownDType, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_bf16_stochastic, f32_to_f16};
pub use host::HostTensor;
pub use shape::{Shape, contiguous_strides};
pub use storage::Storage;
