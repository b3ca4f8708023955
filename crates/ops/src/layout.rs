//! Joint iteration over several equally shaped tensors: axes that are contiguous in every tensor are merged, and the
//! innermost run is read in vectors if all of them allow it.

use program::TensorRef;

/// A common loop over tensors of one shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Walk {
    /// Extents after folding, outermost first; at least one.
    pub shape: Vec<usize>,
    /// For each tensor its strides over `shape`, in elements.
    pub strides: Vec<Vec<usize>>,
    /// Elements of one access: 1, 2, 4 or 8. Divides the innermost extent.
    pub width: usize,
}

impl Walk {
    /// Panics when the shapes differ: the shape rule admits nothing else.
    pub fn new(tensors: &[&TensorRef]) -> Walk {
        let shape = &tensors[0].shape;
        assert!(tensors.iter().all(|t| t.shape == *shape), "operands of one walk have one shape");
        let mut folded: Vec<usize> = Vec::new();
        let mut strides: Vec<Vec<usize>> = vec![Vec::new(); tensors.len()];
        for axis in (0..shape.len()).filter(|axis| shape[*axis] != 1) {
            let after = |i: usize| strides[i].last() == Some(&(tensors[i].strides[axis] * shape[axis]));
            if !folded.is_empty() && (0..tensors.len()).all(after) {
                *folded.last_mut().expect("checked to have an axis") *= shape[axis];
                for (list, tensor) in strides.iter_mut().zip(tensors) {
                    *list.last_mut().expect("as long as the shape") = tensor.strides[axis];
                }
            } else {
                folded.push(shape[axis]);
                strides.iter_mut().zip(tensors).for_each(|(list, t)| list.push(t.strides[axis]));
            }
        }
        if folded.is_empty() {
            folded.push(1);
            strides.iter_mut().for_each(|list| list.push(1));
        }
        let mut walk = Walk { shape: folded, strides, width: 1 };
        walk.width = [8, 4, 2].into_iter().find(|n| walk.allows(*n, tensors)).unwrap_or(1);
        walk
    }

    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    fn allows(&self, width: usize, tensors: &[&TensorRef]) -> bool {
        let runs = tensors.iter().zip(&self.strides);
        runs.into_iter().all(|(tensor, strides)| readable(tensor, self.shape[self.shape.len() - 1], strides, width))
    }
}

/// The widest access (1, 2, 4 or 8 elements) in which every row of the last axis can be walked, in
/// all of these tensors.
pub fn row_width(tensors: &[&TensorRef]) -> usize {
    let columns = |t: &TensorRef| t.shape.last().copied().unwrap_or(1);
    let allows = |width: usize| tensors.iter().all(|t| readable(t, columns(t), &t.strides, width));
    [8, 4, 2].into_iter().find(|width| allows(*width)).unwrap_or(1)
}

/// True if runs of `inner` elements divide into accesses of `width` that are all aligned.
fn readable(tensor: &TensorRef, inner: usize, strides: &[usize], width: usize) -> bool {
    let Some((last, outer)) = strides.split_last() else { return false };
    let access = (width * tensor.dtype.size()).min(16);
    let aligned = |bytes: usize| bytes.is_multiple_of(access);
    *last == 1
        && inner.is_multiple_of(width)
        && aligned(tensor.offset)
        && outer.iter().all(|s| aligned(s * tensor.dtype.size()))
}

#[cfg(test)]
mod tests {
    use program::ArenaId;
    use tensor::DType;

    use super::*;

    #[test]
    fn dense_tensors_become_one_run() {
        let x = TensorRef::dense(ArenaId(0), 512, DType::BF16, [2, 1, 3, 8]);
        let walk = Walk::new(&[&x, &x]);
        assert_eq!((walk.shape, walk.width), (vec![48], 8));
        let odd = TensorRef { offset: 520, ..x.clone() };
        assert_eq!(Walk::new(&[&x, &odd]).width, 4);
        let scalar = TensorRef::dense(ArenaId(0), 0, DType::F32, []);
        assert_eq!(Walk::new(&[&scalar]).shape, [1]);
    }

    #[test]
    fn slices_keep_their_row_stride() {
        let dense = TensorRef::dense(ArenaId(0), 0, DType::BF16, [2, 4, 16]);
        let slice = TensorRef { strides: vec![4 * 24, 24, 1], offset: 32, ..dense.clone() };
        let walk = Walk::new(&[&dense, &slice]);
        assert_eq!(walk, Walk { shape: vec![8, 16], strides: vec![vec![16, 1], vec![24, 1]], width: 8 });
        let heads = TensorRef { shape: vec![8, 2, 8], strides: vec![24, 8, 1], ..slice };
        let out = TensorRef::dense(ArenaId(0), 0, DType::F32, [8, 2, 8]);
        assert_eq!(Walk::new(&[&heads, &out]).shape, [8, 16]);
    }
}
