//! Training as a whole: options, data and a compiled model become steps, logs, checkpoints and
//! exports.
//!
//! Invariant: no single operation and no type of a device driver is known here; `device.rs` alone
//! chooses between the backends.

pub mod config;
pub mod conformance;
pub mod device;
mod engine;
pub mod error;
mod feed;
mod metrics;
mod model;
mod peft;
mod plan;
pub mod schedule;
pub mod source;
mod trainer;
mod weights;

pub use device::{Device, DeviceRequest};
pub use error::{Result, TrainError};
pub use metrics::{EvaluationMetrics, StepMetrics};
pub use model::{Forward, LossAndGradients, Model};
pub use source::ModelSource;
pub use trainer::Trainer;
