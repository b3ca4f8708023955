//! The ranks of a program on the GPUs of this process, a session for each. One thread queues the work of all: what they do
//! together are copies between peers, ordered by events, and an entry is captured as one graph over all GPUs. So there
//! is no second order of execution that could wait for the first. Knows ranks and where tensors of the whole are; not what
//! an instruction does.

use std::collections::HashMap;
use std::sync::Arc;

use program::{BackendError, Choices, MemoryLine, Movement, Program, Reading, Session, TensorRef};

use crate::driver::{Event, Graph};
use crate::engine::{Engine, Options};
use crate::error::{During, Error, Result};
use crate::session::{CudaSession, backend_error};

/// An entry as it was captured, and how often it ran.
#[derive(Default)]
struct Replay {
    runs: usize,
    graph: Option<Graph>,
}

/// A program for several GPUs. The fields are dropped in order: graphs before the memory that they use.
pub struct CudaGroup {
    program: Arc<Program>,
    replays: HashMap<usize, Replay>,
    /// Marks of the ranks in what they do together: that a rank has come, that it has its pieces.
    come: Vec<Event>,
    done: Vec<Event>,
    ranks: Vec<CudaSession>,
    check_each: bool,
    graphs: bool,
}

impl CudaGroup {
    /// Opens as many GPUs as the program has ranks, from the first visible one on. All take the algorithms that the first
    /// chose.
    pub fn load(program: Arc<Program>, options: &Options) -> std::result::Result<CudaGroup, BackendError> {
        let mut ranks: Vec<CudaSession> = Vec::new();
        for rank in 0..program.cluster.ranks {
            let mut options = Options { device: options.device + rank, ..options.clone() };
            options.algorithms.extend(ranks.first().map(|first| first.algorithms().clone()).unwrap_or_default());
            ranks.push(CudaSession::new(Arc::new(program.of_rank(rank)), &options)?);
        }
        Self::connected(program, ranks, options).map_err(backend_error)
    }

    fn connected(program: Arc<Program>, ranks: Vec<CudaSession>, options: &Options) -> Result<CudaGroup> {
        for own in &ranks {
            for other in ranks.iter().filter(|other| !std::ptr::eq(*other, own)) {
                own.engine().device.reach(&other.engine().device)?;
            }
        }
        let marks = || {
            let mark = |rank: &CudaSession| {
                rank.engine().device.bind()?;
                Event::without_time(&rank.engine().device)
            };
            ranks.iter().map(mark).collect::<Result<Vec<_>>>()
        };
        let (come, done) = (marks()?, marks()?);
        let (check_each, graphs) = (options.check_each, options.graphs && !options.check_each);
        Ok(CudaGroup { program, replays: HashMap::new(), come, done, ranks, check_each, graphs })
    }

    fn engines(&self) -> impl Iterator<Item = &Engine> {
        self.ranks.iter().map(CudaSession::engine)
    }

    /// Makes the computation of every other rank wait for that of the first, or the first for all others.
    fn order(&self, first_waits: bool) -> Result<()> {
        for (rank, engine) in self.engines().enumerate().skip(1) {
            let first = self.ranks[0].engine();
            let (before, after, mark) = match first_waits {
                true => (engine, first, &self.come[rank]),
                false => (first, engine, &self.come[0]),
            };
            before.device.bind()?;
            mark.record(&before.stream)?;
            after.device.bind()?;
            after.stream.wait(mark)?;
        }
        Ok(())
    }

    /// Queues an instruction on all ranks.
    fn queue_step(&mut self, entry: usize, index: usize) -> Result<()> {
        let queued = match self.ranks[0].joint(entry, index) {
            Some((movement, among)) => self.meet(movement, among, entry, index),
            None => self.ranks.iter_mut().try_for_each(|rank| rank.queue_step(entry, index)),
        };
        let queued = match self.check_each {
            true => queued.and_then(|()| self.synchronise()),
            false => queued,
        };
        queued.during(|| self.ranks[0].place_of(entry, index))
    }

