//! From datasets to batches: formatting, encoding, packing, the order of rows.

pub(crate) mod conversation;
pub(crate) mod data_digest;
pub(crate) mod data_shard;
pub(crate) mod dataset_spec;
pub(crate) mod encoded;
pub(crate) mod feed;
pub(crate) mod few_steps;
mod first_batches;
mod image_shapes;
pub(crate) mod images;
mod logit_shapes;
pub(crate) mod mixture;
pub(crate) mod node_folder;
pub(crate) mod remote_shards;
pub(crate) mod row_length;
pub(crate) mod shared_prompts;
pub(crate) mod streamed;
