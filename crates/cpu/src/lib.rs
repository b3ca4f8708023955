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
mod pipeline;
mod rows;
mod scratch;
mod session;
mod simd;
mod storage;
mod together;
mod wire;

pub use backend::CpuBackend;
pub use simd::parts as products;

/// Returns the name of the processor's instruction set, on which the bits of products depend.
pub fn instructions() -> &'static str {
    simd::Level::here().name()
}
