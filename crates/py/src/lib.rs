//! `surogate._native`: the engine as a Python module.
//!
//! Invariant: this crate converts, it never decides. It turns Python text, dicts and numpy arrays
//! into the engine's types and back, and engine errors into exceptions.

mod operations;

use pyo3::prelude::*;

/// The module's contents; `surogate/_native.pyi` describes them to type checkers.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::operations::{infer, op_schemas};
}
