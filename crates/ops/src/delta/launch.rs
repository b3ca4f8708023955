//! Launches of the gated delta rule's kernels, token by token, and the choice between them and those in chunks.
//! Forward, one pass over the tokens. Backward, three: the states once more, the gradients of the states from the end,
//! and all other gradients within chunks, which no longer depend on each other.

use program::{Arch, Arg, Arithmetic, TensorRef};

use super::{CHUNK, Extents, additive, scale, tensor_cores};
use crate::kernel::{KernelSpec, LowerCall, device_type};

pub const RECURRENCE: &str = include_str!("recurrence.cu");
const CHUNKS: &str = include_str!("chunks.cu");
const HEADERS: &[(&str, &str)] = &[("types.cuh", include_str!("../cuda/types.cuh"))];

/// Columns of a state in one block, and lanes that share the rows of a column.
pub const COLUMNS: usize = 32;
const LANES: usize = 4;
/// Tokens whose keys a block reads at once.
const STEP: usize = 16;
/// Threads of a block that computes the gradients of a chunk.
const CHUNK_THREADS: usize = 256;

/// The offsets in bytes of what the kernels of a backward pass hand one another: for each head of each row the states
/// at the starts of chunks, the gradients of those at their ends, and for each token what the state misses and the
/// gradient of the correction.
struct Handed {
    d_states: usize,
    misses: usize,
    d_corrections: usize,
    end: usize,
}

impl Handed {
    fn of(e: &Extents) -> Handed {
        let states = e.batch * e.heads * e.chunks() * e.key_dim * e.value_dim * 4;
        let tokens = e.batch * e.heads * e.tokens * e.value_dim * 4;
        let aligned = |bytes: usize| bytes.next_multiple_of(256);
        let misses = aligned(states) * 2;
        let d_corrections = misses + aligned(tokens);
        Handed { d_states: aligned(states), misses, d_corrections, end: d_corrections + aligned(tokens) }
    }
}

/// Bytes of scratch memory of a backward pass token by token.
pub fn handed(e: &Extents) -> usize {
    Handed::of(e).end
}

/// Returns the arithmetic in which the kernels of a pass multiply.
pub fn arithmetic(call: &LowerCall<'_>) -> Arithmetic {
    if tensor_cores::suits(call, call.outputs) { Arithmetic::OfOperands } else { Arithmetic::Single }
}

/// Bytes of scratch memory of a pass, whichever kernels it has.
pub fn scratch(call: &LowerCall<'_>) -> usize {
    let (e, backward) = (extents(call), call.outputs.len() > 1);
    match call.machine.arch {
        Arch::Cpu => 0,
        _ if tensor_cores::suits(call, call.outputs) => tensor_cores::scratch(call, backward),
        _ if backward => handed(&e),
        _ => 0,
    }
}

/// The type of an operand [B, T, heads] or [B, T, heads, columns], and where head `h` of token `t` of row `b` is.
fn place(name: &str, tensor: &TensorRef) -> [(String, String); 2] {
    let [b, t, h, ..] = tensor.strides[..] else { unreachable!("the shape rule requires three axes") };
    let dense = tensor.shape.len() == 3 || tensor.strides[3] == 1 || tensor.shape[3] == 1;
    assert!(dense, "the columns of a head have gaps: {tensor}");
    let at = format!("((size_t)(b)*{b}+(size_t)(t)*{t}+(size_t)(h)*{h})");
    [(format!("{name}_T"), device_type(tensor.dtype).to_owned()), (format!("{name}_AT(b,t,h)"), at)]
}

pub fn extents(call: &LowerCall<'_>) -> Extents {
    Extents::of(&call.inputs[1].shape, &call.inputs[2].shape)
}

