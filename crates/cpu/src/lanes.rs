//! Transfers that were queued and not done yet: each lane in order, up to a mark when something waits for it. Knows
//! instructions by their number alone.

use std::collections::{HashSet, VecDeque};

use program::{EventId, Lane};

/// What is in a lane.
enum Entry {
    Transfer(usize),
    Record(EventId),
    Wait(EventId),
}

/// The transfer streams.
#[derive(Default)]
pub struct Lanes {
    queues: [VecDeque<Entry>; Lane::ALL.len()],
    passed: HashSet<EventId>,
}

impl Lanes {
    /// Queues a transfer by the number of its instruction.
    pub fn put_off(&mut self, lane: Lane, instruction: usize) {
        self.queues[lane as usize].push_back(Entry::Transfer(instruction));
    }

    pub fn record(&mut self, lane: Lane, event: EventId) {
        self.queues[lane as usize].push_back(Entry::Record(event));
    }

    pub fn wait(&mut self, lane: Lane, event: EventId) {
        self.queues[lane as usize].push_back(Entry::Wait(event));
    }

    /// The computation has come to a mark of its own.
    pub fn passed(&mut self, event: EventId) {
        self.passed.insert(event);
    }

    /// Does what must be done before an event has passed, and nothing more. Panics where nothing recorded it.
    pub fn catch_up(&mut self, event: EventId, run: &mut dyn FnMut(usize)) {
        if self.passed.contains(&event) {
            return;
        }
        let holds = |queue: &VecDeque<Entry>| queue.iter().any(|e| matches!(e, Entry::Record(of) if *of == event));
        let lane = self.queues.iter().position(holds).expect("an event is recorded before it is waited for");
        while !self.passed.contains(&event) {
            match self.queues[lane].pop_front().expect("the mark is in the queue") {
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
    fn a_lane_comes_to_its_mark_and_no_further() {
        let mut lanes = Lanes::default();
        let event = EventId;
        lanes.passed(event(0));
        lanes.wait(Lane::ToHost, event(0));
        lanes.put_off(Lane::ToHost, 7);
        lanes.record(Lane::ToHost, event(1));
        lanes.put_off(Lane::ToHost, 8);
        lanes.wait(Lane::ToDevice, event(1));
        lanes.put_off(Lane::ToDevice, 9);
        lanes.record(Lane::ToDevice, event(2));
        let mut done = Vec::new();
        lanes.catch_up(event(2), &mut |index| done.push(index));
        assert_eq!(done, [7, 9]);
        assert!(!lanes.is_empty());
        lanes.record(Lane::ToHost, event(3));
        lanes.catch_up(event(3), &mut |index| done.push(index));
        assert_eq!(done, [7, 9, 8]);
        assert!(lanes.is_empty());
    }
}
