//! The instructions: few kinds, many operations. Everything that a backend needs is in the instruction; nothing is
//! looked up while the program runs.

use std::fmt;
use std::sync::Arc;

use tensor::Attrs;

use crate::arithmetic::Arithmetic;
use crate::memory::TensorRef;

/// An index into [`crate::Program::kernels`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelId(pub u32);

/// Device code as text: one translation unit with one entry point. Equal kernels are stored once.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// The `extern "C"` function to launch.
    pub entry: String,
    pub source: String,
    /// (name, text) of the headers that the source includes.
    pub headers: Vec<(String, String)>,
    /// Preprocessor definitions: shapes and types are constants to the compiler.
    pub defines: Vec<(String, String)>,
}

/// One argument of a kernel, in the order of its signature.
#[derive(Clone, Debug, PartialEq)]
pub enum Arg {
    /// Address of an input, by index.
    Input(usize),
    /// Address of an output, by index.
    Output(usize),
    /// Address inside the instruction's workspace, in bytes from its start.
    Scratch(usize),
    /// A tensor map of an input of four axes for the copy engine (TMA) of Hopper and later (64-byte aligned, 128
    /// bytes): it moves boxes of these extents, zeros where they leave the tensor, in the 128-byte swizzle. If
    /// `matrices` is given, the input is seen as that number of matrices [1, matrices, rows, columns]; they must be
    /// evenly spaced.
    Boxes {
        input: usize,
        extents: [u32; 4],
        matrices: Option<usize>,
    },
    /// A tensor map of an output, into which the engine writes: nothing where boxes leave the tensor.
    OutputBoxes {
        output: usize,
        extents: [u32; 4],
        matrices: Option<usize>,
    },
    I32(i32),
    U32(u32),
    I64(i64),
    /// A number that is larger by `step` on each next rank.
    PerRank {
        first: i64,
        step: i64,
    },
    /// A number that is larger by `step` for each next part of a sequence.
    PerPart {
        step: i64,
    },
    F32(f32),
}

/// One launch of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelCall {
    pub kernel: KernelId,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    pub args: Vec<Arg>,
}

/// One operation: by its name and attributes for the CPU, as kernel calls for a GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    pub op: String,
    pub attrs: Attrs,
    pub inputs: Vec<TensorRef>,
    /// An output keeps its present contents until it is overwritten: updates and accumulating
    /// operations read it.
    pub outputs: Vec<TensorRef>,
    pub scratch: Option<TensorRef>,
    /// The kind of arithmetic that the operation declares: only estimates read it.
    pub arithmetic: Arithmetic,
    /// In order, on one stream. Empty in a program compiled for the CPU.
    pub calls: Vec<KernelCall>,
}

/// D = scale·op(A)·op(B) (+ bias) (+ low-rank addends) (+ D), accumulated in f32 and rounded once to D's type — or once
/// more where a backend adds the low-rank part in a second pass.
///
/// Operands are matrices by [`TensorRef::as_matrix`]. op(X) is X or its transpose; D is [m, n]. In a batch the first
/// axis of A, B and D counts products, and there are neither bias nor addends.
///
/// Operands of eight bits are quantized with a scale for each tensor, a power of two: the product is that of the
/// dequantized values. With scales of blocks, operands are bytes of two four-bit elements each, both along the sum:
/// A [m, k/2], B [n, k/2], `transpose_b`.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemm {
    /// Number of products of these extents: 1, or the first axis of A, B and D.
    pub batch: usize,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: TensorRef,
    pub b: TensorRef,
    pub d: TensorRef,
    pub transpose_a: bool,
    pub transpose_b: bool,
    pub scale: f32,
    /// The scales of A and B, where these are quantized.
    pub scales: Option<Scales>,
    /// [n], added to every row.
    pub bias: Option<TensorRef>,
    /// Adds to D instead of overwriting it.
    pub accumulate: bool,
    /// The bits of a row of D follow from its row of A, whatever M is.
    pub batch_invariant: bool,
    pub low_rank: Vec<LowRank>,
}

