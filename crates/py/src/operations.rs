//! The operations and the inputs as the DSL sees them: what there is, and which types a call gives.
//!
//! Types and attributes cross the border as JSON text, in the form that the IR writes them.

use graph::ValueType;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde_json::{Value, json};
use tensor::Attrs;

fn parse<T: for<'de> serde::Deserialize<'de>>(what: &str, text: &str) -> PyResult<T> {
    serde_json::from_str(text).map_err(|e| PyValueError::new_err(format!("{what}: {e}")))
}

/// Output types of a call: `infer("add", '[{"dtype": "float", "shape": ["B", 4]}, …]', "{}")`.
///
/// Raises ValueError when the operation does not exist or the types do not fit; the message names
/// the operation and the shapes.
#[pyfunction]
pub fn infer(op: &str, inputs: &str, attrs: &str) -> PyResult<String> {
    let inputs: Vec<ValueType> = parse("input types", inputs)?;
    let attrs: Attrs = parse("attributes", attrs)?;
    let types = ops::find(op).and_then(|op| ops::infer(op.id(), &inputs, &attrs)).map_err(PyValueError::new_err)?;
    Ok(serde_json::to_string(&types).expect("types are always representable as JSON"))
}

/// Every operation as a JSON list of `{name, class, doc, attributes: [{name, kind, doc}]}`.
#[pyfunction]
pub fn op_schemas() -> String {
    let schemas: Vec<Value> = ops::all()
        .iter()
        .map(|op| {
            let attributes: Vec<Value> =
                op.attributes().iter().map(|a| json!({"name": a.name, "kind": a.kind, "doc": a.doc})).collect();
            let class = format!("{:?}", op.class()).to_lowercase();
            json!({"name": op.name(), "class": class, "doc": op.doc(), "attributes": attributes})
        })
        .collect();
    serde_json::to_string(&schemas).expect("schemas are always representable as JSON")
}

/// Returns the inputs that a batch can have, as a JSON list of `{name, dtype, shape, doc}`.
#[pyfunction]
pub fn batch_inputs() -> String {
    let row = |of: &data::inputs::Input| {
        let axis = |axis: &&str| axis.parse::<usize>().map_or_else(|_| json!(axis), |n| json!(n));
        let shape = if of.axes.is_empty() { json!([1]) } else { of.axes.iter().map(axis).collect() };
        json!({"name": of.name, "dtype": of.dtype().name(), "shape": shape, "doc": of.doc})
    };
    Value::from_iter(data::inputs::INPUTS.iter().map(row)).to_string()
}
