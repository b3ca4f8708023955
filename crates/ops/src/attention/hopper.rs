//! Attention on Hopper's tensor cores (wgmma) and copy engine: the division of the work for a head's size, the
//! launches, the workspace. The other kernel variants are in `library`.

mod division;
mod passes;

use program::{Arg, Documents, TensorRef};

use division::{Division, widths};
use passes::{Passes, Scratch, keys_for_one_pass, padded};

use super::launch::{Launch, assert_dense, optional_args, suits_tensor_cores};
use super::operands::{Extents, Optional};
use super::reading::Reading;
use crate::kernel::{KernelSpec, LowerCall};

const BEGIN: &str = include_str!("hopper/begin.cu");
const FORWARD: &str = include_str!("hopper/forward.cu");
const STATISTICS: &str = include_str!("hopper/statistics.cu");
const GRADIENTS: &str = include_str!("hopper/gradients.cu");
const GRADIENT_Q: &str = include_str!("hopper/gradient_q.cu");
const GRADIENT_KV: &str = include_str!("hopper/gradient_kv.cu");
const GRADIENT_KV_WIDE: &str = include_str!("hopper/gradient_kv_wide.cu");
const HEADERS: &[(&str, &str)] = &[
    ("blocks.cuh", include_str!("hopper/blocks.cuh")),
    ("queries.cuh", include_str!("hopper/queries.cuh")),
    ("keys.cuh", include_str!("hopper/keys.cuh")),
    ("weights.cuh", include_str!("hopper/weights.cuh")),
    ("turns.cuh", include_str!("hopper/turns.cuh")),
    ("shares.cuh", include_str!("hopper/shares.cuh")),
    ("semaphore.cuh", include_str!("../cuda/semaphore.cuh")),
    ("types.cuh", include_str!("../cuda/types.cuh")),
    device::HANDOFF,
    device::WGMMA,
];

/// Widest head of the kernels.
const WIDEST: usize = 256;
/// Bytes of room to align shared memory.
const SLACK: usize = 1024;

/// True on Hopper for what tensor cores read, heads of up to 256 columns.
pub fn takes(call: &LowerCall<'_>) -> bool {
    let reading = Reading::checked(call.attrs, call.inputs[0].shape[3]);
    let reads = reading.scale > 0.0 && !reading.branches;
    call.machine.arch.is_hopper() && suits_tensor_cores(call, WIDEST) && reads
}

/// True if the forward pass over full causal rows is faster than a library's: heads of more than 64 columns, and those
/// of up to 64 whose keys three share (H200: 418 TFLOP/s, cuDNN 368 to 381; with other groups 340 to 417, cuDNN 363 to
/// 410).
pub fn is_ahead(call: &LowerCall<'_>) -> bool {
    let e = Extents::of_call(call.inputs);
    let (w, wv) = widths(&e);
    takes(call) && (w + wv > 128 || e.group().is_multiple_of(3) && !e.group().is_multiple_of(2))
}

/// Scratch memory of the forward pass: a ticket.
pub fn forward_scratch() -> usize {
    16
}

/// Scratch memory of the backward pass.
pub fn scratch(call: &LowerCall<'_>) -> usize {
    Scratch::of(call).bytes
}

/// Boxes of rows of 64 columns.
fn boxes(input: usize, rows: usize) -> Arg {
    Arg::Boxes { input, extents: [1, rows as u32, 1, 64], matrices: None }
}

fn output_boxes(output: usize) -> Arg {
    Arg::OutputBoxes { output, extents: [1, 64, 1, 64], matrices: None }
}

/// Returns the launch of a kernel with persistent blocks that draw their work.
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

/// Returns the kernels: the ticket is set to zero, then the pass.
pub fn forward(call: &LowerCall<'_>) -> Vec<KernelSpec> {
    assert_dense(call, &[&call.inputs[3], &call.outputs[1]]);
    let e = Extents::of_call(call.inputs);
    let span = Reading::checked(call.attrs, e.head_dim).hiding_window(e.tokens).unwrap_or(e.tokens);
    let packed = call.documents != Documents::Rows;
    let intervals = Optional::of_call(call.inputs, call.outputs.len()).limit.is_some();
    let (division, (w, wv)) = (Division::forward(&e, span, packed, intervals), widths(&e));
    let [limit, sink] = optional_args(call);
    let ticket = Arg::Scratch(0);
    let begin = KernelSpec {
        entry: "attention_begin",
        source: BEGIN.to_owned(),
        headers: vec![],
        defines: vec![],
        grid: [1; 3],
        block: [1; 3],
        shared_bytes: 0,
        args: vec![ticket.clone()],
    };
    let queries = division.q_stages * division.warpgroups * w.max(wv) * 128;
    let size = [call.machine.units, division.threads(), SLACK + queries + division.tiles((w, wv))];
    let keys = division.keys;
    let args = vec![
        boxes(0, 64),
        boxes(1, keys),
        boxes(2, keys),
        output_boxes(0),
        Arg::Input(3),
        limit,
        sink,
        Arg::Output(1),
        ticket,
    ];
    vec![begin, spec("attention_forward", FORWARD, call, &[], division.defines(&e), size, args)]
}

