//! A loaded program: its memory, its bound instructions, and the loop that runs them. Transfers are deferred until
//! something waits for them, which is as late as the program's events allow; other backends run them early.

use std::sync::Arc;
use std::time::Instant;

use program::{
    BackendError, Collective, EventId, Instruction, MemoryClass, MemoryLine, Program, Provenance, Session, Step,
    StreamId, TensorRef,
};
use rayon::ThreadPool;

use crate::arena::Memory;
use crate::deferred::DeferredTransfers;
use crate::fabric::RankHandle;
use crate::scratch::Scratch;
use crate::{call, copy, finite, matmul, pieces, rows};

/// An instruction with all decisions of loading taken.
enum BoundInstruction {
    Call(call::ReferenceCall),
    Rows(rows::RowwiseCall),
    Pieces(pieces::PiecewiseCall),
    Gemm(Box<matmul::GemmPlan>),
    Copy(copy::StridedCopy),
    Zero(TensorRef),
    Collective(Collective, RankHandle),
    Record(EventId, StreamId),
    Wait(EventId, StreamId),
}

impl BoundInstruction {
    fn run(&self, memory: &mut Memory, scratch: &mut Scratch) -> Result<(), BackendError> {
        match self {
            BoundInstruction::Call(call) => call.run(memory, scratch),
            BoundInstruction::Rows(rows) => rows.run(memory, scratch),
            BoundInstruction::Pieces(pieces) => pieces.run(memory),
            BoundInstruction::Gemm(gemm) => gemm.run(memory, scratch),
            BoundInstruction::Copy(copy) => copy.run(memory, scratch),
            BoundInstruction::Zero(at) => copy::zero(memory, at),
            BoundInstruction::Collective(of, handle) => return collective(of, handle, memory),
            BoundInstruction::Record(..) | BoundInstruction::Wait(..) => {}
        }
        Ok(())
    }
}

/// Copies the pieces of all ranks to their places on this one.
fn collective(of: &Collective, handle: &RankHandle, memory: &mut Memory) -> Result<(), BackendError> {
    // The bytes are published as a copy: the own part of an all-gather may lie in the result.
    let own = memory.read::<u8>(&of.from).to_vec();
    let to = memory.write::<u8>(&of.to);
    handle.collective(of.movement, of.group, &own, |rank, bytes| {
        to[rank * bytes.len()..][..bytes.len()].copy_from_slice(bytes)
    })
}

/// A program in this host's memory.
pub struct CpuSession {
    program: Arc<Program>,
    pool: Arc<ThreadPool>,
    memory: Memory,
    /// One list of instructions for each entry.
    entries: Vec<Vec<BoundInstruction>>,
    scratch: Scratch,
    check_finite: bool,
    /// The handle of this rank, where there are others.
    handle: Option<RankHandle>,
    /// The index of the instruction after which a run fails.
    #[cfg(test)]
    pub fails_at: Option<usize>,
}

impl CpuSession {
    pub fn load(
        program: Arc<Program>,
        pool: Arc<ThreadPool>,
        check_finite: bool,
        handle: Option<RankHandle>,
    ) -> Result<Self, BackendError> {
        let memory = Memory::allocate(&program.arenas)?;
        let (entries, scratch) = (Vec::new(), Scratch::default());
        let mut session = CpuSession {
            program,
            pool,
            memory,
            entries,
            scratch,
            check_finite,
            handle,
            #[cfg(test)]
            fails_at: None,
        };
        session.make_ready(&[])?;
        Ok(session)
    }

    /// Address of the prepared instructions of an entry.
    #[cfg(test)]
    pub fn prepared(&self, entry: usize) -> usize {
        self.entries[entry].as_ptr().addr()
    }

    /// Writes the constants and prepares the instructions of the entries that are not among those before, by `known`.
    fn make_ready(&mut self, known: &[Option<usize>]) -> Result<(), BackendError> {
        let CpuSession { program, memory, scratch, handle, .. } = self;
        for constant in &program.constants {
            assert!(constant.at.is_dense(), "a constant is dense: {}", constant.at);
            memory.write::<u8>(&constant.at).copy_from_slice(&constant.value.bytes);
        }
        let mut before: Vec<_> = std::mem::take(&mut self.entries).into_iter().map(Some).collect();
        for (index, entry) in program.entries.iter().enumerate() {
            let known = known.get(index).copied().flatten().and_then(|known| before[known].take());
            let new = || entry.steps.iter().map(|step| prepare(step, memory, scratch, handle)).collect();
            self.entries.push(known.map_or_else(new, Ok)?);
        }
        Ok(())
    }
}

