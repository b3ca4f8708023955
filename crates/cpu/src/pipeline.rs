//! The stages of a pipeline as threads: a session for each, with memory and a pool of its own. Tensors cross from stage
//! to stage through channels. Knows stages and what crosses; not when micro-steps run, or what an instruction does.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use program::{BackendError, MicroStep, Program, SendDirection, Session, Stages, TensorRef, Turn, schedule};

use crate::fabric::RankHandle;
use crate::session::CpuSession;
use crate::together::together;

/// The channels from and to a stage's neighbors. A message has the tensors that cross at one pass, in order.
struct Links {
    from: [Option<Receiver<Vec<Vec<u8>>>>; 2],
    to: [Option<Sender<Vec<Vec<u8>>>>; 2],
    timeout: Duration,
}

/// The stages of a program.
pub struct CpuStages {
    sessions: Vec<CpuSession>,
    handles: Vec<RankHandle>,
    /// The time that a stage waits for its neighbors.
    timeout: Duration,
}

impl CpuStages {
    /// Loads one session for each rank handle, made by `load`. `timeout`: the time that a stage waits for its
    /// neighbors.
    pub fn load(
        program: &Program,
        handles: Vec<RankHandle>,
        timeout: Duration,
        load: impl Fn(Arc<Program>, RankHandle) -> Result<CpuSession, BackendError>,
    ) -> Result<Self, BackendError> {
        let of = |handle: &RankHandle| load(Arc::new(program.of_stage(handle.rank)), handle.clone());
        let sessions = handles.iter().map(of).collect::<Result<_, _>>()?;
        Ok(CpuStages { sessions, handles, timeout })
    }

    /// Channels from each stage to the next and back.
    fn links(&self) -> Vec<Links> {
        let none = || Links { from: [None, None], to: [None, None], timeout: self.timeout };
        let mut links: Vec<Links> = self.sessions.iter().map(|_| none()).collect();
        for stage in 1..links.len() {
            let (sender, receiver) = channel();
            links[stage - 1].to[SendDirection::Forward as usize] = Some(sender);
            links[stage].from[SendDirection::Forward as usize] = Some(receiver);
            let (sender, receiver) = channel();
            links[stage].to[SendDirection::Backward as usize] = Some(sender);
            links[stage - 1].from[SendDirection::Backward as usize] = Some(receiver);
        }
        links
    }
}

impl Stages for CpuStages {
    type Of = CpuSession;

    fn of(&mut self, stage: usize) -> &mut CpuSession {
        &mut self.sessions[stage]
    }

    fn get(&self, stage: usize) -> &CpuSession {
        &self.sessions[stage]
    }

    fn adopt(&mut self, program: &Arc<Program>) -> Result<(), BackendError> {
        let mut stages = self.sessions.iter_mut().enumerate();
        stages.try_for_each(|(stage, session)| session.adopt(Arc::new(program.of_stage(stage))))
    }

    fn run_micro_steps(&mut self, program: &Arc<Program>, micro_steps: &[MicroStep]) -> Result<(), BackendError> {
        let links = self.links();
        let given = self.sessions.iter_mut().zip(links).enumerate();
        let run = |(stage, (session, links)): &mut (usize, (&mut CpuSession, Links))| {
            let mut turns = schedule(*stage, program.cluster.stages, micro_steps.len()).into_iter();
            turns.try_for_each(|turn| pass(program, *stage, session, links, micro_steps, turn))
        };
        together("stage", &self.handles, given, run).map(drop)
    }

    fn run_together(&mut self, entries: &[usize]) -> Result<(), BackendError> {
        let given = self.sessions.iter_mut().zip(entries);
        together("stage", &self.handles, given, |(session, entry)| session.run(**entry)).map(drop)
    }

    fn profile_together(&mut self, entries: &[usize], stage: usize) -> Result<Vec<f64>, BackendError> {
        let given = self.sessions.iter_mut().zip(entries);
        let profiles = together("stage", &self.handles, given, |(session, entry)| session.profile(**entry))?;
        Ok(profiles.into_iter().nth(stage).expect("every stage has a profile"))
    }

    fn send(&mut self, from: (usize, &TensorRef), to: (usize, &TensorRef)) -> Result<(), BackendError> {
        let mut bytes = vec![0; from.1.bytes()];
        self.sessions[from.0].read(from.1, &mut bytes)?;
        self.sessions[to.0].write(to.1, &bytes)
    }

    fn notes(&self) -> Vec<String> {
        Vec::new()
    }
}

