//! Attention on the tensor cores of every GPU from sm_80 on (`mma.sync`): how the work is divided for a head's size
//! and a GPU's shared memory, the launches, the scratch memory. Which other realisations there are stands in `library`.

use program::{Arch, Arg, TensorRef};
use tensor::DType;

use super::Extents;
use super::kernels::{assert_dense, mask_defines, optional_args, strides};
use crate::kernel::{KernelSpec, LowerCall, device_type};

const FORWARD: &str = include_str!("portable/forward.cu");
const RECORDS: &str = include_str!("portable/records.cu");
const GRADIENT_Q: &str = include_str!("portable/gradient_q.cu");
const GRADIENT_KV: &str = include_str!("portable/gradient_kv.cu");
const GRADIENT_KV_WIDE: &str = include_str!("portable/gradient_kv_wide.cu");
const HEADERS: &[(&str, &str)] = &[
    ("tiles.cuh", include_str!("portable/tiles.cuh")),
    ("queries.cuh", include_str!("portable/queries.cuh")),
    ("types.cuh", include_str!("../cuda/types.cuh")),
    ("mma.cuh", include_str!("../cuda/mma.cuh")),
    ("reduce.cuh", include_str!("../cuda/reduce.cuh")),
];

/// Bytes of `records`: what the gradients need of one query and head.
const RECORD: usize = 16;
/// Queries and head pairs of one block of the kernel that writes them.
const RECORDS_OF_BLOCK: usize = 8;
/// Alignment of rows in memory, bytes.
const ALIGNMENT: usize = 16;

/// True for bf16 and f16 with heads in steps of 8, in layouts whose rows lie on 16-byte boundaries.
pub fn takes(call: &LowerCall<'_>) -> bool {
    let e = Extents::of_call(call.inputs);
    let dtype = call.inputs[0].dtype;
    let backward = call.outputs.len() == 3;
    let others = if backward { vec![&call.inputs[3], &call.inputs[5]] } else { vec![] };
    let results = if backward { call.outputs } else { &call.outputs[..1] };
    matches!(call.machine.arch, Arch::Cuda(_))
        && matches!(dtype, DType::BF16 | DType::F16)
        && e.head_dim.is_multiple_of(8)
        && e.value_dim.is_multiple_of(8)
        && call.inputs[..3].iter().chain(others).chain(results).all(|t| t.dtype == dtype && suits(t))
}

/// Rows on 16-byte boundaries, heads dense. Arenas and buffers start on larger boundaries, so an offset tells.
pub fn suits(tensor: &TensorRef) -> bool {
    let aligned = |axis: usize| tensor.shape[axis] == 1 || (tensor.strides[axis] * 2).is_multiple_of(ALIGNMENT);
    (tensor.strides[3] == 1 || tensor.shape[3] == 1) && tensor.offset.is_multiple_of(ALIGNMENT) && (0..3).all(aligned)
}

/// Dynamic shared memory that a block may have, bytes.
fn shared_limit(arch: &Arch) -> usize {
    let Arch::Cuda(name) = arch else { unreachable!("lowered for GPUs alone") };
    match name.as_str() {
        "sm_80" | "sm_87" => 163 << 10,
        name if name.starts_with("sm_9") || name.starts_with("sm_10") => 227 << 10,
        _ => 99 << 10,
    }
}

/// Bytes from one row of a tile to the next: an odd number of 16-byte chunks.
const fn pitch(columns: usize) -> usize {
    (columns + 8) * 2
}

/// Queries that own their sums, in strips of 16 · `row_tiles`, and walk over tiles of `keys`: the forward pass and dq.
#[derive(Clone, Copy)]
struct ByQuery {
    strips: usize,
    row_tiles: usize,
    keys: usize,
    /// The queries' rows stay in registers.
    hold: bool,
    /// Warps that share a strip, each with its part of the columns.
    parts: usize,
    /// Tiles under way at once; of dq alone.
    stages: usize,
    blocks: usize,
}

impl ByQuery {
    fn rows(&self) -> usize {
        self.strips * self.row_tiles * 16
    }

    fn threads(&self) -> usize {
        self.strips * self.parts * 32
    }

