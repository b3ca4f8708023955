//! Arenas and the tensors that lie in them.

use std::fmt;

use tensor::{DType, Shape, Storage, contiguous_strides};

/// An index into [`crate::Program::arenas`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ArenaId(pub u32);

/// The contents of an arena: the classes of the memory plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ArenaKind {
    /// Base weights, frozen or trained.
    Weights,
    /// Low-rank adapter matrices (LoRA).
    Adapters,
    /// f32 gradients of everything that is trained.
    Gradients,
    /// Optimizer states of all parameters.
    Optimizer,
    /// The tensors of the batch.
    Batch,
    /// Step scalars: learning rate, norms, sums.
    Scalars,
    /// Tables computed once, for example rotary frequencies.
    Constants,
    /// Values between operations, and the scratch memory of single instructions.
    Activations,
    /// f32 copies of weights, which the optimizer updates in their place.
    Masters,
    /// Activations that wait in host memory for the backward pass.
    Waiting,
    /// Quantized weights, and the quantizers' state from earlier steps.
    States,
    /// Frozen quantized weights, where they are not among the weights: in host memory.
    Quants,
    /// Keys and values of earlier tokens, in pages.
    Cache,
    /// The residual that compression leaves of each rank's gradients: sent with those of the next step.
    Errors,
}

/// The lifetime of an arena's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lifetime {
    /// From one program over a layout to the next.
    Layout,
    /// From one entry to the next, but not from one program to the next, which may want more pages.
    Program,
    /// While the entry runs, not longer.
    Entry,
}

impl ArenaKind {
    /// In the order of the arenas of a compiled program ([`ArenaKind::id`]).
    pub const ALL: [ArenaKind; 14] = [
        ArenaKind::Weights,
        ArenaKind::Adapters,
        ArenaKind::Gradients,
        ArenaKind::Optimizer,
        ArenaKind::Batch,
        ArenaKind::Scalars,
        ArenaKind::Constants,
        ArenaKind::Activations,
        ArenaKind::Masters,
        ArenaKind::Waiting,
        ArenaKind::States,
        ArenaKind::Quants,
        ArenaKind::Cache,
        ArenaKind::Errors,
    ];

    /// Name, what it holds in words, and for how long.
    const fn row(self) -> (&'static str, &'static str, Lifetime) {
        match self {
            ArenaKind::Weights => ("weights", "base weights", Lifetime::Layout),
            ArenaKind::Adapters => ("adapters", "LoRA matrices", Lifetime::Layout),
            ArenaKind::Gradients => ("gradients", "f32 gradients of what is trained", Lifetime::Layout),
            ArenaKind::Optimizer => ("optimizer", "optimizer states", Lifetime::Layout),
            ArenaKind::Batch => ("batch", "batch tensors", Lifetime::Entry),
            ArenaKind::Scalars => ("scalars", "step scalars, sums of the gradients' squares", Lifetime::Layout),
            ArenaKind::Constants => ("constants", "tables computed while compiling", Lifetime::Entry),
            ArenaKind::Activations => ("activations", "values between operations, scratch included", Lifetime::Entry),
            ArenaKind::Masters => ("master", "f32 copies of weights", Lifetime::Layout),
            ArenaKind::Waiting => ("waiting", "activations that wait for the backward pass", Lifetime::Entry),
            ArenaKind::States => ("codes", "codes and norms of weights, magnitudes of earlier steps", Lifetime::Layout),
            ArenaKind::Quants => ("quants", "frozen weights in codes", Lifetime::Layout),
            ArenaKind::Cache => ("cache", "what is kept of earlier tokens", Lifetime::Program),
            ArenaKind::Errors => ("errors", "gradients that compression has not sent yet", Lifetime::Layout),
        }
    }

    /// Returns the number of the arena in a compiled program. Arenas from [`ArenaKind::Masters`] on exist only if they,
    /// or a later one, hold something.
    pub const fn id(self) -> ArenaId {
        ArenaId(self as u32)
    }

