//! The backward pass over full rows on Hopper: when it applies, its scratch memory, its launches.
//! Which other realisations there are stands in `library`.

use program::{Arch, Arg, Documents, TensorRef};
use tensor::DType;

use super::library::plain;
use super::{Extents, Reading};
use crate::kernel::{KernelSpec, LowerCall};

const STATISTICS: &str = include_str!("statistics.cu");
const GRADIENTS: &str = include_str!("hopper.cu");
const TYPES: (&str, &str) = ("types.cuh", include_str!("../cuda/types.cuh"));

/// Columns of a head, queries of a block, keys of a tile: as the kernels divide the work.
const HEAD_DIM: usize = 128;
const QUERIES: usize = 64;
const KEYS: usize = 128;
/// Threads of a block of the gradients' kernel, and its shared memory with room to align it: k, v, two stages of q
/// and d_o with their statistics, two tiles of ds.
const THREADS: u32 = 384;
const SHARED_BYTES: usize =
    1024 + (2 * KEYS + 2 * 2 * QUERIES) * HEAD_DIM * 2 + 2 * QUERIES * 8 + 2 * KEYS * QUERIES * 2;
/// Alignment, in bytes, that the copy engine asks of addresses and strides.
const ALIGNMENT: usize = 16;

/// True for the backward pass of bf16 heads of 128 over rows of one document each, without a window that hides a
/// key, on Hopper, in layouts that the copy engine reads.
pub fn takes(call: &LowerCall<'_>) -> bool {
    let [q, k, v, o, _, d_o, _] = call.inputs else { return false };
    matches!(&call.machine.arch, Arch::Cuda(name) if name == "sm_90a")
        && call.documents == Documents::Rows
        && q.shape[3] == HEAD_DIM
        && plain(call)
        && [q, k, v, o, d_o].into_iter().chain(call.outputs).all(suits)
}

fn suits(tensor: &TensorRef) -> bool {
    let aligned = |axis: usize| tensor.shape[axis] == 1 || (tensor.strides[axis] * 2).is_multiple_of(ALIGNMENT);
    tensor.dtype == DType::BF16
        && tensor.strides[3] == 1
        && tensor.offset.is_multiple_of(ALIGNMENT)
        && (0..3).all(aligned)
}

/// Where the parts of the scratch memory start, in bytes, and its size.
struct Scratch {
    /// f32 [B, heads, blocks, 64, 128], in the order in which registers hold it.
    dq_sums: usize,
    /// f32 [B, heads, blocks · 64, 2]
    statistics: usize,
    /// i32: the ticket, and a turn for every block of queries.
    turns: usize,
    turn_count: usize,
    bytes: usize,
}

impl Scratch {
    fn of(e: &Extents) -> Scratch {
        let blocks = e.batch * e.heads * e.tokens.div_ceil(QUERIES);
        let statistics = blocks * QUERIES * HEAD_DIM * 4;
        let turns = statistics + blocks * QUERIES * 8;
        let turn_count = 1 + blocks;
        Scratch { dq_sums: 0, statistics, turns, turn_count, bytes: turns + turn_count * 4 }
    }
}

/// Scratch memory of the call, in bytes: 136 MB for 8 rows of 2048 tokens with 16 heads.
pub fn scratch(call: &LowerCall<'_>) -> usize {
    Scratch::of(&Extents::of_call(call.inputs)).bytes
}

/// The statistics of the queries, then the gradients.
pub fn backward(call: &LowerCall<'_>) -> Vec<KernelSpec> {
    let [q, k, v, o, lse, d_o, _] = call.inputs else { unreachable!("the shape rule asks for seven inputs") };
    let [dq, dk, dv] = call.outputs else { unreachable!("the shape rule gives three results") };
    assert!(lse.is_dense(), "row statistics lie without gaps: {lse}");
    let e = Extents::of_call(call.inputs);
    let at = Scratch::of(&e);
    let mut defines = numbers(call, &e, &at);
    for (name, tensor) in [("Q", q), ("K", k), ("V", v), ("O", o), ("DO", d_o), ("DQ", dq), ("DK", dk), ("DV", dv)] {
        let axes = ["B", "S", "H"].into_iter().zip(&tensor.strides);
        defines.extend(axes.map(|(axis, stride)| (format!("{name}_{axis}"), stride.to_string())));
    }
    let rows = e.batch * e.heads * e.tokens.next_multiple_of(QUERIES);
    let statistics = KernelSpec {
        entry: "attention_statistics",
        source: STATISTICS.to_owned(),
        headers: vec![TYPES, ("reduce.cuh", include_str!("../cuda/reduce.cuh"))],
        defines: defines.clone(),
        grid: [(rows / 8) as u32, 1, 1],
        block: [256, 1, 1],
        shared_bytes: 0,
        args: vec![Arg::Input(3), Arg::Input(5), Arg::Input(4), Arg::Scratch(at.statistics), Arg::Scratch(at.turns)],
    };
    let boxes = |input: usize, tokens: usize| Arg::Boxes { input, extents: [1, tokens as u32, 1, 64] };
    let gradients = KernelSpec {
        entry: "attention_gradients",
        source: GRADIENTS.to_owned(),
        headers: vec![TYPES, device::HANDOFF, device::WGMMA],
        defines,
        grid: [(e.batch * e.kv_heads * e.tokens.div_ceil(KEYS)) as u32, 1, 1],
        block: [THREADS, 1, 1],
        shared_bytes: SHARED_BYTES as u32,
        args: [boxes(0, QUERIES), boxes(1, KEYS), boxes(2, KEYS), boxes(5, QUERIES)]
            .into_iter()
            .chain([at.statistics, at.dq_sums, at.turns].map(Arg::Scratch))
            .chain((0..3).map(Arg::Output))
            .collect(),
    };
    vec![statistics, gradients]
}

fn numbers(call: &LowerCall<'_>, e: &Extents, at: &Scratch) -> Vec<(String, String)> {
    let numbers = [
        ("BATCH", e.batch),
        ("TOKENS", e.tokens),
        ("HEADS", e.heads),
        ("KV_HEADS", e.kv_heads),
        ("TURNS", at.turn_count),
    ];
    let mut defines: Vec<_> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
    defines.push(("SCALE".to_owned(), format!("{:e}f", Reading::checked(call.attrs, HEAD_DIM).scale as f32)));
    defines
}
