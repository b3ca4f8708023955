//! The placement of optimizer states, f32 copies of the weights, gradients and frozen weights in codes, as far as the
//! options leave it open: on the device, unless only the host makes the run fit, or what fits recomputes for longer
//! than the link takes. Codes, which every micro-step fetches twice, only where the run does not fit otherwise.
//! Knows programs, their bytes and their expected times; not how one is made.

use program::{Arch, ArenaKind, Choice, EntryKind, Machine, PlanDecision, Program, Reason, Seen, Subject, estimate};

use super::Outlook;
use crate::CompileError;
use crate::options::{CompileOptions, OffloadOptions};

/// A state that may be moved to the host, and the option that decides it.
struct State {
    subject: Subject,
    /// The arena of its bytes.
    arena: ArenaKind,
    traffic: Traffic,
    setting: fn(&mut OffloadOptions) -> &mut Option<bool>,
}

/// The transfers over the link of a state on the host, in one step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Traffic {
    /// To the device for the update, and back.
    BothWays,
    /// To the device for the update, which leaves nothing of it.
    OneWay,
    /// To the device for both passes of each micro-step.
    EachPass,
}

const STATES: [State; 4] = [
    State {
        subject: Subject::OptimizerStates,
        arena: ArenaKind::Optimizer,
        traffic: Traffic::BothWays,
        setting: |of| &mut of.optimizer,
    },
    State {
        subject: Subject::MasterCopies,
        arena: ArenaKind::Masters,
        traffic: Traffic::BothWays,
        setting: |of| &mut of.master,
    },
    State {
        subject: Subject::Gradients,
        arena: ArenaKind::Gradients,
        traffic: Traffic::OneWay,
        setting: |of| &mut of.gradients,
    },
    State {
        subject: Subject::FrozenCodes,
        arena: ArenaKind::Quants,
        traffic: Traffic::EachPass,
        setting: |of| &mut of.quants,
    },
];

/// A choice among the states, as bits.
type Moved = usize;

/// A program with some states on the host.
pub(crate) struct Candidate {
    pub program: Program,
    /// The micro-step as it was expected before the program was made; none where there is none.
    pub outlook: Option<Outlook>,
}

/// The fastest candidate so far.
struct Fastest {
    outlook: Outlook,
    /// Seconds of its update's transfers.
    transfers: f64,
}

/// The candidates that another one has to be faster than.
#[derive(Clone, Copy)]
pub(crate) struct Rivals<'a> {
    /// The plan of the candidate with all states on the device, where that fits.
    pub first: Option<&'a [PlanDecision]>,
    /// The micro-step of the fastest, and the seconds by which that of another has to be shorter to make up for its transfers.
    fastest: Option<(&'a Outlook, f64)>,
}

impl Rivals<'_> {
    /// True if a candidate cannot be the fastest. With the same savings it may still be: it has more room for fused nodes.
    pub fn are_faster_than(&self, of: &Outlook) -> bool {
        let Some((fastest, transfers)) = self.fastest else { return false };
        let gain = fastest.seconds.zip(of.seconds).map(|(fastest, seconds)| fastest - seconds);
        of.savings != fastest.savings && gain.is_some_and(|gain| gain <= transfers)
    }
}

