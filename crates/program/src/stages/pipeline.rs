//! A program of stages as one session. Micro-steps are queued until something needs their results; then all stages do
//! their passes of all of them. Knows stages, slots and which pass is of which entry; not how stages run at the same
//! time, or how bytes get from one to another: that is the part of [`Stages`].

use std::collections::HashMap;
use std::sync::Arc;

use super::{STAGE, SendDirection, Turn};
use crate::backend::{BackendError, Reading, Session};
use crate::memory::{ArenaKind, MemoryLine, TensorRef};
use crate::program::{Program, scalar};
use crate::variant::EntryKind;

/// Bytes to be written, each with its stage and its place as the stage by itself finds it.
pub type Writes = Vec<(usize, TensorRef, Vec<u8>)>;

/// A micro-step that has not run yet.
pub struct MicroStep {
    /// The index of one of its entries.
    pub entry: usize,
    /// Its batch and its number.
    pub writes: Writes,
}

/// The devices of the stages, with a session each, of [`Program::of_stage`].
pub trait Stages: Send {
    type Of: Session;

    /// The session of a stage.
    fn of(&mut self, stage: usize) -> &mut Self::Of;

    /// The session of a stage, for queries.
    fn get(&self, stage: usize) -> &Self::Of;

    /// Stages go on with another program over the same layout.
    fn adopt(&mut self, program: &Arc<Program>) -> Result<(), BackendError>;

    /// Does the passes of all micro-steps of a step in the order of [`super::schedule`]. The error is that of the stage that
    /// failed, and names it.
    fn run_micro_steps(&mut self, program: &Arc<Program>, micro_steps: &[MicroStep]) -> Result<(), BackendError>;

    /// Does an entry that all stages have, which may come together in it: of each stage its own.
    fn run_together(&mut self, entries: &[usize]) -> Result<(), BackendError>;

    /// Runs like [`Stages::run_together`], and returns the seconds of each instruction of one stage.
    fn profile_together(&mut self, entries: &[usize], stage: usize) -> Result<Vec<f64>, BackendError>;

    /// Copies bytes from one stage to another, after all queued work of both.
    fn send(&mut self, from: (usize, &TensorRef), to: (usize, &TensorRef)) -> Result<(), BackendError>;

    /// Decisions and findings of loading, a sentence each.
    fn notes(&self) -> Vec<String>;
}

/// The session of a program of stages.
pub struct PipelineSession<D> {
    program: Arc<Program>,
    stages: D,
    queued: Vec<MicroStep>,
    /// Writes for the entry that runs next.
    pending: Writes,
    /// Readings in flight, by the number that this session gives them: the stage and its reading.
    readings: HashMap<u64, (usize, Reading)>,
    last_reading: u64,
}

impl<D: Stages> PipelineSession<D> {
    /// Over the devices of a program's stages.
    pub fn new(program: Arc<Program>, stages: D) -> Self {
        let (queued, pending, readings) = (Vec::new(), Vec::new(), HashMap::new());
        PipelineSession { program, stages, queued, pending, readings, last_reading: 0 }
    }

    /// The devices of the stages.
    pub fn stages_mut(&mut self) -> &mut D {
        &mut self.stages
    }

    /// Runs the queued micro-steps through all stages.
    fn flush(&mut self) -> Result<(), BackendError> {
        match std::mem::take(&mut self.queued) {
            queued if queued.is_empty() => Ok(()),
            queued => self.stages.run_micro_steps(&self.program, &queued),
        }
    }

    /// Runs one micro-batch through all stages by itself, in the first slot, with `run` for each pass.
    fn alone(
        &mut self,
        entry: usize,
        mut run: impl FnMut(&mut D::Of, usize, usize) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        self.flush()?;
        self.write_pending()?;
        for pass in self.program.passes(entry) {
            self.receive(pass)?;
            let stage = self.program.entries[pass].stage.number;
            let local = self.program.entry_in_stage(pass, 0);
            run(self.stages.of(stage), pass, local).map_err(|error| error.of_stage(&self.program, stage))?;
        }
        Ok(())
    }

    fn write_pending(&mut self) -> Result<(), BackendError> {
        let mut pending = std::mem::take(&mut self.pending).into_iter();
        pending.try_for_each(|(stage, at, bytes)| self.stages.of(stage).write(&at, &bytes))
    }

