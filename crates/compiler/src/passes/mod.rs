//! Graph rewrites, one file each. The order and its reasons stand in `lib.rs`.

pub mod adapters;
pub mod common_subexpressions;
pub mod dead_code;
pub mod dropout;
pub mod dropout_linear;
pub mod expand;
pub mod fold_constants;
pub mod fuse;
pub mod identities;
pub mod low_rank;
pub mod merge_linears;
pub mod results;
