//! `surogate._native`: the engine as a Python module.
//!
//! Invariant: this crate converts, it never decides. It turns Python text, dicts and numpy arrays
//! into the engine's types and back, and engine errors into exceptions.

mod arrays;
mod compress;
mod config;
mod console;
mod data;
mod doctor;
mod errors;
mod generate;
mod images;
mod merge;
mod model;
mod operations;
mod prune;
mod run;
mod score;
mod signals;
mod trainer;

use pyo3::prelude::*;

/// A plan is many small objects: with the system's allocator that of Qwen3-30B-A3B took 14.4 s instead of 9.1.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The module's contents; `surogate/_native.pyi` describes them to type checkers.
#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::compress::Compression;
    #[pymodule_export]
    use crate::config::{
        Config, choose_files, config_help, config_schema, expand_path, foreign_option, matching_names, read_yaml,
    };
    #[pymodule_export]
    use crate::data::{Tokenizer, check_data, show_data};
    #[pymodule_export]
    use crate::doctor::{calibrate, check_operations, examine_machine};
    #[pymodule_export]
    use crate::errors::{
        ConfigError, DataError, DivergedError, MemoryPlanError, NodeLostError, RunError, SurogateError,
    };
    #[pymodule_export]
    use crate::generate::{Generation, generation_help, prompt_fields};
    #[pymodule_export]
    use crate::images::{ImageProcessor, image_uris};
    #[pymodule_export]
    use crate::merge::{
        adapter_base, carried_tensors, default_encoding, end_tokens, extend, has_own_head, leads_out, merge, published,
        tokens_of_adapter, write_gguf,
    };
    #[pymodule_export]
    use crate::model::Model;
    #[pymodule_export]
    use crate::operations::{batch_inputs, infer, op_schemas};
    #[pymodule_export]
    use crate::prune::prune;
    #[pymodule_export]
    use crate::run::{
        abandon, cache_folder, checkpoint_fault, leave, machine_names, preview, run, say, signalled, unsaid, visible,
        visible_text, without_userinfo,
    };
    #[pymodule_export]
    use crate::score::Scoring;
    #[pymodule_export]
    use crate::trainer::Trainer;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
