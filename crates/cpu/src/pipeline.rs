//! The stages of a pipeline as threads: a session for each, with memory and a pool of its own. Micro-steps are queued until
//! something needs what they come to; then all stages do their passes of all of them, one forward, one backward, and hand on
//! what the program says. Knows stages, slots and what crosses; not what an instruction does.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;
use std::{panic, thread};

use program::{
    ArenaKind, BackendError, EntryKind, Hand, MemoryLine, Program, STAGE, Session, TensorRef, Turn, scalar, schedule,
};

use crate::fabric::Seat;
use crate::session::CpuSession;

/// Bytes for places of stages, in which they are found by themselves.
type Writes = Vec<(usize, TensorRef, Vec<u8>)>;

/// A micro-step that has not run yet.
struct Queued {
    /// One of its entries.
    entry: usize,
    /// Its batch and its number.
    writes: Writes,
}

/// What a stage gets from its neighbours and gives them. A message is what crosses at one pass, tensor by tensor.
struct Links {
    from: [Option<Receiver<Vec<Vec<u8>>>>; 2],
    to: [Option<Sender<Vec<Vec<u8>>>>; 2],
    patience: Duration,
}

/// A program of stages.
pub struct PipelineSession {
    program: Arc<Program>,
    stages: Vec<CpuSession>,
    seats: Vec<Seat>,
    patience: Duration,
    queued: Vec<Queued>,
    /// Written for the entry that runs next.
    pending: Writes,
}

fn failed(call: String, message: String) -> BackendError {
    BackendError::Failed { call, message, context: None }
}

impl PipelineSession {
    /// One session for each seat, made by `load`. `patience`: how long a stage waits for its neighbours.
    pub fn load(
        program: Arc<Program>,
        seats: Vec<Seat>,
        patience: Duration,
        load: impl Fn(Arc<Program>, Seat) -> Result<CpuSession, BackendError>,
    ) -> Result<Self, BackendError> {
        let of = |seat: &Seat| load(Arc::new(program.of_stage(seat.rank)), seat.clone());
        let stages = seats.iter().map(of).collect::<Result<_, _>>()?;
        Ok(PipelineSession { program, stages, seats, patience, queued: Vec::new(), pending: Vec::new() })
    }

    /// Runs what is queued.
    fn flush(&mut self) -> Result<(), BackendError> {
        let queued = std::mem::take(&mut self.queued);
        if queued.is_empty() {
            return Ok(());
        }
        let count = self.stages.len();
        let mut links: VecDeque<Links> = self.links().into();
        let program = self.program.clone();
        self.together(
            |stage, session| (stage, session, links.pop_front().expect("links for each stage")),
            |work| {
                let (stage, session, links) = work;
                for turn in schedule(*stage, count, queued.len()) {
                    pass(&program, *stage, session, links, &queued, turn)?;
                }
                Ok(())
            },
        )
        .map(drop)
    }

    /// Channels from each stage to the next and back.
    fn links(&self) -> Vec<Links> {
        let none = || Links { from: [None, None], to: [None, None], patience: self.patience };
        let mut links: Vec<Links> = self.stages.iter().map(|_| none()).collect();
        for stage in 1..links.len() {
            let (on, taken) = channel();
            (links[stage - 1].to[Hand::On as usize], links[stage].from[Hand::On as usize]) = (Some(on), Some(taken));
            let (back, taken) = channel();
            (links[stage].to[Hand::Back as usize], links[stage - 1].from[Hand::Back as usize]) =
                (Some(back), Some(taken));
        }
        links
    }