    /// Returns the kind of an arena of a compiled program, by its number.
    pub fn at(id: ArenaId) -> ArenaKind {
        ArenaKind::ALL[id.0 as usize]
    }

    pub const fn name(self) -> &'static str {
        self.row().0
    }

    /// The contents as words for people.
    pub const fn words(self) -> &'static str {
        self.row().1
    }

    /// True if every rank has contents of its own; as a whole they are concatenated in the order of the ranks.
    pub const fn is_of_rank(self) -> bool {
        matches!(self, ArenaKind::Errors)
    }

    /// True if contents live from one program over a layout to the next. All others but pages belong to the entry that
    /// runs.
    pub const fn is_persistent(self) -> bool {
        matches!(self.row().2, Lifetime::Layout)
    }
}

/// The memory in which an arena is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemorySpace {
    /// Memory of the device itself.
    Device,
    /// Host memory that the device can access. Write-combined memory is read by the host at a fraction of its speed.
    Host { write_combined: bool },
}

/// One allocation, made once; each rank of a cluster makes its own.
#[derive(Clone, Debug, PartialEq)]
pub struct Arena {
    pub kind: ArenaKind,
    /// Bytes of one rank's arena.
    pub bytes: usize,
    pub place: MemorySpace,
    /// The shards over the ranks, in ascending order; empty where every rank has all of it. Tensors of the layout lie
    /// in the whole, those of instructions in the part of their rank.
    pub shards: Vec<Shard>,
}

/// A range of an arena that is divided evenly over the ranks. All in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Start of the range in the whole.
    pub start: usize,
    /// Bytes of each rank's piece.
    pub piece: usize,
    /// Start of the piece in the arena of every rank.
    pub at: usize,
}

/// A range of one rank's arena that belongs to a tensor of the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub rank: usize,
    /// Byte offset in the rank's arena.
    pub at: usize,
    /// Byte offset in the tensor.
    pub from: usize,
    pub bytes: usize,
}

impl Arena {
    /// An arena in the device's memory.
    pub fn on_device(kind: ArenaKind, bytes: usize) -> Arena {
        Arena { kind, bytes, place: MemorySpace::Device, shards: Vec::new() }
    }

    /// Returns the pieces of a dense tensor of an arena that is sharded over `ranks`.
    pub fn pieces(&self, tensor: &TensorRef, ranks: usize) -> Vec<Piece> {
        let (begin, end) = (tensor.offset, tensor.offset + tensor.bytes());
        let mut pieces = Vec::new();
        for shard in &self.shards {
            for rank in 0..ranks {
                let first = shard.start + rank * shard.piece;
                let (from, to) = (first.max(begin), (first + shard.piece).min(end));
                if from < to {
                    pieces.push(Piece { rank, at: shard.at + from - first, from: from - begin, bytes: to - from });
                }
            }
        }
        let found: usize = pieces.iter().map(|piece| piece.bytes).sum();
        assert_eq!(found, tensor.bytes(), "{tensor} lies in the shards of its arena");
        pieces
    }

    /// True where the memory is the host's.
    pub fn is_on_host(&self) -> bool {
        self.place != MemorySpace::Device
    }
}

/// A strided tensor inside an arena.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorRef {
    pub arena: ArenaId,
    /// Bytes from the start of the arena.
    pub offset: usize,
    pub dtype: DType,
    pub shape: Shape,
    /// Strides in elements, one per axis.
    pub strides: Vec<usize>,
    /// Bytes by which the tensor moves from each shard to the next: the program of all ranks is one. 0 where it lies at
    /// the same place everywhere.
    pub per_rank: usize,
}

impl TensorRef {
    pub fn dense(arena: ArenaId, offset: usize, dtype: DType, shape: impl Into<Shape>) -> Self {
        let shape = shape.into();
        let strides = contiguous_strides(&shape);
        TensorRef { arena, offset, dtype, shape, strides, per_rank: 0 }
    }

    /// Returns the tensor as the rank with this shard finds it.
    pub fn of_share(&self, share: usize) -> TensorRef {
        TensorRef { offset: self.offset + share * self.per_rank, per_rank: 0, ..self.clone() }
    }

