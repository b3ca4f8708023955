//! The CPU backend: its thread pool, and sessions on it.

use std::num::NonZero;
use std::sync::Arc;

use program::{Backend, BackendError, Program, Session};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::session::CpuSession;

/// Runs programs on this host's CPU. Results do not depend on the number of threads.
pub struct CpuBackend {
    pool: Arc<ThreadPool>,
    check_finite: bool,
}

impl CpuBackend {
    /// `threads`: how many threads work; all that the host offers when unset.
    pub fn new(threads: Option<usize>) -> Result<CpuBackend, BackendError> {
        let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, NonZero::get));
        let builder = ThreadPoolBuilder::new().num_threads(threads.max(1)).thread_name(|i| format!("cpu-{i}"));
        let pool = builder.build().map_err(|error| {
            BackendError::Unavailable(format!("a pool of {threads} threads could not be started: {error}"))
        })?;
        Ok(CpuBackend { pool: Arc::new(pool), check_finite: false })
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
        Ok(Box::new(CpuSession::load(program, self.pool.clone(), self.check_finite)?))
    }
}
