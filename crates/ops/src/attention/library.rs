//! Which realisation a call of attention gets: the one place where it is chosen, from the call and the machine.
//!
//! Hopper's own kernels, the portable ones for tensor cores, the plain ones, and a library for the forward pass over
//! full rows where it is the fastest. No calls of the library here; what it takes was read off its plans (cuDNN 9.19).

use program::{Arch, Documents, TensorRef};
use tensor::DType;

use super::operands::{Extents, Optional, Reading};
use super::{hopper, portable};
use crate::kernel::LowerCall;

/// Largest head that the library's fast plans take.
const MAX_HEAD_DIM: usize = 128;
/// Alignment that the library asks of every tensor: bytes of addresses, and of strides.
const ALIGNMENT: usize = 16;
/// Scratch of the library's forward pass, an upper bound.
pub const LIBRARY_BYTES: usize = 8 << 10;

/// Which code computes an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Realisation {
    /// A library's plan.
    Library,
    /// Kernels for Hopper's tensor cores and copy engine.
    Hopper,
    /// Kernels for the tensor cores of every GPU from sm_80 on.
    Portable,
    /// Scalar kernels.
    Plain,
}

/// The realisation of a call of either pass. On the CPU the reference's algorithm, which stands for the plain one.
pub fn realisation(call: &LowerCall<'_>) -> Realisation {
    let backward = call.outputs.len() == 3;
    match () {
        () if !backward && library_takes(call) => Realisation::Library,
        () if hopper::takes(call) => Realisation::Hopper,
        () if portable::takes(call) => Realisation::Portable,
        () => Realisation::Plain,
    }
}

/// bf16 heads of up to 128 elements in steps of 8 over full causal rows, in layouts that the library reads: on data
/// centre GPUs from Hopper on, for whose tensor cores the portable kernels are not made.
fn library_takes(call: &LowerCall<'_>) -> bool {
    let Arch::Cuda(name) = &call.machine.arch else { return false };
    let e = Extents::of_call(call.inputs);
    let tensors = [&call.inputs[0], &call.inputs[1], &call.inputs[2], &call.outputs[0]];
    (name.starts_with("sm_9") || name.starts_with("sm_10"))
        && full_causal_rows(call)
        && e.head_dim.is_multiple_of(8)
        && e.head_dim <= MAX_HEAD_DIM
        && tensors.into_iter().all(suits)
}

/// True for causal rows of one document each without anything else: no window that hides a key, no other last keys,
/// no sink, no cap, keys and values of one size.
fn full_causal_rows(call: &LowerCall<'_>) -> bool {
    let e = Extents::of_call(call.inputs);
    let reading = Reading::checked(call.attrs, e.head_dim);
    let optional = Optional::of_call(call.inputs, call.outputs.len());
    call.documents == Documents::Rows
        && e.head_dim == e.value_dim
        && reading.hiding_window(e.tokens).is_none()
        && !reading.bidirectional
        && reading.soft_cap.is_none()
        && optional == (Optional { last_key: None, sink: None })
}

/// bf16, dense heads, addresses and strides on the boundary that the library asks for. Arenas and
/// buffers start on larger boundaries, so an offset tells.
fn suits(tensor: &TensorRef) -> bool {
    let aligned = |axis: usize| tensor.shape[axis] == 1 || (tensor.strides[axis] * 2).is_multiple_of(ALIGNMENT);
    tensor.dtype == DType::BF16
        && tensor.strides[3] == 1
        && tensor.offset.is_multiple_of(ALIGNMENT)
        && (0..3).all(aligned)
}
