//! Several devices that have some layers each: the stages of a pipeline. Their program is one, over the concatenated
//! arenas of all stages; every entry belongs to one stage, and names the tensors that it passes on. Knows entries,
//! arenas and the tensors that cross from stage to stage; not which layers a stage has, or how bytes get there.

mod check;
mod join;
mod pipeline;
mod schedule;
mod stage;

pub use check::check_stages;
pub use join::join;
pub use pipeline::{MicroStep, PipelineSession, Stages, Writes};
pub use schedule::{Turn, idle_share, schedule, turns};
pub use stage::{SendDirection, Stage};

use crate::memory::{Arena, ArenaId, ArenaKind, MemoryClass, MemoryLine, TensorRef};
use crate::program::{Entry, Program};
use crate::variant::EntryKind;

/// The name of the entry that computes the forward pass of a micro-step on every stage but the last.
pub const STAGE: &str = "stage";

/// Arenas of one stage: all kinds, of which some are empty.
pub(crate) const ARENAS: u32 = ArenaKind::ALL.len() as u32;

impl Entry {
    /// Every tensor that the entry names, to be placed elsewhere.
    pub(crate) fn tensors_mut(&mut self) -> impl Iterator<Item = &mut TensorRef> {
        let steps = self.steps.iter_mut().flat_map(|step| step.instruction.tensors_mut());
        let named = self.inputs.iter_mut().chain(&mut self.outputs).map(|(_, at)| at);
        steps.chain(named).chain(self.stage.tensors_mut())
    }
}

impl Program {
    /// Maximal number of micro-steps that a stage has begun and not ended: its batch tensors and received tensors have
    /// that number of slots.
    pub fn slots(&self, stage: usize) -> usize {
        self.cluster.stages - stage
    }

    /// Bytes from slot to slot of a stage.
    pub fn in_slots(&self, stage: usize) -> usize {
        let batch = stage * ARENAS as usize + ArenaKind::Batch.id().0 as usize;
        self.arenas[batch].bytes / self.slots(stage)
    }

    /// Returns the stage that has an arena.
    pub fn stage_of(&self, arena: ArenaId) -> usize {
        if self.cluster.stages == 1 { 0 } else { (arena.0 / ARENAS) as usize }
    }

    /// A tensor of one stage as the stage by itself finds it.
    pub fn in_stage(&self, at: &TensorRef) -> TensorRef {
        let arena = ArenaId(if self.cluster.stages == 1 { at.arena.0 } else { at.arena.0 % ARENAS });
        TensorRef { arena, ..at.clone() }
    }

    /// Returns the same entry on all stages, in their order: one for each stage that has it.
    pub fn parts(&self, entry: usize) -> Vec<usize> {
        let of = &self.entries[entry];
        let same = |other: &Entry| (other.kind, &other.name, other.variant) == (of.kind, &of.name, of.variant);
        (0..self.entries.len()).filter(|index| same(&self.entries[*index])).collect()
    }

    /// The entries that a micro-batch goes through, one after the other.
    pub fn passes(&self, entry: usize) -> Vec<usize> {
        let mut parts = self.parts(entry);
        let of = &self.entries[entry];
        if parts.len() == 1 || !of.kind.trains() {
            return parts;
        }
        parts.reverse();
        let ahead = self.named(EntryKind::Forward, STAGE, of.variant).expect("a pipeline has forward passes");
        [self.parts(ahead), parts].concat()
    }

    /// Returns one stage as a program of its own, with its entries for each slot: those of an entry are consecutive.
    pub fn of_stage(&self, stage: usize) -> Program {
        let first = stage * ARENAS as usize;
        let arenas = self.arenas[first..first + ARENAS as usize].to_vec();
        let slots = self.slots(stage);
        let step = self.in_slots(stage);
        let own = |at: &TensorRef| self.stage_of(at.arena) == stage;
        let place = |at: &mut TensorRef| *at = self.in_stage(at);
        let mut entries = Vec::new();
        for entry in self.entries.iter().filter(|entry| entry.stage.number == stage) {
            let mut entry = entry.clone();
            entry.tensors_mut().for_each(place);
            entries.extend((0..slots).map(|slot| entry.moved_by(slot * step)));
        }
        let mut layout = self.layout.clone();
        layout.parameters.retain(|slot| own(&slot.weight));
        for slot in &mut layout.parameters {
            slot.tensors_mut().for_each(place);
        }
        let scalars = self.scalars.iter().map(|(name, at)| (name.clone(), self.in_stage(at)));
        let constants = self.constants.iter().filter(|of| own(&of.at)).map(|of| {
            let mut of = of.clone();
            place(&mut of.at);
            of
        });
        Program {
            memory: self.memory_of(stage),
            arenas,
            layout,
            scalars: scalars.collect(),
            constants: constants.collect(),
            entries,
            ..self.clone()
        }
    }

    /// The entry of [`Program::of_stage`] for one of this program's, and for a slot.
    pub fn entry_in_stage(&self, entry: usize, slot: usize) -> usize {
        let stage = self.entries[entry].stage.number;
        let before = self.entries[..entry].iter().filter(|of| of.stage.number == stage).count();
        before * self.slots(stage) + slot
    }

    /// The memory plan of a stage's device.
    pub fn memory_of(&self, stage: usize) -> Vec<MemoryLine> {
        if self.cluster.stages == 1 {
            return self.memory.clone();
        }
        let first = stage * ARENAS as usize;
        // Arenas that one device's program would not have are left out.
        let has = |arena: &&Arena| arena.bytes > 0 || arena.kind.id() < ArenaKind::Masters.id();
        let own = self.arenas[first..first + ARENAS as usize].iter().filter(|arena| !arena.is_on_host()).filter(has);
        let line = |class, bytes, note| MemoryLine { class, bytes, note };
        let lines = own.map(|arena| line(MemoryClass::Arena(arena.kind), arena.bytes, arena.kind.words()));
        let others = self.memory.iter().filter(|line| !matches!(line.class, MemoryClass::Arena(_))).copied();
        lines.chain(others).collect()
    }

    /// The stage whose device holds most.
    pub fn fullest_stage(&self) -> usize {
        let bytes = |stage: &usize| self.memory_of(*stage).iter().map(|line| line.bytes).sum::<usize>();
        (0..self.cluster.stages).rev().max_by_key(bytes).expect("there is a stage")
    }
}

impl Entry {
    /// Returns the entry with the batch and the received tensors of another micro-step, `bytes` further.
    fn moved_by(&self, bytes: usize) -> Entry {
        let mut entry = self.clone();
        entry.tensors_mut().filter(|at| at.arena == ArenaKind::Batch.id()).for_each(|at| at.offset += bytes);
        entry
    }

    /// True if the entry moves bytes to or from other stages.
    pub fn crosses(&self) -> bool {
        [self.stage.received(), self.stage.sent()].iter().flatten().any(|(_, tensors)| !tensors.is_empty())
    }
}

impl EntryKind {
    /// Returns true for the entries that run a micro-step.
    pub const fn trains(self) -> bool {
        matches!(self, EntryKind::FirstMicroStep | EntryKind::NextMicroStep)
    }
}
