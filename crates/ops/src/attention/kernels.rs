//! Launches of the scalar attention kernels: f32, and what has no kernel for the tensor cores.

use program::{Arg, TensorRef};
use tensor::DType;

use super::Extents;
use super::launch::{Launch, assert_dense, optional_args};
use crate::kernel::{KernelSpec, LowerCall};

const SOURCE: &str = include_str!("attention.cu");
const HEADERS: &[(&str, &str)] = &[
    ("plain.cuh", include_str!("plain.cuh")),
    ("types.cuh", include_str!("../cuda/types.cuh")),
    ("reduce.cuh", include_str!("../cuda/reduce.cuh")),
];

/// Number of warps in a block, and the number where the shared memory has no room for the rows of four.
const WARPS: usize = 4;
const FEW_WARPS: usize = 1;

/// Returns the queries or keys that one warp holds: the number that fits into 48 KiB of shared memory with a tile,
/// where one does.
fn per_warp(widest: usize) -> usize {
    if widest <= 128 { 4 } else { 1 }
}

/// A kernel whose blocks divide the tokens of `heads` heads among themselves.
fn spec(
    entry: &'static str,
    part: &'static str,
    call: &LowerCall<'_>,
    heads: usize,
    tensors: &[(&str, &TensorRef)],
    args: Vec<Arg>,
) -> KernelSpec {
    let e = Extents::of_call(call.inputs);
    let widest = e.head_dim.max(e.value_dim);
    let per_warp = per_warp(widest);
    let shared = |warps: usize| 4 * (warps * per_warp * (e.head_dim + e.value_dim) + 32 * (widest + 1));
    let warps = if shared(WARPS) <= call.machine.arch.shared_per_block() { WARPS } else { FEW_WARPS };
    let launch = Launch {
        entry,
        source: SOURCE,
        headers: HEADERS,
        division: vec![(part, 1), ("WARPS", warps), ("PER_WARP", per_warp)],
        tensors,
        grid: [e.tokens.div_ceil(warps * per_warp), heads, e.batch],
        threads: warps * 32,
        shared_bytes: shared(warps),
        args,
    };
    launch.of(call)
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
    let [limit, sink] = optional_args(call);
    let queries = [("Q", q), ("K", k), ("V", v), ("DO", d_o), ("DQ", dq)];
    let args = inputs.clone().into_iter().chain([limit.clone(), sink, delta.clone(), Arg::Output(0)]).collect();
    let first = spec("attention_backward_q", "BACKWARD_Q", call, q.shape[2], &queries, args);
    let keys = [("Q", q), ("K", k), ("V", v), ("DO", d_o), ("DK", dk), ("DV", dv)];
    let args = inputs.into_iter().chain([limit, delta, Arg::Output(1), Arg::Output(2)]).collect();
    vec![first, spec("attention_backward_kv", "BACKWARD_KV", call, k.shape[2], &keys, args)]
}
