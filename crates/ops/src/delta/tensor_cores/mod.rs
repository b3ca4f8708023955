//! Launches of the gated delta rule in chunks, on tensor cores: the effects of a chunk's tokens on one another, states
//! from chunk to chunk, and results. For bf16 operands in heads of 64 or 128 columns; states, decays and sums are f32,
//! and what one product hands to the next is bf16. Knows which calls it suits; everything else is `launch.rs`'s.

use program::{Arg, TensorRef};
use tensor::DType;

use super::launch::{extents, kernel, operands};
use super::{CHUNK, Extents, additive, scale};
use crate::kernel::{KernelSpec, LowerCall};

const PREPARE: &str = include_str!("prepare.cu");
const SCAN: &str = include_str!("scan.cu");
const OUTPUT: &str = include_str!("output.cu");
const GRADIENTS: &str = include_str!("gradients.cu");
const HEADERS: &[(&str, &str)] = &[
    ("tiles.cuh", include_str!("tiles.cuh")),
    ("mma.cuh", include_str!("../../cuda/mma.cuh")),
    ("types.cuh", include_str!("../../cuda/types.cuh")),
];

const SCAN_FORWARD: &str = "gated_delta_scan";

/// Columns of a state in one block of a scan: as the scalar kernels have.
const COLUMNS: usize = super::launch::COLUMNS;
const THREADS: u32 = 128;
const GRADIENT_THREADS: u32 = 256;
/// Bytes of a copy to shared memory.
const PIECE: usize = 16;
/// Shared memory that the kernels of a backward pass need in heads of 128 columns, about; GPUs have at most 99 KiB, or more.
const LEAST_SHARED: usize = 160 << 10;

/// Rows of a bf16 tile, in bytes.
const fn tile(rows: usize, columns: usize) -> usize {
    rows * (columns + 8) * 2
}

/// True if these kernels take a call, forward or backward. `results` are its outputs but for states that are kept.
pub fn suits(call: &LowerCall<'_>, results: &[TensorRef]) -> bool {
    let e = extents(call);
    let aligned = |tensor: &&TensorRef| {
        let columns_are_dense = tensor.strides[3] == 1;
        let rows = tensor.strides[..3].iter().zip(&tensor.shape);
        let mut rows = rows.map(|(stride, extent)| *extent == 1 || (stride * 2).is_multiple_of(PIECE));
        tensor.dtype == DType::BF16 && columns_are_dense && tensor.offset.is_multiple_of(PIECE) && rows.all(|even| even)
    };
    let of_heads = call.inputs.iter().chain(results).filter(|tensor| tensor.shape.len() == 4);
    let factor = scale(call.attrs, e.key_dim).expect("checked by the shape rule") as f32;
    [e.key_dim, e.value_dim].iter().all(|columns| [64, 128].contains(columns))
        && call.machine.arch.shared_per_block() >= LEAST_SHARED
        && of_heads.into_iter().all(|tensor| aligned(&tensor))
        // Gradients are divided by it in between.
        && factor.is_normal()
}

/// The offsets in bytes of what the kernels hand one another: for each head of each chunk a row of numbers for each of
/// its tokens, or a state.
struct Handed {
    values: usize,
    reads: usize,
    miss: usize,
    states: usize,
    weights: usize,
    d_miss0: usize,
    d_miss: usize,
    d_states: usize,
    end: usize,
}

impl Handed {
    fn of(e: &Extents, backward: bool, additive: bool) -> Handed {
        let chunks = e.batch * e.heads * e.chunks();
        let mut end = 0;
        let mut next = |numbers: usize, wanted: bool| {
            let at = end;
            end += if wanted { (chunks * numbers * 2).next_multiple_of(256) } else { 0 };
            at
        };
        let (of_values, of_keys, of_state) = (CHUNK * e.value_dim, CHUNK * e.key_dim, e.key_dim * e.value_dim);
        let [values, reads] = [of_values, of_keys].map(|numbers| next(numbers, !additive));
        let [miss, states] = [of_values, of_state].map(|numbers| next(numbers, true));
        let weights = next(CHUNK * CHUNK, backward && !additive);
        let [d_miss0, d_miss, d_states] = [of_values, of_values, of_state].map(|numbers| next(numbers, backward));
        Handed { values, reads, miss, states, weights, d_miss0, d_miss, d_states, end }
    }
}

/// Returns the bytes of scratch memory.
pub fn scratch(call: &LowerCall<'_>, backward: bool) -> usize {
    Handed::of(&extents(call), backward, additive(call.attrs)).end
}

