//! numpy arrays to the engine's batches and tensors, and back.

use data::Batch;
use numpy::{PyArray1, PyArrayDyn, PyArrayMethods, PyReadonlyArrayDyn, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tensor::{DType, HostTensor};

/// int32 of any number of axes, row-major.
pub type Integers<'py> = PyReadonlyArrayDyn<'py, i32>;
/// float32 of any number of axes, row-major.
pub type Floats<'py> = PyReadonlyArrayDyn<'py, f32>;

/// (input_ids, labels, position_ids, weights, tokens of each row where padding follows) of one or more micro-batches.
pub type BatchArrays<'py> =
    (Integers<'py>, Integers<'py>, Option<Integers<'py>>, Option<Floats<'py>>, Option<Vec<usize>>);

fn elements<T: numpy::Element + Clone>(array: &PyReadonlyArrayDyn<'_, T>) -> PyResult<Vec<T>> {
    Ok(array.as_slice().map_err(|_| PyValueError::new_err("arrays must be row-major and dense"))?.to_vec())
}

/// One micro-batch for each index of the first axis; arrays of two axes are one micro-batch.
pub fn batches(arrays: &BatchArrays<'_>) -> PyResult<Vec<Batch>> {
    let (ids, labels, positions, weights, lengths) = arrays;
    let shape = ids.shape();
    let (count, rows, length) = match *shape {
        [rows, length] => (1, rows, length),
        [count, rows, length] => (count, rows, length),
        _ => return Err(PyValueError::new_err(format!("input_ids has {} axes, expected 2 or 3", shape.len()))),
    };
    let (ids, labels) = (elements(ids)?, elements(labels)?);
    let positions = positions.as_ref().map(elements).transpose()?;
    let weights = weights.as_ref().map(elements).transpose()?;
    let size = rows * length;
    let batch = |index: usize| {
        let part = index * size..(index + 1) * size;
        let ids = ids[part.clone()].to_vec();
        let positions = positions.as_ref().map(|p| p[part.clone()].to_vec());
        let weights = weights.as_ref().map(|w| &w[part.clone()]);
        let batch = Batch::from_labels(rows, length, ids, &labels[part], positions, weights)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(match lengths {
            None => batch,
            Some(lengths) => batch.padded_from(&lengths[index * rows..][..rows]),
        })
    };
    (0..count).map(batch).collect()
}

/// Sets what follows the tokens of each row to 0, in f32 [B, T, …].
pub fn clear_padding(tensor: &mut HostTensor, lengths: Option<&[usize]>) {
    let Some(lengths) = lengths else { return };
    let row = tensor.bytes.len() / tensor.shape[0];
    for (bytes, length) in tensor.bytes.chunks_mut(row).zip(lengths) {
        bytes[length * (row / tensor.shape[1])..].fill(0);
    }
}

/// A float32 array in the tensor's shape.
pub fn to_numpy<'py>(py: Python<'py>, tensor: &HostTensor) -> PyResult<Bound<'py, PyArrayDyn<f32>>> {
    assert_eq!(tensor.dtype, DType::F32, "results are handed to Python as f32");
    PyArray1::from_vec(py, tensor.to_f32()).reshape(tensor.shape.clone())
}
