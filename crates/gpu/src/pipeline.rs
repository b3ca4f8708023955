//! The stages of a pipeline on a GPU each. One thread queues the passes of all, each after those that it depends on, so
//! nothing that is queued waits for what is not. The sender's GPU copies a stage's result into a slot of the receiver.
//! Knows stages, slots and what crosses; not when micro-steps run, or what an instruction does.

use std::sync::Arc;

use program::{BackendError, MicroStep, Program, SendDirection, Session, Stages, TensorRef, Turn, turns};

use crate::driver::{Device, Event};
use crate::engine::Options;
use crate::error::{During, Result};
use crate::fabric::{Fabric, Lane, Transport, all_reach, transports};
use crate::group::{THROUGH_HOST, watch_over};
use crate::session::{GpuSession, backend_error};

/// The events of a stage that others wait for. An event belongs to the GPU that records it.
struct Marks {
    /// By slot: the micro-step that had it has ended.
    free: Vec<Event>,
    /// By direction and slot: the bytes of the neighbor on that side have come.
    come: [Vec<Event>; 2],
    /// The end of all queued work.
    now: Event,
}

/// The stages of a program. The fields are dropped in order: what uses memory goes before it.
pub struct GpuStages {
    program: Arc<Program>,
    fabric: Fabric,
    marks: Vec<Marks>,
    /// True if all GPUs have peer access to each other.
    peers: bool,
    check_each: bool,
    sessions: Vec<GpuSession>,
}

impl GpuStages {
    /// Opens one GPU for each stage of the program, from the first visible one on. Later stages use the algorithms that
    /// earlier ones chose for the same products.
    pub fn load(program: &Arc<Program>, options: &Options) -> std::result::Result<GpuStages, BackendError> {
        Self::opened(program, options).map_err(backend_error)
    }

    fn opened(program: &Arc<Program>, options: &Options) -> Result<GpuStages> {
        let mut options = options.clone();
        let first_device = options.device;
        let count = program.cluster.stages;
        let mut sessions = Vec::new();
        for stage in 0..count {
            options.device = first_device + if options.one_device { 0 } else { stage };
            let loaded = GpuSession::load(Arc::new(program.of_stage(stage)), &options);
            let session = loaded.during(|| format!("loading stage {stage} of {count}"))?;
            options.algorithms.extend(session.algorithms().clone());
            sessions.push(session);
        }
        let devices: Vec<_> = sessions.iter().map(|session| session.engine().device.clone()).collect();
        let watch = Arc::new(watch_over(None));
        devices.iter().for_each(|device| device.watch_with(&watch));
        let peers = all_reach(&devices, options.ways)?;
        let ways = transports(options.ways, 1, peers);
        assert!(!ways.contains(&Transport::Nccl), "the options of a pipeline do not ask for NCCL");
        let marks = (0..count).map(|stage| Marks::new(program, &devices, stage)).collect::<Result<_>>()?;
        let fabric = Fabric::new(0..count, count, devices, ways, None)?;
        let mut stages =
            GpuStages { program: program.clone(), fabric, marks, peers, check_each: options.check_each, sessions };
        stages.make_room(program)?;
        Ok(stages)
    }

    fn make_room(&mut self, program: &Program) -> Result<()> {
        self.fabric.missing(program).map_or(Ok(()), |bytes| self.fabric.grow(bytes))
    }

    /// Queues one pass of a stage: it waits for its inputs, runs its entry in the slot of the micro-step, and sends its
    /// results.
    fn pass(&mut self, micro_steps: &[MicroStep], stage: usize, turn: Turn) -> std::result::Result<(), BackendError> {
        let program = self.program.clone();
        let (Turn::Forward(number) | Turn::Backward(number)) = turn;
        let micro_step = &micro_steps[number];
        let slot = number % program.slots(stage);
        let entry = program.pass(micro_step.entry, stage, turn);
        let session = &mut self.sessions[stage];
        for (_, at, bytes) in micro_step.writes.iter().filter(|(of, _, _)| *of == stage) {
            session.write(&program.in_slot(stage, slot, at), bytes)?;
        }
        let crossing = &program.entries[entry].stage;
        self.wait_for(stage, slot, crossing.received()).map_err(backend_error)?;
        self.sessions[stage].run(program.entry_in_stage(entry, slot))?;
        for (direction, from) in crossing.sent().into_iter().filter(|(_, from)| !from.is_empty()) {
            let receiver = direction.receiver(stage);
            let slot_there = number % program.slots(receiver);
            let taken = match (direction, receiver + 1 == program.cluster.stages) {
                (SendDirection::Forward, false) => program.pass(micro_step.entry, receiver, Turn::Forward(number)),
                _ => program.pass(micro_step.entry, receiver, Turn::Backward(number)),
            };
            let to = program.entries[taken].stage.received()[direction as usize].1;
            let from = from.iter().map(|at| program.in_slot(stage, slot, at));
            let to = to.iter().map(|at| program.in_slot(receiver, slot_there, at));
            self.send_results(direction, (stage, from), (receiver, slot_there, to)).map_err(backend_error)?;
        }
        if let Turn::Backward(_) = turn {
            let engine = self.sessions[stage].engine();
            let marked = engine.device.bind().and_then(|()| self.marks[stage].free[slot].record(&engine.stream));
            marked.map_err(backend_error)?;
        }
        Ok(())
    }

