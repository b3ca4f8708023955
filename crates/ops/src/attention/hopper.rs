//! Attention on Hopper's tensor cores (wgmma) and copy engine: how the work is divided for a head's size, the
//! launches, the scratch memory. Which other realisations there are stands in `library`.

use program::{Arg, Documents};
use tensor::DType;

use super::kernels::{assert_dense, mask_defines, optional_args, strides};
use super::operands::{Extents, Reading};
use super::portable::suits;
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
    ("types.cuh", include_str!("../cuda/types.cuh")),
    device::HANDOFF,
    device::WGMMA,
];

/// Widest head of the kernels.
const WIDEST: usize = 256;
/// Keys of a query from which the gradients in one pass are the faster; below, tiles wait for each other too long.
const LONG: usize = 1024;
/// Keys of a query from which wider tiles of keys pay in the forward pass.
const VERY_LONG: usize = 16384;
/// Room to align shared memory.
const SLACK: usize = 1024;

/// True for bf16 and f16 heads of up to 256 columns in steps of 8 on Hopper, in layouts that the copy engine reads.
pub fn takes(call: &LowerCall<'_>) -> bool {
    let e = Extents::of_call(call.inputs);
    let dtype = call.inputs[0].dtype;
    let backward = call.outputs.len() == 3;
    let others = if backward { vec![&call.inputs[3], &call.inputs[5]] } else { vec![] };
    let results = if backward { call.outputs } else { &call.outputs[..1] };
    call.machine.arch.is_hopper()
        && matches!(dtype, DType::BF16 | DType::F16)
        && [e.head_dim, e.value_dim].iter().all(|columns| columns.is_multiple_of(8) && *columns <= WIDEST)
        && Reading::checked(call.attrs, e.head_dim).scale > 0.0
        && call.inputs[..3].iter().chain(others).chain(results).all(|t| t.dtype == dtype && suits(t))
}

/// How a kernel whose blocks own queries divides its work.
#[derive(Clone, Copy)]
struct Division {
    /// Of four warps: each owns 64 rows.
    warpgroups: usize,
    /// Query heads that share a block, and a key head.
    heads: usize,
    /// Keys of a tile.
    keys: usize,
    /// Stages of queries' tiles, and of values'; keys have two.
    q_stages: usize,
    v_stages: usize,
}

impl Division {
    /// `span`: keys that a query sees at most.
    fn forward(e: &Extents, span: usize, packed: bool) -> Division {
        let (w, wv) = widths(e);
        let heads = if e.group().is_multiple_of(2) { 2 } else { 1 };
        let of = |keys: usize, q_stages: usize| Division { warpgroups: 2, heads, keys, q_stages, v_stages: 2 };
        match () {
            () if w + wv > 384 => of(if heads == 2 { 80 } else { 64 }, 1),
            () if w.max(wv) > 128 => of(if w + wv > 320 { 96 } else { 128 }, 1),
            () if w + wv > 128 && span >= VERY_LONG => of(160, 1),
            () if w + wv > 128 => of(128, 2),
            () if heads == 1 && e.group().is_multiple_of(3) => Division { warpgroups: 3, heads: 3, ..of(128, 2) },
            () => of(if packed { 96 } else { 192 }, 2),
        }
    }

    fn gradient_q(e: &Extents) -> Division {
        let (w, wv) = widths(e);
        let heads = if e.group().is_multiple_of(2) { 2 } else { 1 };
        let of = |keys: usize, q_stages: usize| Division { warpgroups: 2, heads, keys, q_stages, v_stages: 2 };
        match () {
            () if w + wv > 384 => Division { v_stages: 1, ..of(48, 1) },
            () if w.max(wv) > 128 => of(if w + wv > 320 { 48 } else { 64 }, 1),
            () if w + wv > 128 => of(64, 2),
            () if heads == 1 && e.group().is_multiple_of(3) => Division { warpgroups: 3, heads: 3, ..of(64, 2) },
            () => of(128, 2),
        }
    }