    /// Does something on every stage at once, with what `given` gives it. The error is that of the stage that failed first,
    /// and names it; the others have stopped. What a stage was given is dropped when its failure is known: links that end
    /// make its neighbours fail too.
    fn together<'s, G: Send, T: Send>(
        &'s mut self,
        mut given: impl FnMut(usize, &'s mut CpuSession) -> G,
        run: impl Fn(&mut G) -> Result<T, BackendError> + Sync,
    ) -> Result<Vec<T>, BackendError> {
        let run = &run;
        let on_stage = |seat: &Seat, mut given: G| {
            let result = panic::catch_unwind(panic::AssertUnwindSafe(|| run(&mut given)));
            match &result {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => seat.fail(error.to_string()),
                Err(_) => seat.fail("it panicked".into()),
            }
            drop(given);
            result
        };
        let stages = self.seats.len();
        let results: Vec<_> = thread::scope(|scope| {
            let work = self.seats.iter().zip(self.stages.iter_mut().enumerate());
            let threads: Vec<_> = work
                .map(|(seat, (stage, session))| {
                    let given = given(stage, session);
                    scope.spawn(move || on_stage(seat, given))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("a stage's thread catches what it runs")).collect()
        });
        let mut done = Vec::new();
        let mut stopped = false;
        for result in results {
            match result {
                Err(payload) => panic::resume_unwind(payload),
                Ok(Ok(value)) => done.push(value),
                Ok(Err(_)) => stopped = true,
            }
        }
        match self.seats[0].failure().filter(|_| stopped) {
            Some((stage, why)) => {
                let message = format!("{why}; the other stages were stopped");
                Err(failed(format!("stage {stage} of {stages}"), message))
            }
            None => Ok(done),
        }
    }

    /// Lets a micro-batch go through all stages by itself, in the first slot, with `run` for each pass.
    fn alone(
        &mut self,
        entry: usize,
        mut run: impl FnMut(&mut CpuSession, usize, usize) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        self.flush()?;
        self.write_pending()?;
        for pass in self.program.clone().passes(entry) {
            self.hand(pass)?;
            let stage = self.program.entries[pass].stage.number;
            let local = self.program.entry_in_stage(pass, 0);
            run(&mut self.stages[stage], pass, local).map_err(|error| self.of_stage(stage, error))?;
        }
        Ok(())
    }

    fn of_stage(&self, stage: usize, error: BackendError) -> BackendError {
        failed(format!("stage {stage} of {}", self.seats.len()), error.to_string())
    }

    fn write_pending(&mut self) -> Result<(), BackendError> {
        for (stage, at, bytes) in std::mem::take(&mut self.pending) {
            self.stages[stage].write(&at, &bytes)?;
        }
        Ok(())
    }

    /// Brings what an entry receives from where the passes before it left it.
    fn hand(&mut self, entry: usize) -> Result<(), BackendError> {
        let program = self.program.clone();
        let (of, variant) = (&program.entries[entry].stage, program.entries[entry].variant);
        let kind = program.entries[entry].kind;
        for (hand, to) in of.received().into_iter().filter(|(_, to)| !to.is_empty()) {
            let from = match hand {
                Hand::On => of.number - 1,
                Hand::Back => of.number + 1,
            };
            let ahead = hand == Hand::On && kind.trains();
            let gives = program.entries.iter().find(|other| {
                let named = if ahead { other.name == STAGE } else { other.kind == kind };
                (other.stage.number, other.variant) == (from, variant) && named
            });
            let sent = gives.expect("a neighbour has the pass in front").stage.sent();
            let sent = sent[hand as usize].1;
            for (from_at, to_at) in sent.iter().zip(to) {
                let mut bytes = vec![0; to_at.bytes()];
                self.stages[from].read(&program.in_stage(from_at), &mut bytes)?;
                self.stages[of.number].write(&program.in_stage(to_at), &bytes)?;
            }
        }
        Ok(())
    }

    /// The place of a tensor: its stage, and where that finds it.
    fn place(&self, at: &TensorRef) -> (usize, TensorRef) {
        (self.program.stage_of(at.arena), self.program.in_stage(at))
    }
}

/// One pass of a stage: takes what comes, runs its entry in the slot of the micro-step, gives what it came to.
fn pass(
    program: &Program,
    stage: usize,
    session: &mut CpuSession,
    links: &Links,
    queued: &[Queued],
    turn: Turn,
) -> Result<(), BackendError> {
    let (Turn::Forward(number) | Turn::Backward(number)) = turn;
    let micro_step = &queued[number];
    let slots = program.slots(stage);
    let slot = number % slots;
    let step = program.in_slots(stage);
    let ahead = matches!(turn, Turn::Forward(_));
    let entry = program.passes(micro_step.entry).into_iter().find(|pass| {
        let entry = &program.entries[*pass];
        entry.stage.number == stage && (entry.name == STAGE) == ahead
    });
    let entry = entry.expect("a stage has its passes");
    let in_slot = |at: &TensorRef| {
        let batch = at.arena == ArenaKind::Batch.id();
        TensorRef { offset: at.offset + if batch { slot * step } else { 0 }, ..at.clone() }
    };
    for (_, at, bytes) in micro_step.writes.iter().filter(|(of, _, _)| *of == stage) {
        session.write(&in_slot(at), bytes)?;
    }
    let of = &program.entries[entry].stage;
    for (hand, to) in of.received().into_iter().filter(|(_, to)| !to.is_empty()) {
        for (at, bytes) in to.iter().zip(links.take(hand)?) {
            session.write(&in_slot(&program.in_stage(at)), &bytes)?;
        }
    }
    session.run(program.entry_in_stage(entry, slot))?;
    for (hand, from) in of.sent().into_iter().filter(|(_, from)| !from.is_empty()) {
        let mut message = Vec::new();
        for at in from {
            let mut bytes = vec![0; at.bytes()];
            session.read(&in_slot(&program.in_stage(at)), &mut bytes)?;
            message.push(bytes);
        }
        links.give(hand, message)?;
    }
    Ok(())
}

impl Links {
    fn take(&self, hand: Hand) -> Result<Vec<Vec<u8>>, BackendError> {
        let from = self.from[hand as usize].as_ref().expect("there is a stage on that side");
        from.recv_timeout(self.patience).map_err(|error| match error {
            RecvTimeoutError::Timeout => ended(format!("it waited {} s for its neighbour", self.patience.as_secs())),
            RecvTimeoutError::Disconnected => ended("its neighbour has ended".to_owned()),
        })
    }

