//! A linear layer with few rows applied to dropout of its input, and its backward pass: adapters with dropout on a GPU.
//! The mask is generated where it is used: no masked copy is written or saved.

mod backward;

use graph::{OpId, ValueType};
use program::{Arg, Cost, Machine, TensorRef};
use rayon::prelude::*;
use tensor::{Attrs, DType};

use crate::call::Call;
use crate::dropout::Dice;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for, is_roomy};
use crate::layout::row_width;
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;
use crate::vector::dot;

pub use backward::DropoutLinearBackward;

type Header = (&'static str, &'static str);
const TYPES: Header = ("types.cuh", include_str!("../../cuda/types.cuh"));
const PHILOX: Header = ("philox.cuh", include_str!("../../cuda/philox.cuh"));
const MASK: Header = ("mask.cuh", include_str!("../../cuda/mask.cuh"));
const MMA: Header = ("mma.cuh", include_str!("../../cuda/mma.cuh"));
const PLAIN: &str = include_str!("plain.cu");

/// Threads of one block of the kernel that takes everything.
const THREADS: usize = 256;
/// Pieces that are in flight or in use at once in one warp of the forward kernel.
const STAGES: usize = 2;
/// Most rows of the factor that the tiles take.
const MOST_RANK: usize = 128;
/// Columns that the tiles take are multiples of this.
const GROUP: usize = 64;

/// True if the tiles of a machine take `x` in `columns` columns and a factor of `rank` rows.
pub fn dropout_linear_fits(machine: &Machine, columns: usize, rank: usize) -> bool {
    is_roomy(machine) && columns.is_multiple_of(GROUP) && rank.is_multiple_of(8) && rank <= MOST_RANK
}

/// The extents of a call.
struct Extents<'a> {
    x: &'a TensorRef,
    rows: usize,
    columns: usize,
    rank: usize,
}

impl Extents<'_> {
    fn of(x: &TensorRef, rank: usize) -> Extents<'_> {
        let columns = x.shape[x.shape.len() - 1];
        Extents { x, rows: x.len() / columns, columns, rank }
    }

    /// True if the tiles take these operands: `wide` ones are read 16 bytes at a time, `narrow` ones 4.
    fn tiled(&self, machine: &Machine, wide: &[&TensorRef], narrow: &[&TensorRef], dice: &Dice) -> bool {
        let bf16 = wide.iter().chain(narrow).all(|t| t.dtype == DType::BF16 && t.as_matrix().is_some());
        // Elements are counted in 32 bits.
        let counted = u32::try_from(self.x.len()).is_ok() && dice.least().is_some();
        let wide = wide.iter().all(|t| row_width(&[t]) >= 8);
        let narrow = narrow.iter().all(|t| row_width(&[t]) >= 2);
        dropout_linear_fits(machine, self.columns, self.rank) && bf16 && counted && wide && narrow
    }

    fn defines(&self, dice: &Dice, extra: &[(&str, usize)]) -> Vec<(String, String)> {
        let numbers = [("ROWS", self.rows), ("COLUMNS", self.columns), ("RANK", self.rank)];
        let text = |(name, n): &(&str, usize)| ((*name).to_owned(), n.to_string());
        let mut defines: Vec<(String, String)> = numbers.iter().chain(extra).map(text).collect();
        defines.push(("SCALE".to_owned(), format!("{:e}f", dice.scale)));
        defines.push(("SEED".to_owned(), format!("{}ull", dice.seed)));
        // Where even the largest word is too small, nothing is kept: that costs no comparison of more than 32 bits.
        defines.push(("LEAST".to_owned(), dice.least().map_or("(1ull << 32)".to_owned(), |least| format!("{least}u"))));
        defines
    }
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let (x, a, columns) = (call.inputs[0].real(), call.inputs[2].real(), call.inputs[0].columns());
    let dice = Dice::of(call.attrs, call.inputs[1].int()[0]);
    let (rank, scale) = (a.len() / columns, T::from_f32(dice.scale));
    let [t] = call.outputs_mut();
    t.real().par_chunks_mut(rank).zip(x.par_chunks(columns)).enumerate().for_each(|(row, (t, x))| {
        let mut x = x.to_vec();
        dice.drop(row * columns, &mut x);
        t.iter_mut().zip(a.chunks(columns)).for_each(|(t, a)| *t = scale * dot(&x, a));
    });
}

/// t = dropout(x, micro_step)·aᵀ
pub struct DropoutLinear;

impl Op for DropoutLinear {
    fn id(&self) -> OpId {
        id::DROPOUT_LINEAR
    }

    fn class(&self) -> Class {
        Class::Matmul
    }

