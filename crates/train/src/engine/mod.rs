//! A compiled model on a device: weights in, batches in, tensors and measurements out.

pub mod calibrate;
pub(crate) mod compiled;
pub mod conformance;
pub mod device;
pub(crate) mod fill;
pub(crate) mod instruments;
pub mod machines;
pub(crate) mod probe;
pub(crate) mod programs;
pub(crate) mod time;
pub(crate) mod units;
pub(crate) mod weights;

pub(crate) use compiled::{Compiled, Engine, in_evaluation, in_place, variant_of};