    fn give(&self, hand: Hand, message: Vec<Vec<u8>>) -> Result<(), BackendError> {
        let to = self.to[hand as usize].as_ref().expect("there is a stage on that side");
        to.send(message).map_err(|_| ended("its neighbour has ended".to_owned()))
    }
}

fn ended(message: String) -> BackendError {
    failed("handing on".to_owned(), message)
}

impl Session for PipelineSession {
    fn program(&self) -> &Arc<Program> {
        &self.program
    }

    fn adopt(&mut self, program: Arc<Program>) -> Result<(), BackendError> {
        assert!(program.has_layout_of(&self.program), "a session goes on over the layout that it was loaded with");
        self.flush()?;
        for (seat, session) in self.seats.iter().zip(&mut self.stages) {
            session.adopt(Arc::new(program.of_stage(seat.rank)))?;
        }
        self.program = program;
        Ok(())
    }

    /// A batch, and the number of a micro-step, are for the entry that runs next. Scalars are those of all stages.
    fn write(&mut self, at: &TensorRef, bytes: &[u8]) -> Result<(), BackendError> {
        let (stage, place) = self.place(at);
        if self.program.scalar(scalar::MICRO_STEP) == Some(at) {
            let all = 0..self.stages.len();
            self.pending.extend(all.map(|stage| (stage, place.clone(), bytes.to_vec())));
            return Ok(());
        }
        if place.arena == ArenaKind::Batch.id() {
            self.pending.push((stage, place, bytes.to_vec()));
            return Ok(());
        }
        self.flush()?;
        match place.arena == ArenaKind::Scalars.id() {
            true => self.stages.iter_mut().try_for_each(|session| session.write(&place, bytes)),
            false => self.stages[stage].write(&place, bytes),
        }
    }

    fn read(&mut self, at: &TensorRef, out: &mut [u8]) -> Result<(), BackendError> {
        self.flush()?;
        let (stage, place) = self.place(at);
        self.stages[stage].read(&place, out)
    }

    fn run(&mut self, entry: usize) -> Result<(), BackendError> {
        match self.program.entries[entry].kind {
            EntryKind::FirstMicroStep | EntryKind::NextMicroStep => {
                let writes = std::mem::take(&mut self.pending);
                self.queued.push(Queued { entry, writes });
                Ok(())
            }
            EntryKind::Evaluate | EntryKind::Forward => self.alone(entry, |session, _, local| session.run(local)),
            EntryKind::Update | EntryKind::Prepare => {
                self.flush()?;
                let program = self.program.clone();
                let parts = program.parts(entry);
                let local = |stage: usize| program.entry_in_stage(parts[stage], 0);
                self.together(|stage, session| (session, local(stage)), |(session, local)| session.run(*local))
                    .map(drop)
            }
        }
    }

    /// Of one stage, when what it receives is where the passes before it left it.
    fn run_instruction(&mut self, entry: usize, index: usize) -> Result<(), BackendError> {
        self.flush()?;
        if index == 0 {
            self.write_pending()?;
            self.hand(entry)?;
        }
        let local = self.program.entry_in_stage(entry, 0);
        self.stages[self.program.entries[entry].stage.number].run_instruction(local, index)
    }

