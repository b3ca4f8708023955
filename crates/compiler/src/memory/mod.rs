//! Addresses: the arenas, where every parameter lies in them, which values share a buffer, and how buffers are packed.
//! Knows nothing of time: when something is on the device is `residency/`'s.

mod arenas;
mod intervals;
mod matrices;
mod parameters;
mod pieces;
mod place;
mod shadow;
mod shards;
mod states;

pub(crate) use arenas::{SCALAR_BYTES, SCALARS, SUM_SQUARES, arena, scalar_ref};
pub(crate) use intervals::{Interval, pack, peak};
pub(crate) use matrices::Matrices;
pub(crate) use parameters::{ParameterPlan, Run, Squares, Start, plan_parameters, updated_alike};
pub(crate) use pieces::{Errors, part};
pub(crate) use place::{Copied, Fixed, Placement, dtype_of, is_view, place};
pub(crate) use shadow::{Shadow, shadow_adapters};
pub(crate) use shards::{Bucket, Group};
pub(crate) use states::{Histories, StatePlan, plan_states};

/// Tensors in flat arenas start on multiples of this many elements: one block of the 8-bit
/// optimizer, and the granule of sharding.
pub const ALIGNMENT_ELEMENTS: usize = 256;

/// Everything else starts on multiples of this many bytes.
pub const ALIGNMENT_BYTES: usize = 256;

/// `n` rounded up to a multiple of `unit`.
pub(crate) fn align(n: usize, unit: usize) -> usize {
    n.div_ceil(unit) * unit
}
