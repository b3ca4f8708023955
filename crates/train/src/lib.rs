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
mod compress;
pub mod config;
pub mod conformance;
mod conversation;
mod data_shard;
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
mod few_steps;
mod flops;
mod follow;
mod formats;
mod generate;
mod gguf;
mod hf_config;
mod images;
mod instruments;
mod journal;
mod live;
mod log;
pub mod machines;
mod memory;
mod merge;
mod metrics;
mod milestones;
mod mixture;
mod model;
mod model_folder;
mod nodes;
mod opening;
mod origins;
mod other_parts;
mod packed_weights;
mod peft;
mod plan;
mod preflight;
mod prequantised;
pub mod preview;
mod probe;
mod prune;
mod quantise;
mod quantised_base;
mod quantize_aware;
mod recheck;
mod recommend;
mod record;
mod reference;
mod reference_table;
mod resume;
mod rollout;
mod rope_scaling;
mod rounding;
mod row_length;
mod run;
mod run_folder;
mod saving;
mod scaling;
pub mod schedule;
mod score;
mod shared_prompts;
pub mod source;
mod split;
mod staged;
mod startup;
mod step;
mod teacher;
mod time;
mod tokenizer_class;
mod trainer;
mod units;
mod vision;
mod weight_source;
mod weights;
mod words;
mod written;

pub use compress::{
    Calibration, Compared, CompressRequest, Compressed, IncludedPart, Measuring, Method, Planned, RangeObserver,
    compress, planned,
};
pub use device::{Device, DeviceRequest};
pub use encoded::Encoded;
pub use error::{Result, TrainError};
pub use extend::{Extend, Extended, extend, tokens_of_adapter};
pub use feed::{CheckedData, check_data, choose_files, matching_names};
pub use generate::{
    EndTokens, Finish, Generation, GenerationOptions, Generator, Messages, Piece, Prompt, PromptEncoder, Request,
    section as generation_section,
};
pub use gguf::{GgufDone, default_encoding, write_gguf};
pub use images::are_in_data as images_are_in_data;
pub use journal::Journal;
pub use merge::{Merged, ModelNames, merge};
pub use metrics::{EvaluationMetrics, StepMetrics};
pub use model::{Forward, LossAndGradients, Model};
pub use model_folder::{leads_out, published};
pub use net::LOST;
pub use nodes::{come_together, starts_on_ray};
pub use peft::base_of as adapter_base;
pub use preview::{Across, Preview};
pub use prune::{Latency, Over, PruneRequest, Pruned, Sizes, Summing, prune};
pub use recommend::recommended;
pub use run::{Observer, Outcome, run};
pub use scaling::Flushed;
pub use score::{BATCH_TOKENS, Score, ScoreRequest, Scoring};
pub use source::{ModelSource, has_own_head, image_reader, model_config};
pub use trainer::Trainer;
