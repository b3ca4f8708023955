//! Grouped products on Hopper's tensor cores (wgmma) and copy engine: the calls that they take, and their launches. The
//! kernels are persistent and walk over the tiles of all groups; a cluster of two blocks shares what both multiply,
//! unless a result has few columns.

use program::{Arg, TensorRef};
use tensor::DType;

use super::grouped::flag;
use super::weight_gradient;
use crate::kernel::{KernelSpec, LowerCall, defines_for};

const LINEAR: &str = include_str!("hopper/linear.cu");
const GRADIENT: &str = include_str!("hopper/gradient.cu");
const HEADERS: &[(&str, &str)] = &[
    ("steps.cuh", include_str!("hopper/steps.cuh")),
    ("types.cuh", include_str!("../cuda/types.cuh")),
    device::HANDOFF,
    device::WGMMA,
];

/// Number of terms in a step.
const DEEP: usize = 64;
/// Rows of a box of x.
const BOX_ROWS: u32 = 32;
const SLACK: usize = 1024;
/// Two pieces of the result for a warpgroup that multiplies.
const PIECES_BYTES: usize = 2 * 64 * 64 * 2;

/// The division of a kernel: blocks of a cluster, warpgroups of a block that multiply (one more fetches), rows of its
/// factors in a step, and steps in flight.
struct Shape {
    cluster: usize,
    halves: usize,
    rows: [usize; 2],
    stages: usize,
}

const SQUARE: Shape = Shape { cluster: 2, halves: 2, rows: [128, 256], stages: 4 };
/// Rows or columns up to which a result is narrow: then it matters most that all blocks read different parts of the
/// long factor.
const FEW: usize = 64;
/// The shape for codes whose sums are kept in f32 besides those of the tensor cores, and the one for few rows.
const PROMOTED: Shape = Shape { cluster: 2, halves: 2, rows: [128, 192], stages: 4 };
const NARROW: Shape = Shape { cluster: 1, halves: 1, rows: [FEW, 128], stages: 8 };
/// The shapes for gradients with few rows, and with few columns.
const FEW_ROWS: Shape = Shape { cluster: 1, halves: 1, rows: [FEW, 256], stages: 5 };
const FEW_COLUMNS: Shape = Shape { cluster: 1, halves: 2, rows: [128, FEW], stages: 8 };

impl Shape {
    fn threads(&self) -> usize {
        128 * (1 + self.halves)
    }

    fn shared(&self) -> usize {
        let stage = (self.rows[0] + self.rows[1]) * DEEP * 2;
        SLACK + self.stages * stage + self.halves * PIECES_BYTES
    }
}

/// True on Hopper for operands that suit tensor cores and whose rows all lie evenly. Codes lie along the sum: others have no
/// products.
pub fn takes(call: &LowerCall<'_>, tensors: &[&TensorRef]) -> bool {
    let codes = tensors.iter().any(|tensor| tensor.dtype.small().is_some());
    if codes && flag(call.attrs, "transposed") {
        return false;
    }
    let empty = tensors.iter().any(|tensor| tensor.is_empty());
    call.machine.arch.is_hopper() && !empty && tensors.iter().all(|tensor| tensor.as_matrix().is_some())
}

/// Returns boxes of `rows` rows of 64 columns, or of 64 pairs of codes.
fn boxes(input: usize, rows: u32, matrices: usize) -> Arg {
    Arg::Boxes { input, extents: [1, 1, rows, 64], matrices: Some(matrices) }
}

fn kernel(
    entry: &'static str,
    source: &'static str,
    call: &LowerCall<'_>,
    shape: &Shape,
    numbers: &[(&str, usize)],
    args: Vec<Arg>,
) -> KernelSpec {
    let all = [
        ("THREADS", shape.threads()),
        ("CLUSTER", shape.cluster),
        ("HALVES", shape.halves),
        ("DEEP", DEEP),
        ("STAGES", shape.stages),
    ];
    let blocks = call.machine.units / shape.cluster * shape.cluster;
    KernelSpec {
        entry,
        source: source.to_owned(),
        headers: HEADERS.to_vec(),
        defines: all.iter().chain(numbers).map(|(name, n)| ((*name).to_owned(), n.to_string())).collect(),
        grid: [blocks.max(shape.cluster) as u32, 1, 1],
        block: [shape.threads() as u32, 1, 1],
        shared_bytes: shape.shared() as u32,
        args,
    }
}

