//! What a run would be, without running it: its graph, its program, its memory and its time, for
//! any machine. Reads no data and no weights.

mod text;

use graph::Graph;
use program::{Arch, Documents, EntryKind, Instruction, Lane, Machine, Place, Program, TensorRef, Variant};

use crate::advice::with_advice;
use crate::config::{Config, Reasons};
use crate::error::Result;
use crate::plan::{self, Plan};
use crate::source::ModelSource;

/// Documents of a packed row that a preview reckons with; the data decides in the run.
const DOCUMENTS_PER_ROW: usize = 16;

/// The run's program and what follows from it.
pub struct Preview {
    pub program: Program,
    /// What the user should know, a sentence each.
    pub notes: Vec<String>,
    recommended: Option<Reasons>,
    /// The same, a line each.
    recommendations: Vec<String>,
    batch: usize,
    sequence_len: usize,
    accumulation: usize,
}

/// Time as it is expected, and at the machine's measured ceilings, which no run beats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// One micro-step, forward and backward.
    pub micro_step_seconds: f64,
    pub update_seconds: f64,
    /// All micro-steps of an optimizer step, and the update.
    pub step_seconds: f64,
    /// The same at the ceilings.
    pub ceiling_seconds: f64,
    pub tokens_per_second: f64,
    /// Floating-point operations of an optimizer step, those done again included.
    pub step_flops: f64,
    /// Bytes that an optimizer step moves, inputs and outputs of each instruction counted once.
    pub step_bytes: f64,
    /// What lies on the host, where something does.
    pub host: Option<HostEstimate>,
}

/// What it costs that something lies in host memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostEstimate {
    /// Bytes between device and host in a micro-step after the first, and in the update.
    pub micro_step_bytes: f64,
    pub update_bytes: f64,
    /// Seconds of these in which nothing is computed.
    pub micro_step_seconds: f64,
    pub update_seconds: f64,
    /// Tokens of a step from which it costs less than [`FREE`] of the step; none where no number of micro-steps
    /// makes it that cheap.
    pub free_tokens: Option<u64>,
}

/// Share of a step that is as good as nothing.
const FREE: f64 = 0.015;

fn variant(config: &Config, plan: &Plan, machine: &Machine) -> Variant {
    let (batch, seq_len) = (config.training.per_device_train_batch_size as usize, plan.sequence_len);
    let tokens = batch * seq_len;
    let documents = match (config.data.sample_packing, &machine.arch) {
        (false, _) => Documents::Rows,
        (true, Arch::Cpu) => Documents::Packed { count: tokens, longest: seq_len },
        (true, _) => Documents::Packed { count: (batch * DOCUMENTS_PER_ROW).min(tokens), longest: seq_len },
    };
    Variant { batch, seq_len, documents }
}

/// The model as a flat graph, in the shape of the run's batches.
pub fn graph(config: &Config, source: &ModelSource, machine: &Machine) -> Result<Graph> {
    let plan = Plan::new(config, source)?;
    Ok(compiler::expand(&source.model, &plan.compile, variant(config, &plan, machine))?)
}

impl Preview {
    /// [`Preview::new`], whose refusal for lack of memory says what would fit.
    pub fn advised(config: &Config, source: &ModelSource, machine: &Machine) -> Result<Preview> {
        Preview::new(config, source, machine).map_err(|error| with_advice(error, config, source, machine))
    }

    /// Compiles for a machine, which need not be this one.
    pub fn new(config: &Config, source: &ModelSource, machine: &Machine) -> Result<Preview> {
        plan::require_machine(config, machine, config.hardware.gpus as usize)?;
        let plan = Plan::new(config, source)?;
        let mut options = plan.compile.clone();
        let variant = variant(config, &plan, machine);
        options.variants = vec![variant];
        let program = compiler::compile(&source.model, &options, machine)?;
        Ok(Preview {
            program,
            notes: plan.notes,
            recommended: config.recommended.clone(),
            recommendations: config.recommendations(),
            batch: variant.batch,
            sequence_len: variant.seq_len,
            accumulation: config.training.gradient_accumulation_steps as usize,
        })
    }

    /// Bytes of everything that the plan holds.
    pub fn memory_bytes(&self) -> usize {
        self.program.memory.iter().map(|line| line.bytes).sum()
    }

    /// All instructions one after the other.
    pub fn estimate(&self) -> Estimate {
        let of = |kind: EntryKind| {
            let entry = self.program.entries.iter().find(|entry| entry.kind == kind);
            entry.map(|entry| program::estimate(entry, &self.program)).unwrap_or_default()
        };
        let [first, next, update] = [EntryKind::FirstMicroStep, EntryKind::NextMicroStep, EntryKind::Update].map(of);
        let more = (self.accumulation - 1) as f64;
        let step_seconds = first.seconds + next.seconds * more + update.seconds;
        let tokens = (self.batch * self.sequence_len * self.accumulation) as f64;
        Estimate {
            micro_step_seconds: first.seconds,
            update_seconds: update.seconds,
            step_seconds,
            ceiling_seconds: first.ceiling + next.ceiling * more + update.ceiling,
            tokens_per_second: tokens / step_seconds,
            step_flops: first.flops + next.flops * more + update.flops,
            step_bytes: first.bytes + next.bytes * more + update.bytes,
            host: self.host_estimate(),
        }
    }

    fn host_estimate(&self) -> Option<HostEstimate> {
        if self.program.host_memory().is_empty() {
            return None;
        }
        let mut at_hand = self.program.clone();
        at_hand.arenas.iter_mut().for_each(|arena| arena.place = Place::Device);
        let of = |kind: EntryKind| {
            let entry = self.program.entries.iter().find(|entry| entry.kind == kind)?;
            let (found, without) = (program::estimate(entry, &self.program), program::estimate(entry, &at_hand));
            let reached = entry.steps.iter().filter(|step| step.instruction.lane() == Lane::Compute);
            let reached: usize = reached.map(|step| self.reached_bytes(&step.instruction)).sum();
            let waiting = found.seconds - (without.seconds - without.waiting);
            Some((found.transferred + reached as f64, waiting.max(0.0), found.seconds))
        };
        let (micro_step_bytes, micro_step_seconds, seconds) = of(EntryKind::NextMicroStep)?;
        let (update_bytes, update_seconds, _) = of(EntryKind::Update)?;
        let spare = FREE * seconds - micro_step_seconds;
        let micro_steps = (update_seconds / spare).ceil().max(1.0);
        let free_tokens = (spare > 0.0).then(|| micro_steps as u64 * (self.batch * self.sequence_len) as u64);
        Some(HostEstimate { micro_step_bytes, update_bytes, micro_step_seconds, update_seconds, free_tokens })
    }

    /// Bytes of host memory that an instruction of the computation reads and writes in place.
    fn reached_bytes(&self, instruction: &Instruction) -> usize {
        let on_host = |at: &&TensorRef| self.program.arenas[at.arena.0 as usize].is_on_host();
        let bytes = |of: Vec<&TensorRef>| of.into_iter().filter(on_host).map(TensorRef::bytes).sum::<usize>();
        bytes(instruction.reads()) + 2 * bytes(instruction.writes())
    }
}
