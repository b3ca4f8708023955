//! Attention of new tokens over all tokens that their sequences hold.

use graph::{Dim, OpId, ValueType};
use program::{Arch, Arg, Cost, TensorRef};
use tensor::{Attrs, DType};

use super::strips::Strips;
use super::{PLACED_INPUTS, check_places, cpu, examples};
use crate::attention::launch::{is_aligned, strides};
use crate::attention::operands::Optional;
use crate::attention::{ATTRIBUTES, MAX_HEAD_DIM, OF_PAGES, Reading};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type};
use crate::op::{Attribute, Class, Example, Op};
use crate::registry::id;

const SOURCE: &str = include_str!("read.cu");
const MERGE: &str = include_str!("merge.cu");
const STRIPS: &str = include_str!("strips.cu");
const HEADERS: &[(&str, &str)] = &[
    ("types.cuh", include_str!("../../cuda/types.cuh")),
    ("pack.cuh", include_str!("../../cuda/pack.cuh")),
    ("pages.cuh", include_str!("pages.cuh")),
    device::DEPENDENT_LAUNCH,
];
const STRIPS_HEADERS: &[(&str, &str)] = &[
    ("strips.cuh", include_str!("../strips.cuh")),
    ("types.cuh", include_str!("../../cuda/types.cuh")),
    ("mma.cuh", include_str!("../../cuda/mma.cuh")),
    ("tiles.cuh", include_str!("../portable/tiles.cuh")),
    ("pages.cuh", include_str!("pages.cuh")),
    device::DEPENDENT_LAUNCH,
];

const THREADS: usize = 128;
/// Numbers of a query, and of a sum, that a thread holds.
const HELD: usize = 32;
/// Query heads of one block at most.
const MOST_HEADS: usize = 8;
/// Blocks for each multiprocessor that keep the memory busy.
const BLOCKS_PER_UNIT: usize = 8;
/// Number of keys from which a block is worth its start.
const LEAST_KEYS: usize = 64;

/// o = cached_attention(q, key_cache, value_cache, positions, table [, last_key] [, sink])
pub struct CachedAttention;

/// The extents of a call.
pub(super) struct Extents {
    pub batch: usize,
    pub tokens: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    page: usize,
    /// Pages of the longest sequence.
    table: usize,
}

impl Extents {
    pub fn of(inputs: &[TensorRef]) -> Extents {
        let [q, keys, values, _, table, ..] = inputs else { unreachable!("the shape rule requires five inputs") };
        Extents {
            batch: q.shape[0],
            tokens: q.shape[1],
            heads: q.shape[2],
            kv_heads: keys.shape[2],
            head_dim: q.shape[3],
            value_dim: values.shape[3],
            page: keys.shape[1],
            table: table.shape[1],
        }
    }

    /// Keys that a query may see at most.
    pub fn longest(&self, reading: &Reading) -> usize {
        reading.window.map_or(self.page * self.table, |window| window.min(self.page * self.table))
    }
}

/// The division of a call without tensor cores over threads and blocks.
struct Division {
    /// Neighbouring columns that a thread reads at once.
    vector: usize,
    /// Threads that share a key.
    lanes: usize,
    /// Vectors of a key, and of a value, that a thread reads.
    chunks: [usize; 2],
    /// Query heads of a block: they share the keys that it reads.
    heads: usize,
    /// Parts that the keys of a query are divided into.
    splits: usize,
}

impl Division {
    fn of(call: &LowerCall<'_>) -> Division {
        let e = Extents::of(call.inputs);
        let (q, caches) = (&call.inputs[0], &call.inputs[1..3]);
        let bytes = q.dtype.size();
        let aligned = |t: &TensorRef| {
            t.dtype == q.dtype && t.shape[3].is_multiple_of(16 / bytes) && t.offset.is_multiple_of(16) && is_aligned(t)
        };
        let wide = matches!(q.dtype, DType::BF16 | DType::F16 | DType::F32) && caches.iter().all(aligned);
        let vector = if wide { 16 / bytes } else { 1 };
        let vectors = [e.head_dim, e.value_dim].map(|columns| columns.div_ceil(vector));
        let lanes = vectors[0].max(vectors[1]).next_power_of_two().min(32);
        let chunks = vectors.map(|n| n.div_ceil(lanes));
        let held = vector * chunks[0].max(chunks[1]);
        let group = e.heads / e.kv_heads;
        let most = (HELD / held).clamp(1, MOST_HEADS);
        let heads = (1..=most.min(group)).rev().find(|n| group.is_multiple_of(*n)).expect("1 divides everything");
        let blocks = e.batch * e.tokens * e.heads / heads;
        let reading = Reading::checked(call.attrs, e.head_dim);
        let wanted = (BLOCKS_PER_UNIT * call.machine.units).div_ceil(blocks);
        let splits = wanted.clamp(1, e.longest(&reading).div_ceil(LEAST_KEYS));
        Division { vector, lanes, chunks, heads, splits }
    }

