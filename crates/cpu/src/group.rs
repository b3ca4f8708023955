//! The ranks of a program that are of this process, as threads: a session for each, with memory and a pool of its own, that
//! come together where the program says so. Where there are other processes, the one that leads has them do what all ranks
//! must. Knows ranks and where tensors of the whole are; not what an instruction does.

use std::ops::Range;
use std::panic;
use std::sync::Arc;
use std::thread;

use net::{Channel, Failure, Nodes};
use program::{BackendError, MemoryLine, Program, Session, TensorRef};

use crate::fabric::Seat;
use crate::order::Order;
use crate::session::CpuSession;

/// A program for several ranks.
pub struct GroupSession {
    program: Arc<Program>,
    /// Those of this process.
    ranks: Vec<CpuSession>,
    seats: Vec<Seat>,
    /// The processes of the other ranks.
    nodes: Option<Arc<Nodes>>,
}

fn lost(failure: Failure) -> BackendError {
    BackendError::Failed { call: "an exchange between nodes".into(), message: failure.to_string(), context: None }
}

impl GroupSession {
    /// One session for each seat, made by `load`.
    pub fn load(
        program: Arc<Program>,
        seats: Vec<Seat>,
        nodes: Option<Arc<Nodes>>,
        load: impl Fn(Arc<Program>, Seat) -> Result<CpuSession, BackendError>,
    ) -> Result<Self, BackendError> {
        let processes = nodes.as_ref().map_or(1, |nodes| nodes.count);
        assert_eq!(seats.len() * processes, program.cluster.ranks, "a seat for each rank");
        let of = |seat: &Seat| load(Arc::new(program.of_rank(seat.rank)), seat.clone());
        let ranks = seats.iter().map(of).collect::<Result<_, _>>()?;
        Ok(GroupSession { program, ranks, seats, nodes })
    }

    /// The ranks of this process.
    fn here(&self) -> Range<usize> {
        self.seats[0].rank..self.seats[0].rank + self.seats.len()
    }

    /// The session of a rank, if it is of this process.
    fn rank(&mut self, rank: usize) -> Option<&mut CpuSession> {
        let index = rank.checked_sub(self.here().start)?;
        self.ranks.get_mut(index)
    }

    /// The node that a rank is of.
    fn node_of(&self, rank: usize) -> usize {
        rank / self.seats.len()
    }

    /// The other nodes, where this one leads and they wait for orders.
    fn led(&self) -> Option<Arc<Nodes>> {
        self.nodes.clone().filter(|nodes| nodes.node == 0 && !nodes.is_together())
    }

    /// Has all other nodes do something, where they wait for orders.
    fn order(&self, order: &Order, bytes: &[u8]) -> Result<(), BackendError> {
        match self.led() {
            Some(nodes) => nodes.tell(Channel::Order, &[&order.to_bytes(), bytes]).map_err(lost),
            None => Ok(()),
        }
    }

    /// Reads a tensor of a rank, wherever that is: all nodes read the same, or this one leads.
    fn read_anywhere(&mut self, rank: usize, at: &TensorRef, out: &mut [u8]) -> Result<(), BackendError> {
        let Some(nodes) = self.nodes.clone() else { return self.ranks[rank].read(at, out) };
        let owner = self.node_of(rank);
        if let Some(session) = self.rank(rank) {
            session.read(at, out)?;
            return match nodes.is_together() {
                true => nodes.tell(Channel::Reply, &[out]).map_err(lost),
                false => Ok(()),
            };
        }
        if !nodes.is_together() {
            let order = Order::Read { rank, at: at.clone() };
            nodes.send(owner, Channel::Order, &[&order.to_bytes()]).map_err(lost)?;
        }
        let bytes = nodes.receive(owner, Channel::Reply, "the reading of a tensor").map_err(lost)?;
        if bytes.len() != out.len() {
            let why = format!("it sent {} bytes of a tensor, expected {}", bytes.len(), out.len());
            return Err(lost(Failure { node: owner, why, code: 1 }));
        }
        out.copy_from_slice(&bytes);
        Ok(())
    }

    /// Writes a tensor of a rank; of another process' only where this one leads.
    fn write_anywhere(&mut self, rank: usize, at: &TensorRef, bytes: &[u8]) -> Result<(), BackendError> {
        if let Some(session) = self.rank(rank) {
            return session.write(at, bytes);
        }
        let Some(nodes) = self.led() else { return Ok(()) };
        let order = Order::Write { rank: Some(rank), at: at.clone() };
        nodes.send(self.node_of(rank), Channel::Order, &[&order.to_bytes(), bytes]).map_err(lost)
    }