/// Runs one pass of a stage: receives its inputs, runs its entry in the slot of the micro-step, sends its results.
fn pass(
    program: &Program,
    stage: usize,
    session: &mut CpuSession,
    links: &Links,
    micro_steps: &[MicroStep],
    turn: Turn,
) -> Result<(), BackendError> {
    let (Turn::Forward(number) | Turn::Backward(number)) = turn;
    let micro_step = &micro_steps[number];
    let slot = number % program.slots(stage);
    let entry = program.pass(micro_step.entry, stage, turn);
    let in_slot = |at: &TensorRef| program.in_slot(stage, slot, at);
    for (_, at, bytes) in micro_step.writes.iter().filter(|(of, _, _)| *of == stage) {
        session.write(&in_slot(at), bytes)?;
    }
    let of = &program.entries[entry].stage;
    for (direction, to) in of.received().into_iter().filter(|(_, to)| !to.is_empty()) {
        for (at, bytes) in to.iter().zip(links.receive(direction)?) {
            session.write(&in_slot(at), &bytes)?;
        }
    }
    session.run(program.entry_in_stage(entry, slot))?;
    for (direction, from) in of.sent().into_iter().filter(|(_, from)| !from.is_empty()) {
        let mut message = Vec::new();
        for at in from {
            let mut bytes = vec![0; at.bytes()];
            session.read(&in_slot(at), &mut bytes)?;
            message.push(bytes);
        }
        links.send(direction, message)?;
    }
    Ok(())
}

impl Links {
    fn receive(&self, direction: SendDirection) -> Result<Vec<Vec<u8>>, BackendError> {
        let from = self.from[direction as usize].as_ref().expect("there is a stage on that side");
        from.recv_timeout(self.timeout).map_err(|error| match error {
            RecvTimeoutError::Timeout => ended(format!("it waited {} s for its neighbour", self.timeout.as_secs())),
            RecvTimeoutError::Disconnected => ended("its neighbour has ended".to_owned()),
        })
    }

    fn send(&self, direction: SendDirection, message: Vec<Vec<u8>>) -> Result<(), BackendError> {
        let to = self.to[direction as usize].as_ref().expect("there is a stage on that side");
        to.send(message).map_err(|_| ended("its neighbour has ended".to_owned()))
    }
}

fn ended(message: String) -> BackendError {
    BackendError::Failed { call: "handing on".to_owned(), message, context: None }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use program::{
        Arena, ArenaId, ArenaKind, Cluster, Cost, Entry, EntryKind, Instruction, Layout, Machine, PipelineSession,
        Provenance, STAGE, Stage, Step, Variant, check_stages, join, scalar,
    };
    use rayon::ThreadPoolBuilder;
    use tensor::DType;

    use super::*;
    use crate::fabric::Fabric;

    const STAGES: usize = 3;
    const VARIANT: Variant =
        Variant { batch: 1, seq_len: 1, documents: program::Documents::Rows, patches: 0, logits: 0 };

    fn at(kind: ArenaKind, offset: usize) -> TensorRef {
        TensorRef::dense(kind.id(), offset, DType::F32, [1])
    }

    /// A stage that passes on its inputs unchanged, forward and backward; the first stage's micro-batch is a number,
    /// and each stage keeps the last value that comes back to it.
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
            from_previous: if is_first { none() } else { vec![received.clone()] },
            to_next: if is_last { none() } else { vec![sent.clone()] },
            ..Stage::default()
        };
        let back = Stage {
            from_previous: if is_last { vec![received.clone()] } else { none() },
            from_next: if is_last { none() } else { vec![gradient.clone()] },
            to_previous: if is_first { none() } else { vec![returned.clone()] },
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

    fn pipeline() -> PipelineSession<CpuStages> {
        let program = Arc::new(join((0..STAGES).map(part).collect(), &[]));
        assert_eq!(check_stages(&program), Ok(()));
        let pool = || Arc::new(ThreadPoolBuilder::new().num_threads(1).build().unwrap());
        let load = |program: Arc<Program>, handle: RankHandle| CpuSession::load(program, pool(), false, Some(handle));
        let timeout = Duration::from_secs(600);
        let stages = CpuStages::load(&program, Fabric::handles(STAGES, timeout), timeout, load).unwrap();
        PipelineSession::new(program, stages)
    }

    /// Queues micro-steps whose batches are these numbers.
    fn queue(pipeline: &mut PipelineSession<CpuStages>, numbers: &[f32]) {
        let program = pipeline.program().clone();
        for (index, number) in numbers.iter().enumerate() {
            let entry = program.micro_step(index == 0, index + 1 == numbers.len(), Some(VARIANT)).unwrap();
            pipeline.write(&program.entries[entry].inputs[0].1, &number.to_le_bytes()).unwrap();
            pipeline.run(entry).unwrap();
        }
    }

    fn last(pipeline: &mut PipelineSession<CpuStages>, stage: usize) -> f32 {
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
            pipeline.stages_mut().of(stage).fails_at = Some(0);
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
        pipeline.stages_mut().timeout = Duration::from_millis(50);
        let links = pipeline.stages_mut().links();
        let message = links[1].receive(SendDirection::Forward).unwrap_err().to_string();
        assert!(message.contains("it waited 0 s for its neighbour"), "{message}");
        drop(links);
    }
}