    fn pitches(&self, e: &Extents) -> (usize, usize) {
        let padded = |columns: usize| columns.next_multiple_of(16 * self.parts);
        (pitch(padded(e.head_dim)), pitch(padded(e.value_dim)))
    }

    fn forward_shared(&self, e: &Extents) -> usize {
        let (q, v) = self.pitches(e);
        let partner = if self.parts > 1 { self.threads() * self.row_tiles * self.keys * 2 } else { 0 };
        self.rows() * q + self.keys * (q + v) + self.rows() * 8 + partner
    }

    fn gradient_shared(&self, e: &Extents) -> usize {
        let (q, v) = self.pitches(e);
        let (own, tiles) = (self.rows() * (q + v), self.stages * self.keys * (q + v));
        let partner = if self.parts > 1 { self.threads() * self.row_tiles * self.keys * 4 } else { 0 };
        partner + if self.hold { own.max(tiles) } else { own + tiles }
    }

    fn defines(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("STRIPS", self.strips),
            ("MT", self.row_tiles),
            ("KEYS", self.keys),
            ("HOLD", self.hold as usize),
            ("PARTS", self.parts),
            ("STAGES", self.stages),
            ("MIN_BLOCKS", self.blocks),
        ]
    }
}

const fn by_query([strips, row_tiles, keys]: [usize; 3], hold: bool, [parts, stages, blocks]: [usize; 3]) -> ByQuery {
    ByQuery { strips, row_tiles, keys, hold, parts, stages, blocks }
}

/// Keys that own their sums and walk over blocks of `queries`: dk and dv.
#[derive(Clone, Copy)]
enum ByKey {
    /// A warp computes scores and sums of its own keys.
    Strips { strips: usize, row_tiles: usize, queries: usize, stages: usize, blocks: usize },
    /// Warps hand one another scores, and share the columns of the sums.
    Shared {
        warps: usize,
        rows: usize,
        queries: usize,
        score_strips: usize,
        score_parts: usize,
        parts: usize,
        stages: usize,
        blocks: usize,
    },
}

const fn strips([strips, row_tiles, queries]: [usize; 3], [stages, blocks]: [usize; 2]) -> ByKey {
    ByKey::Strips { strips, row_tiles, queries, stages, blocks }
}

const fn shared(
    [warps, rows, queries]: [usize; 3],
    [score_strips, score_parts, parts]: [usize; 3],
    [stages, blocks]: [usize; 2],
) -> ByKey {
    ByKey::Shared { warps, rows, queries, score_strips, score_parts, parts, stages, blocks }
}

impl ByKey {
    fn rows(&self) -> usize {
        match *self {
            ByKey::Strips { strips, row_tiles, .. } => strips * row_tiles * 16,
            ByKey::Shared { rows, .. } => rows,
        }
    }

    fn threads(&self) -> usize {
        match *self {
            ByKey::Strips { strips, .. } => strips * 32,
            ByKey::Shared { warps, .. } => warps * 32,
        }
    }

    fn blocks(&self) -> usize {
        match *self {
            ByKey::Strips { blocks, .. } | ByKey::Shared { blocks, .. } => blocks,
        }
    }

    fn source(&self) -> &'static str {
        match self {
            ByKey::Strips { .. } => GRADIENT_KV,
            ByKey::Shared { .. } => GRADIENT_KV_WIDE,
        }
    }

    fn shared_bytes(&self, e: &Extents) -> usize {
        let (parts, queries, stages, handed) = match *self {
            ByKey::Strips { queries, stages, .. } => (1, queries, stages, 0),
            ByKey::Shared { rows, queries, parts, stages, .. } => (parts, queries, stages, 2 * rows * pitch(queries)),
        };
        let padded = |columns: usize| pitch(columns.next_multiple_of(16 * parts));
        let row = padded(e.head_dim) + padded(e.value_dim);
        self.rows() * row + handed + stages * queries * (row + RECORD)
    }

    fn defines(&self) -> Vec<(&'static str, usize)> {
        match *self {
            ByKey::Strips { strips, row_tiles, queries, stages, blocks } => vec![
                ("STRIPS", strips),
                ("MT", row_tiles),
                ("QUERIES", queries),
                ("HOLD", 0),
                ("STAGES", stages),
                ("MIN_BLOCKS", blocks),
            ],
            ByKey::Shared { warps, rows, queries, score_strips, score_parts, parts, stages, blocks } => vec![
                ("WARPS", warps),
                ("ROWS", rows),
                ("QUERIES", queries),
                ("SCORE_STRIPS", score_strips),
                ("SCORE_PARTS", score_parts),
                ("PARTS", parts),
                ("STAGES", stages),
                ("MIN_BLOCKS", blocks),
            ],
        }
    }
}