/// The program that the options ask for, with what they leave open about the states decided by the expected step.
/// `bytes` are those of an arena if all states are on the host. `compiled` gives no program where it would be the
/// first one with other places, or slower than a rival.
pub(crate) fn least_step(
    options: &CompileOptions,
    machine: &Machine,
    bytes: impl Fn(ArenaKind) -> usize,
    mut compiled: impl FnMut(&CompileOptions, Option<Rivals<'_>>) -> Result<Option<Candidate>, CompileError>,
) -> Result<Program, CompileError> {
    let mut options = options.clone();
    if options.sharding.inter_node_group().size > 1 {
        // Sums of nodes that have all shards each are added up on the device.
        options.plan.offload.gradients.get_or_insert(false);
    }
    let options = &options;
    let stays = compiled(options, None).map(|candidate| candidate.expect("there is no other to compare with"));
    let updates = options.training.as_ref().is_some_and(|training| training.optimizer.is_some());
    if !updates || machine.arch == Arch::Cpu {
        return stays.map(|of| of.program);
    }
    let micro_steps = options.plan.micro_steps.max(1) as f64;
    // A transfer longer than what was recomputed takes is no gain; one that frees less than is missing is no help.
    let (mut least, most, missing) = match &stays {
        Ok(of) => (step_seconds(&of.program, micro_steps), recompute_seconds(&of.program) * micro_steps, 0),
        Err(CompileError::DoesNotFit { needed, available, .. }) => (f64::INFINITY, f64::INFINITY, needed - available),
        Err(_) => return stays.map(|of| of.program),
    };
    let states = States { bytes: STATES.map(|state| bytes(state.arena)), machine, micro_steps };
    let mut choices = states.open(options);
    choices.retain(|moved| missing > 0 || states.of(*moved, Traffic::EachPass) == 0);
    choices.retain(|moved| states.seconds(*moved) < most && states.all(*moved) >= missing);
    choices.sort_by(|a, b| states.seconds(*a).total_cmp(&states.seconds(*b)));
    // With the same decisions otherwise, transfers only add to the step.
    let own = stays.as_ref().ok().map(|of| of.program.plan.clone());
    // The computation of the update may hide as much of its transfers as it takes itself.
    let computed = stays.as_ref().map_or(0.0, |of| update_seconds(&of.program));
    let of_stays = stays.as_ref().ok().and_then(|of| of.outlook.clone());
    let mut fastest = of_stays.map(|outlook| Fastest { outlook, transfers: 0.0 });
    let mut best = stays.map(|of| of.program);
    for moved in choices {
        let transfers = |of: &Fastest| (states.update_seconds(moved) - of.transfers - computed).max(0.0) / micro_steps;
        let rivals = Rivals { first: own.as_deref(), fastest: fastest.as_ref().map(|of| (&of.outlook, transfers(of))) };
        let Candidate { mut program, outlook } = match compiled(&with(options, moved), Some(rivals)) {
            Ok(Some(candidate)) => candidate,
            Ok(None) => continue,
            Err(CompileError::DoesNotFit { .. }) => continue,
            Err(other) => return Err(other),
        };
        let (step, nothing_more) = (step_seconds(&program, micro_steps), recompute_seconds(&program) == 0.0);
        if step < least {
            program.plan.splice(0..0, states.lines(moved, options, missing > 0));
            (least, best) = (step, Ok(program));
            // Codes that every micro-step fetches are part of its time, but not of that of its nodes.
            let known = outlook.filter(|_| states.of(moved, Traffic::EachPass) == 0);
            fastest = known.map(|outlook| Fastest { outlook, transfers: states.update_seconds(moved) });
        }
        if nothing_more {
            break;
        }
    }
    best
}

/// True if two plans choose the same of everything, whatever their reasons.
pub(crate) fn chooses_the_same(one: &[PlanDecision], other: &[PlanDecision]) -> bool {
    let choice = |of: &PlanDecision| (of.entry, of.variant, of.subject, of.layers.clone(), of.choice);
    one.iter().map(choice).eq(other.iter().map(choice))
}

fn with(options: &CompileOptions, moved: Moved) -> CompileOptions {
    let mut options = options.clone();
    for (_, state) in STATES.iter().enumerate().filter(|(index, _)| moved & 1 << index != 0) {
        *(state.setting)(&mut options.plan.offload) = Some(true);
    }
    options
}

/// Returns the seconds of the update.
fn update_seconds(program: &Program) -> f64 {
    program.update(true).map_or(0.0, |index| estimate(&program.entries[index], program, Seen::default()).seconds)
}

/// Returns the seconds of a step of `micro_steps` micro-steps, for the first shape of batches.
pub(super) fn step_seconds(program: &Program, micro_steps: f64) -> f64 {
    let of = |entry: Option<usize>| {
        let entry = entry.map(|index| &program.entries[index]);
        entry.map_or(0.0, |entry| estimate(entry, program, Seen::default()).seconds)
    };
    let several = micro_steps > 1.0;
    let [first, last] =
        [(true, !several), (false, true)].map(|(first, last)| of(program.micro_step(first, last, None)));
    let between =
        if micro_steps > 2.0 { of(program.micro_step(false, false, None)) * (micro_steps - 2.0) } else { 0.0 };
    first + between + if several { last } else { 0.0 } + of(program.update(true))
}

/// Seconds of a micro-step that a plan spends to fit: on recomputation, and on waiting for the link.
pub(super) fn recompute_seconds(program: &Program) -> f64 {
    let again = program.plan.iter().filter(|line| line.reason.is_need());
    let waiting = program.entries.iter().find(|entry| entry.kind == EntryKind::FirstMicroStep);
    again.map(|line| line.seconds).sum::<f64>()
        + waiting.map_or(0.0, |entry| estimate(entry, program, Seen::default()).waiting)
}

struct States<'a> {
    bytes: [usize; 4],
    machine: &'a Machine,
    micro_steps: f64,
}

