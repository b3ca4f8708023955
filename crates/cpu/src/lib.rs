//! Runs a program with the operations' CPU references: the numerical reference of the engine, and the backend of
//! machines without a GPU.
//!
//! Values are rounded to storage types where the program says so; arithmetic in between is f32. The bits do not depend
//! on the number of threads.
//!
//! Invariant: no graphs, no gradients, no adapters, no run configuration.

mod arena;
mod attention;
mod backend;
mod call;
mod copy;
mod deferred;
mod fabric;
mod finite;
mod group;
mod layout;
mod matmul;
mod pieces;
mod pipeline;
mod rows;
mod scratch;
mod session;
mod simd;
mod storage;
mod together;
mod wire;

use tensor::DType;

pub use backend::CpuBackend;
pub use simd::parts as products;

/// Returns true if sums over numbers of a type have an order that follows from the sequence of a token alone, whatever is
/// computed with it: where this processor multiplies tiles of the type.
pub fn sums_by_sequence(dtype: DType) -> bool {
    let attention = simd::Tiles::<f32>::here().is_some();
    match dtype {
        DType::F32 => attention,
        DType::BF16 => attention && simd::Tiles::<u16>::here().is_some(),
        _ => false,
    }
}

/// Returns the name of the processor's instruction set, on which the bits of products depend.
pub fn instructions() -> &'static str {
    simd::Level::here().name()
}