    /// Of the stage that holds most.
    fn allocated(&self) -> Vec<MemoryLine> {
        self.stages[self.program.fullest_stage()].allocated()
    }

    /// Of the stage that the entry is of; an update with its waits for the others. Nothing else runs at the same time.
    fn profile(&mut self, entry: usize) -> Result<Vec<f64>, BackendError> {
        let program = self.program.clone();
        if program.entries[entry].kind == EntryKind::Update {
            self.flush()?;
            let parts = program.parts(entry);
            let local = |stage: usize| program.entry_in_stage(parts[stage], 0);
            let given = |stage, session| (session, local(stage));
            let mut all = self.together(given, |given: &mut (&mut CpuSession, usize)| given.0.profile(given.1))?;
            return Ok(all.swap_remove(program.entries[entry].stage.number));
        }
        let mut seconds = Vec::new();
        self.alone(entry, |session, pass, local| {
            let times = session.profile(local)?;
            if pass == entry {
                seconds = times;
            }
            Ok(())
        })?;
        Ok(seconds)
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        self.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use program::{
        Arena, ArenaId, Cluster, Cost, Entry, Instruction, Layout, Machine, Provenance, Stage, Step, Variant,
        check_stages, join,
    };
    use rayon::ThreadPoolBuilder;
    use tensor::DType;

    use super::*;
    use crate::fabric::Fabric;

    const STAGES: usize = 3;
    const VARIANT: Variant = Variant { batch: 1, seq_len: 1, documents: program::Documents::Rows };

    fn at(kind: ArenaKind, offset: usize) -> TensorRef {
        TensorRef::dense(kind.id(), offset, DType::F32, [1])
    }

    /// A stage that hands on what it was given with nothing added, forward and back; the first one's micro-batch is a number,
    /// and each stage has what comes back to it last.
    fn part(stage: usize) -> Program {
        let (input, received, gradient) =
            (at(ArenaKind::Batch, 0), at(ArenaKind::Batch, 64), at(ArenaKind::Batch, 128));
        let (sent, returned, last) =
            (at(ArenaKind::Activations, 0), at(ArenaKind::Activations, 64), at(ArenaKind::Weights, 0));
        let (is_first, is_last) = (stage == 0, stage + 1 == STAGES);
        let entry = |kind: EntryKind, name: &str, copies: Vec<(TensorRef, TensorRef)>, crossing: Stage| Entry {
            kind,
            name: name.to_owned(),
            variant: (kind != EntryKind::Update).then_some(VARIANT),
            steps: copies
                .into_iter()
                .map(|(from, to)| Step {
                    instruction: Instruction::Copy { from, to },
                    provenance: Provenance { op: format!("of {}", kind.name()), ..Provenance::default() },
                    cost: Cost::default(),
                })
                .collect(),
            inputs: if is_first { vec![("input_ids".into(), input.clone())] } else { vec![] },
            outputs: vec![],
            stage: crossing,
        };
        let none = Vec::new;
        let given = if is_first { input.clone() } else { received.clone() };
        let handed = Stage {
            from_before: if is_first { none() } else { vec![received.clone()] },
            to_behind: if is_last { none() } else { vec![sent.clone()] },
            ..Stage::default()
        };
        let back = Stage {
            from_before: if is_last { vec![received.clone()] } else { none() },
            from_behind: if is_last { none() } else { vec![gradient.clone()] },
            to_before: if is_first { none() } else { vec![returned.clone()] },
            ..Stage::default()
        };
        let came = if is_last { received } else { gradient };
        let ahead = entry(EntryKind::Forward, STAGE, vec![(given.clone(), sent.clone())], handed.clone());
        let step =
            |kind| entry(kind, "", vec![(came.clone(), returned.clone()), (came.clone(), last.clone())], back.clone());
        let mut entries = vec![step(EntryKind::FirstMicroStep), step(EntryKind::NextMicroStep)];
        entries.push(entry(EntryKind::Evaluate, "", vec![(given.clone(), sent), (given, last)], handed));
        entries.extend((!is_last).then_some(ahead));
        entries.push(entry(EntryKind::Update, "", vec![], Stage::default()));
        let bytes = |kind: ArenaKind| if kind == ArenaKind::Batch { 192 * (STAGES - stage) } else { 256 };
        Program {
            name: "test".into(),
            machine: Machine::cpu(1 << 30, 1),
            cluster: Cluster { stages: STAGES, ..Cluster::ONE },
            arenas: ArenaKind::ALL.map(|kind| Arena::on_device(kind, bytes(kind))).to_vec(),
            layout: Layout::default(),
            constants: vec![],
            scalars: vec![(scalar::MICRO_STEP.into(), at(ArenaKind::Scalars, 0))],
            kernels: vec![],
            entries,
            memory: vec![],
            activations: vec![],
            phases: vec![],
            plan: vec![],
            seed: 0,
        }
    }

    fn pipeline() -> PipelineSession {
        let program = Arc::new(join((0..STAGES).map(part).collect(), &[]));
        assert_eq!(check_stages(&program), Ok(()));
        let pool = || Arc::new(ThreadPoolBuilder::new().num_threads(1).build().unwrap());
        let load = |program: Arc<Program>, seat: Seat| CpuSession::load(program, pool(), false, Some(seat));
        let patience = Duration::from_secs(600);
        PipelineSession::load(program, Fabric::seats(STAGES, patience), patience, load).unwrap()
    }

    /// Queues micro-steps whose batches are these numbers.
    fn queue(pipeline: &mut PipelineSession, numbers: &[f32]) {
        let program = pipeline.program().clone();
        for (index, number) in numbers.iter().enumerate() {
            let entry = program.micro_step(index == 0, index + 1 == numbers.len(), Some(VARIANT)).unwrap();
            pipeline.write(&program.entries[entry].inputs[0].1, &number.to_le_bytes()).unwrap();
            pipeline.run(entry).unwrap();
        }
    }

    fn last(pipeline: &mut PipelineSession, stage: usize) -> f32 {
        let arena = ArenaId(stage as u32 * ArenaKind::ALL.len() as u32 + ArenaKind::Weights.id().0);
        let mut bytes = [0; 4];
        pipeline.read(&TensorRef { arena, ..at(ArenaKind::Weights, 0) }, &mut bytes).unwrap();
        f32::from_le_bytes(bytes)
    }

    #[test]
    fn micro_steps_come_to_all_stages_in_their_order() {
        for count in 1..9 {
            let mut pipeline = pipeline();
            let numbers: Vec<f32> = (0..count).map(|number| 10.0 + number as f32).collect();
            queue(&mut pipeline, &numbers);
            for stage in (0..STAGES).rev() {
                assert_eq!(last(&mut pipeline, stage), *numbers.last().unwrap(), "stage {stage}, {count} micro-steps");
            }
        }
    }

    #[test]
    fn an_evaluation_goes_through_all_stages() {
        let mut pipeline = pipeline();
        queue(&mut pipeline, &[1.0, 2.0]);
        let program = pipeline.program().clone();
        let entry = program.entry(EntryKind::Evaluate, Some(VARIANT)).unwrap();
        pipeline.write(&program.entries[entry].inputs[0].1, &7f32.to_le_bytes()).unwrap();
        pipeline.run(entry).unwrap();
        assert_eq!([0, 1, 2].map(|stage| last(&mut pipeline, stage)), [7.0; 3]);
    }

    #[test]
    fn a_stage_that_fails_is_named_with_its_instruction_and_ends_the_others() {
        let cases = (0..STAGES).flat_map(|stage| [1, 4].map(|count| (stage, count)));
        for (stage, micro_steps) in cases.flat_map(|case| [case; 50]) {
            let mut pipeline = pipeline();
            pipeline.stages[stage].fails_at = Some(0);
            queue(&mut pipeline, &vec![1.0; micro_steps]);
            let begin = Instant::now();
            let message = pipeline.synchronize().unwrap_err().to_string();
            assert!(begin.elapsed() < Duration::from_secs(5), "the others do not wait");
            let expected = [format!("stage {stage} of 3"), "instruction 0 was made to fail".to_owned()];
            assert!(expected.iter().all(|part| message.contains(part)), "{message}");
        }
    }

    #[test]
    fn a_neighbour_that_does_not_answer_is_not_waited_for_for_ever() {
        let mut pipeline = pipeline();
        pipeline.patience = Duration::from_millis(50);
        let links = pipeline.links();
        let message = links[1].take(Hand::On).unwrap_err().to_string();
        assert!(message.contains("it waited 0 s for its neighbour"), "{message}");
        drop(links);
    }
}