impl States<'_> {
    /// Choices among the states that there are and that the options leave open.
    fn open(&self, options: &CompileOptions) -> Vec<Moved> {
        let mut offload = options.plan.offload;
        let left_open = STATES.iter().zip(self.bytes).enumerate();
        let open = left_open
            .filter(|(_, (state, bytes))| *bytes > 0 && (state.setting)(&mut offload).is_none())
            .fold(0, |open, (index, _)| open | 1 << index);
        (1..1 << STATES.len()).filter(|moved| moved & !open == 0).collect()
    }

    /// Returns the bytes of the states that are moved.
    fn all(&self, moved: Moved) -> usize {
        STATES.iter().enumerate().map(|(index, _)| self.bytes[index] * (moved >> index & 1)).sum()
    }

    /// Returns the bytes of those of them that have this traffic.
    fn of(&self, moved: Moved, traffic: Traffic) -> usize {
        let with = STATES.iter().enumerate().filter(|(_, state)| state.traffic == traffic);
        self.all(with.fold(0, |with, (index, _)| with | 1 << index) & moved)
    }

    /// Returns the seconds of a step's transfers over the link.
    fn seconds(&self, moved: Moved) -> f64 {
        let passes = self.of(moved, Traffic::EachPass) as f64;
        self.update_seconds(moved) + 2.0 * self.micro_steps * passes / self.machine.link.one_way
    }

    /// Returns the seconds of the update's transfers over the link, which no micro-step hides.
    fn update_seconds(&self, moved: Moved) -> f64 {
        let [both, one] = [Traffic::BothWays, Traffic::OneWay].map(|traffic| self.of(moved, traffic) as f64);
        let link = &self.machine.link;
        ((both + one) / link.one_way).max((2.0 * both + one) / link.both_ways)
    }

    fn lines(&self, moved: Moved, options: &CompileOptions, needed: bool) -> Vec<PlanDecision> {
        let line = |(index, (state, bytes)): (usize, (&State, usize))| PlanDecision {
            entry: EntryKind::Update,
            variant: options.variants[0],
            subject: state.subject,
            layers: Vec::new(),
            choice: Choice::Offload(true),
            reason: if needed { Reason::NeededToFit } else { Reason::FasterThanRecompute },
            bytes,
            seconds: self.seconds(1 << index),
        };
        let all = STATES.iter().zip(self.bytes).enumerate();
        all.filter(|(index, _)| moved & 1 << index != 0).map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_moves_what_its_states_need() {
        let mut machine = Machine::h200();
        machine.link.one_way = 10.0;
        machine.link.both_ways = 16.0;
        // Optimizer states, master copies, gradients, codes.
        let states = States { bytes: [160, 80, 40, 20], machine: &machine, micro_steps: 4.0 };
        assert_eq!(states.seconds(0b0000), 0.0);
        assert_eq!(states.seconds(0b0001), 320.0 / 16.0, "there and back");
        assert_eq!(states.seconds(0b0011), 480.0 / 16.0);
        assert_eq!(states.seconds(0b0100), 40.0 / 10.0, "there alone");
        assert_eq!(states.seconds(0b0101), 360.0 / 16.0);
        assert_eq!(states.seconds(0b1000), 2.0 * 4.0 * 20.0 / 10.0, "twice in each micro-step");
        assert_eq!((states.all(0b1001), states.of(0b1001, Traffic::EachPass)), (180, 20));
    }

    #[test]
    fn a_rival_has_to_be_faster_by_more_than_its_transfers() {
        let outlook = |level: usize, seconds: Option<f64>| Outlook::new((1, 1), vec![level], seconds);
        let fastest = outlook(3, Some(10.0));
        let rivals = Rivals { first: None, fastest: Some((&fastest, 2.0)) };
        assert!(rivals.are_faster_than(&outlook(2, Some(8.5))), "1.5 s less for 2 s of transfers");
        assert!(!rivals.are_faster_than(&outlook(2, Some(7.5))));
        assert!(!rivals.are_faster_than(&outlook(3, Some(10.0))), "the same savings may leave room for fused nodes");
        assert!(!rivals.are_faster_than(&outlook(2, None)), "its nodes do not say how long it takes");
        assert!(!Rivals { first: None, fastest: None }.are_faster_than(&outlook(2, Some(99.0))));
    }
}