    /// Does something on every rank at once. The error is that of the rank that failed first, and names it; the
    /// others have stopped.
    fn together<T: Send>(
        &mut self,
        run: impl Fn(&mut CpuSession) -> Result<T, BackendError> + Sync,
    ) -> Result<Vec<T>, BackendError> {
        let on_rank = |seat: &Seat, session: &mut CpuSession| {
            let result = panic::catch_unwind(panic::AssertUnwindSafe(|| run(session)));
            match &result {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => seat.fail(error.to_string()),
                Err(_) => seat.fail("it panicked".into()),
            }
            result
        };
        let results: Vec<_> = thread::scope(|scope| {
            let ranks = self.seats.iter().zip(&mut self.ranks);
            let threads: Vec<_> = ranks.map(|(seat, session)| scope.spawn(|| on_rank(seat, session))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a rank's thread catches what it runs")).collect()
        });
        let mut done = Vec::new();
        let mut failed = false;
        for result in results {
            match result {
                Err(payload) => panic::resume_unwind(payload),
                Ok(Ok(value)) => done.push(value),
                Ok(Err(_)) => failed = true,
            }
        }
        match self.seats[0].failure().filter(|_| failed) {
            Some((rank, why)) => {
                if let Some(nodes) = &self.nodes {
                    nodes.abort(&format!("rank {rank}: {why}"), 1);
                }
                let message = format!("{why}; the other ranks were stopped");
                Err(BackendError::Failed {
                    call: format!("rank {rank} of {}", self.program.cluster.ranks),
                    message,
                    context: None,
                })
            }
            None => Ok(done),
        }
    }
}

impl Session for GroupSession {
    fn program(&self) -> &Arc<Program> {
        &self.program
    }

    fn adopt(&mut self, program: Arc<Program>) -> Result<(), BackendError> {
        assert!(program.has_layout_of(&self.program), "a session goes on over the layout that it was loaded with");
        assert!(self.led().is_none(), "nodes change their programs together");
        for (seat, session) in self.seats.iter().zip(&mut self.ranks) {
            session.adopt(Arc::new(program.of_rank(seat.rank)))?;
        }
        self.program = program;
        Ok(())
    }

    fn write(&mut self, at: &TensorRef, bytes: &[u8]) -> Result<(), BackendError> {
        let Some(pieces) = self.program.pieces(at) else {
            if at.per_rank != 0 {
                return (0..self.program.cluster.ranks).try_for_each(|rank| self.write_rank(rank, at, bytes));
            }
            self.order(&Order::Write { rank: None, at: at.clone() }, bytes)?;
            return self.ranks.iter_mut().try_for_each(|session| session.write(at, bytes));
        };
        pieces
            .into_iter()
            .try_for_each(|(of, place)| self.write_anywhere(of.rank, &place, &bytes[of.from..of.from + of.bytes]))
    }

    fn write_rank(&mut self, rank: usize, at: &TensorRef, bytes: &[u8]) -> Result<(), BackendError> {
        self.write_anywhere(rank, &at.of_rank(rank), bytes)
    }

    fn read(&mut self, at: &TensorRef, out: &mut [u8]) -> Result<(), BackendError> {
        let Some(pieces) = self.program.pieces(at) else {
            let first = self.here().start;
            return self.ranks[0].read(&at.of_rank(first), out);
        };
        pieces
            .into_iter()
            .try_for_each(|(of, place)| self.read_anywhere(of.rank, &place, &mut out[of.from..of.from + of.bytes]))
    }

    fn read_rank(&mut self, rank: usize, at: &TensorRef, out: &mut [u8]) -> Result<(), BackendError> {
        self.read_anywhere(rank, &at.of_rank(rank), out)
    }

    fn run(&mut self, entry: usize) -> Result<(), BackendError> {
        self.order(&Order::Run { entry }, &[])?;
        self.together(|session| session.run(entry)).map(drop)
    }

    fn run_instruction(&mut self, entry: usize, index: usize) -> Result<(), BackendError> {
        self.order(&Order::Step { entry, index }, &[])?;
        self.together(|session| session.run_instruction(entry, index)).map(drop)
    }

    fn obey(&mut self, order: &[u8]) -> Result<(), BackendError> {
        let Some((order, bytes)) = Order::from_bytes(order) else {
            return Err(lost(Failure { node: 0, why: "it ordered something that there is not".into(), code: 1 }));
        };
        match order {
            Order::Write { rank: Some(rank), at } => self.rank(rank).expect("a rank of this node").write(&at, bytes),
            Order::Write { rank: None, at } => self.ranks.iter_mut().try_for_each(|session| session.write(&at, bytes)),
            Order::Read { rank, at } => {
                let mut out = vec![0; at.bytes()];
                self.rank(rank).expect("a rank of this node").read(&at, &mut out)?;
                let nodes = self.nodes.as_ref().expect("an order comes from another node");
                nodes.send(0, Channel::Reply, &[&out]).map_err(lost)
            }
            Order::Run { entry } => self.run(entry),
            Order::Step { entry, index } => self.run_instruction(entry, index),
            Order::Profile { entry } => self.profile(entry).map(drop),
        }
    }

    /// Of one rank: all have as much.
    fn allocated(&self) -> Vec<MemoryLine> {
        self.ranks[0].allocated()
    }

