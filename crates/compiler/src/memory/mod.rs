//! The exact memory plan: where every parameter, every value and every scratch buffer lies.

mod arenas;
mod buffers;
mod intervals;
mod matrices;
mod parameters;
mod place;
mod shadow;

pub(crate) use arenas::{SCALAR_BYTES, SCALARS, SUM_SQUARES, arena, scalar_ref};
pub(crate) use buffers::{Buffers, Usage};
#[cfg(test)]
pub(crate) use intervals::{Interval, pack};
pub(crate) use matrices::Matrices;
pub(crate) use parameters::{ParameterPlan, Run, Squares, plan_parameters};
pub(crate) use place::{Fixed, Placement, dtype_of, is_view, place};
pub(crate) use shadow::shadow_adapters;

/// Tensors in flat arenas start on multiples of this many elements: one block of the 8-bit
/// optimizer, and the granule of sharding.
pub const ALIGNMENT_ELEMENTS: usize = 256;

/// Everything else starts on multiples of this many bytes.
pub const ALIGNMENT_BYTES: usize = 256;

/// `n` rounded up to a multiple of `unit`.
pub(crate) fn align(n: usize, unit: usize) -> usize {
    n.div_ceil(unit) * unit
}
