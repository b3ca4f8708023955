//! The backend contract on NVIDIA GPUs. What the machine has is not looked at before a program is loaded.

use crate::engine::Options;
use crate::session::CudaSession;
use program::{Backend, BackendError, Choices, Program, Session};
use std::sync::Arc;

/// Loads programs onto one GPU.
pub struct CudaBackend {
    options: Options,
}

impl CudaBackend {
    /// Opens nothing yet; [`Backend::load`] does.
    pub fn new(options: Options) -> CudaBackend {
        CudaBackend { options }
    }

    /// As [`Backend::load`], with the profile and the notes within reach.
    pub fn load_session(&self, program: Arc<Program>) -> std::result::Result<CudaSession, BackendError> {
        CudaSession::new(program, &self.options)
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn load(&self, program: Arc<Program>) -> std::result::Result<Box<dyn Session>, BackendError> {
        Ok(Box::new(self.load_session(program)?))
    }

    fn load_with(
        &self,
        program: Arc<Program>,
        choices: &Choices,
    ) -> std::result::Result<Box<dyn Session>, BackendError> {
        let mut options = self.options.clone();
        options.algorithms.extend(choices.iter().map(|(name, choice)| (name.clone(), choice.clone())));
        Ok(Box::new(CudaSession::new(program, &options)?))
    }
}
