//! Every operation: shape rule, gradient rule, cost, kernel text, CPU reference and examples of
//! each in one folder. `registry.rs` is the list.
//!
//! Invariant: no passes, no drivers, no models, no run configuration. CUDA is text here.

mod append;
mod call;
mod compensation;
pub mod evaluate;
pub mod examples;
mod gradient;
mod invariance;
mod kernel;
mod op;
mod real;
mod registry;
mod verify;

pub mod attention;
mod delta;
pub mod dequantise;
mod dropout;
pub mod elementwise;
mod embedding;
mod experts;
mod heads;
mod layout;
mod loss;
mod magnitude;
mod matmul;
mod norm;
pub mod optimizer;
mod pixels;
pub mod quantise;
mod rope;
mod rows;
pub mod rowwise;
mod seed;
mod sequence;
mod transpose;
mod vector;
mod view;

pub use append::Append;
pub use call::{Call, Data, Input, Output};
pub use gradient::{Emit, GradientCall, Gradients};
pub use graph::OpId;
pub use invariance::BATCH_INVARIANT;
pub use kernel::{KernelSpec, LowerCall, Lowered, defines_for, device_type};
pub use magnitude::MOST_RANK as MOST_RANK_WITH_NORMS;
pub use matmul::{MOST_RANK, dropout_linear_fits};
pub use op::{Attribute, Class, Example, ExampleInput, Fusion, Keeps, Op, Pairing, Rows};
pub use real::Real;
pub use registry::{all, find, get, id};
pub use rows::sampling;
pub use vector::{Loop, largest, sum_of, sum_of_three, vectorised};
pub use verify::{infer, verify};
