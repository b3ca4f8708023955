//! Rewrites of a graph up to `join_forms`, one file each (`adapters` has four). The order and its reasons are in `entry_graph` in `entry.rs`; what
//! carries out the memory plan is in `plan/`.

mod adapter_slots;
pub mod adapters;
pub mod batch_invariant;
pub mod branches;
pub mod cache;
pub mod common_subexpressions;
pub mod dead_code;
pub mod dropout;
pub mod dropout_linear;
pub mod embedding_noise;
pub mod expand;
pub mod expert_bias;
pub mod fold_constants;
pub mod fuse;
pub mod identities;
pub mod join_forms;
pub mod loss_scale;
pub mod low_rank;
mod magnitude;
pub mod merge_linears;
pub mod packed_linears;
pub mod produced_codes;
pub mod results;
pub mod sequence;
mod stacked_adapters;
pub mod stacked_parameters;
pub mod stage;
pub mod trained_logits;
pub mod without_adapters;
pub mod without_images;
