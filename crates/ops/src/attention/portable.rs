//! Attention on the tensor cores of every GPU from sm_80 on (`mma.sync`): the calls that it takes, the launches, the
//! scratch memory. The division of the work is in `division`, the other kernel variants in `library`.

mod division;

use program::{Arg, TensorRef};

use division::{ByKey, ByQuery, forward_division, key_division, q_division};

use super::Extents;
use super::launch::{Launch, assert_dense, optional_args, suits_tensor_cores};
use super::operands::Optional;
use super::reading::Reading;
use super::tiles::{SHARERS, STRIP, STRIPS, Tiles, in_one_order, wants_one_order};
use crate::kernel::{KernelSpec, LowerCall};

const FORWARD: &str = include_str!("portable/forward.cu");
const INVARIANT: &str = include_str!("portable/invariant.cu");
const RECORDS: &str = include_str!("portable/records.cu");
const GRADIENT_Q: &str = include_str!("portable/gradient_q.cu");
const GRADIENTS: &str = include_str!("portable/gradients.cu");
const HEADERS: &[(&str, &str)] = &[
    ("tiles.cuh", include_str!("portable/tiles.cuh")),
    ("queries.cuh", include_str!("portable/queries.cuh")),
    ("semaphore.cuh", include_str!("../cuda/semaphore.cuh")),
    ("types.cuh", include_str!("../cuda/types.cuh")),
    ("mma.cuh", include_str!("../cuda/mma.cuh")),
];

const INVARIANT_HEADERS: &[(&str, &str)] = &[
    ("strips.cuh", include_str!("strips.cuh")),
    ("tiles.cuh", include_str!("portable/tiles.cuh")),
    ("types.cuh", include_str!("../cuda/types.cuh")),
    ("mma.cuh", include_str!("../cuda/mma.cuh")),
];

/// Bytes of `records`: what the gradients need of one query and head.
const RECORD: usize = 16;
/// Threads of a block of the kernel that writes them.
const RECORD_THREADS: usize = 256;

/// Largest head that has a division.
const MAX_HEAD_DIM: usize = 512;

/// Results of a forward pass: o and lse. A backward pass has three.
const FORWARD_OUTPUTS: usize = 2;

const FITS: &str = "these kernels run only what `takes` accepts";

/// True on GPUs for what tensor cores read, in heads whose tiles fit the shared memory of a block.
pub fn takes(call: &LowerCall<'_>) -> bool {
    if !call.machine.arch.is_gpu() || !suits_tensor_cores(call, MAX_HEAD_DIM) {
        return false;
    }
    let (e, limit) = (Extents::of_call(call.inputs), call.machine.arch.shared_per_block());
    let is_forward = call.outputs.len() == FORWARD_OUTPUTS;
    match is_forward {
        true => forward_division(&e, limit).is_some(),
        false => key_division(&e, limit).is_some_and(|(of, _)| of.turns.is_some() || q_division(&e, limit).is_some()),
    }
}

fn forward_parts(call: &LowerCall<'_>, e: &Extents) -> (ByQuery, usize) {
    forward_division(e, call.machine.arch.shared_per_block()).expect(FITS)
}

fn key_parts(call: &LowerCall<'_>, e: &Extents) -> (ByKey, usize) {
    key_division(e, call.machine.arch.shared_per_block()).expect(FITS)
}

/// The first bytes of the parts of the backward pass's scratch, and its size.
struct Scratch {
    /// f32 [B, heads, blocks of queries, queries, padded columns], in the order in which registers hold it.
    dq_sums: usize,
    /// i32: the ticket, and a turn for every block of queries and `turn_heads` heads.
    turns: usize,
    turn_count: usize,
    bytes: usize,
}

impl Scratch {
    /// Places the parts after the records of the queries, float4 [B, heads, T].
    fn of(e: &Extents, division: &ByKey) -> Scratch {
        let dq_sums = e.batch * e.heads * e.tokens * RECORD;
        if division.turns.is_none() {
            return Scratch { dq_sums: 0, turns: 0, turn_count: 0, bytes: dq_sums };
        }
        let blocks = division.query_blocks(e);
        let sums = e.batch * e.heads * blocks * division.queries * division.padded(e.head_dim) * 4;
        let (turns, turn_count) = (dq_sums + sums, 1 + e.batch * e.heads / division.turn_heads(e) * blocks);
        Scratch { dq_sums, turns, turn_count, bytes: turns + turn_count * 4 }
    }
}

/// Bytes of the backward pass's scratch.
pub fn backward_scratch(call: &LowerCall<'_>) -> usize {
    let e = Extents::of_call(call.inputs);
    Scratch::of(&e, &key_parts(call, &e).0).bytes
}