/// A kernel of the call: `part` is the definition that names it.
pub fn kernel(
    entry: &'static str,
    part: &str,
    source: &str,
    call: &LowerCall<'_>,
    tensors: &[(&str, &TensorRef)],
) -> KernelSpec {
    let e = extents(call);
    assert!(call.inputs[5].is_dense(), "document starts and positions lie without gaps: {}", call.inputs[5]);
    let numbers = [
        (part, 1),
        ("TOKENS", e.tokens),
        ("KEY_HEADS", e.key_heads),
        ("HEADS", e.heads),
        ("DK", e.key_dim),
        ("DV", e.value_dim),
        ("CHUNK", CHUNK),
        ("CHUNKS", e.chunks()),
        ("COLUMNS", COLUMNS),
        ("LANES", LANES),
        ("STEP", STEP),
        ("ADDITIVE", usize::from(additive(call.attrs))),
    ];
    let mut defines: Vec<_> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
    let scale = scale(call.attrs, e.key_dim).expect("checked by the shape rule");
    defines.push(("SCALE".to_owned(), format!("{:e}f", scale as f32)));
    defines.extend(tensors.iter().flat_map(|(name, tensor)| place(name, tensor)));
    KernelSpec {
        entry,
        source: source.to_owned(),
        headers: HEADERS.to_vec(),
        defines,
        grid: [e.value_dim.div_ceil(COLUMNS) as u32, e.heads as u32, e.batch as u32],
        block: [(COLUMNS * LANES) as u32, 1, 1],
        shared_bytes: 0,
        args: Vec::new(),
    }
}

/// The operands of a call by the names that the kernels have for them.
pub fn operands<'a>(call: &'a LowerCall<'_>) -> Vec<(&'static str, &'a TensorRef)> {
    let names = ["Q", "K", "V", "G", "BETA"];
    names.into_iter().zip(call.inputs).collect()
}

pub fn forward(call: &LowerCall<'_>) -> Vec<KernelSpec> {
    if tensor_cores::suits(call, call.outputs) {
        return tensor_cores::forward(call);
    }
    let mut tensors = operands(call);
    tensors.push(("O", &call.outputs[0]));
    let args = (0..6).map(Arg::Input).chain([Arg::Output(0)]).collect();
    vec![KernelSpec { args, ..kernel("gated_delta_forward", "FORWARD", RECURRENCE, call, &tensors) }]
}

/// True if a call that goes on from kept states is computed in chunks on tensor cores: from one whole chunk on.
pub fn cached_in_chunks(call: &LowerCall<'_>) -> bool {
    call.machine.arch != Arch::Cpu && extents(call).tokens >= CHUNK && tensor_cores::suits(call, &call.outputs[..1])
}

pub fn backward(call: &LowerCall<'_>) -> Vec<KernelSpec> {
    if tensor_cores::suits(call, call.outputs) {
        return tensor_cores::backward(call);
    }
    let (e, d_o) = (extents(call), &call.inputs[6]);
    let [dq, dk, dv, dg, dbeta] = call.outputs else { unreachable!("the shape rule gives five results") };
    let at = Handed::of(&e);
    let [states, d_states, misses, d_corrections] = [0, at.d_states, at.misses, at.d_corrections].map(Arg::Scratch);
    let mut tensors = operands(call);
    let args = [1, 2, 3, 4, 5].map(Arg::Input).into_iter().chain([states.clone(), misses.clone()]).collect();
    let again = KernelSpec { args, ..kernel("gated_delta_states", "STATES", RECURRENCE, call, &tensors) };
    tensors.extend([("DO", d_o), ("DV_OUT", dv)]);
    let results = [d_states.clone(), d_corrections.clone(), Arg::Output(2)];
    let args = [0, 1, 3, 4, 5, 6].map(Arg::Input).into_iter().chain(results).collect();
    let back = KernelSpec { args, ..kernel("gated_delta_reverse", "REVERSE", RECURRENCE, call, &tensors) };
    tensors.extend([("DQ", dq), ("DK_OUT", dk), ("DG", dg), ("DBETA", dbeta)]);
    let handed = [states, d_states, misses, d_corrections];
    let inputs = [0, 1, 3, 4, 5, 6].map(Arg::Input).into_iter().chain(handed);
    let within = KernelSpec {
        grid: [e.chunks() as u32, e.key_heads as u32, e.batch as u32],
        block: [CHUNK_THREADS as u32, 1, 1],
        args: inputs.chain([0, 1, 3, 4].map(Arg::Output)).collect(),
        ..kernel("gated_delta_chunks", "WITHIN", CHUNKS, call, &tensors)
    };
    vec![again, back, within]
}
