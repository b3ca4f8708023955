//! The weight gradient of RMS normalisation: sums over all rows, in parts that are added in order.

use graph::{Element, ValueType};
use program::{Arg, TensorRef};
use tensor::Attrs;

use super::{cpu, row_shape, rows_of};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for};
use crate::layout::row_width;
use crate::op::{Attribute, Class, Example, ExampleInput, Op};

const SOURCE: &str = include_str!("weight.cu");
const HEADERS: &[(&str, &str)] =
    &[("types.cuh", include_str!("../../cuda/types.cuh")), ("pack.cuh", include_str!("../../cuda/pack.cuh"))];

/// Threads of one block.
const THREADS: usize = 256;
/// Rows that one thread sums at least.
const LEAST_ROWS: usize = 8;
/// Blocks that fill a GPU: two for each multiprocessor of the largest.
const BLOCKS: usize = 264;

/// How rows and columns are dealt to blocks and threads.
struct Deal {
    width: usize,
    /// Threads side by side, each with `width` columns.
    across: usize,
    /// Threads below one another, each with every `down`-th row.
    down: usize,
    /// Blocks side by side and below one another.
    grid: (usize, usize),
    rows_per_part: usize,
}

impl Deal {
    fn new(x: &TensorRef, dy: &TensorRef, columns: usize) -> Deal {
        let rows = rows_of(x);
        let width = row_width(&[x, dy]);
        let across = (columns / width).next_power_of_two().min(32);
        let down = THREADS / across;
        let blocks_across = (columns / width).div_ceil(across);
        let parts = rows.div_ceil(down * LEAST_ROWS).clamp(1, BLOCKS.div_ceil(blocks_across));
        let rows_per_part = rows.div_ceil(parts);
        Deal { width, across, down, grid: (blocks_across, rows.div_ceil(rows_per_part)), rows_per_part }
    }
}

/// dw = Σ over `parts` of partial f32 [parts, columns], or dw + it.
pub fn sum_partials(columns: usize, parts: usize, accumulate: bool, partial: Arg, dw: Arg) -> KernelSpec {
    let numbers = [("COLUMNS", columns), ("PARTS", parts), ("ACCUMULATE", accumulate as usize)];
    KernelSpec {
        entry: "sum_partials",
        source: SOURCE.to_owned(),
        headers: HEADERS.to_vec(),
        defines: numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec(),
        grid: [columns.div_ceil(32) as u32, 1, 1],
        block: [1024, 1, 1],
        shared_bytes: 0,
        args: vec![partial, dw],
    }
}

/// Bytes of the partial sums.
pub(in super::super) fn scratch(call: &LowerCall<'_>, dy: &TensorRef) -> usize {
    let columns = call.outputs[0].len();
    Deal::new(&call.inputs[0], dy, columns).grid.1 * columns * 4
}

/// The partial sums and their sum. `inputs` are the kernel's x, statistics and dy; with `centered`, the
/// statistics are the row's mean and then r, and dw = Σ dy·(x − mean)·r.
pub(in super::super) fn kernels(
    call: &LowerCall<'_>,
    dy: &TensorRef,
    inputs: Vec<Arg>,
    centered: bool,
) -> Vec<KernelSpec> {
    let x = &call.inputs[0];
    let columns = call.outputs[0].len();
    let deal = Deal::new(x, dy, columns);
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let numbers = [
        ("COLUMNS", columns),
        ("ROWS", rows_of(x)),
        ("WIDTH", deal.width),
        ("ACROSS", deal.across),
        ("DOWN", deal.down),
        ("ROWS_PER_PART", deal.rows_per_part),
        ("CENTERED", centered as usize),
    ];
    let mut defines: Vec<(String, String)> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
    defines.extend(defines_for("X", x));
    defines.extend(defines_for("DY", dy));
    let partial = KernelSpec {
        entry: "norm_weight_partial",
        source: SOURCE.to_owned(),
        headers: HEADERS.to_vec(),
        defines,
        grid: [deal.grid.0 as u32, deal.grid.1 as u32, 1],
        block: [THREADS as u32, 1, 1],
        shared_bytes: 0,
        args: inputs.into_iter().chain([Arg::Scratch(0)]).collect(),
    };
    vec![partial, sum_partials(columns, deal.grid.1, accumulate, Arg::Scratch(0), Arg::Output(0))]
}

/// dw = Σ over rows of dy·x·r
pub struct RmsNormWeightGradient;

impl Op for RmsNormWeightGradient {
    fn name(&self) -> &'static str {
        "rmsnorm_weight_gradient"
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "Weight gradient of `rmsnorm`: dw = Σ rows dy·x·r, in f32. x, r, dy → dw f32 [H]. With `accumulate`, added to."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "accumulate", kind: "bool?", doc: "add to the result instead of overwriting it" }]
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, r, dy] = inputs else { return Err("takes x, r and dy".into()) };
        if dy.shape != x.shape || r.shape != row_shape(x) {
            return Err("dy must be shaped like x, r like its rows".into());
        }
        Ok(vec![ValueType::new(Element::F32, [x.shape[x.shape.len() - 1].clone()])])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        scratch(call, &call.inputs[2])
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let args = vec![Arg::Input(0), Arg::Input(1), Arg::Input(2)];
        Lowered::Kernels(kernels(call, &call.inputs[2], args, false))
    }

    crate::reference!(cpu::weight_gradient);

    fn examples(&self) -> Vec<Example> {
        let example = |rows: usize, columns: usize, attrs: Attrs| {
            Example::new(
                vec![
                    ExampleInput::Normal { shape: vec![rows, columns], scale: 1.0 },
                    ExampleInput::UniformF32 { shape: vec![rows], low: 0.5, high: 1.5 },
                    ExampleInput::Normal { shape: vec![rows, columns], scale: 1.0 },
                ],
                attrs,
            )
            .with_state(vec![ExampleInput::NormalF32 { shape: vec![columns], scale: 1.0 }])
        };
        vec![
            example(150, 64, Attrs::new()),
            example(7, 300, Attrs::new().with("accumulate", true)),
            example(5000, 24, Attrs::new()),
            example(40, 33, Attrs::new()),
        ]
    }
}
