//! What the backend's attention instruction takes, and the scratch memory that it needs.
//!
//! The one place where library or kernels are chosen: whatever becomes an instruction can be loaded.
//! No calls of the library here; its sizes were read off its plans (cuDNN 9.19).

use program::{Arch, Documents, TensorRef};
use tensor::DType;

use super::{Extents, Optional, Reading};
use crate::kernel::LowerCall;

/// Largest head whose backward pass the library has on every architecture.
const MAX_HEAD_DIM: usize = 128;
/// Alignment that the library asks of every tensor: bytes of addresses, and of strides.
const ALIGNMENT: usize = 16;

/// True when the call, of either pass, becomes an attention instruction: on a GPU for bf16 heads of up to 128
/// elements in steps of 8 with plain scores, without a window that hides a key, in layouts that the library reads.
pub fn takes_instruction(call: &LowerCall<'_>) -> bool {
    forward_takes(call) && gradients(call).iter().all(|t| suits(t, call.documents))
}

/// True when the forward pass writes lse as [B, T, heads]: the library does so for packed documents.
/// The kernels of the backward pass must know, because their call may have gradients that the
/// library does not write.
pub fn lse_by_token(call: &LowerCall<'_>) -> bool {
    call.documents != Documents::Rows && forward_takes(call)
}

fn forward_takes(call: &LowerCall<'_>) -> bool {
    let e = Extents::of_call(call.inputs);
    takes_documents(call)
        && plain(call)
        && e.head_dim.is_multiple_of(8)
        && e.head_dim <= MAX_HEAD_DIM
        && forward_tensors(call).into_iter().all(|t| suits(t, call.documents))
}

/// True for causal rows or documents without anything else: no window that hides a key, no other last keys, no sink,
/// no cap, keys and values of one size.
pub fn plain(call: &LowerCall<'_>) -> bool {
    let e = Extents::of_call(call.inputs);
    let reading = Reading::checked(call.attrs, e.head_dim);
    let optional = Optional::of_call(call.inputs, call.outputs.len());
    e.head_dim == e.value_dim
        && reading.hiding_window(e.tokens).is_none()
        && !reading.bidirectional
        && reading.soft_cap.is_none()
        && optional == (Optional { last_key: None, sink: None })
}

/// A backward pass over packed documents that gives the same bits in every run exists for Hopper only.
fn takes_documents(call: &LowerCall<'_>) -> bool {
    match &call.machine.arch {
        Arch::Cpu => false,
        Arch::Cuda(name) => call.documents == Documents::Rows || name.starts_with("sm_90"),
    }
}

/// q, k, v and o, in calls of either pass.
fn forward_tensors<'a>(call: &LowerCall<'a>) -> [&'a TensorRef; 4] {
    let o = if is_backward(call) { &call.inputs[3] } else { &call.outputs[0] };
    [&call.inputs[0], &call.inputs[1], &call.inputs[2], o]
}

/// d_o, dq, dk and dv, in calls of the backward pass.
fn gradients<'a>(call: &LowerCall<'a>) -> Vec<&'a TensorRef> {
    if is_backward(call) { call.inputs[5..6].iter().chain(call.outputs).collect() } else { vec![] }
}

fn is_backward(call: &LowerCall<'_>) -> bool {
    call.outputs.len() == 3
}

/// bf16, dense heads, addresses and strides on the library's alignment; tokens of packed rows lie
/// evenly spaced over all rows. Arenas and buffers start on larger boundaries, so an offset tells.
fn suits(tensor: &TensorRef, documents: Documents) -> bool {
    let [rows, tokens, _, _] = tensor.shape[..] else { unreachable!("[B, T, heads, D] by the shape rule") };
    let aligned = |axis: usize| tensor.shape[axis] == 1 || (tensor.strides[axis] * 2).is_multiple_of(ALIGNMENT);
    let even = rows == 1 || tensor.strides[0] == tokens * token_stride(tensor);
    tensor.dtype == DType::BF16
        && tensor.strides[3] == 1
        && tensor.offset.is_multiple_of(ALIGNMENT)
        && (0..3).all(aligned)
        && (documents == Documents::Rows || even)
}

/// Elements from one token to the next; of a single token, its own.
fn token_stride(tensor: &TensorRef) -> usize {
    if tensor.shape[1] == 1 { tensor.shape[2] * tensor.shape[3] } else { tensor.strides[1] }
}

/// Bytes for small tables and for the gaps between the parts.
const SLACK: usize = 8 << 10;

/// Scratch of the forward pass, an upper bound.
pub fn forward_bytes(call: &LowerCall<'_>) -> usize {
    match call.documents {
        Documents::Rows => SLACK,
        Documents::Packed { count, .. } => SLACK + 256 * count.max(64) + documents_bytes(count),
    }
}

/// Scratch of the deterministic backward pass, an upper bound: the bf16 gradient of all scores in
/// whole tiles, dk and dv for every query head where heads share keys, and the f32 row sums d_o·o.
/// 2.42 GB for 8 rows of 2048 tokens with 32 heads of 128 that share 8.
pub fn backward_bytes(call: &LowerCall<'_>) -> usize {
    let e = Extents::of_call(call.inputs);
    let [_, dk, dv] = call.outputs else { unreachable!("the shape rule gives three results") };
    let (slots, longest) = match call.documents {
        Documents::Rows => (e.batch, e.tokens),
        Documents::Packed { count, longest } => (count, longest),
    };
    let scores = slots * e.heads * longest.next_multiple_of(64) * longest.next_multiple_of(128) * 2;
    let tokens = e.batch * e.tokens;
    let head_gradients = match call.documents {
        _ if e.group() == 1 => 0,
        Documents::Rows => 2 * tokens * e.heads * e.head_dim * 2,
        Documents::Packed { .. } => tokens * (token_stride(dk) + token_stride(dv)) * e.group() * 2,
    };
    let tables = if call.documents == Documents::Rows { 0 } else { 384 * slots + documents_bytes(slots) };
    scores + head_gradients + tokens * e.heads * 4 + tables + SLACK
}

/// Offsets of the documents in up to 12 units, their lengths and first tokens.
fn documents_bytes(count: usize) -> usize {
    (count + 1) * (12 * 8 + 4 + 4)
}
