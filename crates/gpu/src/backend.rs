//! The backend contract on GPUs of either vendor. The machine is not examined before a program is loaded.

use crate::amdsmi::{AmdInstruments, AmdSmi};
use crate::driver::{Device, Driver};
use crate::engine::Options;
use crate::error::{Error, Result};
use crate::group::GpuGroup;
use crate::library::{open_amdsmi, open_driver, open_nvml};
use crate::nccl::Endings;
use crate::nvml::{Instruments, Nvml};
use crate::pipeline::GpuStages;
use crate::session::{GpuSession, backend_error};
use crate::vendor::Vendor;
use net::Nodes;
use program::{Backend, BackendError, Choices, Gauges, NodeSession, PipelineSession, Program, Session};
use std::sync::{Arc, OnceLock};

/// Loads programs onto one GPU, or onto one for each rank or stage.
pub struct GpuBackend {
    options: Options,
    /// The connections to the processes of the other ranks.
    nodes: Option<Arc<Nodes>>,
    endings: Arc<Endings>,
    /// The sensors of the GPU, opened when they are first requested.
    instruments: OnceLock<Result<Sensors>>,
}

impl GpuBackend {
    /// Opens nothing yet; [`Backend::load`] does.
    pub fn new(options: Options) -> GpuBackend {
        GpuBackend { options, nodes: None, endings: Arc::default(), instruments: OnceLock::new() }
    }

    /// Makes programs run with ranks in several processes, the same number in each.
    pub fn with_nodes(mut self, nodes: Option<Arc<Nodes>>) -> GpuBackend {
        self.nodes = nodes;
        self
    }

    fn load_on(&self, program: Arc<Program>, options: &Options) -> std::result::Result<Box<dyn Session>, BackendError> {
        if program.cluster.stages > 1 {
            let stages = GpuStages::load(&program, options)?;
            return Ok(Box::new(PipelineSession::new(program, stages)));
        }
        if program.cluster.ranks == 1 {
            return Ok(Box::new(GpuSession::new(program, options)?));
        }
        let group = Box::new(GpuGroup::load(program, options, self.nodes.clone(), &self.endings)?);
        Ok(match &self.nodes {
            Some(nodes) => Box::new(NodeSession::new(group, nodes.clone())),
            None => group,
        })
    }

    /// Loads a program like [`Backend::load`], and returns the session itself, with its profile and notes.
    pub fn load_session(&self, program: Arc<Program>) -> std::result::Result<GpuSession, BackendError> {
        GpuSession::new(program, &self.options)
    }
}

impl Backend for GpuBackend {
    fn name(&self) -> &'static str {
        self.options.search.vendor.device()
    }

    fn load(&self, program: Arc<Program>) -> std::result::Result<Box<dyn Session>, BackendError> {
        self.load_on(program, &self.options)
    }

    fn load_with(
        &self,
        program: Arc<Program>,
        choices: &Choices,
    ) -> std::result::Result<Box<dyn Session>, BackendError> {
        let mut options = self.options.clone();
        options.algorithms.extend(choices.iter().map(|(name, choice)| (name.clone(), choice.clone())));
        self.load_on(program, &options)
    }

    fn gauges(&self) -> std::result::Result<Option<Gauges>, BackendError> {
        let instruments = self.instruments.get_or_init(|| instruments(&self.options));
        let read = instruments.as_ref().map_err(Error::clone).and_then(Sensors::gauges);
        read.map(Some).map_err(backend_error)
    }
}

/// The sensors of a GPU, by its vendor's library.
enum Sensors {
    Nvidia(Instruments),
    Amd(AmdInstruments),
}

impl Sensors {
    fn gauges(&self) -> Result<Gauges> {
        match self {
            Sensors::Nvidia(of) => of.gauges(),
            Sensors::Amd(of) => of.gauges(),
        }
    }
}

/// Opens the sensors of the GPU that programs run on.
fn instruments(options: &Options) -> Result<Sensors> {
    let driver = Driver::new(open_driver(&options.search)?.table)?;
    let bus = Device::bus(&driver, options.device)?;
    Ok(match options.search.vendor {
        Vendor::Nvidia => Sensors::Nvidia(Nvml::new(open_nvml(&options.search)?)?.instruments(&bus)?),
        Vendor::Amd => Sensors::Amd(AmdSmi::new(open_amdsmi(&options.search)?)?.instruments(&bus)?),
    })
}
