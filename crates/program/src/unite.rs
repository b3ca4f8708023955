//! Merges programs for different batch shapes over one layout into one program, and finds the entries that another
//! program already has. Knows places and kernels by number, not why a shape is needed.

use std::collections::HashMap;

use crate::decision::PlanDecision;
use crate::instruction::{Instruction, Kernel, KernelId};
use crate::memory::{Arena, ArenaKind, MemoryClass, MemoryLine, TensorRef};
use crate::program::{Constant, Entry, Program};
use crate::variant::{EntryKind, Variant};

/// Alignment of constants in bytes.
const ALIGNMENT: usize = 256;

/// Returns a program of the entries for the wanted shapes, in the order of `parts`, with the update of the first part.
/// Every part has the layout of the first. Arenas of single entries have the size of the largest among the parts.
pub fn unite(parts: &[&Program], wanted: impl Fn(&Variant) -> bool) -> Program {
    let first = parts.first().expect("at least one program is united");
    let mut united = Union::default();
    let mut entries = Vec::new();
    let mut plan = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        assert!(part.has_layout_of(first), "programs are united over one layout");
        let keeps = |variant: &Option<Variant>| variant.as_ref().map_or(index == 0, &wanted);
        entries.extend(part.entries.iter().filter(|entry| keeps(&entry.variant)).map(|entry| united.take(part, entry)));
        let keeps = |of: &&PlanDecision| match of.entry {
            EntryKind::Update | EntryKind::Prepare => index == 0,
            EntryKind::FirstMicroStep | EntryKind::NextMicroStep | EntryKind::Evaluate | EntryKind::Forward => {
                wanted(&of.variant)
            }
        };
        plan.extend(part.plan.iter().filter(keeps).cloned());
    }
    let Union { kernels, constants, constants_end, .. } = united;
    let mut arenas = Vec::new();
    for part in parts {
        widen(&mut arenas, &part.arenas);
    }
    for arena in arenas.iter_mut().filter(|arena: &&mut Arena| arena.kind == ArenaKind::Constants) {
        arena.bytes = constants_end;
    }
    let fullest = parts.iter().max_by_key(|part| arena_bytes(part, ArenaKind::Activations)).expect("at least one");
    Program {
        memory: memory_lines(&arenas, parts),
        activations: fullest.activations.clone(),
        phases: MemoryLine::greatest(parts.iter().flat_map(|part| part.phases.iter().copied())),
        arenas,
        constants,
        kernels,
        entries,
        plan,
        name: first.name.clone(),
        machine: first.machine.clone(),
        cluster: first.cluster,
        layout: first.layout.clone(),
        scalars: first.scalars.clone(),
        seed: first.seed,
    }
}

/// Kernels and constants of several programs, each once.
#[derive(Default)]
struct Union {
    kernels: Vec<Kernel>,
    ids: HashMap<Kernel, KernelId>,
    constants: Vec<Constant>,
    constants_end: usize,
}

impl Union {
    /// An entry of a part with the union's numbers and places.
    fn take(&mut self, part: &Program, entry: &Entry) -> Entry {
        let mut entry = entry.clone();
        let constants = part.arena(ArenaKind::Constants);
        for step in &mut entry.steps {
            if let Instruction::Launch(launch) = &mut step.instruction {
                for call in &mut launch.calls {
                    call.kernel = self.kernel(&part.kernels[call.kernel.0 as usize]);
                }
            }
            for at in step.instruction.tensors_mut() {
                self.move_constant(part, constants.is_some_and(|arena| arena == at.arena), at);
            }
        }
        for (_, at) in &mut entry.outputs {
            self.move_constant(part, constants.is_some_and(|arena| arena == at.arena), at);
        }
        entry
    }

    fn kernel(&mut self, kernel: &Kernel) -> KernelId {
        if let Some(id) = self.ids.get(kernel) {
            return *id;
        }
        let id = KernelId(self.kernels.len() as u32);
        self.ids.insert(kernel.clone(), id);
        self.kernels.push(kernel.clone());
        id
    }

