//! Instructions made ready: plans chosen, kernels loaded, addresses resolved.
//!
//! Preparing has two halves. First every instruction gets its plan and says how much workspace it
//! wants; then one workspace is allocated for all (they run one after another) and addresses are
//! bound. Queueing afterwards looks nothing up. No knowledge of entry points.

mod addends;
mod attention;
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

/// What preparing works with.
pub(crate) struct Preparation<'a> {
    pub engine: &'a mut Engine,
    pub memory: &'a Memory,
    pub kernels: &'a Kernels,
    /// Of the entry.
    pub events: &'a mut Events,
}

/// An instruction with its plan, before the workspace exists.
pub(crate) enum Planned {
    Launches(Vec<launch::PreparedCall>),
    Product(product::PlannedProduct),
    Attention(Box<attention::PlannedAttention>),
    Strided(strided::Strided),
    Lane(transfer::OnLane),
}

/// An instruction that can be queued.
pub(crate) enum Prepared {
    Launches(Vec<launch::PreparedCall>),
    Product(product::PreparedProduct),
    Attention(Box<attention::PreparedAttention>),
    Strided(strided::Strided),
    Lane(transfer::OnLane),
}

pub(crate) use launch::Kernels;
pub(crate) use memory::Memory;
pub(crate) use transfer::Events;

impl Planned {
    pub fn new(p: &mut Preparation, instruction: &Instruction) -> Result<Planned> {
        Ok(match instruction {
            Instruction::Launch(launch) => Planned::Launches(launch::prepare(p, launch)?),
            Instruction::Gemm(gemm) => Planned::Product(product::plan(p, gemm)?),
            Instruction::AttentionForward(a) => Planned::Attention(Box::new(attention::plan(p, a)?)),
            Instruction::Copy { from, to } => Planned::Strided(strided::copy(p, from, to)?),
            Instruction::Zero { at } => Planned::Strided(strided::zero(p, at)?),
            Instruction::Transfer { from, to, lane } => Planned::Lane(transfer::transfer(p, from, to, *lane)),
            Instruction::Record { event, lane } => Planned::Lane(transfer::record(p, *event, *lane)?),
            Instruction::Wait { event, lane } => Planned::Lane(transfer::wait(p, *event, *lane)?),
        })
    }

    /// Bytes of workspace that the instruction uses while it runs.
    pub fn workspace(&self) -> usize {
        match self {
            Planned::Launches(_) | Planned::Strided(_) | Planned::Lane(_) => 0,
            Planned::Product(product) => product.workspace(),
            Planned::Attention(attention) => attention.workspace(),
        }
    }

    /// Binds the workspace, which is aligned to 256 and at least as large as asked for.
    pub fn bind(self, engine: &Engine, workspace: u64) -> Result<Prepared> {
        Ok(match self {
            Planned::Launches(calls) => Prepared::Launches(calls),
            Planned::Product(product) => Prepared::Product(product.bind(workspace)),
            Planned::Attention(attention) => Prepared::Attention(Box::new(attention.bind(engine, workspace)?)),
            Planned::Strided(strided) => Prepared::Strided(strided),
            Planned::Lane(on_lane) => Prepared::Lane(on_lane),
        })
    }
}

impl Prepared {
    /// Queues the instruction on its lane.
    pub fn queue(&mut self, engine: &Engine) -> Result<()> {
        let stream: &Stream = &engine.stream;
        match self {
            Prepared::Launches(calls) => calls.iter_mut().try_for_each(|call| call.queue(stream)),
            Prepared::Product(product) => product.queue(engine),
            Prepared::Attention(attention) => attention.queue(engine),
            Prepared::Strided(strided) => strided.queue(stream),
            Prepared::Lane(on_lane) => on_lane.queue(engine),
        }
    }
}
