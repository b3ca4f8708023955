//! The gradients of the adapters of one linear, from one reading of dy: for each slice of its columns dt = scale·dy·b
//! and db = scale·dyᵀ·t. As products of their own these are small ones that read dy twice.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::{Attrs, DType};

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for, device_type, is_roomy};
use crate::layout::row_width;
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;
use crate::vector::{add_scaled, dot};

const TYPES: (&str, &str) = ("types.cuh", include_str!("../../cuda/types.cuh"));
const PACK: (&str, &str) = ("pack.cuh", include_str!("../../cuda/pack.cuh"));
const MMA: (&str, &str) = ("mma.cuh", include_str!("../../cuda/mma.cuh"));

/// Threads of one block of the kernels besides the tiles.
const THREADS: usize = 256;
/// Number of rows in a tile.
const TALL: usize = 64;
/// Number of tiles that are in flight at once in a block.
const STAGES: usize = 3;
/// Warps of one block of tiles.
const WARPS: usize = 4;
/// Blocks that fill the largest GPUs: two for each multiprocessor.
const BLOCKS: usize = 264;
/// Largest number of chunks of rows that wide tiles may lead to: their parts of db are added one after the other. On an
/// H200, 4096 rows of 1024 columns at rank 16: 16 chunks in tiles of 64 columns 8.3 µs, 64 chunks in tiles of 256
/// columns 11.9 µs.
const MOST_CHUNKS: usize = 24;
/// Shared memory of a block, bytes, of which a multiprocessor of the largest GPUs holds two.
const TWICE: usize = 113 << 10;
/// Most columns of the low-rank factors.
pub const MOST_RANK: usize = 64;

/// The attributes of a call.
struct Reading {
    scale: f64,
    /// First column and number of columns of each slice.
    columns: Vec<(usize, usize)>,
    accumulate: bool,
}

impl Reading {
    fn of(attrs: &Attrs) -> Result<Reading, String> {
        let columns = attrs.sizes("columns")?;
        if columns.is_empty() || columns.len() % 2 != 0 {
            return Err("`columns` lists a first column and a number of columns for each adapter".into());
        }
        Ok(Reading {
            scale: attrs.optional_float("scale")?.unwrap_or(1.0),
            columns: columns.chunks(2).map(|pair| (pair[0], pair[1])).collect(),
            accumulate: attrs.flag("accumulate")?,
        })
    }

    fn checked(attrs: &Attrs) -> Reading {
        Reading::of(attrs).expect("checked by the shape rule")
    }
}

/// The partition of the tiles over blocks.
struct Tiles {
    rows: usize,
    rank: usize,
    /// Number of columns in all slices.
    columns: usize,
    /// Columns of one tile; divides every slice.
    width: usize,
    /// Number of rows in a block.
    chunk: usize,
}

impl Tiles {
    /// Returns the partition; `None` where the tiles do not take the operands: they are all bf16 or all f16, in rows of
    /// aligned pieces of 16 bytes, with equal ranks.
    fn new(call: &LowerCall<'_>, reading: &Reading) -> Option<Tiles> {
        let (dy, factors) = (&call.inputs[0], &call.inputs[1..]);
        let rank = *factors[0].shape.last()?;
        let of_tiles = matches!(dy.dtype, DType::BF16 | DType::F16);
        let matrix = |t: &TensorRef| of_tiles && t.dtype == dy.dtype && t.as_matrix().is_some();
        let pieces = |t: &TensorRef| matrix(t) && t.shape.last() == Some(&rank) && row_width(&[t]) == 8;
        let results = call.outputs.chunks(2).all(|pair| matrix(&pair[0]) && row_width(&[&pair[0]]) >= 4);
        let dense = factors.iter().skip(1).step_by(2).all(TensorRef::is_dense);
        let fits = matrix(dy) && row_width(&[dy]) == 8 && factors.iter().all(pieces) && results && dense;
        let rows = dy.len() / dy.shape.last()?;
        let columns: usize = reading.columns.iter().map(|(_, n)| n).sum();
        let most = rows.div_ceil(TALL);
        // Wide tiles leave less to add up; older and smaller GPUs have less shared memory for them.
        let widths: &[usize] = if is_roomy(call.machine) { &[256, 128, 64] } else { &[128, 64] };
        // Two blocks share a multiprocessor, where a narrower tile lets them.
        let shared = |width: &usize| 2 * (width * rank + STAGES * TALL * (width + rank));
        let arch = call.machine.arch;
        let has_room = |width: &usize| !arch.is_gpu() || shared(width) <= arch.shared_per_block();
        let fits_twice = |width: &usize| (shared(width) <= TWICE || *width == 64) && has_room(width);
        let divides = |width: &usize| reading.columns.iter().all(|(first, n)| n % width == 0 && first % 8 == 0);
        let fitting: Vec<usize> = widths.iter().copied().filter(divides).filter(fits_twice).collect();
        let chunks = |width: &usize| (BLOCKS / (columns / width)).clamp(1, most);
        let width = *fitting.iter().find(|width| chunks(width) <= MOST_CHUNKS).or(fitting.last())?;
        let chunk = steps(columns / width, most) * TALL;
        (fits && rank <= MOST_RANK).then_some(Tiles { rows, rank, columns, width, chunk })
    }

