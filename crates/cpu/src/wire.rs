//! Collectives between processes: each sends every other the bytes that its ranks publish, over the connections that
//! [`net`] keeps. Knows which ranks are where; not what the bytes are.

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use net::{Channel, Failure, Nodes};
use program::{Movement, ProcessGroup};

use crate::fabric::Wire;

/// Length of the header before the bytes: the movement, and the number of bytes that a rank publishes.
const HEADER: usize = 9;

/// The connections of a process whose ranks follow those of the process before.
pub struct NodeWire {
    nodes: Arc<Nodes>,
    /// Number of ranks of each process.
    local: usize,
}

impl NodeWire {
    pub fn new(nodes: Arc<Nodes>, local: usize) -> NodeWire {
        NodeWire { nodes, local }
    }

    fn ranks_of(&self, node: usize) -> Range<usize> {
        node * self.local..(node + 1) * self.local
    }

    /// Returns the failure of a node as one of its first rank.
    fn of_rank(&self, failure: &Failure) -> (usize, String) {
        (failure.node * self.local, failure.to_string())
    }

    fn exchange(
        &self,
        movement: Movement,
        group: ProcessGroup,
        bytes: usize,
        shown: &[RwLock<Vec<u8>>],
    ) -> Result<(), Failure> {
        let piece = bytes / group.size;
        // Number of pieces for each node: one for each of its ranks in the group of a rank of this node.
        let each = self.local / group.stride;
        let what = format!("a {} of {bytes} bytes", movement.name());
        let mut header = [0; HEADER];
        header[0] = movement as u8;
        header[1..].copy_from_slice(&(bytes as u64).to_le_bytes());
        let own: Vec<_> = self.ranks_of(self.nodes.node).map(|rank| shown[rank].read()).collect();
        let own: Vec<_> = own.into_iter().map(|shown| shown.unwrap_or_else(PoisonError::into_inner)).collect();
        for node in self.nodes.others() {
            let meant = match movement {
                Movement::AllGather => 0..bytes,
                Movement::AllToAll | Movement::AllToAllOthers => node * each * piece..(node + 1) * each * piece,
            };
            let mut parts = vec![&header[..]];
            parts.extend(own.iter().map(|shown| &shown[meant.clone()]));
            self.nodes.send(node, Channel::Collective, &parts)?;
        }
        let of_rank = match movement {
            Movement::AllGather => bytes,
            Movement::AllToAll | Movement::AllToAllOthers => each * piece,
        };
        for node in self.nodes.others() {
            let got = self.nodes.receive(node, Channel::Collective, &what)?;
            if got.get(..HEADER) != Some(&header[..]) || got.len() != HEADER + self.local * of_rank {
                let why = format!("it came to another collective than {what}");
                self.nodes.abort(&format!("node {node}: {why}"), 1);
                return Err(Failure { node, why, code: 1 });
            }
            for (rank, bytes) in self.ranks_of(node).zip(got[HEADER..].chunks(of_rank.max(1))) {
                let mut place = shown[rank].write().unwrap_or_else(PoisonError::into_inner);
                place.clear();
                place.extend_from_slice(bytes);
            }
        }
        Ok(())
    }
}

impl Wire for NodeWire {
    fn swap(
        &self,
        movement: Movement,
        group: ProcessGroup,
        bytes: usize,
        shown: &[RwLock<Vec<u8>>],
    ) -> Result<(), (usize, String)> {
        self.exchange(movement, group, bytes, shown).map_err(|failure| self.of_rank(&failure))
    }
}