    fn defines(&self, e: &Extents) -> Vec<(&'static str, usize)> {
        vec![
            ("WARPGROUPS", self.warpgroups),
            ("HEADS_PER_BLOCK", self.heads),
            ("KEYS", self.keys),
            ("STAGES", 2),
            ("V_STAGES", self.v_stages),
            ("Q_STAGES", self.q_stages),
            ("SECTION", e.batch * e.kv_heads),
        ]
    }

    fn threads(&self) -> usize {
        128 * (self.warpgroups + 1)
    }

    /// Bytes of the tiles of keys and values.
    fn tiles(&self, (w, wv): (usize, usize)) -> usize {
        self.keys * (2 * w + self.v_stages * wv) * 2
    }
}

/// Columns of q and v as they lie in shared memory.
fn widths(e: &Extents) -> (usize, usize) {
    (e.head_dim.next_multiple_of(64), e.value_dim.next_multiple_of(64))
}

/// Rows of the statistics of a head.
fn padded(e: &Extents) -> usize {
    e.tokens.next_multiple_of(64) + 64
}

/// Scratch memory of the forward pass: a ticket.
pub fn forward_scratch() -> usize {
    16
}

/// Whether the gradients take one pass, dq summed over the tiles of keys by turns: long intervals and narrow heads.
fn in_one_pass(call: &LowerCall<'_>) -> bool {
    let e = Extents::of_call(call.inputs);
    let (w, wv) = widths(&e);
    let window = Reading::checked(call.attrs, e.head_dim).hiding_window(e.tokens);
    w.max(wv) <= 128 && call.documents == Documents::Rows && window.is_none_or(|window| window >= LONG)
}

/// Where the parts of the backward pass's scratch start, in bytes, and its size.
struct Scratch {
    /// f32 [B, heads, blocks of 64 queries, 64, columns], in one pass alone.
    dq_sums: usize,
    /// i32 [B, padded, 2]; the statistics, f32 [B, heads, padded, 2], come first.
    intervals: usize,
    /// i32: tickets, and in one pass a turn for every block of queries.
    tickets: usize,
    ticket_count: usize,
    bytes: usize,
}

impl Scratch {
    fn of(call: &LowerCall<'_>) -> Scratch {
        let e = Extents::of_call(call.inputs);
        let blocks = e.batch * e.heads * e.tokens.div_ceil(64);
        let one_pass = in_one_pass(call);
        let intervals = e.batch * e.heads * padded(&e) * 8;
        let dq_sums = intervals + e.batch * padded(&e) * 8;
        let tickets = dq_sums + if one_pass { blocks * 64 * widths(&e).0 * 4 } else { 0 };
        let ticket_count = if one_pass { 1 + blocks } else { 2 };
        Scratch { dq_sums, intervals, tickets, ticket_count, bytes: tickets + ticket_count * 4 }
    }
}

/// Scratch memory of the backward pass.
pub fn scratch(call: &LowerCall<'_>) -> usize {
    Scratch::of(call).bytes
}

/// Boxes of rows of 64 columns.
fn boxes(input: usize, rows: usize) -> Arg {
    Arg::Boxes { input, extents: [1, rows as u32, 1, 64] }
}

fn output_boxes(output: usize) -> Arg {
    Arg::OutputBoxes { output, extents: [1, 64, 1, 64] }
}

fn spec(
    entry: &'static str,
    source: &str,
    call: &LowerCall<'_>,
    division: Vec<(&'static str, usize)>,
    [blocks, threads, shared]: [usize; 3],
    args: Vec<Arg>,
) -> KernelSpec {
    let mut defines = mask_defines(call);
    let is_f16 = (call.inputs[0].dtype == DType::F16) as usize;
    let numbers = division.into_iter().chain([("IS_F16", is_f16)]);
    defines.extend(numbers.map(|(name, n)| (name.to_owned(), n.to_string())));
    KernelSpec {
        entry,
        source: source.to_owned(),
        headers: HEADERS.to_vec(),
        defines,
        grid: [blocks as u32, 1, 1],
        block: [threads as u32, 1, 1],
        shared_bytes: shared as u32,
        args,
    }
}

/// The ticket set to zero, then the pass.
pub fn forward(call: &LowerCall<'_>) -> Vec<KernelSpec> {
    assert_dense(call, &[&call.inputs[3], &call.outputs[1]]);
    let e = Extents::of_call(call.inputs);
    let span = Reading::checked(call.attrs, e.head_dim).hiding_window(e.tokens).unwrap_or(e.tokens);
    let (division, (w, wv)) = (Division::forward(&e, span, call.documents != Documents::Rows), widths(&e));
    let [last_key, sink] = optional_args(call);
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
        last_key,
        sink,
        Arg::Output(1),
        ticket,
    ];
    vec![begin, spec("attention_forward", FORWARD, call, division.defines(&e), size, args)]
}

