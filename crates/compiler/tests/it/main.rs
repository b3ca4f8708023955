//! The passes and programs of small models, judged on the CPU backend.

/// The allocator of the Python extension.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

mod axes;
mod batch_invariant;
mod entries;
mod experts;
mod fp8;
mod generation;
mod load_groups;
mod loss_scale;
mod nodes;
mod nvfp4;
mod nvfp4_experts;
mod offload;
mod packed;
mod pipeline;
mod plan;
mod programs;
mod quantize_aware;
mod ranks;
mod sequence;
mod sharded_codes;
mod stacks;
mod stages;
mod support;
mod unite;