/// The scales of quantized operands of a product.
#[derive(Clone, Debug, PartialEq)]
pub struct Scales {
    /// f32 [1] each: the factors of the elements of A and of B.
    pub of: [TensorRef; 2],
    /// u8, where A and B have four bits: an E4M3 scale for every 16 elements along the sum, as
    /// [`tensor::packed::operand`] places them.
    pub blocks: Option<[TensorRef; 2]>,
    /// The sum may keep only the bits of the device's fastest one, instead of f32's at least every 128 terms.
    pub fast_sum: bool,
}

impl Scales {
    /// Returns the scales of factors that are numbers or have eight bits.
    pub fn of_tensors(of: [TensorRef; 2], fast_sum: bool) -> Scales {
        Scales { of, blocks: None, fast_sum }
    }

    fn tensors(&self) -> impl Iterator<Item = &TensorRef> {
        self.of.iter().chain(self.blocks.iter().flatten())
    }

    fn tensors_mut(&mut self) -> impl Iterator<Item = &mut TensorRef> {
        self.of.iter_mut().chain(self.blocks.iter_mut().flatten())
    }
}

impl Gemm {
    /// True if the factors have four bits and scales of blocks.
    pub fn has_blocks(&self) -> bool {
        self.scales.as_ref().is_some_and(|scales| scales.blocks.is_some())
    }
}

/// D[:, columns] += scale · T·op(B), with T [m, r].
#[derive(Clone, Debug, PartialEq)]
pub struct LowRank {
    pub t: TensorRef,
    pub b: TensorRef,
    /// B is stored [columns, r] and used transposed; otherwise it is [r, columns].
    pub transpose_b: bool,
    pub scale: f32,
    /// First column of D and how many.
    pub columns: (usize, usize),
}

/// The division of the rows of a batch into documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Documents {
    /// Every row is one document.
    Rows,
    /// Rows hold documents; where they start is data of the batch.
    Packed,
}

/// Causal softmax attention over rows of one document each, as a library does it.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionForward {
    /// [B, T, heads, head_dim], strided.
    pub q: TensorRef,
    /// [B, T, kv_heads, head_dim], strided.
    pub k: TensorRef,
    pub v: TensorRef,
    /// [B, T, heads, head_dim], the output.
    pub o: TensorRef,
    /// f32 [B, heads, T]: log of the sum of the exponentials of a row's scores.
    pub lse: TensorRef,
    /// i32 [B, T], the first token of each token's document: zeros but for padding after a document.
    pub document_start: TensorRef,
    pub scale: f32,
    /// Planned for the backend's library; the backend checks that it suffices.
    pub scratch: Option<TensorRef>,
}

/// A queue of instructions. Each works in order; only events order instructions of different queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StreamId {
    /// Everything but transfers. An entry begins and ends on it.
    Compute,
    /// Transfers from the device to the host.
    ToHost,
    /// Transfers from the host to the device.
    ToDevice,
    /// Collectives between the ranks of a run.
    Exchange,
}

impl StreamId {
    pub const ALL: [StreamId; 4] = [StreamId::Compute, StreamId::ToHost, StreamId::ToDevice, StreamId::Exchange];

    pub const fn name(self) -> &'static str {
        match self {
            StreamId::Compute => "compute",
            StreamId::ToHost => "to host",
            StreamId::ToDevice => "to device",
            StreamId::Exchange => "exchange",
        }
    }
}

/// A mark in a stream, by a number that is unique within an entry. Recorded once, before it is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId(pub u32);

/// The movement of bytes between ranks. Nothing is added during the transfer: sums are launches, in the order of the
/// ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Movement {
    /// All-gather: every rank gets the bytes of all, concatenated in the order of the ranks.
    AllGather,
    /// All-to-all: every rank's bytes are one piece for each rank: each gets from all the piece with its number.
    AllToAll,
    /// All-to-all without the own piece, which stays where it is: its place in the result is not written.
    AllToAllOthers,
}

impl Movement {
    pub const fn name(self) -> &'static str {
        match self {
            Movement::AllGather => "gather",
            Movement::AllToAll => "exchange",
            Movement::AllToAllOthers => "exchange of others",
        }
    }
}

/// The process groups of a collective: all ranks fall into groups of this shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProcessGroup {
    /// Number of ranks in a group.
    pub size: usize,
    /// Distance from each rank of a group to its next one: 1 where they are consecutive.
    pub stride: usize,
}

