//! What a graph needs of memory, before anything is lowered.

use graph::Graph;
use program::{ArenaId, EntryKind, Machine, Variant};

use crate::lower::{Lowering, fixed_places};
use crate::memory::{Buffers, ParameterPlan, arena, place, plan_parameters, shadow_adapters};
use crate::options::CompileOptions;
use crate::residency::Homes;
use crate::update;

/// The part of the plan that no decision changes.
pub(super) struct Memory<'a> {
    machine: &'a Machine,
    parameters: ParameterPlan,
    homes: Homes,
    fixed_bytes: usize,
}

impl<'a> Memory<'a> {
    pub fn new(graphs: &[(EntryKind, Variant, Graph)], options: &CompileOptions, machine: &'a Machine) -> Memory<'a> {
        let table = &graphs.first().expect("at least one entry is asked for").2;
        let parameters = plan_parameters(table, options);
        let homes = Homes::new(&options.plan.offload);
        let mut lowering = Lowering::new(machine);
        for (_, _, graph) in graphs {
            fixed_places(graph, &parameters, &mut lowering);
        }
        if let Some(optimizer) = options.training.as_ref().and_then(|t| t.optimizer.as_ref()) {
            update::entry(&parameters, optimizer, options.seed, &homes, &mut lowering);
        }
        let on_device = |arena: ArenaId, bytes: usize| if homes.on_device(arena) { bytes } else { 0 };
        let of_parameters = parameters.weights_bytes
            + parameters.adapters_bytes
            + on_device(arena::GRADIENTS, parameters.gradients_bytes)
            + on_device(arena::OPTIMIZER, parameters.optimizer_bytes)
            + on_device(arena::MASTERS, parameters.masters_bytes);
        let rest = lowering.batch_bytes + lowering.constant_bytes() + parameters.scalar_bytes() + machine.context_bytes;
        Memory { machine, fixed_bytes: of_parameters + rest, parameters, homes }
    }

    /// Bytes of everything but the activation arena.
    pub fn fixed_bytes(&self) -> usize {
        self.fixed_bytes
    }

    /// Bytes of the activation arena that one entry needs.
    pub fn activation_bytes(&self, graph: &Graph, variant: Variant) -> usize {
        let mut lowering = Lowering::new(self.machine);
        let fixed = fixed_places(graph, &self.parameters, &mut lowering);
        let mut placement = place(graph, &fixed);
        let shadow = shadow_adapters(graph, &mut placement);
        Buffers::plan(graph, &placement, shadow.as_ref(), self.machine, variant.documents, &self.homes).bytes
    }
}
