//! A check that the stages of a pipeline can come to the end of a step together: each gets the tensors that it waits
//! for, in the order in which it asks, of the size that it expects, and has a slot for them. Knows the order of passes
//! and sizes; not what is moved.

use std::collections::VecDeque;

use super::{STAGE, SendDirection, Turn, schedule};
use crate::group::check_group;
use crate::memory::TensorRef;
use crate::program::{Entry, Program};
use crate::variant::{EntryKind, Variant};

/// Simulates the stages of a program, for up to twice as many micro-steps as there are stages, and the updates. The
/// error names stage and pass.
pub fn check_stages(program: &Program) -> Result<(), String> {
    let stages = program.cluster.stages;
    let mut variants: Vec<Variant> = Vec::new();
    for entry in program.entries.iter().filter(|entry| entry.kind.trains()) {
        variants.extend(entry.variant.filter(|variant| !variants.contains(variant)));
    }
    for variant in variants {
        for micro_steps in 1..=2 * stages {
            Pipeline::new(program, variant, micro_steps)?.run()?;
        }
    }
    for index in 0..program.entries.len() {
        let entry = &program.entries[index];
        if entry.stage.number > 0 || entry.name == STAGE {
            continue;
        }
        let parts: Vec<Entry> = program.parts(index).into_iter().map(|part| program.entries[part].clone()).collect();
        if parts.len() != stages {
            return Err(format!("{} is of {} stages, the program of {stages}", entry.kind.name(), parts.len()));
        }
        match entry.kind {
            EntryKind::Update => check_group(&parts).map_err(|error| format!("update: {error}"))?,
            EntryKind::Evaluate => evaluation(&parts)?,
            EntryKind::FirstMicroStep | EntryKind::NextMicroStep | EntryKind::Forward | EntryKind::Prepare => {}
        }
    }
    Ok(())
}

/// Checks the tensors that stages pass on in an evaluation.
fn evaluation(parts: &[Entry]) -> Result<(), String> {
    let mut sent: &[TensorRef] = &[];
    for (stage, part) in parts.iter().enumerate() {
        alike(sent, &part.stage.from_previous).map_err(|error| format!("stage {stage}, evaluation: {error}"))?;
        sent = &part.stage.to_next;
    }
    if sent.is_empty() { Ok(()) } else { Err("the last stage hands something on".to_owned()) }
}

/// Checks that sent and received tensors agree one for one, in type and number of bytes.
fn alike(sent: &[TensorRef], received: &[TensorRef]) -> Result<(), String> {
    let form = |of: &[TensorRef]| of.iter().map(|at| (at.dtype, at.bytes())).collect::<Vec<_>>();
    if form(sent) == form(received) && sent.iter().chain(received).all(TensorRef::is_dense) {
        return Ok(());
    }
    let bytes = |of: &[TensorRef]| of.iter().map(TensorRef::bytes).sum::<usize>();
    Err(format!("{} bytes are sent, {} expected, or in other tensors", bytes(sent), bytes(received)))
}

