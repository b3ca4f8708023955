//! The compiled step: flat instructions over arenas, the machine they were planned for, and the contract of a backend.
//!
//! Invariant: nothing here knows how gradients are derived, or the list of operations: these are names, and kernels are
//! text. What limits the kinds of instructions, attention among them, is known for estimates (`work.rs`, `efficiency.rs`),
//! and what libraries take (`library.rs`).

mod architecture;
mod arithmetic;
mod backend;
mod cluster;
mod decision;
mod efficiency;
mod estimate;
mod gauges;
mod gfx;
mod group;
mod instruction;
mod known;
mod layout;
pub mod library;
mod machine;
mod measured;
mod memory;
mod nodes;
mod of_rank;
mod order;
mod parameter;
mod program;
mod stages;
mod target;
mod text;
mod unite;
mod variant;
mod work;

pub use architecture::{Architecture, UnknownArchitecture};
pub use arithmetic::Arithmetic;
pub use backend::{Backend, BackendError, Choices, Reading, Session};
pub use cluster::Cluster;
pub use decision::{Choice, LayerPart, Obstacle, PlanDecision, Reason, Subject};
pub use efficiency::{AttentionRate, Efficiency, Hidden, Products, Realisation};
pub use estimate::{Estimate, ceiling, estimate, kind_of, seconds};
pub use gauges::Gauges;
pub use gfx::{Gfx, UnknownGfx};
pub use group::check_group;
pub use instruction::{
    Arg, AttentionForward, Collective, Cost, Documents, EventId, Gemm, Instruction, Kernel, KernelCall, KernelId,
    Launch, Layer, LowRank, Movement, Phase, ProcessGroup, Provenance, Scales, Step, StreamId,
};
pub use known::{PRODUCTS, names as machine_names, peak};
pub use layout::{Layout, Quantiser, Scaling};
pub use machine::{FP8, Link, Machine, Origin};
pub use memory::{Arena, ArenaId, ArenaKind, MemoryClass, MemoryLine, MemorySpace, Piece, Shard, TensorRef};
pub use nodes::{NodeSession, ranks_of};
pub use order::check_order;
pub use parameter::{Initializer, OptimizerState, PackedWeight, ParameterSlot};
pub use program::{COMPRESSED, Constant, Entry, LAST, Program, generation, scalar};
pub use stages::{
    MicroStep, PipelineSession, STAGE, SendDirection, Stage, Stages, Turn, Writes, check_stages, idle_share, join,
    schedule, turns,
};
pub use target::{Arch, Codes};
pub use unite::unite;
pub use variant::{EntryKind, Variant};
pub use work::{Cause, Extents, OfPatch, Seen, Spread, Times, Work, clock, expected_times, products_ceiling};
