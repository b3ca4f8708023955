//! Whether optimizer states, f32 copies of the weights and gradients lie on the host, as far as the options leave it
//! open: on the device, unless nothing else makes the run fit, or computing more again takes longer than the link.
//! Knows their bytes and the rates of the link; not what an update does with them.

use graph::Graph;
use program::{Arch, EntryKind, Machine, PlanLine, Variant};

use super::Search;
use super::memory::Memory;
use crate::CompileError;
use crate::options::{CompileOptions, OffloadOptions};

/// Share of a micro-step behind which transfers of gradients pass: they come and go in the backward pass, whose
/// beginning and end they cannot use.
const BEHIND: f64 = 0.5;

/// What may be moved: the option, what it is, and how it is set.
struct State {
    option: &'static str,
    name: &'static str,
    setting: fn(&mut OffloadOptions) -> &mut Option<bool>,
}

const STATES: [State; 3] = [
    State { option: "offload_optimizer", name: "optimizer states", setting: |of| &mut of.optimizer },
    State { option: "offload_master", name: "f32 copies of weights", setting: |of| &mut of.master },
    State { option: "offload_grads", name: "gradients", setting: |of| &mut of.gradients },
];

/// A choice among the states, as bits.
type Moved = u8;

/// The options with everything decided about the states, and what was decided for the user.
pub(crate) fn place_states(
    graphs: &[(EntryKind, Variant, Graph)],
    options: &CompileOptions,
    machine: &Machine,
) -> Result<(CompileOptions, Vec<PlanLine>), CompileError> {
    let updates = options.training.as_ref().is_some_and(|training| training.optimizer.is_some());
    let bytes = Memory::new(graphs, options, machine).of_update();
    let stay = Placing { graphs, options, machine, bytes };
    let open = if updates && machine.arch != Arch::Cpu { stay.open() } else { 0 };
    if open == 0 {
        return Ok((options.clone(), Vec::new()));
    }
    let Some((moved, needed)) = stay.best(open)? else { return Ok((options.clone(), Vec::new())) };
    let lines = stay.lines(moved, needed);
    Ok((stay.with(moved), lines))
}

struct Placing<'a> {
    graphs: &'a [(EntryKind, Variant, Graph)],
    options: &'a CompileOptions,
    machine: &'a Machine,
    /// Of the states, in their order.
    bytes: [usize; 3],
}

impl Placing<'_> {
    /// The states that there are and that the options leave open.
    fn open(&self) -> Moved {
        let mut offload = self.options.plan.offload;
        let left_open = STATES.iter().zip(self.bytes).enumerate();
        left_open
            .filter(|(_, (state, bytes))| *bytes > 0 && (state.setting)(&mut offload).is_none())
            .fold(0, |open, (index, _)| open | 1 << index)
    }

    fn with(&self, moved: Moved) -> CompileOptions {
        let mut options = self.options.clone();
        for (_, state) in STATES.iter().enumerate().filter(|(index, _)| moved & 1 << index != 0) {
            *(state.setting)(&mut options.plan.offload) = Some(true);
        }
        options
    }

    /// What to move, and whether the run needs it to fit. None where all stays, or nothing helps.
    fn best(&self, open: Moved) -> Result<Option<(Moved, bool)>, CompileError> {
        let micro_steps = self.options.plan.micro_steps.max(1) as f64;
        let resident = self.micro_step(0)?;
        let mut choices: Vec<Moved> = (1..8).filter(|moved| moved & !open == 0).collect();
        choices.sort_by(|a, b| self.update_seconds(*a).total_cmp(&self.update_seconds(*b)));
        let most = match resident {
            Some([fitting, free]) => {
                // Fewer seconds than the cheapest transfers take are not worth looking any further.
                let again = (fitting - free) * micro_steps;
                choices.retain(|moved| self.update_seconds(*moved) < again);
                fitting * micro_steps
            }
            None => f64::INFINITY,
        };
        let mut best = None;
        let mut least = most;
        for moved in choices {
            if self.update_seconds(moved) >= least {
                break;
            }
            let Some([seconds, _]) = self.micro_step(moved)? else { continue };
            let step = micro_steps * (seconds + self.waiting_seconds(moved, seconds)) + self.update_seconds(moved);
            if step < least {
                (least, best) = (step, Some((moved, resident.is_none())));
            }
        }
        Ok(best)
    }

    /// Seconds of a micro-step of the fastest plan that fits, and with nothing given up, summed over the shapes of
    /// batches.
    fn micro_step(&self, moved: Moved) -> Result<Option<[f64; 2]>, CompileError> {
        let options = self.with(moved);
        let memory = Memory::new(self.graphs, &options, self.machine);
        let limit = self.machine.memory.min(options.plan.memory_limit.unwrap_or(usize::MAX));
        let available = limit.saturating_sub(memory.fixed_bytes());
        if limit < memory.fixed_bytes() || memory.update_bytes() > available {
            return Ok(None);
        }
        let mut sum = [0.0; 2];
        for (kind, variant, graph) in self.graphs {
            let (kind, variant, machine) = (*kind, *variant, self.machine);
            let search = Search { kind, variant, graph, memory: &memory, machine, available, margin: 0.0 };
            let Some(seconds) = search.fastest(&options)? else { return Ok(None) };
            if kind == EntryKind::FirstMicroStep {
                sum = [sum[0] + seconds[0], sum[1] + seconds[1]];
            }
        }
        let shapes = self.graphs.iter().filter(|(kind, _, _)| *kind == EntryKind::FirstMicroStep).count().max(1);
        Ok(Some(sum.map(|seconds| seconds / shapes as f64)))
    }

    /// Seconds that the update waits for the link: gradients come, states and copies come and go.
    fn update_seconds(&self, moved: Moved) -> f64 {
        let [states, copies, gradients] = self.moved_bytes(moved);
        let (come, go) = (states + copies + gradients, states + copies);
        let link = &self.machine.link;
        (come / link.one_way).max((come + go) / link.both_ways)
    }

    /// Seconds that a micro-step waits for gradients, which come and go in it.
    fn waiting_seconds(&self, moved: Moved, micro_step: f64) -> f64 {
        let gradients = self.moved_bytes(moved)[2];
        (2.0 * gradients / self.machine.link.both_ways - BEHIND * micro_step).max(0.0)
    }

    fn moved_bytes(&self, moved: Moved) -> [f64; 3] {
        let mut bytes = self.bytes.map(|bytes| bytes as f64);
        (0..bytes.len()).filter(|index| moved & 1 << index == 0).for_each(|index| bytes[index] = 0.0);
        bytes
    }

    fn lines(&self, moved: Moved, needed: bool) -> Vec<PlanLine> {
        let line = |(index, (state, bytes)): (usize, (&State, usize))| PlanLine {
            kind: EntryKind::Update,
            variant: self.graphs[0].1,
            part: state.name.to_owned(),
            layers: String::new(),
            decision: "on the host".to_owned(),
            bytes,
            seconds: self.update_seconds(1 << index),
            reason: match needed {
                true => format!("needed to fit: `{}`", state.option),
                false => format!("faster than computing more again: `{}`", state.option),
            },
        };
        let all = STATES.iter().zip(self.bytes).enumerate();
        all.filter(|(index, _)| moved & 1 << index != 0).map(line).collect()
    }
}