    /// Of the first rank, with its waits for the others.
    fn profile(&mut self, entry: usize) -> Result<Vec<f64>, BackendError> {
        self.order(&Order::Profile { entry }, &[])?;
        Ok(self.together(|session| session.profile(entry))?.swap_remove(0))
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use program::{
        Arena, ArenaId, ArenaKind, Cluster, Collective, Cost, Entry, EntryKind, EventId, Instruction, Layout, Machine,
        Movement, Provenance, Step, StreamId,
    };
    use rayon::ThreadPoolBuilder;
    use tensor::DType;

    use super::*;
    use crate::fabric::Fabric;

    const RANKS: usize = 3;

    fn at(offset: usize, elements: usize) -> TensorRef {
        TensorRef::dense(ArenaId(0), offset, DType::F32, [elements])
    }

    /// Every rank writes a number of its own, gathers those of all, and exchanges what it gathered.
    fn program() -> Program {
        let own = TensorRef { per_rank: 4, ..at(0, 1) };
        let gather = Collective { movement: Movement::Gather, among: RANKS, from: own, to: at(0, RANKS) };
        let exchange = Collective { movement: Movement::Exchange, among: RANKS, from: at(0, RANKS), to: at(64, RANKS) };
        let mark = |event: u32, stream: StreamId| Instruction::Record { event: EventId(event), stream };
        let wait = |event: u32, stream: StreamId| Instruction::Wait { event: EventId(event), stream };
        let instructions = vec![
            Instruction::Copy { from: at(256, 1), to: TensorRef { per_rank: 4, ..at(0, 1) } },
            mark(0, StreamId::Compute),
            wait(0, StreamId::Exchange),
            Instruction::Collective(gather),
            Instruction::Collective(exchange),
            mark(1, StreamId::Exchange),
            wait(1, StreamId::Compute),
            Instruction::Copy { from: at(64, RANKS), to: at(128, RANKS) },
        ];
        let step = |instruction| Step { instruction, provenance: Provenance::default(), cost: Cost::default() };
        let (kind, name, variant) = (EntryKind::Update, String::new(), None);
        let steps = instructions.into_iter().map(step).collect();
        Program {
            name: "test".into(),
            machine: Machine::cpu(1 << 30, 1),
            cluster: Cluster { ranks: RANKS, sequence: 1 },
            arenas: vec![Arena::on_device(ArenaKind::Activations, 512)],
            layout: Layout::default(),
            constants: vec![],
            scalars: vec![],
            kernels: vec![],
            entries: vec![Entry { kind, name, variant, steps, inputs: vec![], outputs: vec![] }],
            memory: vec![],
            activations: vec![],
            phases: vec![],
            plan: vec![],
            seed: 0,
        }
    }

    fn group() -> GroupSession {
        let pool = || Arc::new(ThreadPoolBuilder::new().num_threads(1).build().unwrap());
        let load = |program: Arc<Program>, seat: Seat| CpuSession::load(program, pool(), false, Some(seat));
        GroupSession::load(Arc::new(program()), Fabric::seats(RANKS, Duration::from_secs(600)), None, load).unwrap()
    }

    #[test]
    fn ranks_come_together() {
        let mut group = group();
        for rank in 0..RANKS {
            group.write_rank(rank, &at(256, 1), &(1.0 + rank as f32).to_le_bytes()).unwrap();
        }
        group.run(0).unwrap();
        for rank in 0..RANKS {
            let mut bytes = [0; 4 * RANKS];
            group.read_rank(rank, &at(128, RANKS), &mut bytes).unwrap();
            let expected = [1.0 + rank as f32; RANKS].map(f32::to_le_bytes).concat();
            assert_eq!(bytes.as_slice(), expected, "rank {rank}");
        }
    }

    #[test]
    fn only_entries_that_are_new_are_prepared() {
        let mut group = group();
        let before = group.ranks[1].prepared(0);
        let mut other = program();
        let mut first = other.entries[0].clone();
        first.name = "another".into();
        other.entries.insert(0, first);
        group.adopt(Arc::new(other.clone())).unwrap();
        assert_eq!(group.ranks[1].prepared(1), before);
        assert_ne!(group.ranks[1].prepared(0), before);
        // The same name is not enough.
        other.entries[1].steps.pop();
        group.adopt(Arc::new(other)).unwrap();
        assert_ne!(group.ranks[1].prepared(1), before);
    }

    #[test]
    fn a_failure_anywhere_on_any_rank_ends_all_of_them_by_name() {
        let instructions = program().entries[0].steps.len();
        for (rank, index) in (0..RANKS).flat_map(|rank| (0..instructions).map(move |index| (rank, index))) {
            let mut group = group();
            group.ranks[rank].fails_at = Some(index);
            let begin = Instant::now();
            let message = group.run(0).unwrap_err().to_string();
            assert!(begin.elapsed() < Duration::from_secs(20), "the others do not wait");
            let expected = [format!("rank {rank} of 3"), format!("instruction {index} was made to fail")];
            assert!(expected.iter().all(|part| message.contains(part)), "{message}");
        }
    }
}
