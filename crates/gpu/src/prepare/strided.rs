//! Copies and zeroing: with the copy engine for dense memory, with a kernel where there are gaps or type changes.
#![allow(unsafe_code, reason = "copies between addresses that the program describes")]

use super::Preparation;
use super::launch::{Arguments, BoundLaunch};
use crate::driver::{LaunchShape, Stream};
use crate::error::{Error, Result};
use crate::kernels;
use program::TensorRef;
use tensor::DType;

const THREADS: u32 = 256;
/// The axes of a layout, and the elements of one thread of a dense copy: as in `strided.cu`.
const AXES: usize = 6;
const RUN: usize = 8;

/// Bytes of the widest access, and its type.
const WORD: usize = 16;
const WORD_TYPE: &str = "uint4";

/// A copy or a fill that can be queued.
pub(crate) enum Strided {
    Copy { to: u64, from: u64, bytes: usize },
    Zero { at: u64, bytes: usize },
    Kernel(BoundLaunch),
}

pub(super) fn copy(p: &mut Preparation, from: &TensorRef, to: &TensorRef) -> Result<Strided> {
    assert_eq!(from.len(), to.len(), "a copy keeps the number of elements: {from} to {to}");
    let (source, target) = (p.memory.address(from), p.memory.address(to));
    if from.dtype == to.dtype && from.is_dense() && to.is_dense() {
        return Ok(Strided::Copy { to: target, from: source, bytes: from.bytes() });
    }
    let (source_type, target_type) = types(from.dtype, to.dtype)?;
    if from.is_dense() && to.is_dense() {
        let function = p.engine.own_function(kernels::strided(source_type, target_type), "dense_copy")?;
        let arguments = Arguments::new().word(target).word(source).word(to.len() as u64);
        return Ok(Strided::Kernel(BoundLaunch::new(function, "dense_copy", shape(to.len().div_ceil(RUN)), arguments)));
    }
    let (from, to) = one_shape(from, to);
    let words =
        if [source, target].iter().all(|at| at.is_multiple_of(WORD as u64)) { in_words(&from, &to) } else { None };
    if let Some((from, to)) = words {
        let function = p.engine.own_function(kernels::strided(WORD_TYPE, WORD_TYPE), "strided_copy")?;
        let arguments = Arguments::new().word(target).word(source).structure(&layout(&from, &to));
        return Ok(Strided::Kernel(BoundLaunch::new(function, "strided_copy", shape(to.len()), arguments)));
    }
    let function = p.engine.own_function(kernels::strided(source_type, target_type), "strided_copy")?;
    let arguments = Arguments::new().word(target).word(source).structure(&layout(&from, &to));
    Ok(Strided::Kernel(BoundLaunch::new(function, "strided_copy", shape(to.len()), arguments)))
}

/// Returns both sides under the shape of one of them.
fn one_shape(from: &TensorRef, to: &TensorRef) -> (TensorRef, TensorRef) {
    if let Some(from) = from.reshape(&to.shape) {
        return (from, to.clone());
    }
    let to = to.reshape(&from.shape);
    (from.clone(), to.unwrap_or_else(|| panic!("one side of a copy can be seen in the shape of the other: {from}")))
}

/// Returns both sides of a copy without conversion as accesses of [`WORD`] bytes, if every contiguous run is a multiple
/// of that.
fn in_words(from: &TensorRef, to: &TensorRef) -> Option<(TensorRef, TensorRef)> {
    let size = from.dtype.size();
    let fits = |of: &TensorRef| {
        let (last, outer) = of.strides.split_last()?;
        let aligned = |elements: &usize| (elements * size).is_multiple_of(WORD);
        (*last == 1 && aligned(of.shape.last()?) && outer.iter().all(aligned)).then_some(())
    };
    if from.dtype != to.dtype || fits(from).and(fits(to)).is_none() {
        return None;
    }
    let count = WORD / size;
    let wide = |of: &TensorRef| {
        let mut of = of.clone();
        let last = of.shape.len() - 1;
        of.shape[last] /= count;
        of.strides[..last].iter_mut().for_each(|stride| *stride /= count);
        of
    };
    Some((wide(from), wide(to)))
}

pub(super) fn zero(p: &mut Preparation, at: &TensorRef) -> Result<Strided> {
    let address = p.memory.address(at);
    if at.is_dense() {
        return Ok(Strided::Zero { at: address, bytes: at.bytes() });
    }
    let (_, storage) = types(at.dtype, at.dtype)?;
    let function = p.engine.own_function(kernels::strided(storage, storage), "strided_zero")?;
    let arguments = Arguments::new().word(address).structure(&layout(at, at));
    Ok(Strided::Kernel(BoundLaunch::new(function, "strided_zero", shape(at.len()), arguments)))
}

