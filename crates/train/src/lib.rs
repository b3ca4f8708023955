//! Training as a whole: options, data and a compiled model become steps, logs, checkpoints and
//! exports.
//!
//! Folders are floors: a file imports from its own folder and from lower ones, in the order of
//! `xtask/src/tidy/circles.rs`.
//!
//! Invariant: no single operation and no type of a device driver is known here; `engine/device.rs` alone
//! chooses between the backends.

mod artifacts;
pub mod config;
mod engine;
pub mod error;
mod files;
mod inference;
mod input;
mod model;
mod nodes;
mod plan;
mod run;
mod trainer;
mod words;

pub use artifacts::compress::{
    Calibration, Compared, CompressRequest, Compressed, IncludedPart, Measuring, Method, Planned, RangeObserver,
    compress, planned,
};
pub use artifacts::extend::{Extend, Extended, extend, tokens_of_adapter};
pub use artifacts::gguf::{GgufDone, carried_tensors, default_encoding, write_gguf};
pub use artifacts::merge::{Merged, ModelNames, merge};
pub use artifacts::prune::{Latency, Over, PruneRequest, Pruned, Sizes, Summing, prune};
pub use config::starts_on_ray;
pub use data::in_making::remove_all as abandon;
pub use engine::device::{Device, DeviceRequest};
pub use engine::{calibrate, conformance, device, machines};
pub use error::{Result, TrainError};
pub use inference::generate::{
    EndTokens, Finish, Generation, GenerationOptions, Generator, Messages, Piece, Prompt, PromptEncoder, Request,
    section as generation_section,
};
pub use inference::model::{Forward, LossAndGradients, Model};
pub use inference::score::{BATCH_TOKENS, Score, ScoreRequest, Scoring};
pub use input::encoded::Encoded;
pub use input::feed::{CheckedData, choose_files, matching_names};
pub use input::images::are_in_data as images_are_in_data;
pub use model::folder::{leads_out, published};
pub use model::peft::base_of as adapter_base;
pub use model::source;
pub use model::source::{ModelSource, has_own_head, image_reader, model_config};
pub use net::LOST;
pub use plan::preview;
pub use plan::preview::{Across, Preview};
pub use plan::recommend::recommended;
pub use run::journal::Journal;
pub use run::rendezvous::come_together;
pub use run::{Observer, Outcome, run};
pub use trainer::Trainer;
pub use trainer::checkpoint::fault as checkpoint_fault;
pub use trainer::data_check::check_data;
pub use trainer::flushed::Flushed;
pub use trainer::metrics::{EvaluationMetrics, StepMetrics};
pub use trainer::schedule;
