//! Transfers that were queued and not done yet: each stream in order, up to a mark when something waits for it. Knows
//! instructions by their number alone.

use std::collections::{HashSet, VecDeque};

use program::{EventId, StreamId};

/// One entry of a stream.
enum Entry {
    Transfer(usize),
    Record(EventId),
    Wait(EventId),
}

/// The queues of the transfer streams.
#[derive(Default)]
pub struct DeferredTransfers {
    queues: [VecDeque<Entry>; StreamId::ALL.len()],
    passed: HashSet<EventId>,
}

impl DeferredTransfers {
    /// Queues a transfer by the number of its instruction.
    pub fn defer(&mut self, stream: StreamId, instruction: usize) {
        self.queues[stream as usize].push_back(Entry::Transfer(instruction));
    }

    pub fn record(&mut self, stream: StreamId, event: EventId) {
        self.queues[stream as usize].push_back(Entry::Record(event));
    }

    pub fn wait(&mut self, stream: StreamId, event: EventId) {
        self.queues[stream as usize].push_back(Entry::Wait(event));
    }

    /// Notes that the computation has come to a mark of its own.
    pub fn passed(&mut self, event: EventId) {
        self.passed.insert(event);
    }

    /// Does the transfers that an event depends on, and no others. Panics where nothing recorded it.
    pub fn catch_up(&mut self, event: EventId, run: &mut dyn FnMut(usize)) {
        if self.passed.contains(&event) {
            return;
        }
        let holds = |queue: &VecDeque<Entry>| queue.iter().any(|e| matches!(e, Entry::Record(of) if *of == event));
        let stream = self.queues.iter().position(holds).expect("an event is recorded before it is waited for");
        while !self.passed.contains(&event) {
            match self.queues[stream].pop_front().expect("the mark is in the queue") {
                Entry::Transfer(instruction) => run(instruction),
                Entry::Record(event) => self.passed(event),
                Entry::Wait(other) => self.catch_up(other, run),
            }
        }
    }

    /// True when no transfer is left; marks that no one waits for may be.
    pub fn is_empty(&self) -> bool {
        !self.queues.iter().flatten().any(|entry| matches!(entry, Entry::Transfer(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_comes_to_its_mark_and_no_further() {
        let mut transfers = DeferredTransfers::default();
        let event = EventId;
        transfers.passed(event(0));
        transfers.wait(StreamId::ToHost, event(0));
        transfers.defer(StreamId::ToHost, 7);
        transfers.record(StreamId::ToHost, event(1));
        transfers.defer(StreamId::ToHost, 8);
        transfers.wait(StreamId::ToDevice, event(1));
        transfers.defer(StreamId::ToDevice, 9);
        transfers.record(StreamId::ToDevice, event(2));
        let mut done = Vec::new();
        transfers.catch_up(event(2), &mut |index| done.push(index));
        assert_eq!(done, [7, 9]);
        assert!(!transfers.is_empty());
        transfers.record(StreamId::ToHost, event(3));
        transfers.catch_up(event(3), &mut |index| done.push(index));
        assert_eq!(done, [7, 9, 8]);
        assert!(transfers.is_empty());
    }
}
