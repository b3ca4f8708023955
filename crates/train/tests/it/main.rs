//! Whole runs, models and results of the engine on the CPU; `gpu` needs a card.

/// The allocator of the Python extension.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

mod adapters;
mod codes_alone;
mod compress;
mod corpus;
mod dora;
mod equivalence;
mod extend;
mod families_on_stand_ins;
mod flushed;
mod formats;
mod fp8;
mod generate;
mod golden;
mod gpu;
mod half;
mod milestones;
mod mixtures;
mod nodes;
mod noise;
mod nvfp4;
mod offload;
mod planned;
mod prequantised;
mod qlora;
mod ranks;
mod recommend;
mod recorded;
mod resume;
mod run;
mod saved_modules;
mod sha256;
mod split;
mod stages;
mod standin;
mod stories;
mod watch;