/// A kernel over the blocks of one axis.
fn spec(
    entry: &'static str,
    source: &'static str,
    call: &LowerCall<'_>,
    tensors: &[(&str, &TensorRef)],
    division: Vec<(&'static str, usize)>,
    [blocks, threads, shared_bytes]: [usize; 3],
    args: Vec<Arg>,
) -> KernelSpec {
    let grid = [blocks, 1, 1];
    Launch { entry, source, headers: HEADERS, division, tensors, grid, threads, shared_bytes, args }.of(call)
}

pub fn forward(call: &LowerCall<'_>) -> Vec<KernelSpec> {
    let [q, k, v, starts, ..] = call.inputs else { unreachable!("the shape rule requires four inputs") };
    assert_dense(call, &[starts, &call.outputs[1]]);
    let e = Extents::of_call(call.inputs);
    let (division, shared) = forward_parts(call, &e);
    let blocks = e.batch * e.heads * e.tokens.div_ceil(division.rows());
    let tensors = [("Q", q), ("K", k), ("V", v), ("O", &call.outputs[0])];
    let inputs = (0..4).map(Arg::Input).chain(optional_args(call));
    let args = inputs.chain([Arg::Output(0), Arg::Output(1)]).collect();
    let size = [blocks, division.threads(), shared];
    vec![spec("attention_forward", FORWARD, call, &tensors, division.defines(), size, args)]
}

/// True for a forward pass that wants one order of sums, and whose operands have it: causal documents, with branches or without, of operands of 16 bits.
pub fn takes_in_one_order(call: &LowerCall<'_>) -> bool {
    let e = Extents::of_call(call.inputs);
    let reading = Reading::checked(call.attrs, e.head_dim);
    let limit = Optional::of_call(call.inputs, call.outputs.len()).limit;
    wants_one_order(call.attrs, &call.machine.arch)
        && suits_tensor_cores(call, Tiles::WIDEST)
        && !reading.bidirectional
        && limit.is_some() == reading.branches
        && in_one_order([e.head_dim, e.value_dim], &call.machine.arch).is_some()
}

/// Returns the forward pass whose sums follow from a token's own sequence alone (`batch_invariant`): the tiles, the warps of a
/// strip and their order are those of attention over pages.
pub fn forward_in_one_order(call: &LowerCall<'_>) -> Vec<KernelSpec> {
    let [q, k, v, starts, ..] = call.inputs else { unreachable!("the shape rule requires four inputs") };
    assert_dense(call, &[starts, &call.outputs[1]]);
    let e = Extents::of_call(call.inputs);
    let tiles = in_one_order([e.head_dim, e.value_dim], &call.machine.arch).expect("checked by `takes_in_one_order`");
    let tensors = [("Q", q), ("K", k), ("V", v), ("O", &call.outputs[0])];
    let blocks = (e.tokens * e.group()).div_ceil(STRIP * STRIPS);
    let inputs = (0..4).map(Arg::Input).chain(optional_args(call));
    let launch = Launch {
        entry: "attention_invariant",
        source: INVARIANT,
        headers: INVARIANT_HEADERS,
        division: vec![("STRIPS", STRIPS), ("SHARERS", SHARERS), ("TILE", tiles.keys)],
        tensors: &tensors,
        grid: [e.batch * blocks, e.kv_heads, 1],
        threads: 32 * STRIPS * SHARERS,
        shared_bytes: tiles.bytes(STRIPS * SHARERS),
        args: inputs.chain([Arg::Output(0), Arg::Output(1)]).collect(),
    };
    vec![launch.of(call)]
}

/// The records of the queries; dq, where the last kernel does not make it; the gradients.
pub fn backward(call: &LowerCall<'_>) -> Vec<KernelSpec> {
    let [q, k, v, _, lse, d_o, starts, ..] = call.inputs else { unreachable!("the shape rule requires seven inputs") };
    let [dq, dk, dv] = call.outputs else { unreachable!("the shape rule gives three results") };
    assert_dense(call, &[starts, lse]);
    let e = Extents::of_call(call.inputs);
    let (division, shared) = key_parts(call, &e);
    let at = Scratch::of(&e, &division);
    let mut kernels = vec![records(call, &e, &at)];
    if division.turns.is_none() {
        kernels.push(gradient_q(call, &e));
    }
    let tensors = [("Q", q), ("K", k), ("V", v), ("DO", d_o), ("DQ", dq), ("DK", dk), ("DV", dv)];
    let size = [e.batch * e.kv_heads * e.tokens.div_ceil(division.rows), division.threads(), shared];
    let [limit, _] = optional_args(call);
    let inputs = [0, 1, 2, 5].map(Arg::Input).into_iter().chain([Arg::Scratch(0), limit]);
    let args = inputs.chain([at.dq_sums, at.turns].map(Arg::Scratch)).chain((0..3).map(Arg::Output)).collect();
    kernels.push(spec("attention_gradients", GRADIENTS, call, &tensors, division.defines(&e), size, args));
    kernels
}

fn records(call: &LowerCall<'_>, e: &Extents, at: &Scratch) -> KernelSpec {
    let [_, _, _, o, _, d_o, ..] = call.inputs else { unreachable!("the shape rule requires seven inputs") };
    let [limit, _] = optional_args(call);
    // Lanes of 16 bytes for a row, a power of two of one warp.
    let lanes = (e.value_dim / 8).next_power_of_two().min(32);
    let size = [e.batch * e.heads * e.tokens.div_ceil(RECORD_THREADS / lanes), RECORD_THREADS, 0];
    let args = [3, 5, 4, 6].map(Arg::Input).into_iter().chain([limit, Arg::Scratch(0), Arg::Scratch(at.turns)]);
    let division = vec![("LANES", lanes), ("TURN_COUNT", at.turn_count)];
    spec("attention_records", RECORDS, call, &[("O", o), ("DO", d_o)], division, size, args.collect())
}

fn gradient_q(call: &LowerCall<'_>, e: &Extents) -> KernelSpec {
    let [q, k, v, _, _, d_o, ..] = call.inputs else { unreachable!("the shape rule requires seven inputs") };
    let (division, shared) = q_division(e, call.machine.arch.shared_per_block()).expect(FITS);
    let tensors = [("Q", q), ("K", k), ("V", v), ("DO", d_o), ("DQ", &call.outputs[0])];
    let size = [e.batch * e.heads * e.tokens.div_ceil(division.rows()), division.threads(), shared];
    let [limit, _] = optional_args(call);
    let args = [0, 1, 2, 5].map(Arg::Input).into_iter().chain([Arg::Scratch(0), limit, Arg::Output(0)]).collect();
    spec("attention_gradient_q", GRADIENT_Q, call, &tensors, division.defines(), size, args)
}
