//! The compiled step: flat instructions over arenas, the machine they were planned for, and the
//! contract of a backend.
//!
//! Invariant: nothing here knows gradients or the list of operations. Kernels are carried as text.

mod backend;
mod estimate;
mod gauges;
mod instruction;
mod layout;
mod machine;
mod memory;
mod order;
mod parameter;
mod program;
mod text;
mod unite;

pub use backend::{Backend, BackendError, Choices, Reading, Session};
pub use estimate::{Estimate, Work, ceiling, estimate, expected, kind_of, seconds};
pub use gauges::Gauges;
pub use instruction::{
    Arg, Attention, AttentionBackward, AttentionForward, Cost, Documents, EventId, Gemm, Instruction, Kernel,
    KernelCall, KernelId, Lane, Launch, LowRank, Provenance, Step,
};
pub use layout::Layout;
pub use machine::{Arch, Link, Machine, Reached};
pub use memory::{Arena, ArenaId, ArenaKind, MemoryLine, Place, TensorRef};
pub use order::check_order;
pub use parameter::{Initializer, OptimizerState, ParameterSlot};
pub use program::{Constant, Entry, EntryKind, PlanLine, Program, Variant, scalar};
pub use unite::unite;
