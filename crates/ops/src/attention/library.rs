//! The kernel variant of a call of attention: the one place where it is chosen, from the call and the machine.
//!
//! Hand-written kernels for Hopper, the portable ones for tensor cores, the scalar ones, and a library for the forward
//! pass over full rows where it is the fastest. What the library takes is in `program::library`, which its backend
//! reads too.

use program::{Documents, Realisation, library};

use super::operands::{Extents, Optional};
use super::reading::Reading;
use super::{hopper, portable};
use crate::kernel::LowerCall;

/// Returns the kernel variant of a call of either pass. On the CPU the reference's algorithm, which stands for the
/// scalar kernels.
pub fn realisation(call: &LowerCall<'_>) -> Realisation {
    let backward = call.outputs.len() == 3;
    match () {
        () if !backward && library_takes(call) => Realisation::Library,
        () if hopper::takes(call) => Realisation::Hopper,
        () if portable::takes(call) => Realisation::Portable,
        () => Realisation::Scalar,
    }
}

/// True for full causal rows in layouts that the library reads, where it is fast.
fn library_takes(call: &LowerCall<'_>) -> bool {
    let tensors = [&call.inputs[0], &call.inputs[1], &call.inputs[2], &call.outputs[0]];
    library::has_fast_attention(&call.machine.arch)
        && full_causal_rows(call)
        && library::takes_heads_of(Extents::of_call(call.inputs).head_dim)
        && tensors.into_iter().all(library::reads)
        && !hopper::is_ahead(call)
}

/// True for causal rows of one document each without anything else: no window that hides a key, no other last keys, no
/// branches, no sink, no cap, keys and values of one size.
fn full_causal_rows(call: &LowerCall<'_>) -> bool {
    let e = Extents::of_call(call.inputs);
    let reading = Reading::checked(call.attrs, e.head_dim);
    let optional = Optional::of_call(call.inputs, call.outputs.len());
    call.documents == Documents::Rows
        && e.head_dim == e.value_dim
        && reading.hiding_window(e.tokens).is_none()
        && !reading.bidirectional
        && reading.soft_cap.is_none()
        && optional == (Optional { limit: None, sink: None })
}
