//! The backward pass of `dropout_linear`, with x read and its mask generated only once.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use super::{Extents, MASK, MMA, PHILOX, PLAIN, THREADS, TYPES};
use crate::call::Call;
use crate::dropout::Dice;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;
use crate::vector::add_scaled;

/// Number of steps that are in flight or in use at once in a warp.
const STAGES: usize = 3;
/// Number of columns in a block.
const WIDTH: usize = 64;
/// Number of warps in a block.
const WARPS: usize = 8;
/// Blocks that are enough for the largest GPUs, one for each SM: more leave more parts to add.
const BLOCKS: usize = 132;

/// Threads of one block of the sum.
const SUM_THREADS: usize = 128;

fn extents<'a>(call: &'a LowerCall<'_>) -> Extents<'a> {
    let dt = &call.inputs[0];
    Extents::of(&call.inputs[1], dt.shape[dt.shape.len() - 1])
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let (dt, x, columns) = (call.inputs[0].real(), call.inputs[1].real(), call.inputs[1].columns());
    let dice = Dice::of(call.attrs, call.inputs[2].int()[0]);
    let (rank, scale) = (call.inputs[0].columns(), T::from_f32(dice.scale));
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let mut kept = x.to_vec();
    kept.par_chunks_mut(columns).enumerate().for_each(|(row, x)| dice.drop(row * columns, x));
    call.outputs[0].real().par_chunks_mut(columns).enumerate().for_each(|(r, da)| {
        let mut sum = vec![T::default(); columns];
        dt.chunks(rank).zip(kept.chunks(columns)).for_each(|(dt, x)| add_scaled(&mut sum, dt[r], x));
        da.iter_mut().zip(sum).for_each(|(da, sum)| *da = if accumulate { *da } else { T::default() } + scale * sum);
    });
    let [_, _, _, a, base] = call.inputs else { return };
    let rows = call.outputs[1].real().par_chunks_mut(columns).zip(base.real().par_chunks(columns));
    rows.zip(dt.par_chunks(rank)).enumerate().for_each(|(row, ((dx, base), dt))| {
        let mut sum = vec![T::default(); columns];
        dt.iter().zip(a.real().chunks(columns)).for_each(|(dt, a)| add_scaled(&mut sum, *dt, a));
        dice.drop(row * columns, &mut sum);
        dx.iter_mut().zip(base).zip(sum).for_each(|((dx, base), sum)| *dx = *base + scale * sum);
    });
}

/// da (, dx) = dropout_linear_backward(dt, x, micro_step (, a, base))
pub struct DropoutLinearBackward;

/// The distribution of the tiles over blocks.
struct Tiles {
    /// Neighbouring columns of a lane.
    each: usize,
    /// Number of blocks on an SM.
    blocks: usize,
    /// Number of rows in a block.
    chunk: usize,
    chunks: usize,
}

impl Tiles {
    fn of(extents: &Extents<'_>) -> Tiles {
        // The sums of few ranks leave registers for wide rows of x.
        let (each, blocks) = match extents.rank {
            0..=16 => (8, 1),
            17..=48 => (4, 2),
            _ => (4, 1),
        };
        let tiles = extents.rows.div_ceil(16);
        let chunk = tiles.div_ceil((BLOCKS * WIDTH / extents.columns).clamp(1, tiles)) * 16;
        Tiles { each, blocks, chunk, chunks: extents.rows.div_ceil(chunk) }
    }

    /// The stages and the factors, or the warps' sums.
    fn shared_bytes(&self, rank: usize, input: bool) -> usize {
        let (steps, run) = (rank.div_ceil(16), 32 * self.each * 2);
        let stage = if input { 8 } else { 4 } * run + 16 * (steps * 2 + 1) * 16;
        let factors = if input { WIDTH / 16 * steps * 32 * 16 } else { 0 };
        (WARPS * STAGES * stage + factors).max(WARPS * 16 * 8 * self.each * 4)
    }

