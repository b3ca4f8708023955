//! Runs programs on GPUs of NVIDIA and of AMD.
//!
//! Invariant: this crate knows libraries, arenas and instructions. It does not know graphs,
//! gradients, adapters, precision recipes, run configs, nor the list of operations: kernels reach
//! it as text inside a program.

pub mod algorithms;
pub mod amdsmi;
pub mod backend;
mod codes;
pub mod cublaslt;
pub mod cudnn;
pub mod disk_cache;
pub mod driver;
mod engine;
pub mod error;
mod fabric;
mod group;
pub mod kernel_cache;
pub mod kernels;
pub mod library;
mod machine;
pub mod nccl;
pub mod nvml;
pub mod nvrtc;
mod pipeline;
mod prepare;
mod progress;
mod report;
mod session;
pub mod sys;
mod transfer;
pub mod vendor;

pub use algorithms::Algorithms;
pub use backend::GpuBackend;
pub use engine::Options;
pub use error::{During, Error, Result};
pub use fabric::Ways;
pub use library::{Given, Search};
pub use machine::machine;
pub use report::{LibraryReport, Missing, Report, UsableLibrary, devices};
pub use session::GpuSession;
pub use vendor::Vendor;
