//! One instruction of a program, computed by the CPU backend on copies of its operands. Knows where operands lie, not what is
//! computed.
#![allow(unsafe_code, reason = "copies from and to addresses of the imitated memory, which the caller checks")]

use std::cell::RefCell;
use std::sync::Arc;

use cpu::CpuBackend;
use program::{
    Arena, ArenaId, ArenaKind, Backend, Cost, Entry, EntryKind, Instruction, Machine, Program, Provenance, Session,
    Step, TensorRef,
};
use tensor::DType;

use crate::memory::Memory;

/// Bytes of an arena that operands lie in, and their place among the copies.
struct Block {
    arena: ArenaId,
    start: usize,
    end: usize,
    at: usize,
    is_written: bool,
}

/// An instruction that is ready to be computed.
pub struct Reference {
    session: RefCell<Box<dyn Session>>,
    blocks: Vec<Block>,
}

thread_local! {
    static BACKEND: CpuBackend = CpuBackend::new(Some(1)).expect("a pool of one thread");
}

/// The bytes [start, end) of an arena from a tensor's first element to its last.
fn span(at: &TensorRef) -> (usize, usize) {
    if at.shape.contains(&0) {
        return (at.offset, at.offset);
    }
    let last: usize = at.shape.iter().zip(&at.strides).map(|(extent, stride)| (extent - 1) * stride).sum();
    (at.offset, at.offset + (last + 1) * at.dtype.size())
}

/// Returns the ranges of arenas that operands lie in; those that overlap are one.
fn blocks(instruction: &Instruction) -> Vec<Block> {
    let of = |is_written: bool| move |at: &&TensorRef| (at.arena, span(at), is_written);
    let (reads, writes) = (instruction.reads(), instruction.writes());
    let mut all: Vec<(ArenaId, (usize, usize), bool)> =
        reads.iter().map(of(false)).chain(writes.iter().map(of(true))).collect();
    all.sort_by_key(|(arena, (start, _), _)| (arena.0, *start));
    let (mut found, mut at) = (Vec::<Block>::new(), 0);
    for (arena, (start, end), is_written) in all {
        match found.last_mut().filter(|last| last.arena == arena && start < last.end) {
            Some(last) => {
                last.end = last.end.max(end);
                last.is_written |= is_written;
            }
            None => found.push(Block { arena, start, end, at: 0, is_written }),
        }
    }
    for block in &mut found {
        // Copies keep the alignment of what they are of.
        block.at = at + block.start % 64;
        at = (block.at + block.end - block.start).next_multiple_of(64);
    }
    found
}

impl Reference {
    pub fn new(instruction: &Instruction) -> Result<Reference, String> {
        let mut instruction = instruction.clone();
        if let Instruction::Launch(launch) = &mut instruction {
            launch.scratch = None;
            launch.calls.clear();
        }
        let blocks = blocks(&instruction);
        let bytes = blocks.iter().map(|block| block.at + block.end - block.start).max().unwrap_or(0);
        for at in instruction.tensors_mut() {
            let (start, end) = span(at);
            let holds = |block: &&Block| block.arena == at.arena && block.start <= start && end <= block.end;
            let block = blocks.iter().find(holds).expect("every operand is in a block");
            (at.arena, at.offset) = (ArenaId(0), block.at + start - block.start);
        }
        let program = Arc::new(alone(instruction, bytes));
        let session = BACKEND.with(|backend| backend.load(program)).map_err(|error| error.to_string())?;
        Ok(Reference { session: RefCell::new(session), blocks })
    }

    /// Computes on operands in arenas at these addresses.
    pub fn run(&self, memory: &Memory, arenas: &[u64]) -> Result<(), String> {
        let mut session = self.session.borrow_mut();
        let failed = |error: program::BackendError| error.to_string();
        for block in self.blocks.iter().filter(|block| block.end > block.start) {
            let (from, bytes) = (arenas[block.arena.0 as usize] + block.start as u64, block.end - block.start);
            if !memory.holds(from, bytes) {
                return Err(format!("an operand of {bytes} bytes at {from:#x} is not allocated"));
            }
            // SAFETY: just checked.
            let bytes = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) };
            session.write(&place(block), bytes).map_err(failed)?;
        }
        session.run_instruction(0, 0).map_err(failed)?;
        for block in self.blocks.iter().filter(|block| block.is_written && block.end > block.start) {
            let (to, bytes) = (arenas[block.arena.0 as usize] + block.start as u64, block.end - block.start);
            // SAFETY: checked above, and nothing else looks at it meanwhile.
            let target = unsafe { std::slice::from_raw_parts_mut(to as *mut u8, bytes) };
            session.read(&place(block), target).map_err(failed)?;
        }
        Ok(())
    }
}

fn place(block: &Block) -> TensorRef {
    TensorRef::dense(ArenaId(0), block.at, DType::U8, [block.end - block.start])
}

/// A program of one instruction over one arena.
fn alone(instruction: Instruction, bytes: usize) -> Program {
    let provenance = Provenance { op: "reference".into(), phase: program::Phase::Forward, layer: None, at: None };
    let entry = Entry {
        kind: EntryKind::Forward,
        name: String::new(),
        variant: None,
        steps: vec![Step { instruction, provenance, cost: Cost::default() }],
        inputs: vec![],
        outputs: vec![],
        stage: Default::default(),
    };
    Program {
        name: "reference".into(),
        machine: Machine::cpu(1 << 30, 1),
        cluster: program::Cluster::ONE,
        arenas: vec![Arena::on_device(ArenaKind::Activations, bytes)],
        layout: program::Layout::default(),
        constants: vec![],
        scalars: vec![],
        kernels: vec![],
        entries: vec![entry],
        memory: vec![],
        activations: vec![],
        phases: vec![],
        plan: vec![],
        seed: 0,
    }
}
