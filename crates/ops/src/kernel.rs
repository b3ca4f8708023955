//! The lowering of an operation to an instruction: kernel text with its launch, or one of the instruction kinds that a
//! backend implements with a library.

use program::{Arg, AttentionForward, Gemm, Machine, TensorRef};
use tensor::{Attrs, DType};

/// The tensors of one call, with their final layout.
pub struct LowerCall<'a> {
    pub inputs: &'a [TensorRef],
    pub outputs: &'a [TensorRef],
    pub attrs: &'a Attrs,
    pub machine: &'a Machine,
    pub documents: program::Documents,
}

/// One kernel with its launch. Addresses are arguments; everything else is a definition, so that
/// the compiler of the device code sees constants.
#[derive(Clone, Debug)]
pub struct KernelSpec {
    pub entry: &'static str,
    pub source: String,
    pub headers: Vec<(&'static str, &'static str)>,
    pub defines: Vec<(String, String)>,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub args: Vec<Arg>,
}

/// The form in which a call is lowered.
pub enum Lowered {
    /// Kernels of this operation, in order.
    Kernels(Vec<KernelSpec>),
    Gemm(Box<Gemm>),
    AttentionForward(Box<AttentionForward>),
    /// Element by element, an operand seen in another layout.
    Copy {
        from: TensorRef,
        to: TensorRef,
    },
    /// An exchange of pieces of the only input among consecutive ranks; the pieces received become the only output.
    Exchange {
        among: usize,
    },
}

/// True if a block may have 200 KiB of shared memory: the large GPUs from Hopper on.
pub(crate) fn is_roomy(machine: &Machine) -> bool {
    machine.arch.shared_per_block() >= 200 << 10
}

/// Blocks up to which a kernel takes about as long as its start: it keeps its place on the stream itself, and is
/// launched while the one before still runs.
const SHORT: usize = 1024;

/// True if a kernel of `blocks` blocks calls `grid_dependency_synchronize()`, and is compiled with [`device::DEPENDENT_LAUNCH`].
pub(crate) fn follows(blocks: usize) -> bool {
    blocks <= SHORT
}

/// The device's name of an element type, as `cuda/types.cuh` defines it.
pub fn device_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "double",
        DType::F32 => "float",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        DType::I64 => "long long",
        DType::I32 => "int",
        DType::U8 | DType::E4M3 | DType::E5M2 => "unsigned char",
    }
}

/// Definitions for a tensor `X` that a kernel addresses as rows of its last axis: `X_T` (type) and
/// `X_AT(row)`, the element offset of a row when all other axes are folded. The last axis is dense.
pub fn defines_for(name: &str, tensor: &TensorRef) -> Vec<(String, String)> {
    assert!(tensor.strides.last().is_none_or(|s| *s == 1), "{name} has gaps inside its rows: {tensor}");
    vec![(format!("{name}_T"), device_type(tensor.dtype).to_owned()), (format!("{name}_AT(row)"), row_offset(tensor))]
}

/// The offset of a row as a C expression of `row`.
pub(crate) fn row_offset(tensor: &TensorRef) -> String {
    if let Some((_, _, stride)) = tensor.as_matrix() {
        return format!("((size_t)(row)*{stride})");
    }
    let leading = tensor.shape.len() - 1;
    let mut inner = 1;
    let mut terms = Vec::new();
    for axis in (0..leading).rev().filter(|axis| tensor.shape[*axis] != 1) {
        let index = if inner == 1 { "(size_t)(row)".to_owned() } else { format!("(size_t)(row)/{inner}") };
        terms.push(format!("({index}%{})*{}", tensor.shape[axis], tensor.strides[axis]));
        inner *= tensor.shape[axis];
    }
    format!("({})", terms.join("+"))
}