    /// Makes a stage wait for the tensors that an entry receives.
    fn wait_for(&self, stage: usize, slot: usize, received: [(SendDirection, &[TensorRef]); 2]) -> Result<()> {
        let engine = self.sessions[stage].engine();
        engine.device.bind()?;
        let mut received = received.into_iter().filter(|(_, to)| !to.is_empty());
        received.try_for_each(|(direction, _)| engine.stream.wait(&self.marks[stage].come[direction as usize][slot]))
    }

    /// Copies the results of a pass into a slot of a neighbor. Forward passes wait until the slot is free; in the
    /// backward direction it is that of the micro-step itself.
    fn send_results(
        &self,
        direction: SendDirection,
        (stage, from): (usize, impl Iterator<Item = TensorRef>),
        (receiver, slot, to): (usize, usize, impl Iterator<Item = TensorRef>),
    ) -> Result<()> {
        let engine = self.sessions[stage].engine();
        engine.device.bind()?;
        if direction == SendDirection::Forward {
            engine.stream.wait(&self.marks[receiver].free[slot])?;
        }
        from.zip(to).try_for_each(|(from, to)| self.copy((stage, &from), (receiver, &to)))?;
        self.marks[receiver].come[direction as usize][slot].record(&engine.stream)
    }

    /// Queues a copy on the sender's GPU, whose context is bound.
    fn copy(&self, from: (usize, &TensorRef), to: (usize, &TensorRef)) -> Result<()> {
        let (sender, receiver) = (&self.sessions[from.0], &self.sessions[to.0]);
        let (source, target, bytes) = (sender.address(from.1), receiver.address(to.1), from.1.bytes());
        match self.peers {
            true => sender.engine().stream.copy_between(target, source, bytes),
            false => sender.engine().stream.copy_across((&receiver.engine().device, target), source, bytes),
        }
    }

    /// Queues an entry of each stage: instruction by instruction up to where stages come together.
    fn queue_together(&mut self, entries: &[usize], mut after: impl FnMut(&Self, usize) -> Result<()>) -> Result<()> {
        let count = entries.len();
        let steps: Vec<usize> =
            entries.iter().zip(&self.sessions).map(|(entry, of)| of.program().entries[*entry].steps.len()).collect();
        let mut next = vec![0; count];
        loop {
            for stage in 0..count {
                while next[stage] < steps[stage] && self.sessions[stage].joint(entries[stage], next[stage]).is_none() {
                    let at = (entries[stage], next[stage]);
                    let queued = self.sessions[stage].queue_step(at.0, at.1).and_then(|()| self.checked(stage));
                    queued.during(|| {
                        format!("stage {stage} of {count}, {}", self.sessions[stage].place_of(at.0, at.1))
                    })?;
                    after(self, stage)?;
                    next[stage] += 1;
                }
            }
            if next == steps {
                return Ok(());
            }
            self.meet(entries, &next)?;
            for (stage, next) in next.iter_mut().enumerate() {
                after(self, stage)?;
                *next += 1;
            }
        }
    }

    /// Queues a collective of all stages, each at its own instruction.
    fn meet(&self, entries: &[usize], steps: &[usize]) -> Result<()> {
        let at = |stage: usize| (&self.sessions[stage], entries[stage], steps[stage]);
        let joints: Vec<_> = (0..entries.len())
            .map(|stage| {
                let (session, entry, step) = at(stage);
                session.joint(entry, step).expect("the updates of all stages come together alike")
            })
            .collect();
        assert!(joints.iter().all(|joint| *joint == joints[0]), "the updates of all stages come together alike");
        let lane = |stage: usize| {
            let (session, entry, step) = at(stage);
            let (from, to, bytes) = session.joint_places(entry, step);
            Lane { stream: session.engine().exchange(), from, to, bytes }
        };
        let lanes: Vec<Lane<'_>> = (0..entries.len()).map(lane).collect();
        self.fabric.queue(joints[0].0, joints[0].1, &lanes)
    }