/// The first division whose blocks fit a multiprocessor, with its shared memory. A block costs a KiB beside its own.
fn first_fitting<C: Copy>(
    divisions: &[C],
    limit: usize,
    bytes: impl Fn(&C) -> usize,
    blocks: impl Fn(&C) -> usize,
) -> (C, usize) {
    let fits = |(_, bytes, blocks): &(C, usize, usize)| *bytes <= limit && (bytes + 1024) * blocks <= limit + 1024;
    let candidates = divisions.iter().map(|c| (*c, bytes(c), blocks(c)));
    let (division, bytes, _) =
        candidates.into_iter().find(fits).expect("the last division fits every GPU from sm_80 on");
    (division, bytes)
}

/// The wider of a head's two sizes, as the tiles hold it.
fn widest(e: &Extents) -> usize {
    e.head_dim.max(e.value_dim).next_multiple_of(16)
}

fn forward_division(e: &Extents, limit: usize) -> (ByQuery, usize) {
    let narrow_values = e.value_dim.next_multiple_of(16) <= 128;
    let divisions: &[ByQuery] = match widest(e) {
        ..=64 => &[by_query([4, 2, 64], false, [1, 1, 3]), by_query([4, 2, 64], true, [1, 1, 2])],
        65..=128 => &[by_query([4, 2, 64], false, [1, 1, 2]), by_query([8, 1, 64], false, [1, 1, 1])],
        129..=256 if narrow_values => &[
            by_query([4, 2, 64], false, [1, 1, 2]),
            by_query([4, 2, 32], false, [1, 1, 2]),
            by_query([4, 1, 64], false, [1, 1, 2]),
            by_query([4, 1, 32], false, [1, 1, 2]),
            by_query([4, 1, 32], false, [1, 1, 1]),
        ],
        129..=256 => &[
            by_query([4, 1, 64], false, [1, 1, 2]),
            by_query([4, 1, 32], false, [1, 1, 2]),
            by_query([4, 1, 32], false, [1, 1, 1]),
        ],
        _ => &[by_query([4, 1, 32], false, [2, 1, 1]), by_query([2, 1, 16], false, [2, 1, 1])],
    };
    first_fitting(divisions, limit, |c| c.forward_shared(e), |c| c.blocks)
}

fn q_division(e: &Extents, limit: usize) -> (ByQuery, usize) {
    let divisions: &[ByQuery] = match widest(e) {
        ..=64 => &[by_query([4, 2, 32], true, [1, 2, 2])],
        65..=128 => &[by_query([4, 1, 64], true, [1, 2, 2]), by_query([4, 1, 64], true, [1, 2, 1])],
        129..=256 => &[by_query([4, 1, 32], false, [1, 1, 2]), by_query([4, 1, 32], false, [1, 1, 1])],
        _ => &[by_query([2, 1, 32], false, [2, 1, 1]), by_query([1, 1, 16], false, [2, 1, 1])],
    };
    first_fitting(divisions, limit, |c| c.gradient_shared(e), |c| c.blocks)
}

fn kv_division(e: &Extents, limit: usize) -> (ByKey, usize) {
    let divisions: &[ByKey] = match widest(e) {
        ..=64 => &[strips([4, 2, 32], [2, 2]), strips([4, 1, 32], [2, 2])],
        65..=128 => &[
            shared([4, 64, 64], [2, 2, 2], [1, 2]),
            shared([4, 64, 32], [2, 2, 2], [2, 2]),
            strips([4, 1, 32], [2, 1]),
        ],
        129..=256 => &[
            shared([8, 64, 64], [2, 4, 4], [1, 1]),
            shared([8, 64, 32], [4, 2, 4], [1, 1]),
            shared([8, 32, 32], [2, 2, 8], [1, 1]),
        ],
        _ => &[
            shared([8, 32, 32], [2, 2, 8], [1, 1]),
            shared([8, 32, 16], [2, 1, 8], [1, 1]),
            shared([8, 16, 16], [1, 1, 8], [1, 1]),
        ],
    };
    first_fitting(divisions, limit, |c| c.shared_bytes(e), ByKey::blocks)
}

