//! The parameters that a tensor is made of, and of nothing else: codes of weights, weights that ranks gathered or that
//! came from host memory, stacks of adapters. Follows the instructions of a program in their order; knows no operation.

use std::collections::BTreeSet;

use program::{ArenaId, ArenaKind, Collective, Entry, Instruction, ParameterSlot, Program, TensorRef};

/// The contents of memory at one position of an entry.
pub(crate) struct Origins<'a> {
    program: &'a Program,
    places: Vec<Place>,
}

/// A stretch of an arena.
struct Place {
    arena: ArenaId,
    from: usize,
    to: usize,
    holds: Content,
}

enum Content {
    /// The bytes of parameters as they lie in the whole of their arena, from an offset on.
    Bytes(ArenaId, usize),
    /// Something made of these parameters, by their numbers in the layout; of none if of constants alone.
    Made(BTreeSet<usize>),
}

impl<'a> Origins<'a> {
    /// At the beginning of a micro-step: what was prepared from weights is there.
    pub fn new(program: &'a Program) -> Origins<'a> {
        let mut origins = Origins { program, places: Vec::new() };
        for (group, slots) in program.layout.in_order() {
            let Some(entry) = program.preparation(group) else { continue };
            origins.load(&slots);
            origins.follow(&program.entries[entry], |_, _| ());
        }
        origins
    }

    /// Takes parameters that do not stay to be where they are loaded.
    fn load(&mut self, slots: &[&ParameterSlot]) {
        for slot in slots.iter().filter(|slot| slot.load_group.is_some()) {
            let of = |known: &ParameterSlot| known.name == slot.name;
            let number = self.program.layout.parameters.iter().position(of).expect("it is one of the layout");
            self.put(&slot.weight, Some(Content::Made(BTreeSet::from([number]))));
        }
    }

    /// Goes through an entry; `seen` gets the number of each step, with what is known before it.
    pub fn follow(&mut self, entry: &Entry, mut seen: impl FnMut(usize, &Origins<'a>)) {
        for (number, step) in entry.steps.iter().enumerate() {
            seen(number, self);
            self.advance(&step.instruction);
        }
    }

    /// The parameters, by their numbers; none if the tensor is made of something else, too.
    pub fn of(&self, tensor: &TensorRef) -> Option<BTreeSet<usize>> {
        if self.is_parameter(tensor) {
            return Some(self.held(tensor.arena, self.whole(tensor), tensor.span()));
        }
        if self.program.arenas[tensor.arena.0 as usize].kind == ArenaKind::Constants {
            return Some(BTreeSet::new());
        }
        let (from, to) = (tensor.offset, tensor.offset + tensor.span());
        let mut found = None;
        for place in self.places.iter().filter(|of| of.arena == tensor.arena && of.from < to && from < of.to) {
            let parameters: &mut BTreeSet<usize> = found.get_or_insert_default();
            match &place.holds {
                Content::Made(of) => parameters.extend(of),
                Content::Bytes(arena, start) => {
                    let (first, last) = (from.max(place.from), to.min(place.to));
                    parameters.extend(self.held(*arena, start + first - place.from, last - first));
                }
            }
        }
        found
    }

    /// The parameters that bytes of the whole of an arena belong to.
    fn held(&self, arena: ArenaId, offset: usize, bytes: usize) -> BTreeSet<usize> {
        let slots = self.program.layout.parameters.iter().enumerate();
        let inside = |at: &TensorRef| at.arena == arena && at.offset < offset + bytes && offset < at.offset + at.span();
        slots.filter(|(_, slot)| inside(&slot.weight)).map(|(number, _)| number).collect()
    }

    /// The offset of a tensor in an arena of parameters in the whole: for a shard, where the stretch begins.
    fn whole(&self, tensor: &TensorRef) -> usize {
        let shards = &self.program.arenas[tensor.arena.0 as usize].shards;
        let of_piece = shards.iter().find(|of| (of.at..of.at + of.piece).contains(&tensor.offset));
        of_piece.map_or(tensor.offset, |of| of.start + tensor.offset - of.at)
    }

    fn advance(&mut self, instruction: &Instruction) {
        let content = || match instruction {
            Instruction::Collective(Collective { from, .. }) | Instruction::Transfer { from, .. }
                if self.is_parameter(from) =>
            {
                Some(Content::Bytes(from.arena, self.whole(from)))
            }
            _ => self.made(instruction).map(Content::Made),
        };
        let places = instruction.writes().into_iter().map(|at| (at, content())).collect::<Vec<_>>();
        places.into_iter().for_each(|(at, content)| self.put(at, content));
    }

    /// Records that a tensor is written.
    fn put(&mut self, at: &TensorRef, content: Option<Content>) {
        let (from, to) = (at.offset, at.offset + at.span());
        // Between the rows of a tensor with gaps may be others that are made of parameters.
        if content.is_none() || at.is_dense() {
            self.places.retain(|of| of.arena != at.arena || of.to <= from || to <= of.from);
        }
        self.places.extend(content.map(|holds| Place { arena: at.arena, from, to, holds }));
    }

    /// The parameters that an instruction makes its results of, apart from what was there before.
    fn made(&self, instruction: &Instruction) -> Option<BTreeSet<usize>> {
        let written = instruction.writes();
        let read = instruction.reads().into_iter().filter(|read| !written.iter().any(|at| at.overlaps(read)));
        read.map(|read| self.of(read)).try_fold(BTreeSet::new(), |all, of| Some(&all | &of?))
    }

    fn is_parameter(&self, tensor: &TensorRef) -> bool {
        let kind = self.program.arenas[tensor.arena.0 as usize].kind;
        matches!(kind, ArenaKind::Weights | ArenaKind::Adapters | ArenaKind::Quants)
    }
}