    fn defines(&self) -> [(&'static str, usize); 7] {
        [
            ("THREADS", THREADS),
            ("VECTOR", self.vector),
            ("LANES", self.lanes),
            ("K_CHUNKS", self.chunks[0]),
            ("V_CHUNKS", self.chunks[1]),
            ("SHARE", self.heads),
            ("SPLITS", self.splits),
        ]
    }
}

impl Op for CachedAttention {
    fn id(&self) -> OpId {
        id::CACHED_ATTENTION
    }

    fn class(&self) -> Class {
        Class::Attention
    }

    fn doc(&self) -> &'static str {
        "`attention` of new tokens over caches that hold their own and all earlier keys and values of their sequences \
         (see `cache_write`). Token t of row b, at position p of its sequence, sees the keys at 0 … p, with a window \
         max(0, p + 1 − window) … p; with `last_key`, a position from p on, it sees the keys up to there. A position \
         below 0 is padding, and its result 0. q [B, T, heads, D], key_cache [pages, page, kv_heads, D], value_cache \
         [pages, page, kv_heads, DV], positions i32 [B, T], table i32 [B, M], as wanted last_key i32 [B, T] and sink \
         [heads] → o [B, T, heads, DV]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &ATTRIBUTES[..OF_PAGES]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [q, keys, values, positions, table, ..] = inputs else {
            return Err("takes q, both caches, the positions, the table, and as wanted last_key and a sink".into());
        };
        let optional = Optional::of(inputs, PLACED_INPUTS)
            .map_err(|_| "after the table it takes last_key [B, T] and then a sink [heads], at most")?;
        let sink = optional.sink.map(|at| &inputs[at]);
        let [batch, tokens, Dim::Fixed(heads), Dim::Fixed(head_dim)] = q.shape.as_slice() else {
            return Err("q must be [B, T, heads, D], heads and D known".into());
        };
        let [_, _, Dim::Fixed(kv_heads), Dim::Fixed(key_dim)] = keys.shape.as_slice() else {
            return Err("key_cache must be [pages, page, kv_heads, D]".into());
        };
        let [.., Dim::Fixed(value_dim)] = values.shape.as_slice() else {
            return Err("value_cache must be [pages, page, kv_heads, DV]".into());
        };
        if key_dim != head_dim || values.shape.len() != 4 || values.shape[..3] != keys.shape[..3] {
            return Err("key_cache must have the columns of q, value_cache the pages and heads of key_cache".into());
        }
        if *kv_heads == 0 || heads % kv_heads != 0 {
            return Err(format!("{heads} heads cannot share {kv_heads} key heads evenly"));
        }
        if let Some(dim) = [*head_dim, *value_dim].into_iter().find(|dim| !(1..=MAX_HEAD_DIM).contains(dim)) {
            return Err(format!("heads have 1 to {MAX_HEAD_DIM} columns, not {dim}"));
        }
        check_places(q, positions, table)?;
        Reading::of(attrs, *head_dim)?;
        if optional.limit.is_some_and(|at| inputs[at] != *positions) {
            return Err("last_key must be i32 with the shape of the positions".into());
        }
        if sink.is_some_and(|sink| sink.shape != [Dim::Fixed(*heads)]) {
            return Err(format!("the sink must be [{heads}], one number for each head"));
        }
        if [q, keys, values].into_iter().chain(sink).any(|t| !t.dtype.is_float()) {
            return Err("q, the caches and a sink must be floating point".into());
        }
        let shape = [batch.clone(), tokens.clone(), Dim::Fixed(*heads), Dim::Fixed(*value_dim)];
        Ok(vec![ValueType::new(q.dtype, shape)])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("only what generates text reads a cache")
    }

    /// Returns the cost for sequences of half the longest length: the lengths are data.
    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        let e = Extents::of(inputs);
        let keys = e.longest(&Reading::checked(attrs, e.head_dim)) as f64 / 2.0;
        let columns = (e.head_dim + e.value_dim) as f64;
        let line = (e.kv_heads * inputs[1].dtype.size()) as f64 * columns;
        Cost {
            flops: 2.0 * (e.batch * e.tokens * e.heads) as f64 * keys * columns,
            bytes: (inputs[0].bytes() + outputs[0].bytes()) as f64 + e.batch as f64 * keys * line,
        }
    }

    /// Sum, largest score and unfinished result of every part.
    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        let (e, splits) = (Extents::of(call.inputs), Work::of(call).splits());
        if splits == 1 { 0 } else { 4 * e.batch * e.tokens * e.heads * splits * (e.value_dim + 2) }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        if call.machine.arch == Arch::Cpu {
            return Lowered::Kernels(Vec::new());
        }
        let (e, work) = (Extents::of(call.inputs), Work::of(call));
        let optional = optional_of(call);
        let sink = Arg::Input(optional.sink.unwrap_or(0));
        let result = if work.splits() > 1 { Arg::Scratch(0) } else { Arg::Output(0) };
        let inputs = [0, 1, 2, 3, 4].map(Arg::Input);
        let last = optional.limit.map(Arg::Input);
        let args = inputs.into_iter().chain(last).chain([sink.clone(), result]).collect();
        let mut kernels = vec![work.kernel(call, &e, args)];
        if work.splits() > 1 {
            let args = vec![Arg::Scratch(0), Arg::Input(3), sink, Arg::Output(0)];
            let grid = [e.heads as u32, (e.batch * e.tokens) as u32, 1];
            let numbers = [("THREADS", THREADS), ("SPLITS", work.splits())];
            kernels.push(KernelSpec {
                entry: "merge_parts",
                source: MERGE.to_owned(),
                headers: HEADERS.to_vec(),
                defines: defines(call, &e, &numbers),
                grid,
                block: [THREADS as u32, 1, 1],
                shared_bytes: 0,
                args,
            });
        }
        Lowered::Kernels(kernels)
    }

    crate::reference!(cpu::read);

    fn examples(&self) -> Vec<Example> {
        examples::of_reading()
    }
}

