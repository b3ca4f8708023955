//! Launches of the scalar attention kernels: f32, and what has no kernel for the tensor cores.

use program::{Arg, TensorRef};
use tensor::DType;

use super::{Extents, Optional, Reading};
use crate::kernel::{KernelSpec, LowerCall, device_type};

const SOURCE: &str = include_str!("attention.cu");
const HEADERS: &[(&str, &str)] = &[
    ("plain.cuh", include_str!("plain.cuh")),
    ("types.cuh", include_str!("../cuda/types.cuh")),
    ("reduce.cuh", include_str!("../cuda/reduce.cuh")),
];

/// Warps of one block.
const WARPS: usize = 4;

/// Queries or keys that one warp holds: as many as fit into 48 KiB of shared memory with a tile, where they can.
fn per_warp(widest: usize) -> usize {
    if widest <= 128 { 4 } else { 1 }
}

/// What the interval of keys and the score are made of: the definitions of every kernel of this folder.
pub fn mask_defines(call: &LowerCall<'_>) -> Vec<(String, String)> {
    let e = Extents::of_call(call.inputs);
    let reading = Reading::checked(call.attrs, e.head_dim);
    let optional = Optional::of_call(call.inputs, call.outputs.len());
    let numbers = [
        ("BATCH", e.batch),
        ("TOKENS", e.tokens),
        ("HEADS", e.heads),
        ("KV_HEADS", e.kv_heads),
        ("D", e.head_dim),
        ("DV", e.value_dim),
        ("WINDOW", reading.hiding_window(e.tokens).unwrap_or(0)),
        ("BIDIRECTIONAL", reading.bidirectional as usize),
        ("HAS_LAST", optional.last_key.is_some() as usize),
        ("HAS_SINK", optional.sink.is_some() as usize),
        ("HAS_CAP", reading.soft_cap.is_some() as usize),
    ];
    let mut defines: Vec<_> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
    defines.push(("SCALE".to_owned(), format!("{:e}f", reading.scale as f32)));
    defines.push(("SOFT_CAP".to_owned(), format!("{:e}f", reading.soft_cap.unwrap_or(0.0) as f32)));
    let sink_type = optional.sink.map_or("float", |at| device_type(call.inputs[at].dtype));
    defines.push(("SINK_T".to_owned(), sink_type.to_owned()));
    defines
}

/// The arguments for `last_key` and the sink; another input stands for what is not there, and is not read.
pub fn optional_args(call: &LowerCall<'_>) -> [Arg; 2] {
    let optional = Optional::of_call(call.inputs, call.outputs.len());
    [optional.last_key, optional.sink].map(|at| Arg::Input(at.unwrap_or(0)))
}

/// `X_T` and the strides `X_B`, `X_S`, `X_H` of a tensor [B, T, heads, D].
pub fn strides(name: &str, tensor: &TensorRef) -> Vec<(String, String)> {
    assert!(tensor.strides[3] == 1 || tensor.shape[3] == 1, "the columns of a head lie behind one another: {tensor}");
    let axes = ["B", "S", "H"].into_iter().zip(&tensor.strides);
    let mut defines: Vec<_> = axes.map(|(axis, stride)| (format!("{name}_{axis}"), stride.to_string())).collect();
    defines.push((format!("{name}_T"), device_type(tensor.dtype).to_owned()));
    defines
}

/// A kernel whose blocks divide the tokens of `heads` heads among themselves.
fn spec(
    entry: &'static str,
    part: &str,
    call: &LowerCall<'_>,
    heads: usize,
    tensors: &[(&str, &TensorRef)],
    args: Vec<Arg>,
) -> KernelSpec {
    let e = Extents::of_call(call.inputs);
    let widest = e.head_dim.max(e.value_dim);
    let per_warp = per_warp(widest);
    let numbers = [(part, 1), ("WARPS", WARPS), ("PER_WARP", per_warp)];
    let mut defines: Vec<_> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
    defines.extend(mask_defines(call));
    for (name, tensor) in tensors {
        defines.extend(strides(name, tensor));
    }
    KernelSpec {
        entry,
        source: SOURCE.to_owned(),
        headers: HEADERS.to_vec(),
        defines,
        grid: [e.tokens.div_ceil(WARPS * per_warp) as u32, heads as u32, e.batch as u32],
        block: [WARPS as u32 * 32, 1, 1],
        shared_bytes: 4 * (WARPS * per_warp * (e.head_dim + e.value_dim) + 32 * (widest + 1)) as u32,
        args,
    }
}

/// Row statistics, starts, last keys and sinks lie without gaps.
pub fn assert_dense(call: &LowerCall<'_>, tensors: &[&TensorRef]) {
    let optional = Optional::of_call(call.inputs, call.outputs.len());
    let given = [optional.last_key, optional.sink].into_iter().flatten().map(|at| &call.inputs[at]);
    for tensor in tensors.iter().copied().chain(given) {
        assert!(tensor.is_dense(), "row statistics and what the mask is made of lie without gaps: {tensor}");
    }
}

pub fn forward(call: &LowerCall<'_>) -> Vec<KernelSpec> {
    let [q, k, v, starts, ..] = call.inputs else { unreachable!("the shape rule requires four inputs") };
    assert_dense(call, &[starts, &call.outputs[1]]);
    let tensors = [("Q", q), ("K", k), ("V", v), ("O", &call.outputs[0])];
    let inputs = (0..4).map(Arg::Input).chain(optional_args(call));
    let args = inputs.chain([Arg::Output(0), Arg::Output(1)]).collect();
    vec![spec("attention_forward", "FORWARD", call, q.shape[2], &tensors, args)]
}

/// The means of d_o·v under a row's weights, f32 [B, heads, T].
pub fn backward_scratch(call: &LowerCall<'_>) -> usize {
    call.inputs[4].len() * DType::F32.size()
}

pub fn backward(call: &LowerCall<'_>) -> Vec<KernelSpec> {
    let [q, k, v, _, lse, d_o, starts, ..] = call.inputs else { unreachable!("the shape rule requires seven inputs") };
    let [dq, dk, dv] = call.outputs else { unreachable!("the shape rule gives three results") };
    assert_dense(call, &[starts, lse]);
    let delta = Arg::Scratch(0);
    let inputs = [0, 1, 2, 4, 5, 6].map(Arg::Input);
    let [last_key, sink] = optional_args(call);
    let queries = [("Q", q), ("K", k), ("V", v), ("DO", d_o), ("DQ", dq)];
    let args = inputs.clone().into_iter().chain([last_key.clone(), sink, delta.clone(), Arg::Output(0)]).collect();
    let first = spec("attention_backward_q", "BACKWARD_Q", call, q.shape[2], &queries, args);
    let keys = [("Q", q), ("K", k), ("V", v), ("DO", d_o), ("DK", dk), ("DV", dv)];
    let args = inputs.into_iter().chain([last_key, delta, Arg::Output(1), Arg::Output(2)]).collect();
    vec![first, spec("attention_backward_kv", "BACKWARD_KV", call, k.shape[2], &keys, args)]
}
