//! Every operation: shape rule, gradient rule, cost, kernel text, CPU reference and examples of
//! each in one folder. `registry.rs` is the list.
//!
//! Invariant: no passes, no drivers, no models, no run configuration. CUDA is text here.

mod append;
mod call;
pub mod evaluate;
pub mod examples;
mod gradient;
mod kernel;
mod op;
mod real;
mod registry;
mod verify;

mod dropout;
pub mod elementwise;
mod layout;
mod loss;
pub mod optimizer;
mod seed;
mod norm;
mod rows;
mod view;
mod vector;
mod matmul;
mod embedding;
mod rope;
mod attention;

pub use append::Append;
pub use call::{Call, Data, Input, Output};
pub use gradient::{Emit, GradientCall, Gradients};
pub use kernel::{KernelSpec, LowerCall, Lowered, defines_for, device_type};
pub use op::{Attribute, Class, Example, ExampleInput, Fusion, Op};
pub use real::Real;
pub use registry::{all, find};
pub use verify::{infer, verify};
