//! The arenas: memory allocated once and lent as typed slices. Knows spans and element types, not what is computed with
//! them.
#![allow(unsafe_code, reason = "typed views of raw memory; every view is checked against its arena")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::marker::PhantomData;
use std::ptr::NonNull;

use program::{Arena, BackendError, TensorRef};

/// Alignment of every arena in bytes: a cache line.
const ALIGNMENT: usize = 64;

/// The allocation of one arena.
struct Block {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a block owns its memory; access goes through the borrow of `Memory`.
unsafe impl Send for Block {}
// SAFETY: shared access only reads.
unsafe impl Sync for Block {}

impl Block {
    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes.max(1), ALIGNMENT).expect("an arena is smaller than the address space")
    }

    /// Returns `None` if the system refuses. The process's allocator may reserve memory without asking it.
    fn allocate(bytes: usize) -> Option<Block> {
        // SAFETY: the layout has a size of at least one byte.
        let start = NonNull::new(unsafe { System.alloc_zeroed(Self::layout(bytes)) })?;
        Some(Block { start, bytes })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `allocate` with the same layout.
        unsafe { System.dealloc(self.start.as_ptr(), Self::layout(self.bytes)) }
    }
}

mod sealed {
    pub trait Plain: Copy + Send + Sync + 'static {}
    impl Plain for u8 {}
    impl Plain for u16 {}
    impl Plain for u32 {}
    impl Plain for u64 {}
    impl Plain for i32 {}
    impl Plain for f32 {}
    impl Plain for f64 {}
}

/// A type for which every bit pattern is a value.
pub trait Plain: sealed::Plain {}

impl<T: sealed::Plain> Plain for T {}

/// The memory of one tensor from its first to its last element, gaps included.
pub struct Span<'a> {
    start: *const u8,
    bytes: usize,
    lifetime: PhantomData<&'a [u8]>,
}

// SAFETY: a span only reads, like `&'a [u8]`.
unsafe impl Send for Span<'_> {}
// SAFETY: a span only reads, like `&'a [u8]`.
unsafe impl Sync for Span<'_> {}

/// The memory of one tensor to write to, gaps included.
pub struct SpanMut<'a> {
    start: *mut u8,
    bytes: usize,
    lifetime: PhantomData<&'a mut [u8]>,
}

fn count<T>(start: *const u8, bytes: usize) -> usize {
    assert!(bytes.is_multiple_of(size_of::<T>()), "{bytes} bytes are no whole number of elements");
    assert!(start.cast::<T>().is_aligned(), "a tensor's offset is a multiple of its element size");
    bytes / size_of::<T>()
}

impl<'a> Span<'a> {
    pub fn slice<T: Plain>(&self) -> &'a [T] {
        let len = count::<T>(self.start, self.bytes);
        // SAFETY: in bounds of its arena (`Memory::place`), aligned (`count`), every bit pattern is
        // a `T`, and `Memory::lend` gave out no overlapping mutable span for 'a.
        unsafe { std::slice::from_raw_parts(self.start.cast(), len) }
    }
}

impl<'a> SpanMut<'a> {
    pub fn slice<T: Plain>(self) -> &'a mut [T] {
        let len = count::<T>(self.start, self.bytes);
        // SAFETY: as for `Span::slice`; the span is consumed, so there is one such slice.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), len) }
    }
}

/// All arenas of a program.
pub struct Memory {
    blocks: Vec<Block>,
}

impl Memory {
    /// Zeroed memory for every arena.
    pub fn allocate(arenas: &[Arena]) -> Result<Memory, BackendError> {
        let mut blocks = Vec::with_capacity(arenas.len());
        for arena in arenas {
            let block = Block::allocate(arena.bytes).ok_or_else(|| BackendError::OutOfMemory {
                what: format!("the {} arena", arena.kind.name()),
                needed: arena.bytes,
                available: 0,
            })?;
            blocks.push(block);
        }
        Ok(Memory { blocks })
    }

    /// Arenas of other sizes: those that live from entry to entry stay as they are, the others are reallocated
    /// where they are too small.
    pub fn adopt(&mut self, arenas: &[Arena]) -> Result<(), BackendError> {
        let fits = |(index, arena): (usize, &Arena)| self.blocks.get(index).is_some_and(|b| arena.bytes <= b.bytes);
        let grown: Vec<usize> =
            arenas.iter().enumerate().filter(|known| !fits(*known)).map(|(index, _)| index).collect();
        for index in grown {
            let arena = &arenas[index];
            assert!(index >= self.blocks.len() || !arena.kind.is_persistent(), "one layout has one size");
            let mut block = Memory::allocate(std::slice::from_ref(arena))?.blocks;
            match self.blocks.get_mut(index) {
                Some(known) => std::mem::swap(known, &mut block[0]),
                None => self.blocks.append(&mut block),
            }
        }
        Ok(())
    }

