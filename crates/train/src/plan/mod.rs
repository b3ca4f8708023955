//! From options, model and machine to what is compiled, and the costs that follow.

pub(crate) mod advice;
pub(crate) mod compiler_options;
pub(crate) mod decisions;
pub(crate) mod exact_sampling;
pub(crate) mod formats;
pub(crate) mod memory;
pub(crate) mod milestones;
pub(crate) mod preflight;
pub mod preview;
pub(crate) mod quantize_aware;
pub(crate) mod quantized_model;
pub(crate) mod recommend;
pub(crate) mod reference;
pub(crate) mod resolved;
pub(crate) mod sampled_shapes;
pub(crate) mod split;
pub(crate) mod teacher;

pub(crate) use compiler_options::{Plan, require_machine};
