//! The ranks of a program in this process, a session on a GPU for each. One thread queues the work of all: a collective
//! is queued on all of them before anything after it, and an entry is captured as one graph over all GPUs. So there is
//! no second order of execution that could wait for the first. Ranks of other processes do the same. Knows ranks and
//! where tensors of the whole are; not what an instruction does, or how bytes come from rank to rank.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use net::{Channel, Nodes};
use program::{
    BackendError, Choices, MemoryLine, Movement, ProcessGroup, Program, Reading, Session, TensorRef, ranks_of,
};

use crate::driver::{Event, Graph, Watch};
use crate::engine::{Engine, Options};
use crate::error::{During, Error, Result};
use crate::fabric::{Fabric, Lane, Transport, all_reach, transports};
use crate::library::open_nccl;
use crate::nccl::{Communicators, Endings, Nccl, UniqueId};
use crate::progress::Progress;
use crate::session::{GpuSession, backend_error};

/// The note for users of GPUs without links.
pub(crate) const THROUGH_HOST: &str =
    "the GPUs do not reach the memory of each other: what they exchange goes through host memory";

/// The timeout of a wait for a GPU: far longer than any step takes.
const TIMEOUT: Duration = Duration::from_secs(600);

/// The additional timeout for a rank of this process, so that a wait for another node ends first and the silent node is
/// named.
const EXTRA_TIMEOUT: Duration = Duration::from_secs(30);

/// A captured entry, and the number of its runs.
#[derive(Default)]
struct Replay {
    runs: usize,
    graph: Option<Graph>,
}

/// A program for several GPUs. The fields are dropped in order: graphs before the memory that they use.
pub struct GpuGroup {
    program: Arc<Program>,
    /// The ranks of this process.
    here: Range<usize>,
    /// The connections to the processes of the others.
    nodes: Option<Arc<Nodes>>,
    replays: HashMap<usize, Replay>,
    /// Marks by which computations wait for one another.
    marks: Vec<Event>,
    fabric: Fabric,
    progress: Progress,
    watch: Arc<Watch>,
    endings: Arc<Endings>,
    ranks: Vec<GpuSession>,
    check_each: bool,
    graphs: bool,
    /// The note for users about the transport.
    way: Option<String>,
}

fn lost(failure: net::Failure) -> Error {
    Error::Waited { what: "an exchange between nodes".into(), why: failure.to_string(), context: String::new() }
}

/// Returns bytes that only node 0 makes, and all other nodes receive from it.
fn of_first(nodes: Option<&Nodes>, what: &str, make: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
    match nodes {
        Some(nodes) if nodes.node != 0 => nodes.receive(0, Channel::Collective, what).map_err(lost),
        Some(nodes) => {
            let bytes = make()?;
            nodes.tell(Channel::Collective, &[&bytes]).map_err(lost)?;
            Ok(bytes)
        }
        None => make(),
    }
}

/// Returns the algorithms that the first rank of all chose, for the others.
fn shared_choices(nodes: Option<&Nodes>, own: impl FnOnce() -> Result<Choices>) -> Result<Choices> {
    let bytes = of_first(nodes, "the choice of algorithms", || {
        Ok(serde_json::to_vec(&own()?).expect("text is always representable as JSON"))
    })?;
    serde_json::from_slice(&bytes).map_err(|error| Error::Waited {
        what: "the choice of algorithms".into(),
        why: format!("node 0 sent none: {error}"),
        context: String::new(),
    })
}

impl GpuGroup {
    /// Opens one GPU for each rank of this process, from the first visible one on. All use the algorithms that the
    /// first rank chose.
    pub fn load(
        program: Arc<Program>,
        options: &Options,
        nodes: Option<Arc<Nodes>>,
        endings: &Arc<Endings>,
    ) -> std::result::Result<GpuGroup, BackendError> {
        Self::opened(program, options, nodes, endings.clone()).map_err(backend_error)
    }

    fn opened(
        program: Arc<Program>,
        options: &Options,
        nodes: Option<Arc<Nodes>>,
        endings: Arc<Endings>,
    ) -> Result<GpuGroup> {
        let all = program.cluster.ranks;
        let here = nodes.as_ref().map_or(0..all, |nodes| ranks_of(nodes, all));
        let mut options = options.clone();
        let first_device = options.device;
        let mut ranks = Vec::new();
        let leads = here.start == 0;
        if !leads {
            let chosen = shared_choices(nodes.as_deref(), || unreachable!("node 0 chooses"))?;
            options.algorithms.extend(chosen);
        }
        for rank in here.clone() {
            options.device = first_device + if options.one_device { 0 } else { rank - here.start };
            ranks.push(GpuSession::load(Arc::new(program.of_rank(rank)), &options)?);
            if rank == 0 {
                let chosen = shared_choices(nodes.as_deref(), || Ok(ranks[0].algorithms().clone()))?;
                options.algorithms.extend(chosen);
            }
        }
        let mut group = Self::connected(program, here, ranks, &options, nodes, endings)?;
        group.make_room(group.program.clone().as_ref())?;
        Ok(group)
    }

