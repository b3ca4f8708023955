//! From files to batches: safetensors, datasets, tokenizers, chat templates, label spans, packing, loading.
//!
//! Invariant: this crate knows no graph, no device and no run config; it is told what to do by small structs of its own.

mod error;
mod mmap;
pub mod rows;
pub mod safetensors;
pub mod template;
pub mod tokenizer;

pub use error::{DataError, RowError, RowReason};