    /// Bytes of each arena as they were allocated.
    pub fn sizes(&self) -> impl Iterator<Item = usize> {
        self.blocks.iter().map(|block| block.bytes)
    }

    /// Returns address and bytes of a tensor. Panics when it leaves its arena: the compiler plans no such tensor.
    fn place(&self, at: &TensorRef) -> (*mut u8, usize) {
        let block = self.blocks.get(at.arena.0 as usize).unwrap_or_else(|| panic!("{at} lies in no arena"));
        let end = at.offset.checked_add(at.span()).expect("offsets are smaller than the address space");
        assert!(end <= block.bytes, "{at} ends at byte {end} of an arena of {}", block.bytes);
        // SAFETY: offset + span is within the allocation.
        (unsafe { block.start.as_ptr().add(at.offset) }, at.span())
    }

    /// Checks that a tensor is inside its arena and is aligned. Panics otherwise.
    pub fn check(&self, at: &TensorRef) {
        let (start, _) = self.place(at);
        assert!((start as usize).is_multiple_of(at.dtype.size()), "{at} is not aligned to its elements");
    }

    pub fn read<T: Plain>(&self, at: &TensorRef) -> &[T] {
        let (start, bytes) = self.place(at);
        Span { start, bytes, lifetime: PhantomData }.slice()
    }

    pub fn write<T: Plain>(&mut self, at: &TensorRef) -> &mut [T] {
        let (start, bytes) = self.place(at);
        SpanMut { start, bytes, lifetime: PhantomData }.slice()
    }

    /// Lends several tensors at once. Panics when a written one overlaps another: callers plan
    /// copies for those when a program is loaded.
    pub fn lend(&mut self, reads: &[&TensorRef], writes: &[&TensorRef]) -> (Vec<Span<'_>>, Vec<SpanMut<'_>>) {
        for (index, written) in writes.iter().enumerate() {
            for other in reads.iter().chain(&writes[..index]) {
                assert!(!overlap(written, other), "{written} and {other} are used at once and overlap");
            }
        }
        let spans = reads.iter().map(|at| {
            let (start, bytes) = self.place(at);
            Span { start, bytes, lifetime: PhantomData }
        });
        let spans = spans.collect();
        let spans_mut = writes.iter().map(|at| {
            let (start, bytes) = self.place(at);
            SpanMut { start, bytes, lifetime: PhantomData }
        });
        (spans, spans_mut.collect())
    }
}

/// True if the spans of two tensors share a byte; gaps count.
pub fn overlap(a: &TensorRef, b: &TensorRef) -> bool {
    a.overlaps(b)
}

#[cfg(test)]
mod tests {
    use program::{ArenaId, ArenaKind};
    use tensor::DType;

    use super::*;

    fn memory(bytes: usize) -> Memory {
        Memory::allocate(&[Arena::on_device(ArenaKind::Activations, bytes)]).unwrap()
    }

    fn dense(offset: usize, len: usize) -> TensorRef {
        TensorRef::dense(ArenaId(0), offset, DType::F32, [len])
    }

    #[test]
    fn memory_is_zeroed_aligned_and_lent() {
        let mut memory = memory(128);
        assert!(memory.read::<f32>(&dense(0, 32)).iter().all(|x| *x == 0.0));
        assert!((memory.read::<u8>(&dense(0, 1)).as_ptr() as usize).is_multiple_of(ALIGNMENT));
        let (reads, mut writes) = memory.lend(&[&dense(0, 4), &dense(8, 4)], &[&dense(64, 4)]);
        let written = writes.pop().unwrap().slice::<f32>();
        written.copy_from_slice(reads[0].slice());
        written[3] = 7.0;
        assert_eq!(memory.read::<f32>(&dense(64, 4)), [0.0, 0.0, 0.0, 7.0]);
    }

    #[test]
    #[should_panic(expected = "overlap")]
    fn overlapping_loans_are_refused() {
        memory(128).lend(&[&dense(0, 8)], &[&dense(28, 8)]);
    }

    #[test]
    #[should_panic(expected = "ends at byte 132")]
    fn tensors_outside_are_refused() {
        memory(128).read::<f32>(&dense(100, 8));
    }
}
