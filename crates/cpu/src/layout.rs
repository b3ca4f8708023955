//! Iteration over strided tensors: runs of adjacent elements, and copies between strided and dense memory with element
//! conversion.

use ops::{Loop, vectorised};
use program::TensorRef;
use rayon::prelude::*;

/// Number of elements that one task copies.
const TASK: usize = 1 << 14;

/// A strided tensor in row-major order as equally long runs of neighboring elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Runs {
    /// Number of elements of one run.
    pub length: usize,
    /// (extent, stride in elements) of the axes above the run, outermost first; merged where they
    /// are evenly spaced.
    outer: Vec<(usize, usize)>,
}

impl Runs {
    pub fn of(at: &TensorRef) -> Runs {
        let axes = at.shape.iter().copied().zip(at.strides.iter().copied()).filter(|(n, _)| *n != 1);
        let mut length = 1;
        let mut outer: Vec<(usize, usize)> = Vec::new();
        for (extent, stride) in axes.rev() {
            match outer.last_mut() {
                None if stride == length => length *= extent,
                Some((inner, step)) if stride == *inner * *step => *inner *= extent,
                _ => outer.push((extent, stride)),
            }
        }
        outer.reverse();
        Runs { length, outer }
    }

    /// Returns the start of a run, in elements from the first.
    fn start(&self, index: usize) -> usize {
        let mut rest = index;
        let mut offset = 0;
        for (extent, stride) in self.outer.iter().rev() {
            offset += rest % extent * stride;
            rest /= extent;
        }
        offset
    }

    /// Elements from run to run, when runs are evenly spaced and do not overlap.
    fn row_stride(&self) -> Option<usize> {
        match self.outer.as_slice() {
            [(_, stride)] if *stride >= self.length => Some(*stride),
            _ => None,
        }
    }
}

/// The copy of neighboring elements, to the end of the shorter side.
struct CopyRun;

impl<'a, S: Copy, D, F: Fn(S) -> D> Loop<(&'a [S], &'a mut [D], &'a F)> for CopyRun {
    type Output = ();

    #[inline(always)]
    fn run((source, target, convert): (&'a [S], &'a mut [D], &'a F)) {
        for (to, from) in target.iter_mut().zip(source) {
            *to = convert(*from);
        }
    }
}

/// Reads a strided tensor into dense memory.
pub fn gather<S, D>(source: &[S], runs: &Runs, dense: &mut [D], convert: impl Fn(S) -> D + Sync)
where
    S: Copy + Sync,
    D: Send,
{
    dense.par_chunks_mut(TASK).enumerate().for_each(|(task, dense)| {
        let mut position = task * TASK;
        let mut rest = dense;
        while !rest.is_empty() {
            let (run, inside) = (position / runs.length, position % runs.length);
            let (now, later) = rest.split_at_mut((runs.length - inside).min(rest.len()));
            let start = runs.start(run) + inside;
            vectorised(CopyRun, (&source[start..], &mut *now, &convert));
            position += now.len();
            rest = later;
        }
    });
}

/// Writes dense memory into a strided tensor.
pub fn scatter<S, D>(dense: &[S], runs: &Runs, target: &mut [D], convert: impl Fn(S) -> D + Sync)
where
    S: Copy + Sync,
    D: Send,
{
    let write = |target: &mut [D], dense: &[S]| vectorised(CopyRun, (dense, target, &convert));
    if dense.is_empty() {
    } else if runs.outer.is_empty() {
        target.par_chunks_mut(TASK).zip(dense.par_chunks(TASK)).for_each(|(t, d)| write(t, d));
    } else if let Some(stride) = runs.row_stride() {
        let rows = TASK.div_ceil(runs.length);
        let chunks = target.par_chunks_mut(stride * rows).zip(dense.par_chunks(runs.length * rows));
        chunks.for_each(|(target, dense)| {
            for (t, d) in target.chunks_mut(stride).zip(dense.chunks(runs.length)) {
                write(t, d);
            }
        });
    } else {
        for (run, d) in dense.chunks(runs.length).enumerate() {
            write(&mut target[runs.start(run)..], d);
        }
    }
}

#[cfg(test)]
mod tests {
    use program::ArenaId;
    use tensor::DType;

    use super::*;

    fn strided(shape: &[usize], strides: &[usize]) -> TensorRef {
        let dense = TensorRef::dense(ArenaId(0), 0, DType::F32, shape);
        TensorRef { strides: strides.to_vec(), ..dense }
    }

    #[test]
    fn axes_merge_where_they_can() {
        assert_eq!(Runs::of(&strided(&[2, 3, 4], &[12, 4, 1])), Runs { length: 24, outer: vec![] });
        assert_eq!(Runs::of(&strided(&[2, 3, 4], &[30, 10, 1])), Runs { length: 4, outer: vec![(6, 10)] });
        assert_eq!(Runs::of(&strided(&[2, 1, 4], &[7, 99, 1])), Runs { length: 4, outer: vec![(2, 7)] });
        assert_eq!(
            Runs::of(&strided(&[2, 3, 4], &[50, 10, 2])),
            Runs { length: 1, outer: vec![(2, 50), (3, 10), (4, 2)] }
        );
    }

    #[test]
    fn gather_and_scatter_are_inverse() {
        let cases = [
            strided(&[300, 7, 20], &[160, 20, 1]),
            strided(&[300, 7, 20], &[20, 6000, 1]),
            strided(&[7, 300], &[1, 7]),
            strided(&[40_000], &[1]),
        ];
        for at in cases {
            let runs = Runs::of(&at);
            let memory: Vec<f32> = (0..at.span() / 4).map(|i| i as f32).collect();
            let mut dense = vec![0f32; at.len()];
            gather(&memory, &runs, &mut dense, |x| x);
            let mut index = vec![0; at.shape.len()];
            for value in &dense {
                let offset: usize = index.iter().zip(&at.strides).map(|(i, s)| i * s).sum();
                assert_eq!(*value, offset as f32);
                for axis in (0..index.len()).rev() {
                    index[axis] += 1;
                    if index[axis] < at.shape[axis] {
                        break;
                    }
                    index[axis] = 0;
                }
            }
            let mut back = vec![-1f32; memory.len()];
            scatter(&dense, &runs, &mut back, |x| x);
            let written = back.iter().filter(|x| **x >= 0.0).count();
            assert_eq!(written, at.len());
            assert!(back.iter().zip(&memory).all(|(b, m)| *b < 0.0 || b == m));
        }
    }
}