    fn doc(&self) -> &'static str {
        "t = dropout(x)·aᵀ: `linear` after `dropout` without what lies between them. x […, K], micro_step i32 [1], \
         a [r, K] → t […, r]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        Dice::ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, step, a] = inputs else { return Err("takes x, the micro-step and a".into()) };
        Dice::check(x, step, attrs)?;
        let [rank, columns] = a.shape.as_slice() else { return Err("a must be a matrix".into()) };
        if !a.dtype.is_float() || x.shape.last() != Some(columns) {
            return Err("a must be floating point with the columns of x".into());
        }
        let mut t = x.clone();
        *t.shape.last_mut().expect("checked to have columns") = rank.clone();
        Ok(vec![t])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let (x, step, a, dt) = (call.input(0), call.input(1), call.input(2), call.dy());
        let attrs = call.node.attrs.clone();
        let dx = call.wanted[0].then(|| {
            let product = call.one(id::MATMUL, &[dt, a], Attrs::new());
            call.one(id::DROPOUT, &[product, step], attrs.clone())
        });
        Gradients::Inputs(vec![dx, None, call.wanted(2, id::DROPOUT_LINEAR_BACKWARD, &[dt, x, step], attrs)])
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: 2.0 * inputs[0].len() as f64 * inputs[2].shape[0] as f64, bytes }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let [x, _, a] = call.inputs else { unreachable!("the shape rule requires three inputs") };
        let (t, dice) = (&call.outputs[0], Dice::of(call.attrs, 0));
        let of = Extents::of(x, a.shape[0]);
        assert!(a.is_dense(), "the factor lies densely: {a}");
        let args = vec![Arg::Input(0), Arg::Input(1), Arg::Input(2), Arg::Output(0), Arg::U32(dice.stream)];
        let tiled = of.tiled(call.machine, &[x, a], &[t], &dice);
        let mut defines = match tiled {
            true => of.defines(&dice, &[("TALL", tall(&of)), ("WARPS", warps(&of)), ("STAGES", STAGES)]),
            false => of.defines(&dice, &[("BACKWARD", 0), ("THREADS", THREADS)]),
        };
        for (name, tensor) in [("X", x), ("A", a), ("Y", t)] {
            defines.extend(defines_for(name, tensor));
        }
        Lowered::Kernels(vec![match tiled {
            true => KernelSpec {
                entry: "dropout_linear",
                source: include_str!("forward.cu").to_owned(),
                headers: vec![TYPES, MMA, PHILOX, MASK],
                defines,
                grid: [of.rows.div_ceil(16 * tall(&of)) as u32, 1, 1],
                block: [32 * warps(&of) as u32, 1, 1],
                shared_bytes: shared_bytes(&of) as u32,
                args,
            },
            false => KernelSpec {
                entry: "dropout_linear_plain",
                source: PLAIN.to_owned(),
                headers: vec![TYPES, PHILOX, MASK],
                defines,
                grid: [t.len().div_ceil(THREADS) as u32, 1, 1],
                block: [THREADS as u32, 1, 1],
                shared_bytes: 0,
                args,
            },
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |rows: &[usize], columns: usize, rank: usize| {
            let normal = |shape: Vec<usize>| ExampleInput::Normal { shape, scale: 0.5 };
            let step = ExampleInput::Ints { shape: vec![1], values: vec![7] };
            let inputs = vec![normal([rows, &[columns]].concat()), step, normal(vec![rank, columns])];
            let attrs = Attrs::new().with("p", 0.25).with("seed", 42).with("stream", 5);
            Example::new(inputs, attrs).differentiate(&[0, 2])
        };
        vec![
            example(&[2, 67], 192, 48),
            example(&[70], 64, 8),
            example(&[3, 20], 320, 120),
            // What the tiles do not take.
            example(&[3, 5], 22, 4),
        ]
    }
}

/// True for few columns, which leave little work to a block: small blocks are used then, of which there are more. On an
/// H200 with 4096 rows: 1024 columns and rank 32 8.1 µs in small blocks and 9.0 in large ones, 4096 and 48 27.2 and
/// 24.2.
fn is_small(of: &Extents<'_>) -> bool {
    of.columns <= 2048 || of.rank > 64
}

/// Tiles of 16 rows of one block.
fn tall(of: &Extents<'_>) -> usize {
    if is_small(of) { 1 } else { 2 }
}

/// Returns the number of warps in a block.
fn warps(of: &Extents<'_>) -> usize {
    if is_small(of) { 8 } else { 16 }
}

/// The stages, or the sums of 16 rows of all warps.
fn shared_bytes(of: &Extents<'_>) -> usize {
    let stage = (tall(of) * 2 + of.rank / 8) * 512;
    warps(of) * (STAGES * stage).max(16 * of.rank * 4)
}