    /// What all ranks do together: each copies its pieces from the others when all have come, and goes on when all have
    /// theirs.
    fn meet(&self, movement: Movement, among: usize, entry: usize, index: usize) -> Result<()> {
        let parts: Vec<(u64, u64, usize)> = self.ranks.iter().map(|rank| rank.joint_places(entry, index)).collect();
        for (engine, come) in self.engines().zip(&self.come) {
            engine.device.bind()?;
            come.record(engine.exchange())?;
        }
        for (rank, engine) in self.engines().enumerate() {
            engine.device.bind()?;
            self.come.iter().try_for_each(|come| engine.exchange().wait(come))?;
            let (_, to, bytes) = parts[rank];
            // Every rank begins with another peer, so that all links are in use.
            let (first, own) = (rank / among * among, rank % among);
            for peer in (0..among).map(|far| (own + far) % among) {
                let (from, ..) = parts[first + peer];
                let (from, piece) = match movement {
                    Movement::Gather => (from, bytes),
                    Movement::Exchange => (from + (own * (bytes / among)) as u64, bytes / among),
                };
                engine.exchange().copy_between(to + (peer * piece) as u64, from, piece)?;
            }
            self.done[rank].record(engine.exchange())?;
        }
        for engine in self.engines() {
            engine.device.bind()?;
            self.done.iter().try_for_each(|done| engine.exchange().wait(done))?;
        }
        Ok(())
    }

    fn queue(&mut self, entry: usize) -> Result<()> {
        (0..self.program.entries[entry].steps.len()).try_for_each(|index| self.queue_step(entry, index))
    }

    fn run_entry(&mut self, entry: usize) -> Result<()> {
        let name = self.program.entries[entry].kind.name();
        let mut replay = self.replays.remove(&entry).unwrap_or_default();
        if self.graphs && replay.graph.is_none() && replay.runs > 0 {
            // The first run was eager: every library has done what it does only once.
            let captured =
                self.capture(entry).during(|| format!("capturing entry {name} of {} GPUs", self.ranks.len()));
            replay.graph = Some(captured?);
        }
        replay.runs += 1;
        let ran = match &replay.graph {
            Some(graph) => self.launch(graph).during(|| format!("replaying entry {name} of {} GPUs", self.ranks.len())),
            None => self.queue(entry),
        };
        self.replays.insert(entry, replay);
        ran
    }

    /// Makes the entries of another program ready. A graph is kept where every rank kept its entry: it has addresses of
    /// the memory of all.
    fn replace_entries(&mut self, program: Arc<Program>) -> Result<()> {
        self.synchronise()?;
        let programs: Vec<_> = (0..self.ranks.len()).map(|rank| Arc::new(program.of_rank(rank))).collect();
        let ranks = self.ranks.iter().zip(&programs);
        let known = kept_by_all(ranks.map(|(rank, program)| rank.known_entries(program)));
        // Graphs go before the memory that they use.
        self.replays.retain(|entry, _| known.contains(&Some(*entry)));
        let mut kept = vec![known];
        for (rank, program) in self.ranks.iter_mut().zip(programs) {
            kept.push(rank.replace_entries(program)?);
        }
        let mut before = std::mem::take(&mut self.replays);
        let entries = kept_by_all(kept).into_iter().enumerate();
        self.replays = entries.filter_map(|(entry, known)| Some((entry, before.remove(&known?)?))).collect();
        self.program = program;
        Ok(())
    }

    fn capture(&mut self, entry: usize) -> Result<Graph> {
        self.synchronise()?;
        self.ranks[0].engine().device.bind()?;
        let stream = self.ranks[0].engine().stream.clone();
        let graph = Graph::capture(&stream, || {
            self.order(false)?;
            self.queue(entry)?;
            self.order(true)?;
            self.ranks[0].engine().device.bind()
        })?;
        // Nothing is under way while the graph comes to the devices.
        graph.upload(&stream)?;
        stream.synchronise()?;
        Ok(graph)
    }

    /// Launches behind what every rank has queued; what ranks queue next waits for it.
    fn launch(&self, graph: &Graph) -> Result<()> {
        self.order(true)?;
        let first = self.ranks[0].engine();
        first.device.bind()?;
        graph.launch(&first.stream)?;
        self.order(false)
    }

    fn synchronise(&self) -> Result<()> {
        self.engines().try_for_each(|engine| {
            engine.device.bind()?;
            engine.synchronise()
        })
    }

    /// Runs an entry with a time stamp on the first rank behind every instruction.
    fn profile_steps(&mut self, entry: usize) -> Result<Vec<f64>> {
        self.synchronise()?;
        let mark = |group: &CudaGroup| {
            let engine = group.ranks[0].engine();
            engine.device.bind()?;
            let mark = Event::new(&engine.device)?;
            mark.record(&engine.stream)?;
            Ok::<_, Error>(mark)
        };
        let mut marks = vec![mark(self)?];
        for index in 0..self.program.entries[entry].steps.len() {
            self.queue_step(entry, index)?;
            marks.push(mark(self)?);
        }
        self.synchronise()?;
        marks.windows(2).map(|pair| Ok(f64::from(pair[1].since(&pair[0])?) / 1e3)).collect()
    }
}