    /// Waits for a stage if every instruction is checked.
    fn checked(&self, stage: usize) -> Result<()> {
        if self.check_each { self.sessions[stage].engine().synchronise() } else { Ok(()) }
    }

    fn synchronise(&self) -> Result<()> {
        self.sessions.iter().try_for_each(|session| {
            let engine = session.engine();
            engine.device.bind()?;
            engine.synchronise()
        })
    }
}

impl Marks {
    /// Makes the events of a stage; neighbors record that their bytes have come.
    fn new(program: &Program, devices: &[Arc<Device>], stage: usize) -> Result<Marks> {
        let slots = |device: &Arc<Device>| {
            device.bind()?;
            (0..program.slots(stage)).map(|_| Event::without_time(device)).collect::<Result<Vec<_>>>()
        };
        let of = |neighbor: Option<usize>| neighbor.and_then(|stage| devices.get(stage)).map_or(Ok(Vec::new()), slots);
        let come = [of(stage.checked_sub(1))?, of(Some(stage + 1))?];
        let free = slots(&devices[stage])?;
        Ok(Marks { free, come, now: Event::without_time(&devices[stage])? })
    }
}

impl Stages for GpuStages {
    type Of = GpuSession;

    fn of(&mut self, stage: usize) -> &mut GpuSession {
        &mut self.sessions[stage]
    }

    fn get(&self, stage: usize) -> &GpuSession {
        &self.sessions[stage]
    }

    fn adopt(&mut self, program: &Arc<Program>) -> std::result::Result<(), BackendError> {
        let mut replace = || {
            self.synchronise()?;
            for (stage, session) in self.sessions.iter_mut().enumerate() {
                session.replace_entries(Arc::new(program.of_stage(stage)))?;
            }
            self.program = program.clone();
            self.make_room(program)
        };
        replace().during(|| "making other entries ready".into()).map_err(backend_error)
    }

    fn run_micro_steps(
        &mut self,
        program: &Arc<Program>,
        micro_steps: &[MicroStep],
    ) -> std::result::Result<(), BackendError> {
        let mut all = turns(program.cluster.stages, micro_steps.len()).into_iter();
        all.try_for_each(|(stage, turn)| {
            self.pass(micro_steps, stage, turn).map_err(|error| error.of_stage(program, stage))
        })
    }

    fn run_together(&mut self, entries: &[usize]) -> std::result::Result<(), BackendError> {
        self.queue_together(entries, |_, _| Ok(())).map_err(backend_error)
    }

    fn profile_together(&mut self, entries: &[usize], of: usize) -> std::result::Result<Vec<f64>, BackendError> {
        let mark = |stages: &GpuStages| {
            let engine = stages.sessions[of].engine();
            engine.device.bind()?;
            let mark = Event::new(&engine.device)?;
            mark.record(&engine.stream)?;
            Ok(mark)
        };
        let mut profile = || {
            self.synchronise()?;
            let mut marks = vec![mark(self)?];
            self.queue_together(entries, |stages, stage| {
                if stage == of {
                    marks.push(mark(stages)?);
                }
                Ok(())
            })?;
            self.synchronise()?;
            marks.windows(2).map(|pair| Ok(f64::from(pair[1].since(&pair[0])?) / 1e3)).collect::<Result<Vec<_>>>()
        };
        profile().map_err(backend_error)
    }

    /// Copies on the sender's GPU, after the queued work of both; later work of the receiver is queued after it.
    fn send(&mut self, from: (usize, &TensorRef), to: (usize, &TensorRef)) -> std::result::Result<(), BackendError> {
        let send = || {
            let (sender, receiver) = (self.sessions[from.0].engine(), self.sessions[to.0].engine());
            receiver.device.bind()?;
            self.marks[to.0].now.record(&receiver.stream)?;
            sender.device.bind()?;
            sender.stream.wait(&self.marks[to.0].now)?;
            self.copy(from, to)?;
            self.marks[from.0].now.record(&sender.stream)?;
            receiver.device.bind()?;
            receiver.stream.wait(&self.marks[from.0].now)
        };
        send().map_err(backend_error)
    }

    fn notes(&self) -> Vec<String> {
        if self.peers { Vec::new() } else { vec![THROUGH_HOST.to_owned()] }
    }
}

impl Drop for GpuStages {
    fn drop(&mut self) {
        // Stages write to each other's memory: no work may be in flight when the first one is freed.
        if self.synchronise().is_err() && !self.sessions.iter().all(|session| session.engine().comes_to_rest()) {
            // A GPU whose work does not end is left to the end of the process: freeing its memory would wait for it.
            std::mem::forget(std::mem::take(&mut self.sessions));
        }
    }
}