impl ProcessGroup {
    /// Returns the groups of `size` consecutive ranks.
    pub const fn row(size: usize) -> ProcessGroup {
        ProcessGroup { size, stride: 1 }
    }

    /// Returns the number of a rank in its group.
    pub const fn number(self, rank: usize) -> usize {
        rank / self.stride % self.size
    }

    /// Returns the rank with a number in the group of a rank.
    pub const fn member(self, rank: usize, number: usize) -> usize {
        let extent = self.size * self.stride;
        rank / extent * extent + rank % self.stride + number * self.stride
    }

    /// True if `ranks` is a multiple of the size that groups of this shape cover.
    pub fn divides(self, ranks: usize) -> bool {
        ranks.is_multiple_of(self.size * self.stride)
    }
}

impl fmt::Display for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.stride {
            1 => self.size.fmt(f),
            stride => write!(f, "{}, {stride} apart", self.size),
        }
    }
}

/// A collective of all ranks: it begins when all have come to it, and ends when every piece has arrived. Dense tensors
/// of one type.
#[derive(Clone, Debug, PartialEq)]
pub struct Collective {
    pub movement: Movement,
    pub group: ProcessGroup,
    /// The own part of an all-gather, else the pieces for all ranks.
    pub from: TensorRef,
    /// The pieces of all ranks. An all-gather may leave the own part where it is.
    pub to: TensorRef,
}

impl Collective {
    /// Returns the all-gather over groups of `to.bytes() / from.bytes()` consecutive ranks.
    pub fn gather(from: TensorRef, to: TensorRef) -> Collective {
        let group = ProcessGroup::row(to.bytes() / from.bytes().max(1));
        Collective { movement: Movement::AllGather, group, from, to }
    }
}

/// One instruction of an entry.
#[derive(Clone, Debug, PartialEq)]
pub enum Instruction {
    Launch(Launch),
    Gemm(Gemm),
    AttentionForward(AttentionForward),
    /// Element by element, between layouts or types.
    Copy {
        from: TensorRef,
        to: TensorRef,
    },
    /// Sets every byte to zero.
    Zero {
        at: TensorRef,
    },
    /// Bytes between device and host memory, concurrent with the computation: dense tensors of one type. `stream` is
    /// that of the direction.
    Transfer {
        from: TensorRef,
        to: TensorRef,
        stream: StreamId,
    },
    /// A collective, on the stream of its own, concurrent with the computation.
    Collective(Collective),
    /// Marks the present end of a stream.
    Record {
        event: EventId,
        stream: StreamId,
    },
    /// Makes the instructions that follow on `stream` wait until the stream of the event has come to its mark.
    Wait {
        event: EventId,
        stream: StreamId,
    },
}

/// Operations and bytes of one instruction: inputs and outputs counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    pub flops: f64,
    pub bytes: f64,
}

/// A layer of the model: its number in its stack, from 0.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layer {
    /// Name of the stack; empty where the model has one only.
    pub stack: Arc<str>,
    pub index: usize,
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.stack {
            "" => self.index.fmt(f),
            stack => f.pad(&format!("{stack}.{}", self.index)),
        }
    }
}

/// The part of a step that an instruction belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Phase {
    #[default]
    Forward,
    /// Values of the forward pass, computed once more for the backward pass.
    Recompute,
    Backward,
    Update,
}

impl Phase {
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Forward => "forward",
            Phase::Recompute => "recompute",
            Phase::Backward => "backward",
            Phase::Update => "update",
        }
    }
}

/// The origin of an instruction, which error messages and profiles show.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Provenance {
    /// The operation, for a fused one all of them.
    pub op: String,
    pub phase: Phase,
    pub layer: Option<Layer>,
    /// `file:line` in the model's source.
    pub at: Option<String>,
}

/// An instruction with its origin and cost.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub instruction: Instruction,
    pub provenance: Provenance,
    pub cost: Cost,
}

