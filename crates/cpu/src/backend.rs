//! The CPU backend: its thread pool, and sessions on it.

use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;

use program::{Backend, BackendError, Program, Session};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::fabric::{Fabric, Seat};
use crate::group::GroupSession;
use crate::session::CpuSession;

/// How long a rank waits for the others: far longer than any step takes.
const PATIENCE: Duration = Duration::from_secs(600);

/// Runs programs on this host's CPU. Results do not depend on the number of threads.
pub struct CpuBackend {
    pool: Arc<ThreadPool>,
    check_finite: bool,
}

/// Workers of a session.
fn pool(threads: usize) -> Result<Arc<ThreadPool>, BackendError> {
    let builder = ThreadPoolBuilder::new().num_threads(threads.max(1)).thread_name(|i| format!("cpu-{i}"));
    builder.build().map(Arc::new).map_err(|error| {
        BackendError::Unavailable(format!("a pool of {threads} threads could not be started: {error}"))
    })
}

impl CpuBackend {
    /// `threads`: how many threads work; all that the host offers when unset.
    pub fn new(threads: Option<usize>) -> Result<CpuBackend, BackendError> {
        let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, NonZero::get));
        Ok(CpuBackend { pool: pool(threads)?, check_finite: false })
    }

    /// With `on`, every result is searched for NaN and infinity after every instruction, and the
    /// first is an error that names the operation, its layer and its source line. Slow.
    pub fn check_finite(mut self, on: bool) -> CpuBackend {
        self.check_finite = on;
        self
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn load(&self, program: Arc<Program>) -> Result<Box<dyn Session>, BackendError> {
        let ranks = program.cluster.ranks;
        if ranks == 1 {
            return Ok(Box::new(CpuSession::load(program, self.pool.clone(), self.check_finite, None)?));
        }
        // A rank that waits for others holds a worker: ranks have pools of their own.
        let threads = self.pool.current_num_threads() / ranks;
        let load = |program: Arc<Program>, seat: Seat| {
            CpuSession::load(program, pool(threads)?, self.check_finite, Some(seat))
        };
        Ok(Box::new(GroupSession::load(program, Fabric::seats(ranks, PATIENCE), load)?))
    }
}