/// Bytes of the backward pass's scratch: the records of every query and head.
pub fn backward_scratch(call: &LowerCall<'_>) -> usize {
    let e = Extents::of_call(call.inputs);
    e.batch * e.heads * e.tokens * RECORD
}

/// A kernel over the blocks of one axis.
fn spec(
    entry: &'static str,
    source: &str,
    call: &LowerCall<'_>,
    tensors: &[(&str, &TensorRef)],
    division: Vec<(&'static str, usize)>,
    [blocks, threads, shared]: [usize; 3],
    args: Vec<Arg>,
) -> KernelSpec {
    let mut defines = mask_defines(call);
    defines.push(("ELEMENT".to_owned(), device_type(call.inputs[0].dtype).to_owned()));
    defines.extend(division.into_iter().map(|(name, n)| (name.to_owned(), n.to_string())));
    defines.extend(tensors.iter().flat_map(|(name, tensor)| strides(name, tensor)));
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

pub fn forward(call: &LowerCall<'_>) -> Vec<KernelSpec> {
    let [q, k, v, starts, ..] = call.inputs else { unreachable!("the shape rule asks for four inputs") };
    assert_dense(call, &[starts, &call.outputs[1]]);
    let e = Extents::of_call(call.inputs);
    let (division, shared) = forward_division(&e, shared_limit(&call.machine.arch));
    let blocks = e.batch * e.heads * e.tokens.div_ceil(division.rows());
    let tensors = [("Q", q), ("K", k), ("V", v), ("O", &call.outputs[0])];
    let inputs = (0..4).map(Arg::Input).chain(optional_args(call));
    let args = inputs.chain([Arg::Output(0), Arg::Output(1)]).collect();
    let size = [blocks, division.threads(), shared];
    vec![spec("attention_forward", FORWARD, call, &tensors, division.defines(), size, args)]
}

/// The records of the queries, dq, then dk and dv.
pub fn backward(call: &LowerCall<'_>) -> Vec<KernelSpec> {
    let [q, k, v, o, lse, d_o, starts, ..] = call.inputs else { unreachable!("the shape rule asks for seven inputs") };
    let [dq, dk, dv] = call.outputs else { unreachable!("the shape rule gives three results") };
    assert_dense(call, &[starts, lse]);
    let e = Extents::of_call(call.inputs);
    let limit = shared_limit(&call.machine.arch);
    let (records, [last_key, _]) = (Arg::Scratch(0), optional_args(call));
    let heads = e.batch * e.heads;
    let tensors = [("O", o), ("DO", d_o)];
    let size = [heads * e.tokens.div_ceil(RECORDS_OF_BLOCK), 32 * RECORDS_OF_BLOCK, 0];
    let args = [3, 5, 4, 6].map(Arg::Input).into_iter().chain([last_key, records.clone()]).collect();
    let first = spec("attention_records", RECORDS, call, &tensors, vec![], size, args);
    let inputs = [0, 1, 2, 5].map(Arg::Input).into_iter().chain([records]);
    let (division, shared) = q_division(&e, limit);
    let tensors = [("Q", q), ("K", k), ("V", v), ("DO", d_o), ("DQ", dq)];
    let size = [heads * e.tokens.div_ceil(division.rows()), division.threads(), shared];
    let args = inputs.clone().chain([Arg::Output(0)]).collect();
    let second = spec("attention_gradient_q", GRADIENT_Q, call, &tensors, division.defines(), size, args);
    let (division, shared) = kv_division(&e, limit);
    let tensors = [("Q", q), ("K", k), ("V", v), ("DO", d_o), ("DK", dk), ("DV", dv)];
    let size = [e.batch * e.kv_heads * e.tokens.div_ceil(division.rows()), division.threads(), shared];
    let args = inputs.chain([Arg::Output(1), Arg::Output(2)]).collect();
    let defines = division.defines();
    vec![first, second, spec("attention_gradient_kv", division.source(), call, &tensors, defines, size, args)]
}