/// The state of a simulated step.
struct Pipeline<'a> {
    program: &'a Program,
    micro_steps: usize,
    /// For each stage the entries of a forward pass, of the first micro-step and of the others.
    entries: Vec<[Option<&'a Entry>; 3]>,
    turns: Vec<VecDeque<Turn>>,
    /// Tensors sent from each stage to the next one and not received yet, with the number of the micro-step.
    forward: Vec<VecDeque<(usize, &'a [TensorRef])>>,
    /// Tensors sent from each stage to the one before and not received yet.
    backward: Vec<VecDeque<(usize, &'a [TensorRef])>>,
    /// Micro-steps that each stage has begun and not ended.
    in_flight: Vec<Vec<usize>>,
}

impl<'a> Pipeline<'a> {
    fn new(program: &'a Program, variant: Variant, micro_steps: usize) -> Result<Self, String> {
        let stages = program.cluster.stages;
        let of = |stage: usize, kind: EntryKind, name: &str| {
            program.entries.iter().find(|entry| {
                (entry.stage.number, entry.kind, entry.name.as_str(), entry.variant)
                    == (stage, kind, name, Some(variant))
            })
        };
        let kinds = [(EntryKind::Forward, STAGE), (EntryKind::FirstMicroStep, ""), (EntryKind::NextMicroStep, "")];
        Ok(Pipeline {
            program,
            micro_steps,
            entries: (0..stages).map(|stage| kinds.map(|(kind, name)| of(stage, kind, name))).collect(),
            turns: (0..stages).map(|stage| schedule(stage, stages, micro_steps).into()).collect(),
            forward: vec![VecDeque::new(); stages],
            backward: vec![VecDeque::new(); stages],
            in_flight: vec![Vec::new(); stages],
        })
    }

    fn run(mut self) -> Result<(), String> {
        loop {
            let mut moved = false;
            for stage in 0..self.turns.len() {
                while self.advance(stage)? {
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        let waiting = self.turns.iter().enumerate().find_map(|(stage, turns)| Some((stage, turns.front()?)));
        let left = self.forward.iter().chain(&self.backward).any(|sent| !sent.is_empty());
        match waiting {
            Some((stage, turn)) => Err(format!("stage {stage} waits for ever in {turn:?} of {}", self.micro_steps)),
            None if left => Err("something is sent that no stage takes".to_owned()),
            None => Ok(()),
        }
    }

    /// Does the next pass of a stage, if its inputs are there.
    fn advance(&mut self, stage: usize) -> Result<bool, String> {
        let Some(turn) = self.turns[stage].front().copied() else { return Ok(false) };
        let (number, which) = match turn {
            Turn::Forward(number) => (number, 0),
            Turn::Backward(number) => (number, if number == 0 { 1 } else { 2 }),
        };
        let failed = |why: String| format!("stage {stage}, {turn:?} of {}: {why}", self.micro_steps);
        let entry = self.entries[stage][which].ok_or_else(|| failed("it has no entry for it".to_owned()))?;
        let source = |direction: SendDirection| match direction {
            SendDirection::Forward => stage.checked_sub(1),
            SendDirection::Backward => Some(stage + 1).filter(|from| *from < self.turns.len()),
        };
        for (direction, expected) in entry.stage.received().into_iter().filter(|(_, expected)| !expected.is_empty()) {
            let from = source(direction).ok_or_else(|| failed("it waits for a stage that is not there".to_owned()))?;
            let sent = if direction == SendDirection::Forward { &self.forward[from] } else { &self.backward[from] };
            let Some((of, tensors)) = sent.front() else { return Ok(false) };
            if *of != number {
                return Err(failed(format!("micro-step {of} comes from stage {from}")));
            }
            alike(tensors, expected).map_err(failed)?;
        }
        for (direction, _) in entry.stage.received().into_iter().filter(|(_, expected)| !expected.is_empty()) {
            let from = source(direction).expect("it was there");
            let sent = if direction == SendDirection::Forward { &mut self.forward } else { &mut self.backward };
            sent[from].pop_front();
        }
        for (direction, tensors) in entry.stage.sent().into_iter().filter(|(_, tensors)| !tensors.is_empty()) {
            let sent = if direction == SendDirection::Forward { &mut self.forward } else { &mut self.backward };
            sent[stage].push_back((number, tensors));
        }
        let slots = self.program.slots(stage);
        let in_flight = &mut self.in_flight[stage];
        if !in_flight.contains(&number) {
            in_flight.push(number);
        }
        if in_flight.len() > slots {
            return Err(format!(
                "stage {stage}, {turn:?}: {} micro-steps are in flight in {slots} slots",
                in_flight.len()
            ));
        }
        if let Turn::Backward(number) = turn {
            in_flight.retain(|of| *of != number);
        }
        self.turns[stage].pop_front();
        Ok(true)
    }
}
