//! What lies in host memory, and the instructions that move it beside the computation. Knows arenas and lanes;
//! when something is moved is decided where it is used.

use program::{ArenaId, Cost, EventId, Instruction, Lane, Place, Provenance, Step, TensorRef};

use crate::lower::arena;
use crate::memory::Buffers;
use crate::options::CompileOptions;

/// Device memory of one slice of the update, bytes: 0.6 ms of the link of an H200, long beside what queueing a
/// transfer takes and short beside the whole.
const SLICE_BYTES: usize = 32 << 20;

/// What lies in host memory: the options, with everything decided.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Offload {
    pub master: bool,
    pub optimizer: bool,
    pub gradients: bool,
    /// The update works on states, copies and gradients where they lie.
    pub zero_copy: bool,
    write_combined: bool,
    /// Bytes of one slice of the update.
    pub slice_bytes: usize,
}

impl Offload {
    pub fn new(options: &CompileOptions) -> Offload {
        let of = &options.plan.offload;
        Offload {
            master: of.master.unwrap_or(false),
            optimizer: of.optimizer.unwrap_or(false),
            gradients: of.gradients.unwrap_or(false),
            zero_copy: of.zero_copy,
            write_combined: of.write_combined,
            slice_bytes: of.slice_bytes.unwrap_or(SLICE_BYTES),
        }
    }

    /// Whose memory an arena is. What the host reads for a checkpoint is never write-combined.
    pub fn place(&self, of: ArenaId) -> Place {
        let host = |on: bool, write_combined: bool| if on { Place::Host { write_combined } } else { Place::Device };
        match of {
            arena::OPTIMIZER => host(self.optimizer, false),
            arena::MASTERS => host(self.master, false),
            arena::GRADIENTS => host(self.gradients, false),
            arena::WAITING => host(true, self.write_combined),
            _ => Place::Device,
        }
    }
}

/// Instructions of an entry, with events of its own numbering.
#[derive(Default)]
pub(crate) struct Stream {
    pub steps: Vec<Step>,
    events: u32,
    /// Lanes that have waited for the computation's beginning.
    forked: [bool; Lane::ALL.len()],
}

impl Stream {
    pub fn push(&mut self, step: Step) {
        self.steps.push(step);
    }

    /// Marks the present end of a lane.
    pub fn record(&mut self, lane: Lane, from: &Provenance) -> EventId {
        let event = EventId(self.events);
        self.events += 1;
        self.silent(Instruction::Record { event, lane }, from);
        event
    }

    pub fn wait(&mut self, lane: Lane, event: EventId, from: &Provenance) {
        self.forked[lane as usize] = true;
        self.silent(Instruction::Wait { event, lane }, from);
    }

    /// Makes what follows on a lane wait for all that was computed so far.
    pub fn follow(&mut self, lane: Lane, from: &Provenance) {
        let event = self.record(Lane::Compute, from);
        self.wait(lane, event, from);
    }

    /// Moves bytes. The first transfer of a lane follows what was computed so far.
    pub fn transfer(&mut self, lane: Lane, moved: (TensorRef, TensorRef), from: &Provenance) {
        if !self.forked[lane as usize] {
            self.follow(lane, from);
        }
        let (source, target) = moved;
        let cost = Cost { flops: 0.0, bytes: source.bytes() as f64 };
        let instruction = Instruction::Transfer { from: source, to: target, lane };
        self.steps.push(Step { instruction, provenance: from.clone(), cost });
    }

    fn silent(&mut self, instruction: Instruction, from: &Provenance) {
        self.steps.push(Step { instruction, provenance: from.clone(), cost: Cost::default() });
    }
}

/// The transfers of an entry's values that wait on the host, as its nodes come up.
pub(crate) struct Trips<'a> {
    buffers: &'a Buffers,
    stored: Vec<Option<EventId>>,
    fetched: Vec<Option<EventId>>,
}

impl<'a> Trips<'a> {
    pub fn new(buffers: &'a Buffers) -> Trips<'a> {
        let none = vec![None; buffers.trips.len()];
        Trips { buffers, stored: none.clone(), fetched: none }
    }

    /// What is due before a node: places are freed first, then taken again.
    pub fn before(&mut self, node: usize, from: &Provenance, stream: &mut Stream) {
        let trips = || self.buffers.trips.iter().map(|(trip, _)| trip).enumerate();
        for (index, _) in trips().filter(|(_, trip)| trip.released + 1 == node) {
            let stored = self.stored[index].expect("a value is stored before its place is free");
            stream.wait(Lane::Compute, stored, from);
        }
        for (index, _) in trips().filter(|(_, trip)| trip.fetched == node) {
            let [_, host, behind] = self.buffers.stations(index);
            stream.follow(Lane::ToDevice, from);
            stream.transfer(Lane::ToDevice, (host, behind), from);
            self.fetched[index] = Some(stream.record(Lane::ToDevice, from));
        }
        for (index, _) in trips().filter(|(_, trip)| trip.needed == node) {
            let fetched = self.fetched[index].expect("a value is fetched before it is needed");
            stream.wait(Lane::Compute, fetched, from);
        }
    }

    /// What is due behind a node.
    pub fn behind(&mut self, node: usize, from: &Provenance, stream: &mut Stream) {
        for (index, _) in self.buffers.trips.iter().enumerate().filter(|(_, (trip, _))| trip.written == node) {
            let [before, host, _] = self.buffers.stations(index);
            stream.follow(Lane::ToHost, from);
            stream.transfer(Lane::ToHost, (before, host), from);
            self.stored[index] = Some(stream.record(Lane::ToHost, from));
        }
    }
}