    fn connected(
        program: Arc<Program>,
        here: Range<usize>,
        ranks: Vec<GpuSession>,
        options: &Options,
        nodes: Option<Arc<Nodes>>,
        endings: Arc<Endings>,
    ) -> Result<GpuGroup> {
        let devices: Vec<_> = ranks.iter().map(|rank| rank.engine().device.clone()).collect();
        let watch = Arc::new(watch_over(nodes.clone()));
        devices.iter().for_each(|device| device.watch_with(&watch));
        let peers = all_reach(&devices, options.ways)?;
        let processes = nodes.as_ref().map_or(1, |nodes| nodes.count);
        let transports = transports(options.ways, processes, peers);
        let mut way = transports.contains(&Transport::Host).then(|| THROUGH_HOST.to_owned());
        let nccl = match transports.contains(&Transport::Nccl) {
            false => None,
            true => {
                let nccl = Nccl::new(open_nccl(&options.search)?);
                let id = of_first(nodes.as_deref(), "the address of NCCL", || Ok(nccl.unique_id()?.0.to_vec()))?;
                let id = UniqueId(id.try_into().map_err(|_| Error::Waited {
                    what: "the address of NCCL".into(),
                    why: "node 0 sent none".into(),
                    context: String::new(),
                })?);
                let all = program.cluster.ranks;
                let joined = Communicators::join(&nccl, id, all, here.clone(), &devices, &watch);
                let joined = joined.map_err(|error| watch.root_of(error));
                way = Some(format!("NCCL {} exchanges what {all} ranks show each other", nccl.version()?));
                Some(joined.during(|| format!("connecting {all} ranks"))?)
            }
        };
        let mark = |rank: &GpuSession| {
            rank.engine().device.bind()?;
            Event::without_time(&rank.engine().device)
        };
        let marks = ranks.iter().map(mark).collect::<Result<Vec<_>>>()?;
        let progress = Progress::new(&devices)?;
        let fabric = Fabric::new(here.clone(), program.cluster.ranks, devices, transports, nccl)?;
        let (check_each, graphs) = (options.check_each, options.graphs && !options.check_each);
        let replays = HashMap::new();
        Ok(GpuGroup {
            program,
            here,
            nodes,
            replays,
            marks,
            fabric,
            progress,
            watch,
            endings,
            ranks,
            check_each,
            graphs,
            way,
        })
    }

    /// Enlarges the host memory between GPUs for a program; graphs that have the old addresses are dropped.
    fn make_room(&mut self, program: &Program) -> Result<()> {
        let Some(bytes) = self.fabric.missing(program) else { return Ok(()) };
        self.replays.clear();
        self.fabric.grow(bytes)
    }

    /// Returns the session of a rank of this process.
    fn rank(&mut self, rank: usize) -> &mut GpuSession {
        &mut self.ranks[rank - self.here.start]
    }

    fn engines(&self) -> impl Iterator<Item = &Engine> {
        self.ranks.iter().map(GpuSession::engine)
    }