    /// Number of elements of the shape.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the elements, gaps not counted.
    pub fn bytes(&self) -> usize {
        Storage::Plain(self.dtype).bytes(&self.shape)
    }

    /// Bytes from the first element to the end of the last, gaps counted.
    pub fn span(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        let last: usize = self.shape.iter().zip(&self.strides).map(|(n, s)| (n - 1) * s).sum();
        (last + 1) * self.dtype.size()
    }

    /// True if the spans of two tensors share a byte; gaps count.
    pub fn overlaps(&self, other: &TensorRef) -> bool {
        let apart = self.offset + self.span() <= other.offset || other.offset + other.span() <= self.offset;
        self.arena == other.arena && !apart && !self.is_empty() && !other.is_empty()
    }

    /// True if the elements lie without gaps, in row-major order.
    pub fn is_dense(&self) -> bool {
        let mut expected = 1;
        for (n, stride) in self.shape.iter().zip(&self.strides).rev() {
            if *n != 1 && *stride != expected {
                return false;
            }
            expected *= n;
        }
        true
    }

    /// The same elements under another shape, without moving them; `None` when the gaps forbid it.
    pub fn reshape(&self, shape: &[usize]) -> Option<TensorRef> {
        assert_eq!(self.len(), shape.iter().product::<usize>(), "a reshape keeps the number of elements");
        // Axes of extent 1 carry no information; the others are folded while they are evenly spaced.
        let mut folded: Vec<(usize, usize)> = Vec::new();
        for (n, stride) in self.shape.iter().zip(&self.strides).filter(|(n, _)| **n != 1) {
            match folded.last_mut() {
                Some((count, last)) if *last == n * stride => {
                    *count *= n;
                    *last = *stride;
                }
                _ => folded.push((*n, *stride)),
            }
        }
        let mut strides = vec![1; shape.len()];
        let mut axis = shape.len();
        for (mut count, mut stride) in folded.into_iter().rev() {
            while count > 1 {
                axis = axis.checked_sub(1)?;
                if count % shape[axis] != 0 {
                    return None;
                }
                strides[axis] = stride;
                stride *= shape[axis];
                count /= shape[axis];
            }
        }
        // An axis of extent 1 gets the stride that it would have with more.
        for axis in (0..shape.len()).rev().filter(|axis| shape[*axis] == 1) {
            strides[axis] = if axis + 1 < shape.len() { strides[axis + 1] * shape[axis + 1] } else { 1 };
        }
        Some(TensorRef { shape: shape.to_vec(), strides, ..self.clone() })
    }

    /// True if both are the same elements in the same order; strides of axes of extent 1 are ignored.
    pub fn is_same_place(&self, other: &TensorRef) -> bool {
        let strides = |of: &TensorRef| -> Vec<usize> {
            of.shape.iter().zip(&of.strides).filter(|(n, _)| **n != 1).map(|(_, stride)| *stride).collect()
        };
        (self.arena, self.offset, self.per_rank) == (other.arena, other.offset, other.per_rank)
            && (self.dtype, &self.shape) == (other.dtype, &other.shape)
            && strides(self) == strides(other)
    }

    /// Returns the tensor as a matrix (rows, columns, elements from row to row): all axes but the last folded into
    /// rows. `None` when the rows are not evenly spaced or the last axis has gaps.
    pub fn as_matrix(&self) -> Option<(usize, usize, usize)> {
        let (columns, inner) = match (self.shape.last(), self.strides.last()) {
            (Some(n), Some(s)) => (*n, *s),
            _ => (1, 1),
        };
        if inner != 1 && columns != 1 {
            return None;
        }
        let mut rows = 1;
        let mut row_stride = None;
        let leading = self.shape.len().saturating_sub(1);
        for axis in (0..leading).rev() {
            let (n, stride) = (self.shape[axis], self.strides[axis]);
            if n == 1 {
                continue;
            }
            match row_stride {
                None => row_stride = Some(stride),
                Some(first) if stride == first * rows => {}
                Some(_) => return None,
            }
            rows *= n;
        }
        Some((rows, columns, row_stride.unwrap_or(columns)))
    }
}

