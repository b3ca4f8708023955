//! The expected times of an entry's nodes and of transfers. Knows times and sizes; not what is moved or why.

use graph::Graph;
use program::{Documents, Machine};

use super::LiveRange;
use crate::time::node_seconds;

/// Buckets that are staged at a time: one in flight, one that is summed.
pub(super) const STAGED: usize = 2;

/// A place is kept for this much of the time that a transfer should take.
const SLACK: f64 = 1.25;

/// Seconds from the beginning of an entry.
pub(super) struct Clock {
    /// The beginning of each node, and the end of the last one.
    pub begins: Vec<f64>,
    /// Bytes per second in each direction of the way to the host.
    pub link: f64,
    /// Bytes per second of what all ranks have that one receives; infinite for a single rank.
    pub ranks: f64,
    /// Seconds of exchanges that a gather may find before it.
    pub busy: f64,
}

impl Clock {
    /// Makes a clock. `leaves`: the bytes of a bucket of gradients, where gradients are exchanged.
    pub fn new(graph: &Graph, documents: Documents, machine: &Machine, ranks: usize, leaves: Option<usize>) -> Clock {
        let mut begins = vec![0.0];
        for node in &graph.nodes {
            begins.push(begins[begins.len() - 1] + node_seconds(graph, node, documents, machine));
        }
        let others = 1.0 - 1.0 / ranks as f64;
        let ranks = if ranks > 1 { machine.peer_rate() / others } else { f64::INFINITY };
        let clock = Clock { begins, link: machine.link.both_ways / 2.0, ranks, busy: 0.0 };
        Clock { busy: leaves.map_or(0.0, |bytes| STAGED as f64 * clock.collective(bytes)), ..clock }
    }

    /// Returns the beginning of a position; the end of the last node for positions after it.
    pub fn begin(&self, position: usize) -> f64 {
        self.begins[position.min(self.begins.len() - 1)]
    }

    pub fn end(&self, node: usize) -> f64 {
        self.begins[node + 1]
    }

    pub fn last_node(&self) -> usize {
        self.begins.len() - 2
    }

    /// Returns the seconds for which a transfer keeps a place.
    pub fn transfer(&self, bytes: usize) -> f64 {
        SLACK * bytes as f64 / self.link
    }

    /// Returns the seconds for which a live range keeps its place before it is touched.
    pub fn arrival(&self, live_range: &LiveRange) -> f64 {
        match live_range.shards.is_empty() {
            true => self.transfer(live_range.bytes()),
            // Another gather may be on its way, and gradients that were queued before.
            false => 2.0 * self.collective(live_range.bytes()) + self.busy,
        }
    }

    /// Returns the seconds for which a collective keeps the places of `bytes` bytes, which are those of all ranks.
    pub fn collective(&self, bytes: usize) -> f64 {
        SLACK * bytes as f64 / self.ranks
    }

    /// The first node that begins at a time or later; the position after the last where none does.
    pub fn begins_at(&self, time: f64) -> usize {
        self.begins.partition_point(|at| *at < time).min(self.last_node() + 1)
    }

    /// The last node that has begun by a time.
    pub fn begun(&self, by: f64) -> usize {
        self.begins.partition_point(|at| *at <= by).saturating_sub(1)
    }

    /// Returns the position that is running just before a time: the largest number there is where that is after all
    /// nodes.
    pub fn under_way(&self, before: f64) -> usize {
        match self.begins.partition_point(|at| *at < before) {
            all if all == self.begins.len() => usize::MAX,
            begun => begun.saturating_sub(1),
        }
    }
}
