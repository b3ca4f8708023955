//! Mixtures of experts: every token is sent to a few of many small networks. The choice of them (`route`), an order of
//! the tokens by expert (`group_rows`), the rows in that order and back (`to_groups`, `from_groups`), and products in
//! which every group of rows has a matrix of its own (`grouped_linear`).
//!
//! How many tokens an expert gets is known on the device alone: no size is read by the host, no group is padded, no token
//! is dropped. All orders are those of the tokens, so that every run has the same bits.

mod bias;
mod codes;
mod excess;
mod grouped;
mod hopper;
mod load;
mod order;
mod route;
mod rows;
mod weight_gradient;

pub use bias::{GroupedBias, GroupedRowSums};
pub use codes::GroupedCodes;
pub use excess::LoadExcess;
use graph::{Dim, Element, ValueType};
pub use grouped::GroupedLinear;
pub use load::{BalancedLoss, BalancedLossBackward, ExpertLoad, ExpertLoadBackward, RouterReport};
pub use order::GroupRows;
pub use route::{Route, RouteBackward};
pub use rows::{FromGroups, GroupWeightGradient, ToGroups};
pub use weight_gradient::GroupedWeightGradient;

use program::TensorRef;

use crate::kernel::{KernelSpec, LowerCall};
use crate::op::ExampleInput;

const HEADERS: &[(&str, &str)] = &[("types.cuh", include_str!("../cuda/types.cuh"))];
const MMA_HEADERS: &[(&str, &str)] = &[("mma.cuh", include_str!("../cuda/mma.cuh")), HEADERS[0]];

const PACK: (&str, &str) = ("pack.cuh", include_str!("../cuda/pack.cuh"));
/// Bytes of an access where rows lie evenly.
const ACCESS: usize = 16;

/// Elements of an access to rows of these tensors, which have the same columns: 16 bytes where they all lie on such
/// boundaries.
fn vector(tensors: &[&TensorRef]) -> usize {
    let each = |at: &TensorRef| {
        let elements = ACCESS / at.dtype.size();
        let (columns, leading) = at.shape.split_last().expect("rows have columns");
        let even =
            leading.iter().zip(&at.strides).all(|(extent, stride)| *extent == 1 || stride.is_multiple_of(elements));
        let all = even && columns.is_multiple_of(elements) && at.offset.is_multiple_of(ACCESS);
        if all { elements } else { 1 }
    };
    tensors.iter().map(|at| each(at)).min().unwrap_or(1)
}

/// A kernel of `grid` blocks of `threads` threads.
fn kernel(
    entry: &'static str,
    source: &str,
    grid: [usize; 3],
    threads: usize,
    numbers: &[(&str, usize)],
    args: Vec<program::Arg>,
) -> KernelSpec {
    let numbers = numbers.iter().copied().chain([("THREADS", threads)]);
    KernelSpec {
        entry,
        source: source.to_owned(),
        headers: HEADERS.to_vec(),
        defines: numbers.map(|(name, n)| (name.to_owned(), n.to_string())).collect(),
        grid: grid.map(|n| n as u32),
        block: [threads as u32, 1, 1],
        shared_bytes: 0,
        args,
    }
}

/// Choices of a call: tokens times experts of a token.
fn slots(call: &LowerCall<'_>, input: usize) -> usize {
    call.inputs[input].len()
}

/// Returns the axes of the choices [B, T, k] without the last, and the last.
fn choices(index: &ValueType) -> Result<(&[Dim], usize), String> {
    match (index.dtype, index.shape.split_last()) {
        (Element::I32, Some((Dim::Fixed(k), tokens))) if *k > 0 && !tokens.is_empty() => Ok((tokens, *k)),
        _ => Err("choices must be i32 […, k]".into()),
    }
}

/// Returns the expert of each of an example's choices; one expert has none.
fn example_choices(tokens: usize, k: usize, experts: usize) -> Vec<i32> {
    let own = |t: usize| (0..k).map(move |j| ((t * t * 5 + 3 * j + t) % experts.saturating_sub(1).max(1)) as i32);
    (0..tokens).flat_map(own).collect()
}

/// Order, places and offsets of such choices, as `group_rows` gives them.
fn example_groups(tokens: usize, k: usize, experts: usize) -> (Vec<i32>, Vec<i32>, Vec<i32>) {
    let choices = example_choices(tokens, k, experts);
    order::sorted(&choices, experts)
}

fn ints(shape: &[usize], values: Vec<i32>) -> ExampleInput {
    ExampleInput::Ints { shape: shape.to_vec(), values }
}

fn normal(shape: &[usize]) -> ExampleInput {
    ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 }
}
