//! Datasets, templates, tokenizers, caches and files of weights, as the crate shows them.

mod arrow;
mod bombs;
mod cache;
mod checks;
mod compressed;
mod data_shards;
mod datasets;
mod families;
mod hostile;
mod loader;
mod parquet;
mod preference;
mod real_data;
mod safetensors;
mod shared;
mod spans;
mod spellings;
mod tokenizers;
