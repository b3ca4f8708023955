//! Shapes and strides, both counted in elements.

/// The extents of a tensor, outermost axis first.
pub type Shape = Vec<usize>;

/// Row-major strides of a dense tensor.
pub fn contiguous_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        strides[axis] = strides[axis + 1] * shape[axis + 1];
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_are_row_major() {
        assert_eq!(contiguous_strides(&[2, 3, 4]), [12, 4, 1]);
        assert!(contiguous_strides(&[]).is_empty());
    }
}
