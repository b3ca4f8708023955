//! The CPU backend: its thread pool, and sessions on it.

use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;

use net::Nodes;
use program::{Backend, BackendError, NodeSession, PipelineSession, Program, Session, ranks_of};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::fabric::{Fabric, RankHandle};
use crate::group::GroupSession;
use crate::pipeline::CpuStages;
use crate::session::CpuSession;
use crate::wire::NodeWire;

/// The time that a rank waits for the others: far longer than any step takes.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Runs programs on this host's CPU. Results do not depend on the number of threads.
pub struct CpuBackend {
    pool: Arc<ThreadPool>,
    check_finite: bool,
    /// The connections to the processes of the other ranks.
    nodes: Option<Arc<Nodes>>,
}

/// Builds the thread pool of a session.
fn pool(threads: usize) -> Result<Arc<ThreadPool>, BackendError> {
    let builder = ThreadPoolBuilder::new().num_threads(threads.max(1)).thread_name(|i| format!("cpu-{i}"));
    builder.build().map(Arc::new).map_err(|error| {
        BackendError::Unavailable(format!("a pool of {threads} threads could not be started: {error}"))
    })
}

impl CpuBackend {
    /// Makes a backend with `threads` threads; all that the host offers when unset.
    pub fn new(threads: Option<usize>) -> Result<CpuBackend, BackendError> {
        let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, NonZero::get));
        Ok(CpuBackend { pool: pool(threads)?, check_finite: false, nodes: None })
    }

    /// With `on`, every result is searched for NaN and infinity after every instruction, and the
    /// first is an error that names the operation, its layer and its source line. Slow.
    pub fn check_finite(mut self, on: bool) -> CpuBackend {
        self.check_finite = on;
        self
    }

    /// Makes programs run with ranks in several processes, the same number in each.
    pub fn with_nodes(mut self, nodes: Option<Arc<Nodes>>) -> CpuBackend {
        self.nodes = nodes;
        self
    }

    /// Returns the handles of the ranks of this process.
    fn handles(&self, ranks: usize) -> Vec<RankHandle> {
        let Some(nodes) = &self.nodes else { return Fabric::handles(ranks, TIMEOUT) };
        let here = ranks_of(nodes, ranks);
        let local = here.len();
        let wire = Arc::new(NodeWire::new(nodes.clone(), local));
        // The wire waits for other nodes: its timeout ends before that of the ranks that wait for it.
        let handles = Fabric::handles_of(here, ranks, nodes.timeout + TIMEOUT, Some(wire));
        let fabric = handles[0].fabric();
        nodes.on_failure(move |failure| {
            if let Some(fabric) = fabric.upgrade() {
                fabric.fail_of(failure.node * local, failure.to_string());
            }
        });
        handles
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn load(&self, program: Arc<Program>) -> Result<Box<dyn Session>, BackendError> {
        let (ranks, stages) = (program.cluster.ranks, program.cluster.stages);
        if stages > 1 {
            let threads = self.pool.current_num_threads() / stages;
            let load = |program: Arc<Program>, handle: RankHandle| {
                CpuSession::load(program, pool(threads)?, self.check_finite, Some(handle))
            };
            let handles = Fabric::handles(stages, TIMEOUT);
            let stages = CpuStages::load(&program, handles, TIMEOUT, load)?;
            return Ok(Box::new(PipelineSession::new(program, stages)));
        }
        if ranks == 1 {
            return Ok(Box::new(CpuSession::load(program, self.pool.clone(), self.check_finite, None)?));
        }
        let handles = self.handles(ranks);
        // A rank that waits for others holds a worker: ranks have pools of their own.
        let threads = self.pool.current_num_threads() / handles.len();
        let load = |program: Arc<Program>, handle: RankHandle| {
            CpuSession::load(program, pool(threads)?, self.check_finite, Some(handle))
        };
        let group = Box::new(GroupSession::load(program, handles, load)?);
        Ok(match &self.nodes {
            Some(nodes) => Box::new(NodeSession::new(group, nodes.clone())),
            None => group,
        })
    }
}
