//! Training as a whole: options, data and a compiled model become steps, logs, checkpoints and
//! exports.
//!
//! Invariant: no single operation and no type of a device driver is known here; `device.rs` alone
//! chooses between the backends.

mod adapted;
mod advice;
mod best;
pub mod calibrate;
mod card;
mod checkpoint;
pub mod config;
pub mod conformance;
mod conversation;
mod decisions;
pub mod device;
mod digest;
mod disk;
mod encoded;
mod ending;
mod engine;
pub mod error;
mod export;
mod extend;
mod feed;
mod flops;
mod follow;
mod formats;
mod generate;
mod gguf;
mod hf_config;
mod instruments;
mod journal;
mod log;
pub mod machines;
mod memory;
mod merge;
mod metrics;
mod milestones;
mod model;
mod model_folder;
mod nodes;
mod opening;
mod peft;
mod plan;
mod portions;
mod preflight;
mod prequantised;
pub mod preview;
mod probe;
mod quantise;
mod quantised_base;
mod recheck;
mod recommend;
mod record;
mod resume;
mod rope_scaling;
mod row_length;
mod run;
mod run_folder;
mod saving;
mod scaling;
pub mod schedule;
mod score;
pub mod source;
mod staged;
mod startup;
mod step;
mod time;
mod trainer;
mod units;
mod weights;
mod words;
mod written;

pub use device::{Device, DeviceRequest};
pub use encoded::Encoded;
pub use error::{Result, TrainError};
pub use extend::{Extend, Extended, extend};
pub use feed::{CheckedData, check_data, choose_files, matching_names};
pub use generate::{
    Finish, Generation, GenerationOptions, Generator, Piece, Prompt, PromptEncoder, section as generation_section,
};
pub use gguf::{GgufDone, write_gguf};
pub use journal::Journal;
pub use merge::{Merged, ModelNames, merge};
pub use metrics::{EvaluationMetrics, StepMetrics};
pub use model::{Forward, LossAndGradients, Model};
pub use model_folder::leads_out;
pub use net::LOST;
pub use nodes::{come_together, starts_on_ray};
pub use peft::base_of as adapter_base;
pub use preview::{Across, Preview};
pub use recommend::recommended;
pub use run::{Observer, Outcome, run};
pub use score::{BATCH_TOKENS, Score, ScoreRequest, Scoring};
pub use source::{ModelSource, model_config};
pub use trainer::Trainer;