    /// The tiles, then the sum of their parts of da.
    fn kernels(
        &self,
        of: &Extents<'_>,
        call: &LowerCall<'_>,
        mut defines: Vec<(String, String)>,
        dice: &Dice,
    ) -> Vec<KernelSpec> {
        let input = call.outputs.len() > 1;
        let numbers =
            [("WIDTH", WIDTH), ("EACH", self.each), ("WARPS", WARPS), ("STAGES", STAGES), ("BLOCKS", self.blocks)];
        let numbers = numbers.into_iter().chain([("CHUNK", self.chunk)]);
        defines.extend(numbers.map(|(name, n)| (name.to_owned(), n.to_string())));
        let count = of.rank * of.columns;
        let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
        let sum = [
            ("COUNT", count),
            ("CHUNKS", self.chunks),
            ("THREADS", SUM_THREADS),
            ("ACCUMULATE", usize::from(accumulate)),
        ];
        let mut sum: Vec<(String, String)> = sum.map(|(name, n)| (name.to_owned(), n.to_string())).into();
        sum.push(("SCALE".to_owned(), format!("{:e}f", dice.scale)));
        let parts = [Arg::Scratch(0), Arg::U32(dice.stream)];
        vec![
            KernelSpec {
                entry: "dropout_linear_backward",
                source: include_str!("backward.cu").to_owned(),
                headers: vec![TYPES, MMA, PHILOX, MASK],
                defines,
                grid: [(of.columns / WIDTH) as u32, self.chunks as u32, 1],
                block: [32 * WARPS as u32, 1, 1],
                shared_bytes: self.shared_bytes(of.rank, input) as u32,
                args: (0..call.inputs.len())
                    .map(Arg::Input)
                    .chain(input.then_some(Arg::Output(1)))
                    .chain(parts)
                    .collect(),
            },
            KernelSpec {
                entry: "dropout_linear_sum",
                source: include_str!("sum.cu").to_owned(),
                headers: vec![TYPES],
                defines: sum,
                grid: [count.div_ceil(4 * SUM_THREADS) as u32, 1, 1],
                block: [SUM_THREADS as u32, 1, 1],
                shared_bytes: 0,
                args: vec![Arg::Scratch(0), Arg::Output(0)],
            },
        ]
    }
}

/// Returns the tiles of a call; `None` where they do not take it.
fn tiles(call: &LowerCall<'_>, of: &Extents<'_>, dice: &Dice) -> Option<Tiles> {
    let [dt, x, _, rest @ ..] = call.inputs else { unreachable!("the shape rule requires three inputs") };
    let wide: Vec<&TensorRef> = [dt, x].into_iter().chain(rest).chain(&call.outputs[1..]).collect();
    of.tiled(call.machine, &wide, &[], dice).then(|| Tiles::of(of))
}

impl Op for DropoutLinearBackward {
    fn id(&self) -> OpId {
        id::DROPOUT_LINEAR_BACKWARD
    }

    fn class(&self) -> Class {
        Class::Matmul
    }