/// The kind of memory that a line of the memory plan counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryClass {
    Arena(ArenaKind),
    /// The driver's context and the modules that it loads.
    Context,
    /// Workspaces of libraries, besides the arenas.
    Workspace,
    /// Scratch memory of the CPU's kernels, besides the arenas.
    Scratch,
    /// Another model of the run, which stays as it is.
    Reference,
}

impl MemoryClass {
    /// Returns true for memory that each program of a process has of its own; contexts and workspaces are there once.
    pub const fn is_per_program(self) -> bool {
        matches!(self, MemoryClass::Arena(_) | MemoryClass::Scratch)
    }
}

impl fmt::Display for MemoryClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            MemoryClass::Arena(kind) => kind.name(),
            MemoryClass::Context => "context",
            MemoryClass::Workspace => "workspace",
            MemoryClass::Scratch => "scratch",
            MemoryClass::Reference => "reference",
        })
    }
}

/// One line of the memory plan: a class of memory, or by name a use or a phase of the activation arena.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryLine<C = MemoryClass> {
    pub class: C,
    pub bytes: usize,
    /// The origin of the number, in words.
    pub note: &'static str,
}

impl<C: PartialEq> MemoryLine<C> {
    /// Returns one line for each class, the largest of its lines, in the order in which the classes first occur.
    pub fn greatest(lines: impl IntoIterator<Item = MemoryLine<C>>) -> Vec<MemoryLine<C>> {
        let mut result: Vec<MemoryLine<C>> = Vec::new();
        for line in lines {
            match result.iter_mut().find(|known| known.class == line.class) {
                Some(known) => known.bytes = known.bytes.max(line.bytes),
                None => result.push(line),
            }
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arenas_are_numbered_in_the_order_of_the_list() {
        for (index, kind) in ArenaKind::ALL.into_iter().enumerate() {
            assert_eq!(kind.id(), ArenaId(index as u32), "{kind:?}");
        }
    }

    #[test]
    fn slices_of_a_merged_matrix_are_matrices_with_a_row_stride() {
        let whole = TensorRef::dense(ArenaId(0), 0, DType::BF16, [2, 8, 96]);
        assert!(whole.is_dense());
        let slice = TensorRef { offset: 64, shape: vec![2, 8, 32], ..whole.clone() };
        assert!(!slice.is_dense());
        assert_eq!(slice.as_matrix(), Some((16, 32, 96)));
        assert_eq!(slice.span(), (15 * 96 + 32) * 2);
        let heads = TensorRef { shape: vec![2, 8, 4, 8], strides: vec![768, 96, 8, 1], ..slice };
        assert_eq!(heads.as_matrix(), None);
    }

    #[test]
    fn reshapes_follow_the_strides() {
        let slice = TensorRef {
            arena: ArenaId(0),
            offset: 64,
            dtype: DType::F32,
            shape: vec![2, 8, 32],
            strides: vec![768, 96, 1],
            per_rank: 0,
        };
        let heads = slice.reshape(&[2, 8, 4, 8]).unwrap();
        assert_eq!(heads.strides, [768, 96, 8, 1]);
        assert_eq!(heads.reshape(&[2, 8, 32]).unwrap(), slice);
        assert_eq!(slice.reshape(&[16, 32]).unwrap().strides, [96, 1]);
        assert_eq!(slice.reshape(&[2, 256]), None);
        // One row looks like one of several.
        let one = TensorRef { shape: vec![1, 8, 32], ..slice };
        let heads = one.reshape(&[1, 8, 4, 8]).unwrap();
        assert_eq!(heads.strides, [768, 96, 8, 1]);
        assert_eq!(heads.reshape(&[1, 8, 32]).unwrap(), one);
        let other = TensorRef { strides: vec![1, 96, 1], ..one.clone() };
        assert!(other != one && other.is_same_place(&one) && !heads.is_same_place(&one));
    }
}