/// The kernels that compute the scores and sums of a call.
enum Work {
    /// Strips of queries on tensor cores.
    Strips(Strips),
    Threads(Division),
}

impl Work {
    fn of(call: &LowerCall<'_>) -> Work {
        Strips::of(call).map_or_else(|| Work::Threads(Division::of(call)), Work::Strips)
    }

    fn splits(&self) -> usize {
        match self {
            Work::Strips(strips) => strips.splits,
            Work::Threads(division) => division.splits,
        }
    }

    fn kernel(&self, call: &LowerCall<'_>, e: &Extents, args: Vec<Arg>) -> KernelSpec {
        match self {
            Work::Strips(strips) => {
                let mut defines = defines(call, e, &strips.defines());
                defines.push(("ELEMENT".to_owned(), device_type(call.inputs[0].dtype).to_owned()));
                // The plain mask of those that the tiles of whole rows know: what a token sees is said otherwise here.
                defines.extend(["HAS_LAST", "BIDIRECTIONAL"].map(|name| (name.to_owned(), "0".to_owned())));
                KernelSpec {
                    entry: "cached_strips",
                    source: STRIPS.to_owned(),
                    headers: STRIPS_HEADERS.to_vec(),
                    defines,
                    grid: strips.grid,
                    block: [strips.threads() as u32, 1, 1],
                    shared_bytes: strips.shared_bytes as u32,
                    args,
                }
            }
            Work::Threads(division) => KernelSpec {
                entry: "cached_attention",
                source: SOURCE.to_owned(),
                headers: HEADERS.to_vec(),
                defines: defines(call, e, &division.defines()),
                grid: [division.splits, e.heads / division.heads, e.batch * e.tokens].map(|n| n as u32),
                block: [THREADS as u32, 1, 1],
                shared_bytes: 0,
                args,
            },
        }
    }
}

fn optional_of(call: &LowerCall<'_>) -> Optional {
    Optional::of(call.inputs, PLACED_INPUTS).expect("checked by the shape rule")
}

/// Returns the definitions of extents, division, types and score.
fn defines(call: &LowerCall<'_>, e: &Extents, division: &[(&str, usize)]) -> Vec<(String, String)> {
    let [q, keys, values, ..] = call.inputs else { unreachable!("five inputs at least") };
    let optional = optional_of(call);
    for tensor in &call.inputs[1..] {
        assert!(tensor.is_dense(), "caches, positions, tables and sinks lie densely: {tensor}");
    }
    let reading = Reading::checked(call.attrs, e.head_dim);
    let numbers = [
        ("TOKENS", e.tokens),
        ("HEADS", e.heads),
        ("KV_HEADS", e.kv_heads),
        ("D", e.head_dim),
        ("DV", e.value_dim),
        ("PAGE", e.page),
        ("TABLE", e.table),
        ("WINDOW", reading.window.unwrap_or(0)),
        ("HAS_CAP", reading.soft_cap.is_some() as usize),
        ("HAS_SINK", optional.sink.is_some() as usize),
    ];
    let numbers = numbers.iter().chain(division);
    let mut defines: Vec<_> = numbers.map(|(name, n)| ((*name).to_owned(), n.to_string())).collect();
    defines.extend(strides("Q", q).into_iter().chain(strides("O", &call.outputs[0])));
    let types = [("KEY_T", keys.dtype), ("VALUE_T", values.dtype)];
    defines.extend(types.map(|(name, dtype)| (name.to_owned(), device_type(dtype).to_owned())));
    if optional.limit.is_some() {
        defines.push(("LAST_KEY".to_owned(), "1".to_owned()));
    }
    let sink_type = optional.sink.map_or("float", |at| device_type(call.inputs[at].dtype));
    defines.push(("SINK_T".to_owned(), sink_type.to_owned()));
    defines.push(("SCALE".to_owned(), format!("{:e}f", reading.scale as f32)));
    defines.push(("SOFT_CAP".to_owned(), format!("{:e}f", reading.soft_cap.unwrap_or(1.0) as f32)));
    defines
}
