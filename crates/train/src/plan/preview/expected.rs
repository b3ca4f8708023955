//! Estimated times of a run's steps: a program's entries over the shapes that its batches have.
//!
//! Knows shapes and entries; how long one takes is the program's own estimate.

use program::{Cause, EntryKind, Instruction, MemorySpace, Program, StreamId, TensorRef, Variant};

use super::Shapes;
use crate::plan::reference::{POLICY, REFERENCE};

/// A compiled run and what is known of its batches.
pub(crate) struct Expected<'a> {
    pub program: &'a Program,
    pub shapes: &'a Shapes,
    /// Micro-steps of an optimizer step.
    pub accumulation: usize,
}

/// Time as it is expected, and at the machine's measured ceilings, which no run beats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// One micro-step, forward and backward.
    pub micro_step_seconds: f64,
    pub update_seconds: f64,
    /// Forward passes of a reference or of the policy before a micro-step, in the mean.
    pub passes_seconds: f64,
    /// All of these in an optimizer step.
    pub step_seconds: f64,
    /// The same at the ceilings.
    pub ceiling_seconds: f64,
    pub tokens_per_second: f64,
    /// Floating-point operations of an optimizer step, those done again included; of each rank, where there are
    /// several, and of all stages.
    pub step_flops: f64,
    /// Bytes that an optimizer step moves, inputs and outputs of each instruction counted once.
    pub step_bytes: f64,
    /// Bytes that a rank gets from the others in an optimizer step.
    pub exchanged: f64,
    /// Bytes among them that come from other nodes.
    pub between: f64,
    /// Seconds of an optimizer step in which nothing is computed because bytes are on their way.
    pub waiting: f64,
    /// All steps of the run, where their number is known.
    pub run_seconds: Option<f64>,
    /// All passes over held-out data, next to these.
    pub evaluation_seconds: f64,
    /// Seconds of a step above its bound, by [`Cause`].
    pub above: [f64; Cause::ALL.len()],
    /// The cost of tensors on the host, if there are any.
    pub host: Option<HostEstimate>,
}

/// The cost of keeping tensors in host memory.
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

/// The ratio to its bound from which a step gets a note.
const FAR_ABOVE: f64 = 3.0;