impl Instruction {
    /// Every tensor that is read, outputs that keep their contents not included.
    pub fn reads(&self) -> Vec<&TensorRef> {
        match self {
            Instruction::Launch(l) => l.inputs.iter().collect(),
            Instruction::Gemm(g) => {
                let low_rank = g.low_rank.iter().flat_map(|r| [&r.t, &r.b]);
                [&g.a, &g.b]
                    .into_iter()
                    .chain(g.scales.iter().flat_map(Scales::tensors))
                    .chain(&g.bias)
                    .chain(low_rank)
                    .collect()
            }
            Instruction::AttentionForward(a) => vec![&a.q, &a.k, &a.v, &a.document_start],
            Instruction::Copy { from, .. }
            | Instruction::Transfer { from, .. }
            | Instruction::Collective(Collective { from, .. }) => vec![from],
            Instruction::Zero { .. } | Instruction::Record { .. } | Instruction::Wait { .. } => vec![],
        }
    }

    /// Every tensor that is written.
    pub fn writes(&self) -> Vec<&TensorRef> {
        match self {
            Instruction::Launch(l) => l.outputs.iter().collect(),
            Instruction::Gemm(g) => vec![&g.d],
            Instruction::AttentionForward(a) => vec![&a.o, &a.lse],
            Instruction::Copy { to, .. }
            | Instruction::Transfer { to, .. }
            | Instruction::Collective(Collective { to, .. }) => vec![to],
            Instruction::Zero { at } => vec![at],
            Instruction::Record { .. } | Instruction::Wait { .. } => vec![],
        }
    }

    /// The workspace of its kernels or of a library: written and read while it runs.
    pub fn scratch(&self) -> Option<&TensorRef> {
        match self {
            Instruction::Launch(launch) => launch.scratch.as_ref(),
            Instruction::AttentionForward(attention) => attention.scratch.as_ref(),
            Instruction::Gemm(_)
            | Instruction::Copy { .. }
            | Instruction::Zero { .. }
            | Instruction::Transfer { .. }
            | Instruction::Collective(_)
            | Instruction::Record { .. }
            | Instruction::Wait { .. } => None,
        }
    }

    /// Every tensor that the instruction names, to be placed elsewhere.
    pub fn tensors_mut(&mut self) -> Vec<&mut TensorRef> {
        match self {
            Instruction::Launch(Launch { inputs, outputs, scratch, op: _, attrs: _, arithmetic: _, calls: _ }) => {
                inputs.iter_mut().chain(outputs).chain(scratch).collect()
            }
            Instruction::Gemm(gemm) => {
                let Gemm { a, b, d, scales, bias, low_rank, .. } = gemm;
                let low_rank = low_rank.iter_mut().flat_map(|addend| [&mut addend.t, &mut addend.b]);
                [a, b, d]
                    .into_iter()
                    .chain(scales.iter_mut().flat_map(Scales::tensors_mut))
                    .chain(bias)
                    .chain(low_rank)
                    .collect()
            }
            Instruction::AttentionForward(attention) => {
                let AttentionForward { q, k, v, o, lse, document_start, scratch, scale: _ } = attention;
                [q, k, v, o, lse, document_start].into_iter().chain(scratch).collect()
            }
            Instruction::Copy { from, to }
            | Instruction::Transfer { from, to, stream: _ }
            | Instruction::Collective(Collective { movement: _, group: _, from, to }) => vec![from, to],
            Instruction::Zero { at } => vec![at],
            Instruction::Record { .. } | Instruction::Wait { .. } => vec![],
        }
    }

    /// True if a backend may pass the instruction to a library.
    pub fn may_call_library(&self) -> bool {
        match self {
            Instruction::Gemm(_) | Instruction::AttentionForward(_) => true,
            Instruction::Launch(_)
            | Instruction::Copy { .. }
            | Instruction::Zero { .. }
            | Instruction::Transfer { .. }
            | Instruction::Collective(_)
            | Instruction::Record { .. }
            | Instruction::Wait { .. } => false,
        }
    }

    /// Returns the stream that the instruction is queued on.
    pub fn stream(&self) -> StreamId {
        match self {
            Instruction::Transfer { stream, .. }
            | Instruction::Record { stream, .. }
            | Instruction::Wait { stream, .. } => *stream,
            Instruction::Collective(_) => StreamId::Exchange,
            Instruction::Launch(_)
            | Instruction::Gemm(_)
            | Instruction::AttentionForward(_)
            | Instruction::Copy { .. }
            | Instruction::Zero { .. } => StreamId::Compute,
        }
    }
}