/// For each entry the one before, where all ranks say the same.
fn kept_by_all(ranks: impl IntoIterator<Item = Vec<Option<usize>>>) -> Vec<Option<usize>> {
    let same = |all: Vec<Option<usize>>, own: Vec<Option<usize>>| {
        all.into_iter().zip(own).map(|(all, own)| all.filter(|_| all == own)).collect()
    };
    ranks.into_iter().reduce(same).expect("a group has ranks")
}

impl Session for CudaGroup {
    fn program(&self) -> &Arc<Program> {
        &self.program
    }

    fn adopt(&mut self, program: Arc<Program>) -> std::result::Result<(), BackendError> {
        self.replace_entries(program).during(|| "making other entries ready".into()).map_err(backend_error)
    }

    fn write(&mut self, at: &TensorRef, bytes: &[u8]) -> std::result::Result<(), BackendError> {
        match self.program.pieces(at) {
            None => (0..self.ranks.len()).try_for_each(|rank| self.write_rank(rank, at, bytes)),
            Some(pieces) => pieces
                .into_iter()
                .try_for_each(|(of, place)| self.ranks[of.rank].write(&place, &bytes[of.from..of.from + of.bytes])),
        }
    }

    fn write_rank(&mut self, rank: usize, at: &TensorRef, bytes: &[u8]) -> std::result::Result<(), BackendError> {
        self.ranks[rank].write(&at.of_rank(rank), bytes)
    }

    fn read(&mut self, at: &TensorRef, out: &mut [u8]) -> std::result::Result<(), BackendError> {
        match self.program.pieces(at) {
            None => self.read_rank(0, at, out),
            Some(pieces) => pieces
                .into_iter()
                .try_for_each(|(of, place)| self.ranks[of.rank].read(&place, &mut out[of.from..of.from + of.bytes])),
        }
    }

    fn read_rank(&mut self, rank: usize, at: &TensorRef, out: &mut [u8]) -> std::result::Result<(), BackendError> {
        self.ranks[rank].read(&at.of_rank(rank), out)
    }

    fn read_later(&mut self, at: &[TensorRef]) -> std::result::Result<Reading, BackendError> {
        self.ranks[0].read_later(at)
    }

    fn finish(&mut self, reading: Reading) -> std::result::Result<Vec<u8>, BackendError> {
        self.ranks[0].finish(reading)
    }

    fn run(&mut self, entry: usize) -> std::result::Result<(), BackendError> {
        self.run_entry(entry).map_err(backend_error)
    }

    fn run_instruction(&mut self, entry: usize, index: usize) -> std::result::Result<(), BackendError> {
        self.queue_step(entry, index).and_then(|()| self.synchronise()).map_err(backend_error)
    }

    /// Of one rank: all have as much.
    fn allocated(&self) -> Vec<MemoryLine> {
        self.ranks[0].allocated()
    }

    /// Of the GPU that has most in use.
    fn memory_in_use(&self) -> std::result::Result<Option<usize>, BackendError> {
        self.ranks.iter().try_fold(None, |most: Option<usize>, rank| Ok(most.max(rank.memory_in_use()?)))
    }

    /// Of the first rank, with its waits for the others.
    fn profile(&mut self, entry: usize) -> std::result::Result<Vec<f64>, BackendError> {
        self.profile_steps(entry).map_err(backend_error)
    }

    fn choices(&self) -> Choices {
        self.ranks[0].choices()
    }

    fn load_times(&self) -> Vec<(&'static str, f64)> {
        let mut times = self.ranks[0].load_times();
        let others = self.ranks[1..].iter().flat_map(CudaSession::load_times).map(|(_, seconds)| seconds).sum();
        times.push(("other GPUs", others));
        times
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for note in self.ranks.iter().flat_map(CudaSession::notes) {
            if !notes.contains(&note) {
                notes.push(note);
            }
        }
        notes
    }

    fn synchronize(&mut self) -> std::result::Result<(), BackendError> {
        self.synchronise().map_err(backend_error)
    }
}

impl Drop for CudaGroup {
    fn drop(&mut self) {
        // Ranks read each other's memory: nothing may be under way when the first one is freed. A failure at exit cannot be
        // acted on.
        let _ = self.synchronise();
        self.replays.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_graph_is_kept_where_every_rank_kept_its_entry() {
        let kept = kept_by_all([vec![Some(0), Some(2), None, Some(1)], vec![Some(0), None, None, Some(3)]]);
        assert_eq!(kept, [Some(0), None, None, None]);
    }
}
