//! The Copy and Zero instructions: between layouts and types, without arithmetic.

use program::TensorRef;
use tensor::DType;

use crate::arena::{Memory, Plain, overlap};
use crate::layout::{Runs, gather, scatter};
use crate::scratch::Scratch;
use crate::storage::{Kind, round};

/// A copy that is ready to run.
pub struct StridedCopy {
    from: TensorRef,
    to: TensorRef,
    /// True if both are dense, of one type, and do not overlap.
    plain: bool,
}

impl StridedCopy {
    pub fn new(from: &TensorRef, to: &TensorRef) -> Result<StridedCopy, String> {
        if from.len() != to.len() {
            return Err(format!("{from} and {to} have different numbers of elements"));
        }
        let real = |at: &TensorRef| Kind::of(at.dtype) == Some(Kind::Real);
        if from.dtype != to.dtype && !(real(from) && real(to)) {
            return Err(format!("a copy from {} to {} is not run on the CPU", from.dtype, to.dtype));
        }
        let plain = from.dtype == to.dtype && from.is_dense() && to.is_dense() && !overlap(from, to);
        Ok(StridedCopy { from: from.clone(), to: to.clone(), plain })
    }

    /// Makes room where the elements change their type or place.
    pub fn reserve(&self, scratch: &mut Scratch) {
        if !self.plain && self.from.dtype != self.to.dtype {
            scratch.reserve(0, &self.from);
        }
    }

    pub fn run(&self, memory: &mut Memory, scratch: &mut Scratch) {
        if self.plain {
            let (reads, mut writes) = memory.lend(&[&self.from], &[&self.to]);
            writes.pop().expect("one result").slice::<u8>().copy_from_slice(reads[0].slice());
        } else if self.from.dtype == self.to.dtype {
            match self.from.dtype {
                DType::U8 | DType::E4M3 | DType::E5M2 => self.relayout::<u8>(memory),
                DType::BF16 | DType::F16 => self.relayout::<u16>(memory),
                DType::F32 | DType::I32 => self.relayout::<u32>(memory),
                DType::F64 | DType::I64 => self.relayout::<u64>(memory),
            }
        } else {
            scratch.buffers[0].load(memory, &self.from);
            round(memory, &self.to, scratch.buffers[0].real(self.from.len()));
        }
    }

    /// Moves elements unchanged, through dense memory: the two may overlap.
    fn relayout<T: Plain + Default>(&self, memory: &mut Memory) {
        let mut dense = vec![T::default(); self.from.len()];
        gather(memory.read::<T>(&self.from), &Runs::of(&self.from), &mut dense, |x| x);
        scatter(&dense, &Runs::of(&self.to), memory.write::<T>(&self.to), |x| x);
    }
}

/// Sets every element to zero; gaps keep their contents.
pub fn zero(memory: &mut Memory, at: &TensorRef) {
    fn fill<T: Plain + Default>(memory: &mut Memory, at: &TensorRef) {
        let zeros = vec![T::default(); at.len()];
        scatter(&zeros, &Runs::of(at), memory.write::<T>(at), |x| x);
    }
    if at.is_dense() {
        memory.write::<u8>(at).fill(0);
        return;
    }
    match at.dtype.size() {
        1 => fill::<u8>(memory, at),
        2 => fill::<u16>(memory, at),
        4 => fill::<u32>(memory, at),
        8 => fill::<u64>(memory, at),
        other => panic!("no element has {other} bytes"),
    }
}