fn prepare(
    step: &Step,
    memory: &Memory,
    scratch: &mut Scratch,
    handle: &Option<RankHandle>,
) -> Result<BoundInstruction, BackendError> {
    for at in step.instruction.reads().into_iter().chain(step.instruction.writes()) {
        memory.check(at);
    }
    let prepared = match &step.instruction {
        Instruction::Launch(launch) => {
            let rows = rows::RowwiseCall::launch(launch).map(BoundInstruction::Rows);
            match rows.or_else(|| pieces::PiecewiseCall::launch(launch).map(BoundInstruction::Pieces)) {
                Some(divided) => Ok(divided),
                None => call::ReferenceCall::launch(launch).map(BoundInstruction::Call),
            }
        }
        Instruction::AttentionForward(a) => call::ReferenceCall::attention_forward(a).map(BoundInstruction::Call),
        Instruction::Gemm(gemm) => matmul::GemmPlan::new(gemm).map(|gemm| BoundInstruction::Gemm(Box::new(gemm))),
        Instruction::Copy { from, to } | Instruction::Transfer { from, to, .. } => {
            copy::StridedCopy::new(from, to).map(BoundInstruction::Copy)
        }
        Instruction::Zero { at } => Ok(BoundInstruction::Zero(at.clone())),
        Instruction::Collective(of) => match handle {
            Some(handle) => Ok(BoundInstruction::Collective(of.clone(), handle.clone())),
            None => Err("a single rank has no peer to exchange with".into()),
        },
        Instruction::Record { event, stream } => Ok(BoundInstruction::Record(*event, *stream)),
        Instruction::Wait { event, stream } => Ok(BoundInstruction::Wait(*event, *stream)),
    };
    let prepared = prepared.map_err(|message| BackendError::Failed {
        call: "loading a program on the CPU".into(),
        message,
        context: Some(place(&step.provenance)),
    })?;
    match &prepared {
        BoundInstruction::Call(call) => call.reserve(scratch),
        BoundInstruction::Rows(rows) => rows.reserve(scratch),
        BoundInstruction::Gemm(gemm) => gemm.reserve(scratch),
        BoundInstruction::Copy(copy) => copy.reserve(scratch),
        BoundInstruction::Zero(_)
        | BoundInstruction::Pieces(_)
        | BoundInstruction::Collective(..)
        | BoundInstruction::Record(..)
        | BoundInstruction::Wait(..) => {}
    }
    Ok(prepared)
}

/// `rmsnorm, backward, layer 3, model.py:12`
fn place(from: &Provenance) -> String {
    let layer = from.layer.as_ref().map(|layer| format!("layer {layer}"));
    let parts = [Some(from.op.clone()), Some(from.phase.name().to_owned()), layer, from.at.clone()];
    parts.into_iter().flatten().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ")
}

/// The error of an instruction, with its place.
fn named(error: BackendError, step: &Step) -> BackendError {
    match error {
        BackendError::Failed { call, message, context: None } => {
            BackendError::Failed { call, message, context: Some(place(&step.provenance)) }
        }
        other => other,
    }
}

