//! Views of existing memory. They are never instructions; the references copy.

mod columns;
mod heads;

use graph::ValueType;

/// The references of the views copy floating-point elements only.
fn check_float(x: &ValueType) -> Result<(), String> {
    if x.dtype.is_float() { Ok(()) } else { Err(format!("the elements must be floating point, not {}", x.dtype)) }
}

pub use columns::{Concat, Split};
pub use heads::{MergeHeads, SplitHeads};