/// Returns the kernels: the statistics of the queries; then the gradients in one pass, or dq and then dk and dv.
pub fn backward(call: &LowerCall<'_>) -> Vec<KernelSpec> {
    let [_, _, _, o, lse, d_o, starts, ..] = call.inputs else { unreachable!("the shape rule requires seven inputs") };
    assert_dense(call, &[starts, lse]);
    let e = Extents::of_call(call.inputs);
    let at = Scratch::of(call);
    let lanes = match widths(&e).1 {
        ..=64 => 8,
        65..=128 => 16,
        _ => 32,
    };
    let size = [(e.batch * e.heads * padded(&e)).div_ceil(256 / lanes), 256, 0];
    let args = [3, 5, 4, 6].map(Arg::Input).into_iter().chain([optional_args(call)[0].clone()]);
    let args = args.chain([0, at.intervals, at.drawings[0]].map(Arg::Scratch)).collect();
    let tickets = [at.by_row(), vec![("TICKETS", at.ticket_count), ("LONG", keys_for_one_pass(call))]].concat();
    let first = spec("attention_statistics", STATISTICS, call, &[("O", o), ("DO", d_o)], tickets, size, args);
    let [drawing, next, last] = at.drawings;
    match at.passes {
        Passes::One => vec![first, gradients(call, &e, &at, drawing)],
        Passes::Two => vec![first, gradient_q(call, &e, &at, drawing), gradient_kv(call, &e, &at, next)],
        Passes::ByRow => vec![
            first,
            gradients(call, &e, &at, drawing),
            gradient_q(call, &e, &at, next),
            gradient_kv(call, &e, &at, last),
        ],
    }
}

fn gradients(call: &LowerCall<'_>, e: &Extents, at: &Scratch, drawing: usize) -> KernelSpec {
    let (w, wv) = widths(e);
    let (stages, own_stages) = if w + wv > 128 { (2, 1) } else { (3, 2) };
    // Blocks that work on one key head read the same queries and sums of dq. With a few key heads at a time these stay in the L2
    // cache; with very few, tiles wait for each other's turns. H100, TFLOP/s with all key heads at a time and with 32 of them:
    // 8 x 2048 tokens, 8 key heads of 2 queries 318, 330; of 4 queries 309, 328; 16 x 1024 224, 268; 32 x 512 190, 210.
    let pairs = e.batch * e.kv_heads * at.shares;
    let few = 1 << (call.machine.units / 4).max(1).ilog2();
    // With a window, tiles that run side by side should read different queries.
    let window = Reading::checked(call.attrs, e.head_dim).hiding_window(e.tokens);
    let section = window.map_or(few, |_| 128 / e.tokens.div_ceil(128)).min(pairs).max(1);
    let division = vec![("STAGES", stages), ("KV_STAGES", own_stages), ("SECTION", section), ("SHARES", at.shares)];
    let defines = [at.by_row(), division].concat();
    let tiles = own_stages * 128 * (w + wv) * 2 + stages * (64 * (w + wv) * 2 + 1024);
    let parts_of_dq = 16384 + 2 * 64 * w * 4;
    let args = [boxes(0, 64), boxes(1, 64), boxes(2, 64), boxes(5, 64), output_boxes(1), output_boxes(2)]
        .into_iter()
        .chain([Arg::Output(0)])
        .chain([0, at.intervals, at.dq_sums, drawing, at.turns, at.sums_of_shares, at.ready_shares].map(Arg::Scratch))
        .collect();
    let size = [call.machine.units, 384, SLACK + tiles + parts_of_dq];
    spec("attention_gradients", GRADIENTS, call, &[("DQ", &call.outputs[0])], defines, size, args)
}

fn gradient_q(call: &LowerCall<'_>, e: &Extents, at: &Scratch, drawing: usize) -> KernelSpec {
    let (division, (w, wv)) = (Division::gradient_q(e), widths(e));
    let queries = division.q_stages * division.warpgroups * (w + wv) * 128;
    let size = [call.machine.units, division.threads(), SLACK + queries + division.tiles((w, wv))];
    let keys = division.keys;
    let args = vec![
        boxes(0, 64),
        boxes(1, keys),
        boxes(2, keys),
        boxes(5, 64),
        output_boxes(0),
        Arg::Input(6),
        optional_args(call)[0].clone(),
        Arg::Scratch(0),
        Arg::Scratch(drawing),
    ];
    spec("attention_gradient_q", GRADIENT_Q, call, &[], [at.by_row(), division.defines(e)].concat(), size, args)
}

fn gradient_kv(call: &LowerCall<'_>, e: &Extents, at: &Scratch, drawing: usize) -> KernelSpec {
    let both = widths(e).0 + widths(e).1;
    let wide = both > 256;
    let (tile, stages, own_stages) = match both {
        257.. => (64, 2, 1),
        129..=256 => (128, 2, 2),
        _ => (128, 3, 2),
    };
    let division =
        vec![("TILE", tile), ("STAGES", stages), ("KV_STAGES", own_stages), ("SECTION", e.batch * e.kv_heads)];
    let defines = [at.by_row(), division].concat();
    let handed = if wide { 16384 } else { 0 };
    let tiles = own_stages * tile * both * 2 + stages * (64 * both * 2 + 1024) + handed;
    let args = [boxes(0, 64), boxes(1, 64), boxes(2, 64), boxes(5, 64), output_boxes(1), output_boxes(2)]
        .into_iter()
        .chain([0, at.intervals, drawing].map(Arg::Scratch))
        .collect();
    let source = if wide { GRADIENT_KV_WIDE } else { GRADIENT_KV };
    spec("attention_gradient_kv", source, call, &[], defines, [call.machine.units, 384, SLACK + tiles], args)
}
