//! Views of existing memory. They are never instructions; the references copy.

mod columns;
mod fold;
mod heads;

use graph::{Element, ValueType};

/// The references of the views copy floating-point elements and codes of eight bits only.
fn check_float(x: &ValueType) -> Result<(), String> {
    let codes = matches!(x.dtype, Element::Fixed(dtype) if dtype.small().is_some());
    if x.dtype.is_float() || codes {
        Ok(())
    } else {
        Err(format!("the elements must be floating point, not {}", x.dtype))
    }
}

pub use columns::{Concat, Split};
pub use fold::{FoldRows, UnfoldRows};
pub use heads::{MergeHeads, SplitHeads};
