//! The exact memory plan: where every parameter, every value and every scratch buffer lies.

mod buffers;
mod intervals;
mod matrices;
mod parameters;
mod place;
mod shadow;
mod trips;
mod visits;

pub(crate) use buffers::{Buffers, Usage};
pub(crate) use matrices::Matrices;
pub(crate) use parameters::{ParameterPlan, Run, Squares, plan_parameters};
pub(crate) use place::{Fixed, dtype_of, place};
pub(crate) use shadow::shadow_adapters;
pub(crate) use trips::waiting_bytes;
pub(crate) use visits::Visit;

/// Tensors in flat arenas start on multiples of this many elements: one block of the 8-bit
/// optimizer, and the granule of sharding.
pub const ALIGNMENT_ELEMENTS: usize = 256;

/// Everything else starts on multiples of this many bytes.
pub const ALIGNMENT_BYTES: usize = 256;

/// `n` rounded up to a multiple of `unit`.
pub(crate) fn align(n: usize, unit: usize) -> usize {
    n.div_ceil(unit) * unit
}