    fn chunks(&self) -> usize {
        self.rows.div_ceil(self.chunk)
    }

    /// Bytes of the parts of all dt; those of db follow.
    fn dt_bytes(&self) -> usize {
        self.columns / self.width * self.rows * self.rank * 4
    }

    fn bytes(&self) -> usize {
        self.dt_bytes() + self.chunks() * self.columns * self.rank * 4
    }

    fn shared_bytes(&self) -> u32 {
        (2 * (self.width * self.rank + STAGES * TALL * (self.width + self.rank))) as u32
    }

    fn defines(&self, reading: &Reading, extra: &[(&str, String)]) -> Vec<(String, String)> {
        let mut first = 0;
        let firsts = reading.columns.iter().map(|(_, n)| {
            first += n;
            (first - n).to_string()
        });
        let own = [
            ("FIRSTS", firsts.collect::<Vec<_>>().join(",")),
            ("SLICES", reading.columns.len().to_string()),
            ("WIDTH", self.width.to_string()),
            ("RANK", self.rank.to_string()),
            ("ROWS", self.rows.to_string()),
            ("COLUMNS", self.columns.to_string()),
        ];
        own.iter().chain(extra).map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
    }

    /// The tiles, then the sum of their parts.
    fn kernels(&self, call: &LowerCall<'_>, reading: &Reading) -> Vec<KernelSpec> {
        let slices = 0..reading.columns.len();
        let list = |f: &dyn Fn(usize) -> String| slices.clone().map(f).collect::<Vec<_>>().join(",");
        let (ts, dts) = (|s: usize| &call.inputs[1 + 2 * s], |s: usize| &call.outputs[2 * s]);
        let parts = [Arg::Scratch(0), Arg::Scratch(self.dt_bytes())];
        let starts = reading.columns.iter().map(|(first, _)| first.to_string()).collect::<Vec<_>>().join(",");
        let mut tiles = self.defines(
            reading,
            &[
                ("FACTORS", list(&|s| format!("const NUMBER* __restrict__ t{s}, const NUMBER* __restrict__ b{s}"))),
                ("TS", list(&|s| format!("t{s}"))),
                ("BS", list(&|s| format!("b{s}"))),
                ("STARTS", starts),
                ("NUMBER", device_type(call.inputs[0].dtype).to_owned()),
                ("CHUNK", self.chunk.to_string()),
                ("T_AT(row,s)", row_of(slices.clone().map(ts))),
            ],
        );
        tiles.extend(defines_for("DY", &call.inputs[0]));
        let sum = self.defines(
            reading,
            &[
                ("RESULTS", list(&|s| format!("DT_T* __restrict__ dt{s}, float* __restrict__ db{s}"))),
                ("DTS", list(&|s| format!("dt{s}"))),
                ("DBS", list(&|s| format!("db{s}"))),
                ("DT_T", device_type(dts(0).dtype).to_owned()),
                ("DT_AT(row,s)", row_of(slices.clone().map(dts))),
                ("CHUNKS", self.chunks().to_string()),
                ("THREADS", THREADS.to_string()),
                ("SCALE", format!("{:e}f", reading.scale as f32)),
                ("ACCUMULATE", (reading.accumulate as u32).to_string()),
            ],
        );
        let quads = (slices.len() * self.rows + self.columns) * self.rank / 4;
        vec![
            KernelSpec {
                entry: "low_rank_tiles",
                source: include_str!("tiles.cu").to_owned(),
                headers: vec![TYPES, MMA],
                defines: tiles,
                grid: [(self.columns / self.width) as u32, self.chunks() as u32, 1],
                block: [32 * WARPS as u32, 1, 1],
                shared_bytes: self.shared_bytes(),
                args: (0..call.inputs.len()).map(Arg::Input).chain(parts.clone()).collect(),
            },
            KernelSpec {
                entry: "low_rank_sum",
                source: include_str!("sum.cu").to_owned(),
                headers: vec![TYPES, PACK],
                defines: sum,
                grid: [quads.div_ceil(THREADS) as u32, 1, 1],
                block: [THREADS as u32, 1, 1],
                shared_bytes: 0,
                args: parts.into_iter().chain((0..call.outputs.len()).map(Arg::Output)).collect(),
            },
        ]
    }
}

