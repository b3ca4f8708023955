//! The ranks of a program in this process, as threads: a session for each, with memory and a pool of its own, that meet
//! in the program's collectives. Knows ranks and where tensors of the whole are; not what an instruction does.

use std::sync::Arc;

use program::{BackendError, MemoryLine, Program, Session, TensorRef};

use crate::fabric::RankHandle;
use crate::session::CpuSession;
use crate::together::together;

/// The session of a program for several ranks.
pub struct GroupSession {
    program: Arc<Program>,
    /// The sessions of this process's ranks.
    ranks: Vec<CpuSession>,
    handles: Vec<RankHandle>,
}

impl GroupSession {
    /// Loads one session for each rank handle, made by `load`.
    pub fn load(
        program: Arc<Program>,
        handles: Vec<RankHandle>,
        load: impl Fn(Arc<Program>, RankHandle) -> Result<CpuSession, BackendError>,
    ) -> Result<Self, BackendError> {
        let of = |handle: &RankHandle| load(Arc::new(program.of_rank(handle.rank)), handle.clone());
        let ranks = handles.iter().map(of).collect::<Result<_, _>>()?;
        Ok(GroupSession { program, ranks, handles })
    }

    /// The session of a rank, which is of this process.
    fn rank(&mut self, rank: usize) -> &mut CpuSession {
        &mut self.ranks[rank - self.handles[0].rank]
    }

    /// Runs something on every rank at the same time.
    fn together<T: Send>(
        &mut self,
        run: impl Fn(&mut CpuSession) -> Result<T, BackendError> + Sync,
    ) -> Result<Vec<T>, BackendError> {
        together("rank", &self.handles, self.ranks.iter_mut(), |session| run(session))
    }
}

impl Session for GroupSession {
    fn program(&self) -> &Arc<Program> {
        &self.program
    }

    fn adopt(&mut self, program: Arc<Program>) -> Result<(), BackendError> {
        assert!(program.has_layout_of(&self.program), "a session goes on over the layout that it was loaded with");
        for (handle, session) in self.handles.iter().zip(&mut self.ranks) {
            session.adopt(Arc::new(program.of_rank(handle.rank)))?;
        }
        self.program = program;
        Ok(())
    }

    fn write(&mut self, at: &TensorRef, bytes: &[u8]) -> Result<(), BackendError> {
        match self.program.pieces(at) {
            None => self
                .handles
                .iter()
                .zip(&mut self.ranks)
                .try_for_each(|(handle, of)| of.write(&at.of_share(self.program.cluster.share(handle.rank)), bytes)),
            Some(pieces) => pieces.into_iter().try_for_each(|(of, place)| {
                let bytes = &bytes[of.from..of.from + of.bytes];
                let mut holders = self.program.holders(at, of.rank);
                holders.try_for_each(|rank| self.rank(rank).write(&place, bytes))
            }),
        }
    }

    fn write_rank(&mut self, rank: usize, at: &TensorRef, bytes: &[u8]) -> Result<(), BackendError> {
        let at = at.of_share(self.program.cluster.share(rank));
        self.rank(rank).write(&at, bytes)
    }

    fn read(&mut self, at: &TensorRef, out: &mut [u8]) -> Result<(), BackendError> {
        match self.program.pieces(at) {
            None => self.read_rank(self.handles[0].rank, at, out),
            Some(pieces) => pieces
                .into_iter()
                .try_for_each(|(of, place)| self.rank(of.rank).read(&place, &mut out[of.from..of.from + of.bytes])),
        }
    }

    fn read_rank(&mut self, rank: usize, at: &TensorRef, out: &mut [u8]) -> Result<(), BackendError> {
        let at = at.of_share(self.program.cluster.share(rank));
        self.rank(rank).read(&at, out)
    }

    fn run(&mut self, entry: usize) -> Result<(), BackendError> {
        self.together(|session| session.run(entry)).map(drop)
    }

    fn run_instruction(&mut self, entry: usize, index: usize) -> Result<(), BackendError> {
        self.together(|session| session.run_instruction(entry, index)).map(drop)
    }

    /// Allocations of one rank: all ranks have the same.
    fn allocated(&self) -> Vec<MemoryLine> {
        self.ranks[0].allocated()
    }

    /// Profiles the first rank, including its waits for the others.
    fn profile(&mut self, entry: usize) -> Result<Vec<f64>, BackendError> {
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
        Movement, ProcessGroup, Provenance, Step, StreamId,
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
        let gather =
            Collective { movement: Movement::AllGather, group: ProcessGroup::row(RANKS), from: own, to: at(0, RANKS) };
        let exchange = Collective {
            movement: Movement::AllToAll,
            group: ProcessGroup::row(RANKS),
            from: at(0, RANKS),
            to: at(64, RANKS),
        };
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
            cluster: Cluster::of(RANKS),
            arenas: vec![Arena::on_device(ArenaKind::Activations, 512)],
            layout: Layout::default(),
            constants: vec![],
            scalars: vec![],
            kernels: vec![],
            entries: vec![Entry {
                kind,
                name,
                variant,
                steps,
                inputs: vec![],
                outputs: vec![],
                stage: Default::default(),
            }],
            memory: vec![],
            activations: vec![],
            phases: vec![],
            plan: vec![],
            seed: 0,
        }
    }

    fn group() -> GroupSession {
        let pool = || Arc::new(ThreadPoolBuilder::new().num_threads(1).build().unwrap());
        let load = |program: Arc<Program>, handle: RankHandle| CpuSession::load(program, pool(), false, Some(handle));
        GroupSession::load(Arc::new(program()), Fabric::handles(RANKS, Duration::from_secs(600)), load).unwrap()
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
        // The same name does not suffice.
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