    /// Copies the tensors that an entry receives from where the passes before it left them.
    fn receive(&mut self, entry: usize) -> Result<(), BackendError> {
        let program = self.program.clone();
        let (of, variant) = (&program.entries[entry].stage, program.entries[entry].variant);
        let kind = program.entries[entry].kind;
        for (direction, to) in of.received().into_iter().filter(|(_, to)| !to.is_empty()) {
            let from = direction.sender(of.number);
            let ahead = direction == SendDirection::Forward && kind.trains();
            let gives = program.entries.iter().find(|other| {
                let named = if ahead { other.name == STAGE } else { other.kind == kind };
                (other.stage.number, other.variant) == (from, variant) && named
            });
            let sent = gives.expect("a neighbour has the pass in front").stage.sent();
            for (from_at, to_at) in sent[direction as usize].1.iter().zip(to) {
                self.stages.send((from, &program.in_stage(from_at)), (of.number, &program.in_stage(to_at)))?;
            }
        }
        Ok(())
    }

    /// Returns the stage of a tensor, and its place as the stage by itself finds it.
    fn place(&self, at: &TensorRef) -> (usize, TensorRef) {
        (self.program.stage_of(at.arena), self.program.in_stage(at))
    }

    /// Returns the entries that all stages have of one, numbered as each stage finds its own.
    fn entries_together(&self, entry: usize) -> Vec<usize> {
        self.program.parts(entry).into_iter().map(|part| self.program.entry_in_stage(part, 0)).collect()
    }

    fn all(&self) -> std::ops::Range<usize> {
        0..self.program.cluster.stages
    }
}

impl SendDirection {
    /// Returns the stage that sends to `to` in this direction.
    pub fn sender(self, to: usize) -> usize {
        match self {
            SendDirection::Forward => to - 1,
            SendDirection::Backward => to + 1,
        }
    }

    /// Returns the stage that `from` sends to in this direction.
    pub fn receiver(self, from: usize) -> usize {
        match self {
            SendDirection::Forward => from + 1,
            SendDirection::Backward => from - 1,
        }
    }
}

impl BackendError {
    /// Adds the number of the failed stage.
    pub fn of_stage(self, program: &Program, stage: usize) -> BackendError {
        let call = format!("stage {stage} of {}", program.cluster.stages);
        BackendError::Failed { call, message: self.to_string(), context: None }
    }
}

impl Program {
    /// The entry of a stage for its turn in a micro-step, one of whose entries is given.
    pub fn pass(&self, entry: usize, stage: usize, turn: Turn) -> usize {
        let ahead = matches!(turn, Turn::Forward(_));
        let found = self.passes(entry).into_iter().find(|pass| {
            let entry = &self.entries[*pass];
            entry.stage.number == stage && (entry.name == STAGE) == ahead
        });
        found.expect("a stage has its passes")
    }

    /// A tensor of one stage as the stage by itself finds it for the micro-step in a slot.
    pub fn in_slot(&self, stage: usize, slot: usize, at: &TensorRef) -> TensorRef {
        let at = self.in_stage(at);
        let bytes = if at.arena == ArenaKind::Batch.id() { slot * self.in_slots(stage) } else { 0 };
        TensorRef { offset: at.offset + bytes, ..at }
    }
}

impl<D: Stages> Session for PipelineSession<D> {
    fn program(&self) -> &Arc<Program> {
        &self.program
    }

    fn adopt(&mut self, program: Arc<Program>) -> Result<(), BackendError> {
        assert!(program.has_layout_of(&self.program), "a session goes on over the layout that it was loaded with");
        self.flush()?;
        self.stages.adopt(&program)?;
        self.program = program;
        Ok(())
    }

    /// A batch, and the number of a micro-step, are for the entry that runs next. Scalars are those of all stages.
    fn write(&mut self, at: &TensorRef, bytes: &[u8]) -> Result<(), BackendError> {
        let (stage, place) = self.place(at);
        if self.program.scalar(scalar::MICRO_STEP) == Some(at) {
            self.pending.extend(self.all().map(|stage| (stage, place.clone(), bytes.to_vec())));
            return Ok(());
        }
        if place.arena == ArenaKind::Batch.id() {
            self.pending.push((stage, place, bytes.to_vec()));
            return Ok(());
        }
        self.flush()?;
        match place.arena == ArenaKind::Scalars.id() {
            true => self.all().try_for_each(|stage| self.stages.of(stage).write(&place, bytes)),
            false => self.stages.of(stage).write(&place, bytes),
        }
    }

