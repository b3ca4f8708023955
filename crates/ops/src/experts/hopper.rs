//! Grouped products on Hopper's tensor cores (wgmma) and copy engine: which calls they take, and their launches. The
//! kernels stay on the device and walk over the tiles of all groups; a cluster of two blocks shares what both multiply.

use program::{Arg, TensorRef};

use super::grouped::flag;
use crate::kernel::{KernelSpec, LowerCall, row_offset};

const LINEAR: &str = include_str!("hopper/linear.cu");
const GRADIENT: &str = include_str!("hopper/gradient.cu");
const HEADERS: &[(&str, &str)] = &[
    ("steps.cuh", include_str!("hopper/steps.cuh")),
    ("types.cuh", include_str!("../cuda/types.cuh")),
    device::HANDOFF,
    device::WGMMA,
];

/// One warpgroup fetches, two multiply.
const THREADS: usize = 384;
/// Terms of a step, and steps in flight.
const DEEP: usize = 64;
const STAGES: usize = 4;
/// Columns of the result that a block computes at a time, and the rows of a box of x.
const WIDE: usize = 128;
const BOX_ROWS: u32 = 32;
/// Shared memory: stages of 128 and 256 rows of 64 numbers, two pieces of the result for each warpgroup, room to align.
const STAGE_BYTES: usize = (128 + 256) * DEEP * 2;
const PIECES_BYTES: usize = 4 * 64 * 64 * 2;
const SLACK: usize = 1024;

/// True on Hopper for operands that suit tensor cores and whose rows all lie evenly.
pub fn takes(call: &LowerCall<'_>, tensors: &[&TensorRef]) -> bool {
    let empty = tensors.iter().any(|tensor| tensor.is_empty());
    call.machine.arch.is_hopper() && !empty && tensors.iter().all(|tensor| tensor.as_matrix().is_some())
}

/// Boxes of so many rows of 64 columns.
fn boxes(input: usize, rows: u32, matrices: usize) -> Arg {
    Arg::Boxes { input, extents: [1, 1, rows, 64], matrices: Some(matrices) }
}

fn kernel(
    entry: &'static str,
    source: &'static str,
    call: &LowerCall<'_>,
    numbers: &[(&str, usize)],
    args: Vec<Arg>,
) -> KernelSpec {
    let all = [("THREADS", THREADS), ("DEEP", DEEP), ("STAGES", STAGES)];
    KernelSpec {
        entry,
        source: source.to_owned(),
        headers: HEADERS.to_vec(),
        defines: all.iter().chain(numbers).map(|(name, n)| ((*name).to_owned(), n.to_string())).collect(),
        // Clusters of two.
        grid: [(call.machine.units / 2 * 2).max(2) as u32, 1, 1],
        block: [THREADS as u32, 1, 1],
        shared_bytes: (SLACK + STAGES * STAGE_BYTES + PIECES_BYTES) as u32,
        args,
    }
}

pub fn linear(call: &LowerCall<'_>) -> KernelSpec {
    let (x, y) = (&call.inputs[0], &call.outputs[0]);
    let (groups, transposed) = (call.inputs[2].len() - 1, flag(call.attrs, "transposed"));
    let (k, n) = (x.shape[x.shape.len() - 1], y.shape[y.shape.len() - 1]);
    let numbers = [("GROUPS", groups), ("K", k), ("N", n), ("WIDE", WIDE), ("TRANSPOSED", transposed as usize)];
    let rows_of_w = if transposed { DEEP } else { WIDE };
    let args = vec![
        boxes(0, BOX_ROWS, 1),
        boxes(1, rows_of_w as u32, groups),
        Arg::Input(2),
        Arg::OutputBoxes { output: 0, extents: [1, 1, 64, 64], matrices: Some(1) },
        Arg::Output(0),
    ];
    let mut kernel = kernel("grouped_linear", LINEAR, call, &numbers, args);
    kernel.defines.push(("Y_AT(row)".to_owned(), row_offset(y)));
    kernel
}

pub fn weight_gradient(call: &LowerCall<'_>) -> KernelSpec {
    let (a, b) = (&call.inputs[0], &call.inputs[1]);
    let (m, k) = (a.shape[a.shape.len() - 1], b.shape[b.shape.len() - 1]);
    let accumulate = flag(call.attrs, "accumulate") as usize;
    let numbers = [("GROUPS", call.inputs[2].len() - 1), ("M", m), ("K", k), ("ACCUMULATE", accumulate)];
    // Boxes of as many bytes as those of halves.
    let result = Arg::OutputBoxes { output: 0, extents: [1, 1, 64, 32], matrices: Some(numbers[0].1) };
    let args = vec![boxes(0, DEEP as u32, 1), boxes(1, DEEP as u32, 1), Arg::Input(2), result];
    kernel("grouped_weight_gradient", GRADIENT, call, &numbers, args)
}
