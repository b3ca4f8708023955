//! The session of a process whose program has ranks in other processes, too. The leading process sends the others the
//! commands that concern all ranks. Knows ranks, their processes, and the places of tensors of the whole; not how a
//! rank runs, or how ranks exchange bytes.

mod command;

use std::ops::Range;
use std::sync::Arc;

use net::{Channel, Failure, Nodes};

use crate::backend::{BackendError, Choices, Reading, Session};
use crate::memory::{MemoryLine, TensorRef};
use crate::program::Program;

use command::Command;

/// A session of some of a program's ranks; other processes have sessions of the others.
pub struct NodeSession {
    /// The session of this process's ranks, which it addresses by their number among all.
    own: Box<dyn Session>,
    here: Range<usize>,
    nodes: Arc<Nodes>,
}

fn lost(failure: Failure) -> BackendError {
    BackendError::Failed { call: "an exchange between nodes".into(), message: failure.to_string(), context: None }
}

/// Returns the ranks of a node; each node has the same number.
pub fn ranks_of(nodes: &Nodes, ranks: usize) -> Range<usize> {
    let local = ranks / nodes.count;
    nodes.node * local..(nodes.node + 1) * local
}

impl NodeSession {
    /// Wraps `own`, the session of this process's ranks.
    pub fn new(own: Box<dyn Session>, nodes: Arc<Nodes>) -> NodeSession {
        let here = ranks_of(&nodes, own.program().cluster.ranks);
        NodeSession { own, here, nodes }
    }

    /// Returns the node that has a rank.
    fn node_of(&self, rank: usize) -> usize {
        rank / self.here.len()
    }

    fn share(&self, rank: usize) -> usize {
        self.own.program().cluster.share(rank)
    }

    /// Returns the other nodes if this one leads and they wait for commands.
    fn followers(&self) -> Option<&Nodes> {
        Some(&*self.nodes).filter(|nodes| nodes.node == 0 && !nodes.is_together())
    }

    /// Sends a command to all other nodes, if they wait for commands.
    fn command(&self, command: &Command, bytes: &[u8]) -> Result<(), BackendError> {
        self.followers()
            .map_or(Ok(()), |nodes| nodes.tell(Channel::Command, &[&command.to_bytes(), bytes]).map_err(lost))
    }

    /// Runs on the session of this process; an error ends all nodes.
    fn run_here<T>(
        &mut self,
        run: impl FnOnce(&mut dyn Session) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        run(&mut *self.own).inspect_err(|error| self.nodes.abort(&error.to_string(), 1))
    }

    /// Reads a tensor of any rank, on whichever node: all nodes read the same, or this one leads.
    fn read_anywhere(&mut self, rank: usize, at: &TensorRef, out: &mut [u8]) -> Result<(), BackendError> {
        let together = self.nodes.is_together();
        if self.here.contains(&rank) {
            self.own.read_rank(rank, at, out)?;
            return if together { self.nodes.tell(Channel::Reply, &[out]).map_err(lost) } else { Ok(()) };
        }
        let (owner, nodes) = (self.node_of(rank), &self.nodes);
        if !together {
            let command = Command::Read { rank, at: at.clone() };
            nodes.send(owner, Channel::Command, &[&command.to_bytes()]).map_err(lost)?;
        }
        let bytes = nodes.receive(owner, Channel::Reply, "the reading of a tensor").map_err(lost)?;
        if bytes.len() != out.len() {
            let why = format!("it sent {} bytes of a tensor, expected {}", bytes.len(), out.len());
            return Err(lost(Failure { node: owner, why, code: 1 }));
        }
        out.copy_from_slice(&bytes);
        Ok(())
    }

    /// Writes a tensor of a rank; one of another process only if this one leads.
    fn write_anywhere(&mut self, rank: usize, at: &TensorRef, bytes: &[u8]) -> Result<(), BackendError> {
        if self.here.contains(&rank) {
            return self.own.write_rank(rank, at, bytes);
        }
        let Some(nodes) = self.followers() else { return Ok(()) };
        let command = Command::Write { rank: Some(rank), at: at.clone() };
        nodes.send(self.node_of(rank), Channel::Command, &[&command.to_bytes(), bytes]).map_err(lost)
    }
}

