//! The instructions of an entry as they are queued in streams. Knows queues and events; not what is moved or why.

use program::{Collective, Cost, EventId, Instruction, Provenance, Step, StreamId, TensorRef};

/// Instructions of an entry, with events of its own numbering.
#[derive(Default)]
pub(crate) struct Streams {
    pub steps: Vec<Step>,
    events: u32,
    /// Streams that have waited for the computation's beginning.
    forked: [bool; StreamId::ALL.len()],
}

impl Streams {
    pub fn push(&mut self, step: Step) {
        self.steps.push(step);
    }

    /// Marks the present end of a stream.
    pub fn record(&mut self, stream: StreamId, from: &Provenance) -> EventId {
        let event = EventId(self.events);
        self.events += 1;
        self.silent(Instruction::Record { event, stream }, from);
        event
    }

    pub fn wait(&mut self, stream: StreamId, event: EventId, from: &Provenance) {
        self.forked[stream as usize] = true;
        self.silent(Instruction::Wait { event, stream }, from);
    }

    /// Makes what follows in a stream wait for all that was computed so far.
    pub fn follow(&mut self, stream: StreamId, from: &Provenance) {
        let event = self.record(StreamId::Compute, from);
        self.wait(stream, event, from);
    }

    /// Moves bytes. The first transfer of a stream follows what was computed so far.
    pub fn transfer(&mut self, stream: StreamId, source: &TensorRef, target: &TensorRef, from: &Provenance) {
        if !self.forked[stream as usize] {
            self.follow(stream, from);
        }
        let cost = Cost { flops: 0.0, bytes: source.bytes() as f64 };
        let instruction = Instruction::Transfer { from: source.clone(), to: target.clone(), stream };
        self.steps.push(Step { instruction, provenance: from.clone(), cost });
    }

    /// Queues a collective of the ranks, which starts after what its stream follows.
    pub fn collective(&mut self, of: Collective, from: &Provenance) {
        let cost = Cost { flops: 0.0, bytes: of.to.bytes() as f64 };
        self.steps.push(Step { instruction: Instruction::Collective(of), provenance: from.clone(), cost });
    }

    fn silent(&mut self, instruction: Instruction, from: &Provenance) {
        self.steps.push(Step { instruction, provenance: from.clone(), cost: Cost::default() });
    }
}