fn shape(threads: usize) -> LaunchShape {
    let blocks = u32::try_from(threads.div_ceil(THREADS as usize)).expect("fewer than 2^40 threads in a launch");
    LaunchShape { grid: [blocks, 1, 1], block: [THREADS, 1, 1], shared_bytes: 0, early: false }
}

/// The `Layout` struct of `strided.cu`: count, extents, strides of both sides, innermost axis last.
fn layout(from: &TensorRef, to: &TensorRef) -> [u64; 1 + 3 * AXES] {
    let axes = from.shape.len();
    assert!(axes <= AXES, "tensors have at most {AXES} axes, not {axes}: {from}");
    let mut words = [0; 1 + 3 * AXES];
    words[0] = from.len() as u64;
    words[1..=AXES].fill(1);
    for axis in 0..axes {
        let at = 1 + AXES - axes + axis;
        words[at] = from.shape[axis] as u64;
        words[at + AXES] = from.strides[axis] as u64;
        words[at + 2 * AXES] = to.strides[axis] as u64;
    }
    words
}

/// The C++ storage types of a copy. Equal types move as they are, floats convert, the rest is rejected.
fn types(from: DType, to: DType) -> Result<(&'static str, &'static str)> {
    let name = |dtype| match dtype {
        DType::F64 => "double",
        DType::F32 => "float",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        DType::I64 => "long long",
        DType::I32 => "int",
        DType::U8 | DType::E4M3 | DType::E5M2 => "unsigned char",
    };
    let converts = |dtype| matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
    if from == to || (converts(from) && converts(to)) {
        return Ok((name(from), name(to)));
    }
    Err(Error::Unsupported {
        what: format!("a copy from {from} to {to}"),
        reason: "only f32, bf16 and f16 convert into one another".into(),
        context: String::new(),
    })
}

impl Strided {
    pub fn queue(&mut self, stream: &Stream) -> Result<()> {
        // SAFETY: both ranges are in the session's arenas; the plan keeps a copy's sides apart.
        unsafe {
            match self {
                Strided::Copy { to, from, bytes } => stream.copy(*to, *from, *bytes),
                Strided::Zero { at, bytes } => stream.fill(*at, 1, 0, *bytes),
                Strided::Kernel(call) => call.queue(stream),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use program::ArenaId;

    #[test]
    fn axes_are_aligned_to_the_innermost() {
        let to = TensorRef::dense(ArenaId(0), 0, DType::F32, [2, 3]);
        let from = TensorRef { strides: vec![96, 1], ..to.clone() };
        let words = layout(&from, &to);
        assert_eq!(words[0], 6);
        assert_eq!(words[1..7], [1, 1, 1, 1, 2, 3]);
        assert_eq!(words[7..13], [0, 0, 0, 0, 96, 1]);
        assert_eq!(words[13..19], [0, 0, 0, 0, 3, 1]);
    }

    #[test]
    fn aligned_runs_are_copied_in_words() {
        let to = TensorRef::dense(ArenaId(0), 0, DType::BF16, [2, 5, 64]);
        let from = TensorRef { strides: vec![64, 128, 1], ..to.clone() };
        let (wide, dense) = in_words(&from, &to).unwrap();
        assert_eq!((wide.shape, wide.strides), (vec![2, 5, 8], vec![8, 16, 1]));
        assert_eq!((dense.shape, dense.strides), (vec![2, 5, 8], vec![40, 8, 1]));
        // Rows that begin within a word, runs that end in one, gaps within runs, other types.
        let odd = |strides: Vec<usize>| TensorRef { strides, ..to.clone() };
        assert_eq!(in_words(&odd(vec![64, 132, 1]), &to), None);
        assert_eq!(in_words(&odd(vec![640, 128, 2]), &to), None);
        let narrow = TensorRef::dense(ArenaId(0), 0, DType::BF16, [2, 5, 12]);
        assert_eq!(in_words(&narrow, &narrow), None);
        assert_eq!(in_words(&from, &TensorRef::dense(ArenaId(0), 0, DType::F32, [2, 5, 64])), None);
    }

    #[test]
    fn conversions_between_integers_and_floats_are_refused() {
        assert_eq!(types(DType::BF16, DType::F32).unwrap(), ("bf16", "float"));
        assert_eq!(types(DType::I32, DType::I32).unwrap(), ("int", "int"));
        let refused = types(DType::I32, DType::F32).unwrap_err().to_string();
        assert!(refused.starts_with("a copy from i32 to f32"), "{refused}");
    }
}