impl Session for NodeSession {
    fn program(&self) -> &Arc<Program> {
        self.own.program()
    }

    fn adopt(&mut self, program: Arc<Program>) -> Result<(), BackendError> {
        assert!(self.followers().is_none(), "nodes change their programs together");
        self.own.adopt(program)
    }

    fn write(&mut self, at: &TensorRef, bytes: &[u8]) -> Result<(), BackendError> {
        let program = self.program().clone();
        let Some(pieces) = program.pieces(at) else {
            if at.per_rank != 0 {
                return (0..program.cluster.ranks).try_for_each(|rank| self.write_rank(rank, at, bytes));
            }
            self.command(&Command::Write { rank: None, at: at.clone() }, bytes)?;
            return self.own.write(at, bytes);
        };
        pieces.into_iter().try_for_each(|(of, place)| {
            let bytes = &bytes[of.from..of.from + of.bytes];
            program.holders(at, of.rank).try_for_each(|rank| self.write_anywhere(rank, &place, bytes))
        })
    }

    fn write_rank(&mut self, rank: usize, at: &TensorRef, bytes: &[u8]) -> Result<(), BackendError> {
        self.write_anywhere(rank, &at.of_share(self.share(rank)), bytes)
    }

    fn read(&mut self, at: &TensorRef, out: &mut [u8]) -> Result<(), BackendError> {
        let Some(pieces) = self.program().pieces(at) else { return self.own.read_rank(self.here.start, at, out) };
        pieces
            .into_iter()
            .try_for_each(|(of, place)| self.read_anywhere(of.rank, &place, &mut out[of.from..of.from + of.bytes]))
    }

    fn read_rank(&mut self, rank: usize, at: &TensorRef, out: &mut [u8]) -> Result<(), BackendError> {
        self.read_anywhere(rank, &at.of_share(self.share(rank)), out)
    }

    fn read_later(&mut self, at: &[TensorRef]) -> Result<Reading, BackendError> {
        self.own.read_later(at)
    }

    fn finish(&mut self, reading: Reading) -> Result<Vec<u8>, BackendError> {
        self.run_here(|own| own.finish(reading))
    }

    fn run(&mut self, entry: usize) -> Result<(), BackendError> {
        self.command(&Command::Run { entry }, &[])?;
        self.run_here(|own| own.run(entry))
    }

    fn run_instruction(&mut self, entry: usize, index: usize) -> Result<(), BackendError> {
        self.command(&Command::Step { entry, index }, &[])?;
        self.run_here(|own| own.run_instruction(entry, index))
    }

    fn serve(&mut self, command: &[u8]) -> Result<(), BackendError> {
        let Some((command, bytes)) = Command::from_bytes(command) else {
            return Err(lost(Failure { node: 0, why: "it ordered something that there is not".into(), code: 1 }));
        };
        match command {
            Command::Write { rank: Some(rank), at } => self.own.write_rank(rank, &at, bytes),
            Command::Write { rank: None, at } => self.own.write(&at, bytes),
            Command::Read { rank, at } => {
                let mut out = vec![0; at.bytes()];
                self.own.read_rank(rank, &at, &mut out)?;
                self.nodes.send(0, Channel::Reply, &[&out]).map_err(lost)
            }
            Command::Run { entry } => self.run(entry),
            Command::Step { entry, index } => self.run_instruction(entry, index),
            Command::Profile { entry } => self.profile(entry).map(drop),
        }
    }

    fn allocated(&self) -> Vec<MemoryLine> {
        self.own.allocated()
    }

    fn memory_in_use(&self) -> Result<Option<usize>, BackendError> {
        self.own.memory_in_use()
    }

    fn profile(&mut self, entry: usize) -> Result<Vec<f64>, BackendError> {
        self.command(&Command::Profile { entry }, &[])?;
        self.run_here(|own| own.profile(entry))
    }

    fn choices(&self) -> Choices {
        self.own.choices()
    }

    fn load_times(&self) -> Vec<(&'static str, f64)> {
        self.own.load_times()
    }

    fn notes(&self) -> Vec<String> {
        self.own.notes()
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        self.run_here(|own| own.synchronize())
    }
}