/// Returns the definition of the tensor cores' types, where factors are not bf16.
fn products_of(number: DType) -> Option<(String, String)> {
    (number == DType::F16).then(|| ("PRODUCT_TYPES".to_owned(), "\"f32.f16.f16\"".to_owned()))
}

/// A product whose sum is `scaled` or not; the factors of a second one begin at an input.
pub fn linear(call: &LowerCall<'_>, second: usize, scaled: bool) -> KernelSpec {
    let (x, w, y) = (&call.inputs[0], &call.inputs[1], &call.outputs[0]);
    let groups = call.inputs[2].len() - 1;
    let (transposed, across) = (flag(call.attrs, "transposed"), flag(call.attrs, "across"));
    let (k, n) = (x.shape[x.shape.len() - 1], y.shape[y.shape.len() - 1]);
    let r = call.inputs.get(second).map_or(0, |t| t.shape[t.shape.len() - 1]);
    let codes = x.dtype.small().is_some();
    let promoted = codes && !flag(call.attrs, "fast_sum");
    let shape = match () {
        () if n <= FEW => NARROW,
        () if promoted => PROMOTED,
        () => SQUARE,
    };
    let numbers = [
        ("GROUPS", groups),
        ("K", if codes { k / 2 } else { k }),
        ("N", n),
        ("R", r),
        ("TALL", shape.rows[1]),
        ("TRANSPOSED", transposed as usize),
        ("ACROSS", across as usize),
        ("PROMOTED", promoted as usize),
        ("SCALED", scaled as usize),
    ];
    let rows_of_w = |across: bool| if across { DEEP } else { shape.rows[0] } as u32;
    let mut args = vec![boxes(0, BOX_ROWS, 1), boxes(1, rows_of_w(transposed), groups), Arg::Input(2)];
    if scaled {
        args.extend([Arg::Input(3), Arg::Input(4)]);
    }
    if r > 0 {
        args.extend([boxes(second, BOX_ROWS, 1), boxes(second + 1, rows_of_w(across), groups)]);
    }
    args.extend([Arg::OutputBoxes { output: 0, extents: [1, 1, 64, 64], matrices: Some(1) }, Arg::Output(0)]);
    let mut kernel = kernel("grouped_linear", LINEAR, call, &shape, &numbers, args);
    kernel.defines.extend(defines_for("Y", y));
    let pair = if y.dtype == DType::F16 { "f16_pair" } else { "bf16_pair" };
    kernel.defines.push(("PAIR".to_owned(), pair.to_owned()));
    kernel.defines.extend(products_of(y.dtype));
    if codes {
        // The tensor cores get w as the left factor.
        let types = format!("\"f32.{}.{}\"", w.dtype.name(), x.dtype.name());
        kernel.defines.push(("CODES_TYPES".to_owned(), types));
    }
    kernel
}

pub fn weight_gradient(call: &LowerCall<'_>) -> KernelSpec {
    let (a, b) = (&call.inputs[0], &call.inputs[1]);
    let (m, k) = (a.shape[a.shape.len() - 1], b.shape[b.shape.len() - 1]);
    let accumulate = flag(call.attrs, "accumulate") as usize;
    let shape = match () {
        () if m <= FEW => FEW_ROWS,
        () if k <= FEW => FEW_COLUMNS,
        () => SQUARE,
    };
    let groups = call.inputs[2].len() - 1;
    let scaled = weight_gradient::is_scaled(call);
    let numbers = [
        ("GROUPS", groups),
        ("M", m),
        ("K", k),
        ("WIDE", shape.rows[1]),
        ("ACCUMULATE", accumulate),
        ("SCALED", scaled as usize),
    ];
    // Boxes of the same bytes as those of halves.
    let result = Arg::OutputBoxes { output: 0, extents: [1, 1, 64, 32], matrices: Some(groups) };
    let mut args = vec![boxes(0, DEEP as u32, 1), boxes(1, DEEP as u32, 1), Arg::Input(2)];
    if scaled {
        args.extend([Arg::Input(3), Arg::Input(4)]);
    }
    args.push(result);
    let mut kernel = kernel("grouped_weight_gradient", GRADIENT, call, &shape, &numbers, args);
    kernel.defines.extend(products_of(a.dtype));
    kernel
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_fits_the_shared_memory_of_a_block() {
        let most = 227 << 10;
        for shape in [SQUARE, PROMOTED, NARROW, FEW_ROWS, FEW_COLUMNS] {
            assert!(shape.shared() <= most, "{} of {most} bytes", shape.shared());
            assert!(shape.threads() <= 1024 && shape.rows.iter().all(|rows| rows.is_multiple_of(64)));
        }
    }
}
