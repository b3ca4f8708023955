//! The memory that a graph needs, before anything is lowered.

use graph::Graph;
use program::{ArenaKind, EntryKind, Machine, Variant};

use crate::CompileError;
use crate::lowering::{Lowering, fixed_places};
use crate::memory::{ParameterPlan, arena};
use crate::options::CompileOptions;
use crate::residency::{Homes, Outline};
use crate::update;

/// The part of the plan that no decision changes.
pub(crate) struct Memory<'a> {
    machine: &'a Machine,
    parameters: &'a ParameterPlan,
    homes: Homes,
    /// Bytes of everything but the activation arena.
    fixed_bytes: usize,
}

impl<'a> Memory<'a> {
    pub fn new(
        graphs: &[(EntryKind, Variant, Graph)],
        parameters: &'a ParameterPlan,
        options: &CompileOptions,
        machine: &'a Machine,
    ) -> Memory<'a> {
        let homes = Homes::new(&options.plan.offload);
        let mut lowering = Lowering::new(machine);
        for (_, _, graph) in graphs {
            fixed_places(graph, parameters, &mut lowering);
        }
        if let Some(optimizer) = options.training.as_ref().and_then(|t| t.optimizer.as_ref()) {
            for name in update::names(parameters) {
                let scales_loss = options.scales_loss();
                update::entry(name, parameters, optimizer, scales_loss, options.seed, &homes, &mut lowering);
            }
        }
        // All that is on the device for every entry. Activations are counted for each entry separately.
        let fixed = ArenaKind::ALL.into_iter().filter(|kind| *kind != ArenaKind::Activations);
        let fixed = fixed.filter(|kind| homes.on_device(kind.id()));
        let bytes = fixed.map(|kind| parameters.bytes(kind).unwrap_or_else(|| lowering.bytes(kind)));
        let fixed_bytes = bytes.sum::<usize>() + machine.context_bytes;
        Memory { machine, fixed_bytes, parameters, homes }
    }

    /// Bytes of the activation arena that one entry needs. Above `limit` nothing is packed: it is at least that much then.
    pub fn activation_bytes(&self, graph: &Graph, variant: Variant, limit: usize) -> Bytes {
        let fixed = fixed_places(graph, self.parameters, &mut Lowering::new(self.machine));
        let bytes = |leaves: bool| {
            let (documents, machine) = (variant.documents, self.machine);
            let outline = Outline::new(graph, &fixed, documents, machine, &self.homes, self.parameters, leaves);
            match outline.peak() {
                peak if peak > limit => Bytes::AtLeast(peak),
                _ => Bytes::Exact(outline.pack().bytes),
            }
        };
        if self.parameters.shards == 1 || graph.gradients.is_empty() {
            return bytes(false);
        }
        // On the device, gradients that are sent to other ranks take more than those that are not.
        let both = self.parameters.sharding.exchanges_last() && !self.homes.on_device(arena::GRADIENTS);
        match bytes(true) {
            Bytes::Exact(sent) if both => match bytes(false) {
                Bytes::Exact(kept) => Bytes::Exact(sent.max(kept)),
                more => more,
            },
            of_sent => of_sent,
        }
    }

    /// Returns the bytes that are left for the activation arena.
    pub fn available(&self, options: &CompileOptions) -> usize {
        let limit = self.machine.memory.min(options.plan.memory_limit.unwrap_or(usize::MAX));
        limit.saturating_sub(self.fixed_bytes).saturating_sub(options.plan.reserved)
    }

    /// Returns the error of a plan whose activation arena is too large.
    pub fn does_not_fit(&self, activations: usize, options: &CompileOptions) -> CompileError {
        let available = self.machine.memory.min(options.plan.memory_limit.unwrap_or(usize::MAX));
        let needed = self.fixed_bytes + options.plan.reserved + activations;
        CompileError::DoesNotFit { needed, available, limited: available < self.machine.memory }
    }

    /// The arenas of a micro-step that the plan may move: searches that agree in these need the same activations.
    pub fn moved(&self) -> [bool; 2] {
        [arena::GRADIENTS, arena::QUANTS].map(|of| !self.homes.on_device(of))
    }
}

/// The size of an arena.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bytes {
    Exact(usize),
    AtLeast(usize),
}

impl Bytes {
    /// The size, or what it is at least.
    pub fn least(self) -> usize {
        match self {
            Bytes::Exact(bytes) | Bytes::AtLeast(bytes) => bytes,
        }
    }
}