    fn read(&mut self, at: &TensorRef, out: &mut [u8]) -> Result<(), BackendError> {
        self.flush()?;
        let (stage, place) = self.place(at);
        self.stages.of(stage).read(&place, out)
    }

    /// Reads at once where the tensors are on several stages.
    fn read_later(&mut self, at: &[TensorRef]) -> Result<Reading, BackendError> {
        self.flush()?;
        let (stages, places): (Vec<_>, Vec<_>) = at.iter().map(|at| self.place(at)).unzip();
        if let Some(stage) = stages.first().copied().filter(|first| stages.iter().all(|stage| stage == first)) {
            let reading = self.stages.of(stage).read_later(&places)?;
            self.last_reading += 1;
            self.readings.insert(self.last_reading, (stage, reading));
            return Ok(Reading::Pending(self.last_reading));
        }
        let mut all = Vec::new();
        for (stage, place) in stages.into_iter().zip(places) {
            let mut bytes = vec![0; place.bytes()];
            self.stages.of(stage).read(&place, &mut bytes)?;
            all.extend(bytes);
        }
        Ok(Reading::Done(all))
    }

    fn finish(&mut self, reading: Reading) -> Result<Vec<u8>, BackendError> {
        match reading {
            Reading::Done(bytes) => Ok(bytes),
            Reading::Pending(number) => {
                let (stage, reading) = self.readings.remove(&number).expect("a reading is finished once");
                self.stages.of(stage).finish(reading)
            }
        }
    }

    fn run(&mut self, entry: usize) -> Result<(), BackendError> {
        match self.program.entries[entry].kind {
            EntryKind::FirstMicroStep | EntryKind::NextMicroStep => {
                let writes = std::mem::take(&mut self.pending);
                self.queued.push(MicroStep { entry, writes });
                Ok(())
            }
            EntryKind::Evaluate | EntryKind::Forward => self.alone(entry, |session, _, local| session.run(local)),
            EntryKind::Update | EntryKind::Prepare => {
                self.flush()?;
                let entries = self.entries_together(entry);
                self.stages.run_together(&entries)
            }
        }
    }

    /// Runs an instruction of one stage, after copying the tensors that its entry receives.
    fn run_instruction(&mut self, entry: usize, index: usize) -> Result<(), BackendError> {
        self.flush()?;
        if index == 0 {
            self.write_pending()?;
            self.receive(entry)?;
        }
        let local = self.program.entry_in_stage(entry, 0);
        self.stages.of(self.program.entries[entry].stage.number).run_instruction(local, index)
    }

    /// Allocations of the stage that has the most by the program's plan.
    fn allocated(&self) -> Vec<MemoryLine> {
        self.stages.get(self.program.fullest_stage()).allocated()
    }

    /// The largest number of bytes in use on any stage's device.
    fn memory_in_use(&self) -> Result<Option<usize>, BackendError> {
        self.all().try_fold(None, |most: Option<usize>, stage| Ok(most.max(self.stages.get(stage).memory_in_use()?)))
    }

    /// Profiles the stage of the entry; an update includes its waits for the others. Nothing else runs at the same
    /// time.
    fn profile(&mut self, entry: usize) -> Result<Vec<f64>, BackendError> {
        if matches!(self.program.entries[entry].kind, EntryKind::Update | EntryKind::Prepare) {
            self.flush()?;
            let entries = self.entries_together(entry);
            return self.stages.profile_together(&entries, self.program.entries[entry].stage.number);
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

    /// The choices of all stages.
    fn choices(&self) -> crate::Choices {
        self.all().flat_map(|stage| self.stages.get(stage).choices()).collect()
    }

    fn load_times(&self) -> Vec<(&'static str, f64)> {
        let mut times = self.stages.get(0).load_times();
        let others = self.all().skip(1).flat_map(|stage| self.stages.get(stage).load_times());
        let seconds: f64 = others.map(|(_, seconds)| seconds).sum();
        if !times.is_empty() {
            times.push(("other stages", seconds));
        }
        times
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = self.stages.notes();
        for note in self.all().flat_map(|stage| self.stages.get(stage).notes()) {
            if !notes.contains(&note) {
                notes.push(note);
            }
        }
        notes
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        self.flush()?;
        self.all().try_for_each(|stage| {
            let program = &self.program;
            self.stages.of(stage).synchronize().map_err(|error| error.of_stage(program, stage))
        })
    }
}