    /// Makes the computation of every other rank wait for that of the first, or the first for all others.
    fn order(&self, first_waits: bool) -> Result<()> {
        for (rank, engine) in self.engines().enumerate().skip(1) {
            let first = self.ranks[0].engine();
            let (before, after, mark) = match first_waits {
                true => (engine, first, &self.marks[rank]),
                false => (first, engine, &self.marks[0]),
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
            Some((movement, group)) => self.meet(movement, group, entry, index),
            None => self.ranks.iter_mut().try_for_each(|rank| rank.queue_step(entry, index)),
        };
        let queued = match self.check_each {
            true => queued.and_then(|()| self.synchronise()),
            false => queued,
        };
        queued.during(|| self.ranks[0].place_of(entry, index))
    }

    /// Queues a collective of all ranks.
    fn meet(&self, movement: Movement, group: ProcessGroup, entry: usize, index: usize) -> Result<()> {
        let lane = |rank| {
            let session: &GpuSession = rank;
            let (from, to, bytes) = session.joint_places(entry, index);
            Lane { stream: session.engine().exchange(), from, to, bytes }
        };
        let lanes: Vec<Lane<'_>> = self.ranks.iter().map(lane).collect();
        for (rank, lane) in lanes.iter().enumerate() {
            lane.stream.device.bind()?;
            self.progress.mark(rank, lane.stream, (entry, index))?;
        }
        self.fabric.queue(movement, group, &lanes)
    }

    /// Adds the places of the ranks to an error if a wait for one of them timed out, or replaces it by the reason that
    /// other nodes give.
    fn explained(&self, error: Error) -> Error {
        let error = match self.nodes {
            Some(_) if !matches!(error, Error::Waited { .. }) => self.watch.root_of(error),
            _ => error,
        };
        let Error::Waited { .. } = &error else { return error };
        error.during(|| {
            let places = self.here.clone().map(|rank| {
                let place = match self.progress.of(rank - self.here.start) {
                    Err(()) => "does not answer at all".to_owned(),
                    Ok(None) => "has met no other rank yet".to_owned(),
                    Ok(Some((entry, index))) if entry < self.program.entries.len() => {
                        format!("came to {}", self.ranks[0].place_of(entry, index))
                    }
                    Ok(Some(_)) => "came to an instruction of an earlier program".to_owned(),
                };
                format!("rank {rank} {place}")
            });
            places.collect::<Vec<_>>().join("; ")
        })
    }

    /// Converts to the error of the backend contract.
    fn failed(&self, error: Error) -> BackendError {
        backend_error(self.explained(error))
    }

    fn queue(&mut self, entry: usize) -> Result<()> {
        (0..self.program.entries[entry].steps.len()).try_for_each(|index| self.queue_step(entry, index))
    }

    fn run_entry(&mut self, entry: usize) -> Result<()> {
        let name = self.program.entries[entry].kind.name();
        let mut replay = self.replays.remove(&entry).unwrap_or_default();
        if self.graphs && replay.graph.is_none() && replay.runs > 0 {
            // The first run was eager: every library has done its one-time work.
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

    /// Prepares the entries of another program. A graph is kept where every rank kept its entry: it has addresses of
    /// the memory of all.
    fn replace_entries(&mut self, program: Arc<Program>) -> Result<()> {
        self.synchronise()?;
        let programs: Vec<_> = self.here.clone().map(|rank| Arc::new(program.of_rank(rank))).collect();
        let ranks = self.ranks.iter().zip(&programs);
        let known = kept_by_all(ranks.map(|(rank, program)| rank.known_entries(program)));
        // Graphs are dropped before the memory that they use.
        self.replays.retain(|entry, _| known.contains(&Some(*entry)));
        self.make_room(&program)?;
        let mut kept = vec![known];
        let leads = self.here.start == 0;
        let nodes = self.nodes.clone();
        let mut chosen = match leads {
            true => None,
            false => Some(shared_choices(nodes.as_deref(), || unreachable!("node 0 chooses"))?),
        };
        for (rank, program) in self.ranks.iter_mut().zip(programs) {
            if let Some(chosen) = &chosen {
                rank.prefer(chosen);
            }
            kept.push(rank.replace_entries(program)?);
            if chosen.is_none() {
                chosen = Some(shared_choices(nodes.as_deref(), || Ok(rank.algorithms().clone()))?);
            }
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
        // No work is in flight while the graph is uploaded to the devices.
        graph.upload(&stream)?;
        stream.synchronise()?;
        Ok(graph)
    }

    /// Launches after the queued work of every rank; later work of the ranks waits for it.
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
        })?;
        self.fabric.check()
    }

    /// Runs an entry with a time stamp on the first rank after every instruction.
    fn profile_steps(&mut self, entry: usize) -> Result<Vec<f64>> {
        self.synchronise()?;
        let mark = |group: &GpuGroup| {
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

/// Returns for each entry the one before, where all ranks agree.
fn kept_by_all(ranks: impl IntoIterator<Item = Vec<Option<usize>>>) -> Vec<Option<usize>> {
    let same = |all: Vec<Option<usize>>, own: Vec<Option<usize>>| {
        all.into_iter().zip(own).map(|(all, own)| all.filter(|_| all == own)).collect()
    };
    ranks.into_iter().reduce(same).expect("a group has ranks")
}

impl Session for GpuGroup {
    fn program(&self) -> &Arc<Program> {
        &self.program
    }

    fn adopt(&mut self, program: Arc<Program>) -> std::result::Result<(), BackendError> {
        let adopted = self.replace_entries(program).during(|| "making other entries ready".into());
        adopted.map_err(|error| self.failed(error))
    }

    fn write(&mut self, at: &TensorRef, bytes: &[u8]) -> std::result::Result<(), BackendError> {
        match self.program.pieces(at) {
            None => self.here.clone().try_for_each(|rank| self.write_rank(rank, at, bytes)),
            Some(pieces) => pieces.into_iter().try_for_each(|(of, place)| {
                let bytes = &bytes[of.from..of.from + of.bytes];
                let mut holders = self.program.holders(at, of.rank);
                holders.try_for_each(|rank| self.rank(rank).write(&place, bytes))
            }),
        }
    }

    fn write_rank(&mut self, rank: usize, at: &TensorRef, bytes: &[u8]) -> std::result::Result<(), BackendError> {
        let at = at.of_share(self.program.cluster.share(rank));
        self.rank(rank).write(&at, bytes)
    }

    fn read(&mut self, at: &TensorRef, out: &mut [u8]) -> std::result::Result<(), BackendError> {
        match self.program.pieces(at) {
            None => self.read_rank(self.here.start, at, out),
            Some(pieces) => pieces
                .into_iter()
                .try_for_each(|(of, place)| self.read_rank(of.rank, &place, &mut out[of.from..of.from + of.bytes])),
        }
    }

    fn read_rank(&mut self, rank: usize, at: &TensorRef, out: &mut [u8]) -> std::result::Result<(), BackendError> {
        // This wait can name the rank that is missing.
        self.synchronise().map_err(|error| self.failed(error))?;
        let at = at.of_share(self.program.cluster.share(rank));
        self.rank(rank).read(&at, out)
    }

    fn read_later(&mut self, at: &[TensorRef]) -> std::result::Result<Reading, BackendError> {
        self.ranks[0].read_later(at)
    }

    fn finish(&mut self, reading: Reading) -> std::result::Result<Vec<u8>, BackendError> {
        let finished = self.ranks[0].wait_for(reading);
        finished.and_then(|bytes| self.fabric.check().map(|()| bytes)).map_err(|error| self.failed(error))
    }

    fn run(&mut self, entry: usize) -> std::result::Result<(), BackendError> {
        self.run_entry(entry).map_err(|error| self.failed(error))
    }

    fn run_instruction(&mut self, entry: usize, index: usize) -> std::result::Result<(), BackendError> {
        self.queue_step(entry, index).and_then(|()| self.synchronise()).map_err(|error| self.failed(error))
    }

    /// Allocations of one rank: all ranks have the same.
    fn allocated(&self) -> Vec<MemoryLine> {
        self.ranks[0].allocated()
    }

    /// The largest number of bytes in use on any rank's GPU.
    fn memory_in_use(&self) -> std::result::Result<Option<usize>, BackendError> {
        self.ranks.iter().try_fold(None, |most: Option<usize>, rank| Ok(most.max(rank.memory_in_use()?)))
    }

    /// Profiles the first rank, including its waits for the others.
    fn profile(&mut self, entry: usize) -> std::result::Result<Vec<f64>, BackendError> {
        self.profile_steps(entry).map_err(|error| self.failed(error))
    }

    fn choices(&self) -> Choices {
        self.ranks[0].choices()
    }

    fn load_times(&self) -> Vec<(&'static str, f64)> {
        let mut times = self.ranks[0].load_times();
        let others = self.ranks[1..].iter().flat_map(GpuSession::load_times).map(|(_, seconds)| seconds).sum();
        times.push(("other GPUs", others));
        times
    }

    fn notes(&self) -> Vec<String> {
        let mut notes: Vec<String> = self.way.iter().cloned().collect();
        for note in self.ranks.iter().flat_map(GpuSession::notes) {
            if !notes.contains(&note) {
                notes.push(note);
            }
        }
        notes
    }

    fn synchronize(&mut self) -> std::result::Result<(), BackendError> {
        self.synchronise().map_err(|error| self.failed(error))
    }
}

/// Returns the limits on a wait for the ranks of this process and of others.
pub(crate) fn watch_over(nodes: Option<Arc<Nodes>>) -> Watch {
    let timeout = nodes.as_ref().map_or(TIMEOUT, |nodes| nodes.timeout + EXTRA_TIMEOUT);
    let ended = move || nodes.as_ref()?.ended().map(|failure| failure.to_string());
    Watch { timeout, ended: Box::new(ended) }
}

impl Drop for GpuGroup {
    fn drop(&mut self) {
        // Ranks read each other's memory: no work may be in flight when the first one is freed. NCCL ends a
        // communicator when no graph has it any more; work that it has in flight and that does not end is aborted.
        let idle = self.synchronise().is_ok();
        if idle {
            self.replays.clear();
        }
        // The other processes end later, perhaps because of this one.
        self.fabric.end(idle).into_iter().for_each(|ending| self.endings.add(ending));
        if idle || self.engines().all(Engine::comes_to_rest) {
            self.replays.clear();
            return;
        }
        // A GPU whose work does not end is left to the end of the process: freeing its memory would wait for it.
        std::mem::forget(std::mem::take(&mut self.ranks));
        std::mem::forget(std::mem::take(&mut self.replays));
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
