//! A model in its folder: configuration, weights in every form in which they are stored, adapters, tokenizer class.

pub(crate) mod adapted;
pub(crate) mod base_format;
pub(crate) mod compression;
pub(crate) mod folder;
pub(crate) mod hf_config;
pub(crate) mod json_files;
pub(crate) mod merged;
pub(crate) mod other_parts;
pub(crate) mod packed_weights;
pub(crate) mod peft;
pub(crate) mod quantized_checkpoint;
pub(crate) mod quantizer;
pub(crate) mod rope_scaling;
pub(crate) mod rounding;
pub mod source;
pub(crate) mod tokenizer_class;
pub(crate) mod vision;
pub(crate) mod weight_set;
pub(crate) mod weight_source;