    /// Follows a tensor that is in a constant, or in a part of one, to the constant's place in the union.
    fn move_constant(&mut self, part: &Program, is_constant: bool, at: &mut TensorRef) {
        if !is_constant {
            return;
        }
        let found = part.constants.iter().find(|of| of.holds(at)).expect("what lies in the arena of constants is one");
        at.offset = at.offset - found.at.offset + self.constant(found);
    }

    /// The offset of a constant.
    fn constant(&mut self, constant: &Constant) -> usize {
        let known = self.constants.iter().find(|known| known.value == constant.value);
        if let Some(known) = known {
            return known.at.offset;
        }
        let offset = self.constants_end;
        self.constants_end = (offset + constant.at.bytes()).next_multiple_of(ALIGNMENT);
        self.constants
            .push(Constant { at: TensorRef { offset, ..constant.at.clone() }, value: constant.value.clone() });
        offset
    }
}

impl Program {
    /// Returns for each entry the one of `before` that it equals. Whatever a backend prepared of that one is valid for
    /// this one while the arenas stay where they are. Kernels and constants are compared by content, not by number.
    pub fn entries_of(&self, before: &Program) -> Vec<Option<usize>> {
        let ids: HashMap<&Kernel, KernelId> = self.kernels.iter().zip((0..).map(KernelId)).collect();
        let ids: Vec<Option<KernelId>> = before.kernels.iter().map(|kernel| ids.get(kernel).copied()).collect();
        let stays: Vec<bool> = before.constants.iter().map(|of| self.constants.contains(of)).collect();
        let known = |entry: &Entry| {
            let label = |of: &Entry| (of.kind, of.name.clone(), of.variant, of.steps.len());
            let index = before.entries.iter().position(|known| label(known) == label(entry))?;
            let same = before.renumbered(&before.entries[index], &ids, &stays)? == *entry;
            same.then_some(index)
        };
        self.entries.iter().map(known).collect()
    }

    /// Returns an entry with other numbers of kernels; `None` where one has no number, or a constant does not stay.
    fn renumbered(&self, entry: &Entry, ids: &[Option<KernelId>], stays: &[bool]) -> Option<Entry> {
        let mut entry = entry.clone();
        let constants = self.arena(ArenaKind::Constants);
        let gone = |at: &TensorRef| {
            Some(at.arena) == constants && self.constants.iter().zip(stays).any(|(of, stays)| !stays && of.holds(at))
        };
        if entry.outputs.iter().any(|(_, at)| gone(at)) {
            return None;
        }
        for step in &mut entry.steps {
            if let Instruction::Launch(launch) = &mut step.instruction {
                for call in &mut launch.calls {
                    call.kernel = ids[call.kernel.0 as usize]?;
                }
            }
            if step.instruction.tensors_mut().into_iter().any(|at| gone(at)) {
                return None;
            }
        }
        Some(entry)
    }
}

impl Constant {
    /// True if a tensor of the arena of constants begins in this one.
    fn holds(&self, at: &TensorRef) -> bool {
        (self.at.offset..self.at.offset + self.at.bytes().max(1)).contains(&at.offset)
    }
}

fn widen(arenas: &mut Vec<Arena>, others: &[Arena]) {
    for (index, other) in others.iter().enumerate() {
        match arenas.get_mut(index) {
            Some(arena) => arena.bytes = arena.bytes.max(other.bytes),
            None => arenas.push(other.clone()),
        }
    }
}

fn arena_bytes(program: &Program, kind: ArenaKind) -> usize {
    program.arenas.iter().find(|arena| arena.kind == kind).map_or(0, |arena| arena.bytes)
}

/// The lines of the parts' memory plans, those of arenas with their new sizes.
fn memory_lines(arenas: &[Arena], parts: &[&Program]) -> Vec<MemoryLine> {
    let mut lines = MemoryLine::greatest(parts.iter().flat_map(|part| part.memory.iter().copied()));
    for line in &mut lines {
        let is_it = |arena: &&Arena| line.class == MemoryClass::Arena(arena.kind) && !arena.is_on_host();
        if let Some(arena) = arenas.iter().find(is_it) {
            line.bytes = arena.bytes;
        }
    }
    lines
}
