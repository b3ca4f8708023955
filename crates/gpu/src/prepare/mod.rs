//! Prepares instructions: chooses plans, loads kernels, resolves addresses.
//!
//! There are two phases. First every instruction gets its plan and states its workspace size. Then one workspace is
//! allocated for all of them (they run one after another) and addresses are bound. Enqueueing needs no lookups
//! afterwards. Does not know entry points.

mod addends;
mod attention;
mod few_rows;
mod hopper;
mod launch;
mod memory;
mod product;
mod strided;
mod transfer;

use crate::driver::Stream;
use crate::engine::Engine;
use crate::error::Result;
use program::Instruction;

/// The context in which instructions are prepared.
pub(crate) struct Preparation<'a> {
    pub engine: &'a mut Engine,
    pub memory: &'a Memory,
    pub kernels: &'a Kernels,
    /// The events of the entry.
    pub events: &'a mut Events,
    /// True if kernels of the entry that wait by themselves for earlier work (`dependent_launch.cuh`) are launched early.
    pub early: bool,
}

/// An instruction with its plan, before the workspace exists.
pub(crate) enum PlannedInstruction {
    Launches(Vec<launch::BoundLaunch>),
    Product(product::PlannedGemm),
    Attention(Box<attention::PlannedAttention>),
    Strided(strided::Strided),
    OnStream(transfer::OnStream),
    /// A collective, which the group of the ranks' sessions queues.
    Joint,
}

/// An instruction that can be queued.
pub(crate) enum BoundInstruction {
    Launches(Vec<launch::BoundLaunch>),
    Product(product::BoundGemm),
    Attention(Box<attention::BoundAttention>),
    Strided(strided::Strided),
    OnStream(transfer::OnStream),
    Joint,
}

pub(crate) use launch::Kernels;
pub(crate) use memory::Memory;
pub(crate) use transfer::Events;

impl PlannedInstruction {
    pub fn new(p: &mut Preparation, instruction: &Instruction) -> Result<PlannedInstruction> {
        Ok(match instruction {
            Instruction::Launch(launch) => PlannedInstruction::Launches(launch::prepare(p, launch)?),
            Instruction::Gemm(gemm) => PlannedInstruction::Product(product::plan(p, gemm)?),
            Instruction::AttentionForward(a) => PlannedInstruction::Attention(Box::new(attention::plan(p, a)?)),
            Instruction::Copy { from, to } => PlannedInstruction::Strided(strided::copy(p, from, to)?),
            Instruction::Zero { at } => PlannedInstruction::Strided(strided::zero(p, at)?),
            Instruction::Transfer { from, to, stream } => {
                PlannedInstruction::OnStream(transfer::transfer(p, from, to, *stream))
            }
            Instruction::Collective(_) => PlannedInstruction::Joint,
            Instruction::Record { event, stream } => {
                PlannedInstruction::OnStream(transfer::record(p, *event, *stream)?)
            }
            Instruction::Wait { event, stream } => PlannedInstruction::OnStream(transfer::wait(p, *event, *stream)?),
        })
    }

    /// Bytes of workspace that the instruction uses while it runs.
    pub fn workspace(&self) -> usize {
        match self {
            PlannedInstruction::Launches(_)
            | PlannedInstruction::Strided(_)
            | PlannedInstruction::OnStream(_)
            | PlannedInstruction::Joint => 0,
            PlannedInstruction::Product(product) => product.workspace(),
            PlannedInstruction::Attention(attention) => attention.workspace(),
        }
    }

    /// Binds the workspace, which is aligned to 256 and at least as large as requested.
    pub fn bind(self, engine: &Engine, workspace: u64) -> Result<BoundInstruction> {
        Ok(match self {
            PlannedInstruction::Launches(calls) => BoundInstruction::Launches(calls),
            PlannedInstruction::Product(product) => BoundInstruction::Product(product.bind(workspace)),
            PlannedInstruction::Attention(attention) => {
                BoundInstruction::Attention(Box::new(attention.bind(engine, workspace)?))
            }
            PlannedInstruction::Strided(strided) => BoundInstruction::Strided(strided),
            PlannedInstruction::OnStream(on_stream) => BoundInstruction::OnStream(on_stream),
            PlannedInstruction::Joint => BoundInstruction::Joint,
        })
    }
}

impl BoundInstruction {
    /// Queues the instruction on its stream.
    pub fn queue(&mut self, engine: &Engine) -> Result<()> {
        let stream: &Stream = &engine.stream;
        match self {
            BoundInstruction::Launches(calls) => calls.iter_mut().try_for_each(|call| call.queue(stream)),
            BoundInstruction::Product(product) => product.queue(engine),
            BoundInstruction::Attention(attention) => attention.queue(engine),
            BoundInstruction::Strided(strided) => strided.queue(stream),
            BoundInstruction::OnStream(on_stream) => on_stream.queue(engine),
            BoundInstruction::Joint => panic!("a session of one rank does nothing together with others"),
        }
    }
}
