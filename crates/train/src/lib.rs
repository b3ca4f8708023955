//! Training as a whole: options, data and a compiled model become steps, logs, checkpoints and
//! exports.
//!
//! Invariant: no single operation and no type of a device driver is known here; `device.rs` alone
//! chooses between the backends.

pub mod config;
pub mod device;
mod engine;
pub mod error;
pub mod schedule;
pub mod source;
mod weights;

pub use device::{Device, DeviceRequest};
pub use error::{Result, TrainError};
pub use source::ModelSource;