/// Returns the number of tiles in a block, one below the other: the largest that keeps the GPU filled to nearly nine
/// tenths, or else the one that fills it best.
fn steps(across: usize, down: usize) -> usize {
    let filled = |steps: &usize| {
        let blocks = across * down.div_ceil(*steps);
        (across * down) as f64 / (BLOCKS * blocks.div_ceil(BLOCKS) * steps) as f64
    };
    let choices = || (1..=down).rev();
    let best = || choices().max_by(|a, b| filled(a).total_cmp(&filled(b))).expect("there are rows");
    choices().find(|steps| filled(steps) >= 0.88).unwrap_or_else(best)
}

/// The offset of a row of one of several matrices as a C expression of `row` and `s`.
fn row_of<'a>(matrices: impl Iterator<Item = &'a TensorRef>) -> String {
    let strides = matrices.map(|t| t.as_matrix().expect("checked to be a matrix").2);
    let choice = strides.enumerate().map(|(s, stride)| format!("(s)=={s}?{stride}:")).collect::<String>();
    format!("((size_t)(row)*({choice}0))")
}

/// One slice by the kernel that takes everything.
fn plain(call: &LowerCall<'_>, reading: &Reading, slice: usize) -> KernelSpec {
    let (first, length) = reading.columns[slice];
    let (dy, t, b, dt) =
        (&call.inputs[0], &call.inputs[1 + 2 * slice], &call.inputs[2 + 2 * slice], &call.outputs[2 * slice]);
    let (rank, rows) = (b.shape[1], dy.len() / dy.shape[dy.shape.len() - 1]);
    assert!(b.is_dense(), "the second factor of an adapter lies densely: {b}");
    let numbers = [("START", first), ("LENGTH", length), ("RANK", rank), ("ROWS", rows), ("THREADS", THREADS)];
    let mut defines: Vec<(String, String)> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
    defines.push(("SCALE".to_owned(), format!("{:e}f", reading.scale as f32)));
    defines.push(("ACCUMULATE".to_owned(), (reading.accumulate as u32).to_string()));
    for (name, tensor) in [("DY", dy), ("T", t), ("B", b), ("DT", dt)] {
        defines.extend(defines_for(name, tensor));
    }
    KernelSpec {
        entry: "low_rank_plain",
        source: include_str!("plain.cu").to_owned(),
        headers: vec![TYPES],
        defines,
        grid: [((rows + length) * rank).div_ceil(THREADS) as u32, 1, 1],
        block: [THREADS as u32, 1, 1],
        shared_bytes: 0,
        args: vec![
            Arg::Input(0),
            Arg::Input(1 + 2 * slice),
            Arg::Input(2 + 2 * slice),
            Arg::Output(2 * slice),
            Arg::Output(2 * slice + 1),
        ],
    }
}

fn backward<T: Real>(call: &mut Call<'_, T>) {
    let reading = Reading::checked(call.attrs);
    let (dy, width) = (call.inputs[0].real(), call.inputs[0].columns());
    let scale = T::from_f64(reading.scale);
    for (slice, (first, length)) in reading.columns.iter().copied().enumerate() {
        let (t, b) = (call.inputs[1 + 2 * slice].real(), call.inputs[2 + 2 * slice].real());
        let rank = call.inputs[1 + 2 * slice].columns();
        let [dt, db] = &mut call.outputs[2 * slice..2 * slice + 2] else { unreachable!("two results for each slice") };
        dt.real().par_chunks_mut(rank).zip(dy.par_chunks(width)).for_each(|(dt, dy)| {
            dt.fill(T::default());
            for (dy, b) in dy[first..first + length].iter().zip(b.chunks(rank)) {
                add_scaled(dt, *dy, b);
            }
            dt.iter_mut().for_each(|v| *v = scale * *v);
        });
        db.real().par_chunks_mut(rank).enumerate().for_each(|(column, db)| {
            let dy: Vec<T> = dy.chunks(width).map(|row| row[first + column]).collect();
            for (r, db) in db.iter_mut().enumerate() {
                let t: Vec<T> = t.chunks(rank).map(|row| row[r]).collect();
                let sum = scale * dot(&dy, &t);
                *db = if reading.accumulate { *db + sum } else { sum };
            }
        });
    }
}

/// dt₀, db₀, dt₁, … = low_rank_backward(dy, t₀, b₀, t₁, …)
pub struct LowRankBackward;

