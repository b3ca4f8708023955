//! A dense tensor in host memory, as bytes with a type and a shape.

use crate::convert::{convert, read_f64};
use crate::dtype::DType;
use crate::shape::Shape;
use crate::storage::Storage;

/// Row-major, little-endian, without padding. The value that crosses the engine's border:
/// weights read from files, batches, results handed to Python.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor {
    pub dtype: DType,
    pub shape: Shape,
    pub bytes: Vec<u8>,
}

impl HostTensor {
    /// Makes a tensor. Panics when `bytes` does not hold exactly `shape` elements of `dtype`.
    pub fn new(dtype: DType, shape: impl Into<Shape>, bytes: Vec<u8>) -> Self {
        let shape = shape.into();
        let expected = Storage::Plain(dtype).bytes(&shape);
        assert_eq!(bytes.len(), expected, "{dtype} tensor of shape {shape:?} needs {expected} bytes");
        HostTensor { dtype, shape, bytes }
    }

    pub fn zeros(dtype: DType, shape: impl Into<Shape>) -> Self {
        let shape = shape.into();
        let bytes = vec![0; Storage::Plain(dtype).bytes(&shape)];
        HostTensor { dtype, shape, bytes }
    }

    pub fn from_f32(shape: impl Into<Shape>, values: &[f32]) -> Self {
        let mut bytes = vec![0; 4 * values.len()];
        bytes.as_chunks_mut().0.iter_mut().zip(values).for_each(|(to, value)| *to = value.to_le_bytes());
        Self::new(DType::F32, shape, bytes)
    }

    pub fn from_i32(shape: impl Into<Shape>, values: &[i32]) -> Self {
        Self::new(DType::I32, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every element as f32; 64-bit values are rounded.
    pub fn to_f32(&self) -> Vec<f32> {
        let of = |bytes: &[u8]| bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        if self.dtype == DType::F32 { of(&self.bytes) } else { of(&self.cast(DType::F32).bytes) }
    }

    /// Every element as f64; exact but for large i64.
    pub fn to_f64(&self) -> Vec<f64> {
        self.bytes.chunks_exact(self.dtype.size()).map(|b| read_f64(self.dtype, b)).collect()
    }

    /// The tensor in a type; itself if it has that.
    pub fn into_type(self, dtype: DType) -> HostTensor {
        if self.dtype == dtype { self } else { self.cast(dtype) }
    }

    /// Converts element by element, rounding to nearest even; the same type is a plain copy.
    pub fn cast(&self, dtype: DType) -> HostTensor {
        let mut bytes = vec![0; self.len() * dtype.size()];
        convert(self.dtype, &self.bytes, dtype, &mut bytes);
        HostTensor { dtype, shape: self.shape.clone(), bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn casts_round_and_keep_shape() {
        let t = HostTensor::from_f32([2, 2], &[1.0, -2.5, 3.0e-3, 7.0]);
        let half = t.cast(DType::BF16);
        assert_eq!(half.shape, [2, 2]);
        assert_eq!(half.to_f32()[1], -2.5);
        assert!((half.to_f32()[2] - 3.0e-3).abs() < 3e-5);
    }

    #[test]
    #[should_panic(expected = "needs 16 bytes")]
    fn wrong_length_is_refused() {
        HostTensor::new(DType::F32, [4], vec![0; 15]);
    }
}