/// The statistics of the queries; then the gradients in one pass, or dq and then dk and dv.
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
    let args = args.chain([0, at.intervals, at.tickets].map(Arg::Scratch)).collect();
    let tickets = vec![("TICKETS", at.ticket_count)];
    let mut first = spec("attention_statistics", STATISTICS, call, tickets, size, args);
    first.defines.extend([("O", o), ("DO", d_o)].into_iter().flat_map(|(name, tensor)| strides(name, tensor)));
    match in_one_pass(call) {
        true => vec![first, gradients(call, &e, &at)],
        false => vec![first, gradient_q(call, &e, &at), gradient_kv(call, &e, &at)],
    }
}

fn gradients(call: &LowerCall<'_>, e: &Extents, at: &Scratch) -> KernelSpec {
    let (w, wv) = widths(e);
    let (stages, own_stages) = if w + wv > 128 { (2, 1) } else { (3, 2) };
    // With a window, tiles that run side by side should read different queries: few key heads at a time.
    let pairs = e.batch * e.kv_heads;
    let window = Reading::checked(call.attrs, e.head_dim).hiding_window(e.tokens);
    let section = window.map_or(pairs, |_| (128 / e.tokens.div_ceil(128)).min(pairs).max(1));
    let defines = vec![("STAGES", stages), ("KV_STAGES", own_stages), ("SECTION", section)];
    let tiles = own_stages * 128 * (w + wv) * 2 + stages * (64 * (w + wv) * 2 + 1024);
    let parts_of_dq = 16384 + 2 * 64 * w * 4;
    let args = [boxes(0, 64), boxes(1, 64), boxes(2, 64), boxes(5, 64), output_boxes(1), output_boxes(2)]
        .into_iter()
        .chain([Arg::Output(0)])
        .chain([0, at.intervals, at.dq_sums, at.tickets, at.tickets + 4].map(Arg::Scratch))
        .collect();
    let size = [call.machine.units, 384, SLACK + tiles + parts_of_dq];
    let mut gradients = spec("attention_gradients", GRADIENTS, call, defines, size, args);
    gradients.defines.extend(strides("DQ", &call.outputs[0]));
    gradients
}

fn gradient_q(call: &LowerCall<'_>, e: &Extents, at: &Scratch) -> KernelSpec {
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
        Arg::Scratch(at.tickets),
    ];
    spec("attention_gradient_q", GRADIENT_Q, call, division.defines(e), size, args)
}

fn gradient_kv(call: &LowerCall<'_>, e: &Extents, at: &Scratch) -> KernelSpec {
    let both = widths(e).0 + widths(e).1;
    let wide = both > 256;
    let (tile, stages, own_stages) = match both {
        257.. => (64, 2, 1),
        129..=256 => (128, 2, 2),
        _ => (128, 3, 2),
    };
    let defines =
        vec![("TILE", tile), ("STAGES", stages), ("KV_STAGES", own_stages), ("SECTION", e.batch * e.kv_heads)];
    let handed = if wide { 16384 } else { 0 };
    let tiles = own_stages * tile * both * 2 + stages * (64 * both * 2 + 1024) + handed;
    let args = [boxes(0, 64), boxes(1, 64), boxes(2, 64), boxes(5, 64), output_boxes(1), output_boxes(2)]
        .into_iter()
        .chain([0, at.intervals, at.tickets + 4].map(Arg::Scratch))
        .collect();
    let source = if wide { GRADIENT_KV_WIDE } else { GRADIENT_KV };
    spec("attention_gradient_kv", source, call, defines, [call.machine.units, 384, SLACK + tiles], args)
}
