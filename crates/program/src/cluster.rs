//! The devices that train together. Knows their number; not who runs them, or how bytes get from one to another.

use crate::instruction::{Collective, Movement};

/// The devices that a program is made for: a number of equal machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Devices with a shard of the rows and of the states each, numbered from 0.
    pub ranks: usize,
    /// Number of consecutive ranks that split one micro-batch along the sequence: a divisor of `ranks`.
    pub sequence: usize,
    /// Number of machines, each with the same number of ranks, the first ranks on the first machine: a divisor of
    /// `ranks`.
    pub nodes: usize,
    /// Number of consecutive ranks that divide sharded tensors among them, and the others have copies: all ranks, or
    /// those of a node.
    pub shards: usize,
    /// Devices with some layers each, which pass each micro-batch on: the stages of a pipeline. `ranks` is 1 then.
    pub stages: usize,
}

impl Cluster {
    /// One device without ranks or stages.
    pub const ONE: Cluster = Cluster { ranks: 1, sequence: 1, nodes: 1, shards: 1, stages: 1 };

    /// Returns the cluster of one machine, where each rank has rows and shards of its own.
    pub const fn of(ranks: usize) -> Cluster {
        Cluster { ranks, shards: ranks, ..Cluster::ONE }
    }

    /// Number of micro-batches that are worked on at once.
    pub fn replicas(&self) -> usize {
        self.ranks / self.sequence
    }

    /// Returns the part of its micro-batch that a rank has, from 0.
    pub fn part(&self, rank: usize) -> usize {
        rank % self.sequence
    }

    /// Returns the index of the shard that a rank has of sharded tensors.
    pub fn share(&self, rank: usize) -> usize {
        rank % self.shards
    }

    /// Bytes that a rank gets from other nodes in a collective. Bytes that several ranks of a node need come once, for
    /// all of them.
    pub fn between(&self, of: &Collective) -> usize {
        if self.nodes == 1 {
            return 0;
        }
        let local = self.ranks / self.nodes;
        let far = (0..of.group.size).filter(|number| of.group.member(0, *number) >= local).count();
        let bytes = of.to.bytes() / of.group.size * far;
        match of.movement {
            Movement::AllGather => bytes / (of.group.size - far),
            Movement::AllToAll | Movement::AllToAllOthers => bytes,
        }
    }
}
