//! Normalisations over the last axis, and their gradients: rows of a table, as [`crate::rowwise`] has it.

mod layernorm;
mod rmsnorm;
mod unit;

use graph::{Dim, ValueType};
pub use layernorm::{LAYERNORM, LAYERNORM_BACKWARD, LAYERNORM_WEIGHT_GRADIENT};
pub use rmsnorm::{RMSNORM, RMSNORM_BACKWARD, RMSNORM_GRADIENTS, RMSNORM_WEIGHT_GRADIENT};
use tensor::Attrs;
pub use unit::{UNIT_NORM, UNIT_NORM_BACKWARD};

use crate::op::{Attribute, ExampleInput};

const ACCUMULATE: Attribute =
    Attribute { name: "accumulate", kind: "bool?", doc: "add to dw instead of overwriting it" };

/// The shape of per-row statistics.
fn row_shape(x: &ValueType) -> Vec<Dim> {
    x.shape[..x.shape.len().saturating_sub(1)].to_vec()
}

fn check_weight(x: &ValueType, weight: &ValueType) -> Result<(), String> {
    if weight.shape.len() != 1 || weight.last() != x.last() || x.last().is_none() {
        return Err(format!("the weight must be [{}]", x.shape.last().map(|d| d.to_string()).unwrap_or_default()));
    }
    Ok(())
}

/// Checks that gradients are shaped like x, and statistics like its rows.
fn check_gradient(x: &ValueType, dy: &ValueType, statistics: &[&ValueType]) -> Result<(), String> {
    if x.shape.is_empty() || dy.shape != x.shape || statistics.iter().any(|s| s.shape != row_shape(x)) {
        return Err("dy must be shaped like x, statistics like its rows".into());
    }
    Ok(())
}

fn check_eps(attrs: &Attrs) -> Result<(), String> {
    let eps = attrs.float("eps")?;
    if eps >= 0.0 && eps.is_finite() { Ok(()) } else { Err(format!("`eps` is {eps}, expected a number from 0")) }
}

fn normal(shape: &[usize]) -> ExampleInput {
    ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 }
}

/// Reciprocal standard deviations of rows.
fn scales(rows: usize) -> ExampleInput {
    ExampleInput::UniformF32 { shape: vec![rows], low: 0.5, high: 1.5 }
}
