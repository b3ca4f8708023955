//! Joins the programs of the stages of a pipeline into one. Knows places and kernels by number, not what is computed.

use std::collections::HashMap;

use super::ARENAS;
use crate::instruction::{Instruction, Kernel, KernelId};
use crate::layout::Layout;
use crate::memory::{Arena, ArenaId, ArenaKind, MemoryLine, TensorRef};
use crate::parameter::ParameterSlot;
use crate::program::Program;

/// The program of a pipeline from those of its stages, in their order. `names`: the parameters of all, in the order of the
/// model, which is that of the layout. Scalars are the last stage's: it has the loss.
pub fn join(parts: Vec<Program>, names: &[String]) -> Program {
    let stages = parts.len();
    let last = parts.last().expect("a pipeline has stages");
    let mut joined = Program {
        cluster: crate::Cluster { stages, ..last.cluster },
        scalars: last.scalars.iter().map(|(name, at)| (name.clone(), of_stage(at, stages - 1))).collect(),
        arenas: Vec::new(),
        layout: Layout::default(),
        constants: Vec::new(),
        kernels: Vec::new(),
        entries: Vec::new(),
        plan: Vec::new(),
        ..last.clone()
    };
    let mut activations = Vec::new();
    let mut ids: HashMap<Kernel, KernelId> = HashMap::new();
    let mut slots: HashMap<String, ParameterSlot> = HashMap::new();
    for (stage, part) in parts.into_iter().enumerate() {
        assert!(
            part.layout.extra.is_empty() && part.layout.scaling.is_none(),
            "stages have states of parameters alone"
        );
        let place = |at: &mut TensorRef| *at = of_stage(at, stage);
        joined.arenas.extend(ArenaKind::ALL.iter().enumerate().map(|(index, kind)| {
            let arena = part.arenas.get(index).cloned();
            arena.unwrap_or_else(|| Arena::on_device(*kind, 0))
        }));
        for mut slot in part.layout.parameters {
            slot.tensors_mut().for_each(place);
            slots.insert(slot.name.clone(), slot);
        }
        joined.constants.extend(part.constants.into_iter().map(|mut of| {
            place(&mut of.at);
            of
        }));
        for mut entry in part.entries {
            entry.stage.number = stage;
            entry.tensors_mut().for_each(place);
            for step in &mut entry.steps {
                let Instruction::Launch(launch) = &mut step.instruction else { continue };
                for call in &mut launch.calls {
                    let kernel = &part.kernels[call.kernel.0 as usize];
                    let next = KernelId(joined.kernels.len() as u32);
                    call.kernel = *ids.entry(kernel.clone()).or_insert(next);
                    if call.kernel == next {
                        joined.kernels.push(kernel.clone());
                    }
                }
            }
            joined.entries.push(entry);
        }
        joined.plan.extend(part.plan);
        activations.push(part.activations);
        joined.phases = MemoryLine::greatest(joined.phases.into_iter().chain(part.phases));
    }
    let slot = |name: &String| slots.remove(name).unwrap_or_else(|| panic!("no stage has `{name}`"));
    joined.layout.parameters = names.iter().map(slot).collect();
    assert!(slots.is_empty(), "every parameter of a stage is one of the model's");
    let fullest = joined.fullest_stage();
    (joined.memory, joined.activations) = (joined.memory_of(fullest), activations.swap_remove(fullest));
    joined
}

/// Moves a tensor of a stage by itself to the arenas of all stages.
fn of_stage(at: &TensorRef, stage: usize) -> TensorRef {
    TensorRef { arena: ArenaId(at.arena.0 + stage as u32 * ARENAS), ..at.clone() }
}

impl ParameterSlot {
    /// Every tensor of the parameter.
    pub(super) fn tensors_mut(&mut self) -> impl Iterator<Item = &mut TensorRef> {
        let states = self.states.iter_mut().map(|state| &mut state.at);
        std::iter::once(&mut self.weight).chain(&mut self.gradient).chain(states).chain(&mut self.master)
    }
}