fn run_entry(
    steps: &[Step],
    prepared: &[BoundInstruction],
    memory: &mut Memory,
    scratch: &mut Scratch,
    check_finite: bool,
    mut done: impl FnMut(usize) -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    let mut transfers = DeferredTransfers::default();
    for (index, (step, instruction)) in steps.iter().zip(prepared).enumerate() {
        let stream = step.instruction.stream();
        match instruction {
            BoundInstruction::Wait(event, StreamId::Compute) => {
                let mut ran = Ok(());
                transfers.catch_up(*event, &mut |due: usize| {
                    if ran.is_ok() {
                        ran = prepared[due].run(memory, scratch).map_err(|error| named(error, &steps[due]));
                    }
                });
                ran?;
            }
            BoundInstruction::Record(event, StreamId::Compute) => transfers.passed(*event),
            BoundInstruction::Record(event, stream) => transfers.record(*stream, *event),
            BoundInstruction::Wait(event, stream) => transfers.wait(*stream, *event),
            _ if stream != StreamId::Compute => transfers.defer(stream, index),
            instruction => instruction.run(memory, scratch)?,
        }
        done(index)?;
        let look = check_finite && stream == StreamId::Compute;
        if let Some(message) = look.then(|| finite::find_bad(memory, &step.instruction)).flatten() {
            let context = Some(place(&step.provenance));
            return Err(BackendError::Failed { call: "the check for finite values".into(), message, context });
        }
    }
    assert!(transfers.is_empty(), "an entry waits for its transfers before it ends");
    Ok(())
}

impl Session for CpuSession {
    fn program(&self) -> &Arc<Program> {
        &self.program
    }

    fn adopt(&mut self, program: Arc<Program>) -> Result<(), BackendError> {
        assert!(program.has_layout_of(&self.program), "a session goes on over the layout that it was loaded with");
        self.memory.adopt(&program.arenas)?;
        let known = program.entries_of(&self.program);
        self.program = program;
        self.make_ready(&known)
    }

    fn write(&mut self, at: &TensorRef, bytes: &[u8]) -> Result<(), BackendError> {
        assert!(at.is_dense() && at.bytes() == bytes.len(), "{} bytes are written to {at}", bytes.len());
        self.memory.write::<u8>(at).copy_from_slice(bytes);
        Ok(())
    }

    fn read(&mut self, at: &TensorRef, out: &mut [u8]) -> Result<(), BackendError> {
        assert!(at.is_dense() && at.bytes() == out.len(), "{} bytes are read from {at}", out.len());
        out.copy_from_slice(self.memory.read::<u8>(at));
        Ok(())
    }

    fn run(&mut self, entry: usize) -> Result<(), BackendError> {
        #[cfg(test)]
        let fails_at = self.fails_at;
        let handle = self.handle.clone();
        let done = |_index: usize| {
            #[cfg(test)]
            if fails_at == Some(_index) {
                let (call, message) = ("a test".to_owned(), format!("instruction {_index} was made to fail"));
                return Err(BackendError::Failed { call, message, context: None });
            }
            // A rank that has failed is not waited for until the next collective.
            handle.as_ref().map_or(Ok(()), RankHandle::check)
        };
        let CpuSession { program, pool, memory, entries, scratch, check_finite, .. } = self;
        let steps = &program.entries[entry].steps;
        pool.install(|| run_entry(steps, &entries[entry], memory, scratch, *check_finite, done))
    }

    fn run_instruction(&mut self, entry: usize, index: usize) -> Result<(), BackendError> {
        let CpuSession { pool, memory, entries, scratch, .. } = self;
        pool.install(|| entries[entry][index].run(memory, scratch))
    }

    fn allocated(&self) -> Vec<MemoryLine> {
        let line = |class, bytes, note| MemoryLine { class, bytes, note };
        let arenas = self.program.arenas.iter().zip(self.memory.sizes());
        let arenas = arenas.map(|(arena, bytes)| line(MemoryClass::Arena(arena.kind), bytes, ""));
        let (bytes, note) = (self.scratch.bytes(), "shared by all instructions while they run");
        let scratch = line(MemoryClass::Scratch, bytes, note);
        arenas.chain([scratch]).collect()
    }

    fn profile(&mut self, entry: usize) -> Result<Vec<f64>, BackendError> {
        let CpuSession { program, pool, memory, entries, scratch, .. } = self;
        let steps = &program.entries[entry].steps;
        pool.install(|| {
            let mut seconds = Vec::with_capacity(steps.len());
            let mut last = Instant::now();
            let done = |_| {
                seconds.push(last.elapsed().as_secs_f64());
                last = Instant::now();
                Ok(())
            };
            run_entry(steps, &entries[entry], memory, scratch, false, done)?;
            Ok(seconds)
        })
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        Ok(())
    }
}
