//! Losses: per token, by document and pair, and their weighted sum, where differentiation starts.

mod batch_sum;
mod cross_entropy;
mod distillation;
mod documents;
mod scaled_weights;
mod sorted;
mod task_report;
mod token_statistics;
mod weighted_sum;

use graph::{Element, ValueType};
use program::{Arg, TensorRef};

pub use batch_sum::BatchSum;
pub use cross_entropy::{CrossEntropy, CrossEntropyBackward, CrossEntropyWithGradient};
pub use distillation::{Distillation, DistillationBackward, TopDistillation, TopDistillationBackward, TopLogps};
pub use documents::{DocumentSpread, DocumentSum};
pub use scaled_weights::ScaledWeights;
pub use sorted::{Sorted, Unsorted};
pub use task_report::TaskReport;
pub use token_statistics::TokenStatistics;
pub use weighted_sum::WeightedSum;

use crate::kernel::{KernelSpec, LowerCall};

/// Checks operands that are f32 of one shape.
fn check_alike(inputs: &[ValueType], count: usize, names: &str) -> Result<(), String> {
    if inputs.len() != count {
        return Err(format!("takes {names}"));
    }
    match inputs.iter().all(|t| t.dtype == Element::F32 && t.shape == inputs[0].shape) {
        true => Ok(()),
        false => Err(format!("{names} must be f32 of the same shape")),
    }
}

/// A kernel over dense values of a batch, with every operand in order.
fn batch_kernel(
    entry: &'static str,
    source: &str,
    headers: &[(&'static str, &'static str)],
    [grid, threads]: [usize; 2],
    numbers: &[(&str, usize)],
    call: &LowerCall<'_>,
) -> KernelSpec {
    let operands: Vec<&TensorRef> = call.inputs.iter().chain(call.outputs).collect();
    for tensor in operands {
        assert!(tensor.is_dense(), "batch values lie densely: {tensor}");
    }
    let args = (0..call.inputs.len()).map(Arg::Input).chain((0..call.outputs.len()).map(Arg::Output));
    KernelSpec {
        entry,
        source: source.to_owned(),
        headers: headers.to_vec(),
        defines: numbers.iter().map(|(name, n)| ((*name).to_owned(), n.to_string())).collect(),
        grid: [grid as u32, 1, 1],
        block: [threads as u32, 1, 1],
        shared_bytes: 0,
        args: args.collect(),
    }
}
