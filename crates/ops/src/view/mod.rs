//! Views of existing memory. They are never instructions; the references copy.

mod columns;
mod fold;
mod heads;

use graph::{Element, ValueType};
use program::TensorRef;

use crate::call::Call;
use crate::real::Real;

/// The references of the views copy floating-point elements and codes of eight bits only.
fn check_float(x: &ValueType) -> Result<(), String> {
    let codes = matches!(x.dtype, Element::Fixed(dtype) if dtype.small().is_some());
    if x.dtype.is_float() || codes {
        Ok(())
    } else {
        Err(format!("the elements must be floating point, not {}", x.dtype))
    }
}

/// Returns the axis `at` as groups of `size` neighbors, [N] → [N/size, size]: exact for every layout.
fn apart(whole: &TensorRef, at: usize, size: usize) -> TensorRef {
    let mut groups = whole.clone();
    groups.shape[at] = whole.shape[at] / size;
    groups.strides[at] = whole.strides[at] * size;
    groups.shape.insert(at + 1, size);
    groups.strides.insert(at + 1, whole.strides[at]);
    groups
}

/// Returns the axis `at` and the one after it as one; `None` where neighboring groups have a gap between them.
fn together(groups: &TensorRef, at: usize) -> Option<TensorRef> {
    let mut whole = groups.clone();
    let (size, stride) = (whole.shape.remove(at + 1), whole.strides.remove(at + 1));
    if whole.shape[at] != 1 && whole.strides[at] != size * stride {
        return None;
    }
    whole.shape[at] *= size;
    whole.strides[at] = stride;
    Some(whole)
}

fn copy<T: Real>(call: &mut Call<'_, T>) {
    let x = call.inputs[0].real();
    let [y] = call.outputs_mut();
    y.real().copy_from_slice(x);
}

pub use columns::{Concat, Split};
pub use fold::{FoldRows, UnfoldRows};
pub use heads::{MergeHeads, SplitHeads};
