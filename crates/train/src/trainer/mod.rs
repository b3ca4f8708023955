//! A model in training: its state, steps, evaluation, rollouts, checkpoints.

pub(crate) mod agreement;
pub(crate) mod best;
pub(crate) mod card;
pub(crate) mod checkpoint;
pub(crate) mod command;
pub(crate) mod data_check;
pub(crate) mod early_stopping;
pub(crate) mod export;
pub(crate) mod flushed;
pub(crate) mod in_flight;
pub(crate) mod lent;
pub(crate) mod live;
pub(crate) mod memory;
pub(crate) mod metrics;
pub(crate) mod precompute;
pub(crate) mod progress;
pub(crate) mod reference;
pub(crate) mod reference_table;
pub(crate) mod rollout;
pub(crate) mod saving;
pub(crate) mod scaling;
pub mod schedule;
pub(crate) mod startup;
pub(crate) mod state;
pub(crate) mod step;
pub(crate) mod teacher;
pub(crate) mod teacher_table;
pub(crate) mod trained;
mod utilization;

pub use state::Trainer;
pub(crate) use state::{is_run_id, run_name};