impl Expected<'_> {
    /// A word on a step that is far above its bound, and what the time goes to.
    pub fn far_above(&self) -> Option<String> {
        let of = self.estimate();
        let times = of.step_seconds / of.ceiling_seconds;
        // Below a millisecond of work there is nothing that could be slow.
        if !self.program.machine.origin.has_ceilings() || times <= FAR_ABOVE {
            return None;
        }
        let (cause, seconds) = Cause::ALL.into_iter().zip(of.above).max_by(|a, b| a.1.total_cmp(&b.1))?;
        let share = 100.0 * seconds / of.step_seconds;
        Some(format!("a step is expected to take {times:.1} times its bound; {share:.0} % of it is {}", cause.words()))
    }

    /// All instructions one after the other, over shapes of batches as frequent as they are; of updates that after a
    /// warm-up.
    pub fn estimate(&self) -> Estimate {
        if self.program.cluster.stages > 1 {
            return self.of_stages();
        }
        let evaluate = self.mean(|variant| self.program.entry(EntryKind::Evaluate, Some(variant)));
        let update = self.entry(self.program.update(true));
        let replicas = self.program.cluster.replicas();
        let micro_steps = self.micro_steps();
        let sum = |of: &dyn Fn(&program::Estimate) -> f64| {
            micro_steps.iter().map(|(times, micro_step)| times * of(micro_step)).sum::<f64>() + of(&update)
        };
        let step_seconds = sum(&|of| of.seconds);
        let (times, batches) = self.shapes.evaluations;
        let passes = self.shapes.passes * self.forward().seconds;
        Estimate {
            micro_step_seconds: micro_steps[0].1.seconds,
            update_seconds: update.seconds,
            passes_seconds: passes,
            step_seconds,
            ceiling_seconds: sum(&|of| of.ceiling),
            tokens_per_second: self.shapes.tokens * (self.accumulation * replicas) as f64 / step_seconds,
            step_flops: sum(&|of| of.flops),
            step_bytes: sum(&|of| of.bytes),
            exchanged: sum(&|of| of.exchanged),
            between: sum(&|of| of.between),
            waiting: sum(&|of| of.waiting),
            run_seconds: self.shapes.steps.map(|steps| steps as f64 * step_seconds),
            evaluation_seconds: (times * batches) as f64 * (evaluate.seconds + passes),
            above: std::array::from_fn(|cause| sum(&|of| of.above[cause])),
            host: self.host_estimate(),
        }
    }

    /// The kinds of micro-steps of a step, the first at the beginning, and how many there are of each.
    fn micro_steps(&self) -> Vec<(f64, program::Estimate)> {
        let of = |first: bool, last: bool| self.mean(|variant| self.program.micro_step(first, last, Some(variant)));
        let passes = (self.accumulation as f64 * self.shapes.passes, self.forward());
        let mut all = match self.accumulation {
            1 => vec![(1.0, of(true, true))],
            several => vec![(1.0, of(true, false)), ((several - 2) as f64, of(false, false)), (1.0, of(false, true))],
        };
        all.push(passes);
        all
    }

    /// A forward pass of the reference or of the policy; that of an evaluation where another program has it.
    fn forward(&self) -> program::Estimate {
        let named = |name: &str, variant: Variant| self.program.named(EntryKind::Forward, name, Some(variant));
        let usual = |variant: Variant| self.program.entry(EntryKind::Evaluate, Some(variant));
        self.mean(|variant| named(REFERENCE, variant).or(named(POLICY, variant)).or(usual(variant)))
    }

    pub(super) fn entry(&self, index: Option<usize>) -> program::Estimate {
        let found = index.map(|index| &self.program.entries[index]);
        found.map(|entry| program::estimate(entry, self.program, self.shapes.seen)).unwrap_or_default()
    }

    /// An entry over all shapes of batches, in the mean.
    pub(super) fn mean(&self, index: impl Fn(Variant) -> Option<usize>) -> program::Estimate {
        let of = |variant: &Variant| self.entry(index(*variant));
        let all = self.shapes.variants.iter().map(of).zip(&self.shapes.shares);
        all.fold(program::Estimate::default(), |sum, (of, share)| program::Estimate {
            flops: sum.flops + share * of.flops,
            bytes: sum.bytes + share * of.bytes,
            seconds: sum.seconds + share * of.seconds,
            ceiling: sum.ceiling + share * of.ceiling,
            waiting: sum.waiting + share * of.waiting,
            transferred: sum.transferred + share * of.transferred,
            exchanged: sum.exchanged + share * of.exchanged,
            between: sum.between + share * of.between,
            instructions: sum.instructions.max(of.instructions),
            above: std::array::from_fn(|cause| sum.above[cause] + share * of.above[cause]),
        })
    }

    fn host_estimate(&self) -> Option<HostEstimate> {
        if self.program.host_memory().is_empty() {
            return None;
        }
        let mut on_device = self.program.clone();
        on_device.arenas.iter_mut().for_each(|arena| arena.place = MemorySpace::Device);
        let longest = self.shapes.variants.last().copied();
        let of = |kind: EntryKind, variant: Option<Variant>| {
            let index = match kind {
                EntryKind::Update => self.program.update(true),
                kind => self.program.entry(kind, variant),
            };
            let entry = &self.program.entries[index?];
            let (found, without) = (
                program::estimate(entry, self.program, self.shapes.seen),
                program::estimate(entry, &on_device, self.shapes.seen),
            );
            let reached = entry.steps.iter().filter(|step| step.instruction.stream() == StreamId::Compute);
            let reached: usize = reached.map(|step| self.reached_bytes(&step.instruction)).sum();
            let waiting = found.seconds - (without.seconds - without.waiting);
            Some((found.transferred + reached as f64, waiting.max(0.0), found.seconds))
        };
        let (micro_step_bytes, micro_step_seconds, seconds) = of(EntryKind::NextMicroStep, longest)?;
        let (update_bytes, update_seconds, _) = of(EntryKind::Update, None)?;
        let spare = FREE * seconds - micro_step_seconds;
        let micro_steps = (update_seconds / spare).ceil().max(1.0);
        let free_tokens = (spare > 0.0).then(|| micro_steps as u64 * self.shapes.tokens as u64);
        Some(HostEstimate { micro_step_bytes, update_bytes, micro_step_seconds, update_seconds, free_tokens })
    }

    /// Bytes of host memory that an instruction of the computation reads and writes in place.
    fn reached_bytes(&self, instruction: &Instruction) -> usize {
        let on_host = |at: &&TensorRef| self.program.arenas[at.arena.0 as usize].is_on_host();
        let bytes = |of: Vec<&TensorRef>| of.into_iter().filter(on_host).map(TensorRef::bytes).sum::<usize>();
        bytes(instruction.reads()) + 2 * bytes(instruction.writes())
    }
}