    fn doc(&self) -> &'static str {
        "Gradients of `dropout_linear`: da = dtᵀ·dropout(x), and with a and base dx = base + dropout(dt·a), the same \
         elements dropped. dt […, r], x […, K], micro_step i32 [1] (, a [r, K], base […, K]) → da f32 [r, K] (, dx like \
         base). With `accumulate`, da is added to."
    }

    fn attributes(&self) -> &'static [Attribute] {
        const {
            &Dice::attributes_and(Attribute {
                name: "accumulate",
                kind: "bool?",
                doc: "add to da instead of overwriting it",
            })
        }
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [dt, x, step, rest @ ..] = inputs else { return Err("takes dt, x and the micro-step".into()) };
        Dice::check(x, step, attrs)?;
        attrs.flag("accumulate")?;
        let rows = |t: &ValueType| t.shape.split_last().map(|(_, rows)| rows.to_vec());
        let (Some(rank), Some(columns)) = (dt.last(), x.last()) else {
            return Err("the last axes must be known".into());
        };
        if !dt.dtype.is_float() || rows(dt) != rows(x) {
            return Err("dt must be floating point with the rows of x".into());
        }
        let factor = [Dim::Fixed(rank), Dim::Fixed(columns)];
        let da = ValueType::new(Element::F32, factor.clone());
        match rest {
            [] => Ok(vec![da]),
            [a, base] if a.dtype.is_float() && a.shape == factor && base.dtype.is_float() && base.shape == x.shape => {
                Ok(vec![da, base.clone()])
            }
            _ => Err(format!("after the micro-step stand nothing, or a [{rank}, {columns}] and base like x")),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        let rank = inputs[0].shape[inputs[0].shape.len() - 1];
        Cost { flops: (2 * outputs.len() * inputs[1].len() * rank) as f64, bytes }
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        let of = extents(call);
        tiles(call, &of, &Dice::of(call.attrs, 0)).map_or(0, |tiles| tiles.chunks * of.rank * of.columns * 4)
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (of, dice) = (extents(call), Dice::of(call.attrs, 0));
        let input = call.outputs.len() > 1;
        assert!(
            call.outputs[0].is_dense() && call.inputs.get(3).is_none_or(TensorRef::is_dense),
            "factors lie densely"
        );
        let mut defines = of.defines(&dice, &[("INPUT", usize::from(input))]);
        let names = ["DT", "X", "", "A", "BASE"].into_iter().zip(call.inputs);
        let names = names.chain(["", "DX"].into_iter().zip(call.outputs)).filter(|(name, _)| !name.is_empty());
        names.for_each(|(name, tensor)| defines.extend(defines_for(name, tensor)));
        if let Some(tiles) = tiles(call, &of, &dice) {
            return Lowered::Kernels(tiles.kernels(&of, call, defines, &dice));
        }
        let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
        let numbers = [("BACKWARD", 1), ("THREADS", THREADS), ("ACCUMULATE", usize::from(accumulate))];
        defines.extend(numbers.map(|(name, n)| (name.to_owned(), n.to_string())));
        let elements = (of.rank + if input { of.rows } else { 0 }) * of.columns;
        let tensors = (0..call.inputs.len()).map(Arg::Input).chain((0..call.outputs.len()).map(Arg::Output));
        Lowered::Kernels(vec![KernelSpec {
            entry: "dropout_linear_backward_plain",
            source: PLAIN.to_owned(),
            headers: vec![TYPES, PHILOX, MASK],
            defines,
            grid: [elements.div_ceil(THREADS) as u32, 1, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args: tensors.chain([Arg::U32(dice.stream)]).collect(),
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |rows: &[usize], columns: usize, rank: usize, input: bool, accumulate: bool| {
            let normal = |columns: usize| ExampleInput::Normal { shape: [rows, &[columns]].concat(), scale: 0.5 };
            let step = ExampleInput::Ints { shape: vec![1], values: vec![3] };
            let mut inputs = vec![normal(rank), normal(columns), step];
            let mut state = vec![ExampleInput::NormalF32 { shape: vec![rank, columns], scale: 1.0 }];
            if input {
                inputs.extend([ExampleInput::Normal { shape: vec![rank, columns], scale: 0.5 }, normal(columns)]);
                state.push(normal(columns));
            }
            let attrs = Attrs::new().with("p", 0.25).with("seed", 42).with("stream", 5);
            Example::new(inputs, if accumulate { attrs.with("accumulate", true) } else { attrs }).with_state(state)
        };
        vec![
            example(&[2, 167], 192, 48, true, false),
            example(&[70], 64, 8, true, true),
            example(&[3, 20], 320, 120, true, false),
            example(&[300], 128, 16, false, true),
            // What the tiles do not take.
            example(&[3, 5], 22, 4, true, true),
            example(&[3, 5], 22, 4, false, false),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    /// The sum of both gradients is the one that the separate operations would give.
    #[test]
    fn the_gradient_of_the_input_is_added_to_the_base_with_the_mask_of_dropout() {
        let (rows, columns, rank) = (7, 24, 8);
        let numbers = |n: usize, k: usize| Array::Real((0..n).map(|i| ((i * k % 17) as f64 - 8.0) / 4.0).collect());
        let (dt, x, a, base) = (
            numbers(rows * rank, 3),
            numbers(rows * columns, 5),
            numbers(rank * columns, 7),
            numbers(rows * columns, 11),
        );
        let (step, attrs) = (Array::Int(vec![9]), Attrs::new().with("p", 0.5).with("seed", 3).with("stream", 2));
        let shapes = [vec![rows, rank], vec![rows, columns], vec![1], vec![rank, columns]];
        let zeros = |shape: &[usize]| (shape.to_vec(), Array::Real(vec![0.0f64; shape.iter().product()]));
        let mut found = [zeros(&shapes[3]), zeros(&shapes[1])];
        let inputs: [(&[usize], &Array<f64>); 5] =
            [(&shapes[0], &dt), (&shapes[1], &x), (&shapes[2], &step), (&shapes[3], &a), (&shapes[1], &base)];
        apply(&DropoutLinearBackward, &attrs, &inputs, &mut found);
        let mut product = [zeros(&shapes[1])];
        apply(&crate::matmul::Matmul, &Attrs::new(), &[inputs[0], inputs[3]], &mut product);
        let mut dropped = [zeros(&shapes[1])];
        apply(&crate::dropout::Dropout, &attrs, &[(&shapes[1], &product[0].1), inputs[2]], &mut dropped);
        let expected = dropped[0].1.real().iter().zip(base.real()).map(|(d, b)| d + b);
        let close = |(a, b): (&f64, f64)| (a - b).abs() < 1e-12;
        assert!(found[1].1.real().iter().zip(expected).all(close));
        assert!(dropped[0].1.real().contains(&0.0) && dropped[0].1.real().iter().any(|v| *v != 0.0));
    }
}
