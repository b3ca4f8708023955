//! A launch of one of attention's kernels: the definitions that all of them share, their optional arguments, and which
//! operands the kernels for tensor cores read. The kernels themselves are with each variant.

use program::{Arg, TensorRef};
use tensor::DType;

use super::{Extents, Optional, Reading};
use crate::kernel::{KernelSpec, LowerCall, device_type};

/// Alignment of rows in memory that tensor cores and copy engine are fed from, bytes.
const ALIGNMENT: usize = 16;

/// One kernel of a call.
pub struct Launch<'a> {
    pub entry: &'static str,
    pub source: &'static str,
    pub headers: &'static [(&'static str, &'static str)],
    /// The division of the work, as definitions.
    pub division: Vec<(&'static str, usize)>,
    /// Tensors whose type and strides the kernel receives.
    pub tensors: &'a [(&'a str, &'a TensorRef)],
    pub grid: [usize; 3],
    pub threads: usize,
    pub shared_bytes: usize,
    pub args: Vec<Arg>,
}

impl Launch<'_> {
    pub fn of(self, call: &LowerCall<'_>) -> KernelSpec {
        let mut defines = mask_defines(call);
        defines.extend(self.division.into_iter().map(|(name, n)| (name.to_owned(), n.to_string())));
        defines.extend(self.tensors.iter().flat_map(|(name, tensor)| strides(name, tensor)));
        KernelSpec {
            entry: self.entry,
            source: self.source.to_owned(),
            headers: self.headers.to_vec(),
            defines,
            grid: self.grid.map(|blocks| blocks as u32),
            block: [self.threads as u32, 1, 1],
            shared_bytes: self.shared_bytes as u32,
            args: self.args,
        }
    }
}

/// Returns the definitions of the interval of keys, the score, and the type of q, k and v.
fn mask_defines(call: &LowerCall<'_>) -> Vec<(String, String)> {
    let e = Extents::of_call(call.inputs);
    let reading = Reading::checked(call.attrs, e.head_dim);
    let optional = Optional::of_call(call.inputs, call.outputs.len());
    let numbers = [
        ("BATCH", e.batch),
        ("TOKENS", e.tokens),
        ("HEADS", e.heads),
        ("KV_HEADS", e.kv_heads),
        ("D", e.head_dim),
        ("DV", e.value_dim),
        ("WINDOW", reading.hiding_window(e.tokens).unwrap_or(0)),
        ("BIDIRECTIONAL", reading.bidirectional as usize),
        ("HAS_LAST", (optional.limit.is_some() && !reading.branches) as usize),
        ("HAS_SINK", optional.sink.is_some() as usize),
        ("HAS_CAP", reading.soft_cap.is_some() as usize),
        ("IS_F16", (call.inputs[0].dtype == DType::F16) as usize),
    ];
    let mut defines: Vec<_> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
    defines.push(("ELEMENT".to_owned(), device_type(call.inputs[0].dtype).to_owned()));
    defines.push(("SCALE".to_owned(), format!("{:e}f", reading.scale as f32)));
    defines.push(("SOFT_CAP".to_owned(), format!("{:e}f", reading.soft_cap.unwrap_or(0.0) as f32)));
    if reading.branches {
        defines.push(("BRANCHES".to_owned(), "1".to_owned()));
    }
    let sink_type = optional.sink.map_or("float", |at| device_type(call.inputs[at].dtype));
    defines.push(("SINK_T".to_owned(), sink_type.to_owned()));
    defines
}

/// The type `X_T` and the strides `X_B`, `X_S`, `X_H` of a tensor [B, T, heads, D].
pub fn strides(name: &str, tensor: &TensorRef) -> Vec<(String, String)> {
    assert!(tensor.strides[3] == 1 || tensor.shape[3] == 1, "the columns of a head lie one after another: {tensor}");
    let axes = ["B", "S", "H"].into_iter().zip(&tensor.strides);
    let mut defines: Vec<_> = axes.map(|(axis, stride)| (format!("{name}_{axis}"), stride.to_string())).collect();
    defines.push((format!("{name}_T"), device_type(tensor.dtype).to_owned()));
    defines
}

/// The arguments for `last_key` or `last_query` and the sink; another input stands for what is not there, and is not read.
pub fn optional_args(call: &LowerCall<'_>) -> [Arg; 2] {
    let optional = Optional::of_call(call.inputs, call.outputs.len());
    [optional.limit, optional.sink].map(|at| Arg::Input(at.unwrap_or(0)))
}

/// Row statistics, starts, limits and sinks are without gaps.
pub fn assert_dense(call: &LowerCall<'_>, tensors: &[&TensorRef]) {
    let optional = Optional::of_call(call.inputs, call.outputs.len());
    let given = [optional.limit, optional.sink].into_iter().flatten().map(|at| &call.inputs[at]);
    for tensor in tensors.iter().copied().chain(given) {
        assert!(tensor.is_dense(), "row statistics and what the mask is made of lie without gaps: {tensor}");
    }
}

/// True for operands of one type of 16 bits, heads in steps of 8 up to the widest, rows on 16-byte boundaries: what
/// kernels for tensor cores read and write.
pub fn suits_tensor_cores(call: &LowerCall<'_>, widest: usize) -> bool {
    let e = Extents::of_call(call.inputs);
    let dtype = call.inputs[0].dtype;
    let backward = call.outputs.len() == 3;
    let others = if backward { vec![&call.inputs[3], &call.inputs[5]] } else { vec![] };
    let results = if backward { call.outputs } else { &call.outputs[..1] };
    matches!(dtype, DType::BF16 | DType::F16)
        && [e.head_dim, e.value_dim].iter().all(|columns| columns.is_multiple_of(8) && *columns <= widest)
        && call.inputs[..3].iter().chain(others).chain(results).all(|t| t.dtype == dtype && is_aligned(t))
}

/// Rows of dense heads on 16-byte boundaries. Arenas and buffers start on larger boundaries, so the offset suffices.
pub fn is_aligned(tensor: &TensorRef) -> bool {
    let aligned = |axis: usize| tensor.shape[axis] == 1 || (tensor.strides[axis] * 2).is_multiple_of(ALIGNMENT);
    (tensor.strides[3] == 1 || tensor.shape[3] == 1) && tensor.offset.is_multiple_of(ALIGNMENT) && (0..3).all(aligned)
}