impl Op for LowRankBackward {
    fn id(&self) -> OpId {
        id::LOW_RANK_BACKWARD
    }

    fn class(&self) -> Class {
        Class::Matmul
    }

    fn doc(&self) -> &'static str {
        "Gradients of a `linear`'s adapters: dtᵢ = scale·dyᵢ·bᵢ and dbᵢ = scale·dyᵢᵀ·tᵢ, dyᵢ the adapter's columns of \
         dy. dy […, N], then for each adapter t […, r] and b [len, r] → for each dt […, r], db f32 [len, r]. With \
         `accumulate`, each db is added to."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "scale", kind: "float?", doc: "factor of the products, 1 if absent" },
            Attribute {
                name: "columns",
                kind: "list of int",
                doc: "first column and number of columns of each adapter",
            },
            Attribute { name: "accumulate", kind: "bool?", doc: "add to each db instead of overwriting it" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let reading = Reading::of(attrs)?;
        if inputs.len() != 1 + 2 * reading.columns.len() || inputs.iter().any(|t| !t.dtype.is_float()) {
            return Err("takes dy, then t and b for each adapter, all floating point".into());
        }
        let rows = |t: &ValueType| t.shape.split_last().map(|(_, rows)| rows.to_vec());
        let width = inputs[0].last().ok_or("the last axis of dy must be known")?;
        let mut results = Vec::with_capacity(2 * reading.columns.len());
        for (pair, (first, length)) in inputs[1..].chunks(2).zip(&reading.columns) {
            let (t, b) = (&pair[0], &pair[1]);
            let rank = t.last().ok_or("the rank must be known")?;
            let fits = rows(t) == rows(&inputs[0]) && b.shape == [Dim::Fixed(*length), Dim::Fixed(rank)];
            if !fits || *length == 0 || first + length > width {
                return Err(format!(
                    "the adapter on columns {first}..{} of {width} needs t […, r] with the rows of dy, and b [{length}, r]",
                    first + length
                ));
            }
            results.extend([t.clone(), ValueType::new(Element::F32, b.shape.clone())]);
        }
        Ok(results)
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("built after differentiation")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        let rows = inputs[0].len() / inputs[0].shape[inputs[0].shape.len() - 1];
        let rank = inputs[1].shape[inputs[1].shape.len() - 1];
        let columns: usize = Reading::checked(attrs).columns.iter().map(|(_, n)| n).sum();
        Cost { flops: 4.0 * (rows * columns * rank) as f64, bytes }
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        Tiles::new(call, &Reading::checked(call.attrs)).map_or(0, |tiles| tiles.bytes())
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let reading = Reading::checked(call.attrs);
        Lowered::Kernels(match Tiles::new(call, &reading) {
            Some(tiles) => tiles.kernels(call, &reading),
            None => (0..reading.columns.len()).map(|slice| plain(call, &reading, slice)).collect(),
        })
    }

    crate::reference!(backward);

    fn examples(&self) -> Vec<Example> {
        let example = |rows: &[usize], width: usize, rank: usize, columns: &[usize], accumulate: bool| {
            let normal = |shape: Vec<usize>| ExampleInput::Normal { shape, scale: 0.5 };
            let mut inputs = vec![normal([rows, &[width]].concat())];
            let mut state = Vec::new();
            for pair in columns.chunks(2) {
                inputs.extend([normal([rows, &[rank]].concat()), normal(vec![pair[1], rank])]);
                let db = ExampleInput::NormalF32 { shape: vec![pair[1], rank], scale: 1.0 };
                state.extend([normal([rows, &[rank]].concat()), db]);
            }
            let attrs = Attrs::new().with("scale", 2.0).with("columns", columns.to_vec());
            Example::new(inputs, if accumulate { attrs.with("accumulate", true) } else { attrs }).with_state(state)
        };
        vec![
            example(&[2, 300], 448, 16, &[0, 256, 320, 128], false),
            example(&[70], 64, 8, &[0, 64], true),
            example(&[200], 512, 64, &[0, 256, 256, 256], true),
            // What the tiles do not take.
            example(&[3, 5], 40, 4, &[8, 24], false),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_fill_the_gpu() {
        // 16 tiles side by side, 64 below one another: 256 blocks of 4.
        assert_eq!(steps(16, 64), 4);
        // 264 blocks at once of 6 tiles, and 480 in two turns of 13.
        assert_eq!((steps(24, 64), steps(96, 64)), (6, 13));
        // Nothing fills it: every tile is a block.
        assert_eq!(steps(1, 5), 1);
    }
}
