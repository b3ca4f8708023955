//! Runs programs on NVIDIA GPUs.
//!
//! Invariant: this crate knows libraries, arenas and instructions. It does not know graphs,
//! gradients, adapters, precision recipes, run configs, nor the list of operations: kernels reach
//! it as text inside a program.

pub mod cublaslt;
pub mod cudnn;
pub mod driver;
pub mod error;
pub mod kernel_cache;
pub mod kernels;
pub mod library;
pub mod nvrtc;
pub mod sys;

pub use error::{During, Error, Result};