/// A kernel that has a block for each chunk of each head.
fn by_chunk(
    (entry, part, source): (&'static str, &str, &str),
    call: &LowerCall<'_>,
    tensors: &[(&str, &TensorRef)],
    shared: usize,
    args: Vec<Arg>,
) -> KernelSpec {
    let e = extents(call);
    KernelSpec {
        headers: HEADERS.to_vec(),
        grid: [e.chunks() as u32, e.heads as u32, e.batch as u32],
        block: [THREADS, 1, 1],
        shared_bytes: shared as u32,
        args,
        ..kernel(entry, part, source, call, tensors)
    }
}

/// A kernel that walks over the chunks of some columns of a head.
fn scan(
    (entry, part): (&'static str, &str),
    call: &LowerCall<'_>,
    tensors: &[(&str, &TensorRef)],
    [of_keys, of_values]: [usize; 2],
    args: Vec<Arg>,
) -> KernelSpec {
    let e = extents(call);
    let shared = of_keys * tile(CHUNK, e.key_dim) + of_values * tile(CHUNK, COLUMNS) + tile(e.key_dim, COLUMNS);
    let spec = by_chunk((entry, part, SCAN), call, tensors, shared, args);
    KernelSpec { grid: [(e.value_dim / COLUMNS) as u32, e.heads as u32, e.batch as u32], ..spec }
}

fn shared_to_prepare(e: &Extents, additive: bool) -> usize {
    let squares = 2 * CHUNK * (CHUNK + 1) * 4;
    let rest = if additive { tile(CHUNK, e.key_dim) } else { tile(CHUNK, CHUNK) + squares };
    tile(CHUNK, e.key_dim) + tile(CHUNK, e.value_dim) + tile(CHUNK, CHUNK) + rest
}

/// Returns the kernel that computes the states before the chunks, and what each token's value misses.
fn states(call: &LowerCall<'_>, tensors: &[(&str, &TensorRef)], at: &Handed) -> KernelSpec {
    let additive = additive(call.attrs);
    let values = if additive { vec![Arg::Input(2)] } else { vec![Arg::Scratch(at.values), Arg::Scratch(at.reads)] };
    let made = [at.states, at.miss].map(Arg::Scratch);
    let args = [1, 3, 4, 5].map(Arg::Input).into_iter().chain(values).chain(made).collect();
    scan((SCAN_FORWARD, "FORWARD"), call, tensors, [if additive { 2 } else { 4 }, 3], args)
}

pub fn forward(call: &LowerCall<'_>) -> Vec<KernelSpec> {
    let (e, mut tensors) = (extents(call), operands(call));
    tensors.push(("O", &call.outputs[0]));
    let additive = additive(call.attrs);
    let at = Handed::of(&e, false, additive);
    let made = [at.values, at.reads].map(Arg::Scratch);
    let args = (1..6).map(Arg::Input).chain(made).collect();
    let kind = ("gated_delta_prepare", "ONLY_FORWARD", PREPARE);
    let prepare = (!additive).then(|| by_chunk(kind, call, &tensors, shared_to_prepare(&e, additive), args));
    let read = [Arg::Scratch(at.states), Arg::Scratch(at.miss), Arg::Output(0)];
    let args = [0, 1, 3, 4, 5].map(Arg::Input).into_iter().chain(read).collect();
    let shared = 2 * tile(CHUNK, e.key_dim) + tile(CHUNK + e.key_dim, e.value_dim) + tile(CHUNK, CHUNK);
    let output = by_chunk(("gated_delta_output", "OUTPUT", OUTPUT), call, &tensors, shared, args);
    prepare.into_iter().chain([states(call, &tensors, &at), output]).collect()
}

/// Returns the kernels of a call that goes on from kept states: those of `forward`, whose scan begins and ends there.
pub fn cached(call: &LowerCall<'_>) -> Vec<KernelSpec> {
    let mut kernels = forward(call);
    for kernel in &mut kernels {
        kernel.defines.push(("CACHED".to_owned(), "1".to_owned()));
        if kernel.entry == SCAN_FORWARD {
            kernel.args.extend([Arg::Input(6), Arg::Output(1)]);
        }
    }
    kernels
}

pub fn backward(call: &LowerCall<'_>) -> Vec<KernelSpec> {
    let (e, mut tensors) = (extents(call), operands(call));
    let names = ["DQ", "DK_OUT", "DV_OUT", "DG", "DBETA"];
    tensors.push(("DO", &call.inputs[6]));
    tensors.extend(names.into_iter().zip(call.outputs));
    let additive = additive(call.attrs);
    let at = Handed::of(&e, true, additive);
    let inputs = |numbers: &[usize]| numbers.iter().copied().map(Arg::Input).collect::<Vec<_>>();
    let handed = |offsets: &[usize]| offsets.iter().copied().map(Arg::Scratch).collect::<Vec<_>>();
    // Offsets that only corrections have.
    let corrected = |offsets: &[usize]| if additive { Vec::new() } else { handed(offsets) };
    let args = match additive {
        true => [inputs(&[1, 3, 4, 5, 0, 6]), handed(&[at.d_miss0])].concat(),
        false => {
            let made = [handed(&[at.values, at.reads]), inputs(&[0, 6]), handed(&[at.weights, at.d_miss0])].concat();
            [inputs(&[1, 2, 3, 4, 5]), made].concat()
        }
    };
    let kind = ("gated_delta_prepare", "BACK", PREPARE);
    let prepare = by_chunk(kind, call, &tensors, shared_to_prepare(&e, additive), args);
    let made = handed(&[at.d_miss0, at.d_states, at.d_miss]);
    let args = [inputs(&[0, 1, 3, 4, 5, 6]), corrected(&[at.reads]), made].concat();
    let of_keys = if additive { 4 } else { 6 };
    let reverse = scan(("gated_delta_scan_back", "REVERSE"), call, &tensors, [of_keys, 5], args);
    let read = [corrected(&[at.weights]), handed(&[at.states, at.miss, at.d_states, at.d_miss])].concat();
    let args = [inputs(&[0, 1, 3, 4, 5, 6]), read, (0..5).map(Arg::Output).collect()].concat();
    let shared = 2 * tile(CHUNK, e.key_dim) + tile(3 * CHUNK + e.key_dim, e.value_dim) + 2 * tile(CHUNK, CHUNK);
    let within = by_chunk(("gated_delta_gradients", "WITHIN", GRADIENTS), call, &tensors, shared, args);
    let within = KernelSpec {
        grid: [e.chunks() as u32, e.key_heads as u32, e.batch as u32],
        block: [GRADIENT_THREADS, 1, 1],
        ..within
    };
    vec![prepare, states(call, &tensors, &at), reverse, within]
}
