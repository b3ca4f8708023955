//! Operations on elements at the same place, all given by expressions: one evaluation on the CPU,
//! one generator of CUDA text, one way to fuse.

mod activation;
mod arithmetic;
mod convert;
pub mod expression;
mod fused;
mod kernel;
mod pointwise;
mod swiglu;
mod tape;

use tensor::Attrs;

pub use activation::{ACTIVATION, ACTIVATION_BACKWARD};
pub use arithmetic::{ADD, MUL, SCALE};
pub use convert::{CAST, FILL};
pub use expression::Expr;
pub use fused::{Composed, Elementwise, compose};
pub use swiglu::{SWIGLU, SWIGLU_AND_BACKWARD, SWIGLU_BACKWARD};
pub use tape::round_to;

use crate::registry::find;

/// The expressions of an elementwise operation, one for each result; `None` for any other operation.
/// The attributes must have passed the shape rule.
pub fn expressions(op: &str, attrs: &Attrs) -> Option<Vec<Expr>> {
    find(op)?.expressions(attrs)
}
