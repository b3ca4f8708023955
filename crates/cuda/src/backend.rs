//! The backend contract on NVIDIA GPUs, and what `surogate doctor` reports about this machine.

use crate::driver::{Device, Driver, Properties};
use crate::engine::Options;
use crate::error::Result;
use crate::library::{Kind, Search, open_cublaslt, open_cudnn, open_driver, open_nvrtc};
use crate::nvrtc::Compiler;
use crate::session::CudaSession;
use program::{Backend, BackendError, Choices, Program, Session};
use std::fmt;
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

/// The GPUs that programs can run on, in their order. An error says what of the driver is missing.
pub fn devices(search: &Search) -> Result<Vec<Properties>> {
    let driver = Driver::new(open_driver(search)?.table)?;
    (0..driver.device_count()?).map(|index| Device::properties(&driver, index)).collect()
}

/// One library: found where and in which version, or why not.
#[derive(Clone, Debug)]
pub struct LibraryReport {
    pub kind: Kind,
    /// (path, origin, version), or the reason.
    pub state: std::result::Result<(String, String, String), String>,
}

/// Everything that the backend finds on this machine.
#[derive(Clone, Debug)]
pub struct Report {
    pub libraries: Vec<LibraryReport>,
    /// The visible GPUs, or why there are none.
    pub devices: std::result::Result<Vec<Properties>, String>,
}

impl Report {
    /// Looks for every library and every GPU. Never fails: what is missing is the report.
    pub fn new(search: &Search) -> Report {
        let libraries = Kind::ALL.into_iter().map(|kind| {
            let state = describe(search, kind).map_err(|error| error.to_string());
            LibraryReport { kind, state }
        });
        Report { libraries: libraries.collect(), devices: devices(search).map_err(|error| error.to_string()) }
    }

    /// Whether programs can run here. Those with bf16 attention also need cuDNN: loading one without it
    /// is refused.
    pub fn usable(&self) -> bool {
        let found = |kind| self.libraries.iter().any(|l| l.kind == kind && l.state.is_ok());
        let needed = [Kind::Driver, Kind::Nvrtc, Kind::CublasLt];
        needed.into_iter().all(found) && self.devices.as_ref().is_ok_and(|devices| !devices.is_empty())
    }
}

fn describe(search: &Search, kind: Kind) -> Result<(String, String, String)> {
    let (path, origin, version) = match kind {
        Kind::Driver => {
            let opened = open_driver(search)?;
            let (path, origin) = (opened.path, opened.origin);
            let (major, minor) = Driver::new(opened.table)?.version()?;
            (path, origin, format!("CUDA {major}.{minor}"))
        }
        Kind::Nvrtc => {
            let opened = open_nvrtc(search)?;
            let (path, origin) = (opened.path.clone(), opened.origin);
            let (major, minor) = Compiler::new(opened)?.version();
            (path, origin, format!("{major}.{minor}"))
        }
        Kind::CublasLt => {
            let opened = open_cublaslt(search)?;
            (opened.path.clone(), opened.origin, crate::cublaslt::version(&opened.table))
        }
        Kind::Cudnn => {
            let opened = open_cudnn(search)?;
            let (path, origin) = (opened.path.clone(), opened.origin);
            let version = crate::cudnn::Cudnn::new(opened).version();
            (path, origin, format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
        }
    };
    Ok((path.display().to_string(), origin.to_string(), version))
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for library in &self.libraries {
            match &library.state {
                Ok((path, origin, version)) => {
                    writeln!(f, "{}: {version}, {path} ({origin})", library.kind.title())?;
                }
                Err(reason) => writeln!(f, "{}: not usable: {reason}", library.kind.title())?,
            }
        }
        match &self.devices {
            Ok(devices) if devices.is_empty() => writeln!(f, "GPUs: none")?,
            Ok(devices) => {
                for (index, d) in devices.iter().enumerate() {
                    let gib = d.memory as f64 / (1u64 << 30) as f64;
                    writeln!(f, "GPU {index}: {}, {}, {gib:.0} GiB", d.name, d.architecture)?;
                }
            }
            Err(reason) => writeln!(f, "GPUs: none: {reason}")?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_machine_is_reported_and_not_usable() {
        let report = Report::new(&Search::default());
        assert!(!report.usable());
        let text = report.to_string();
        for kind in Kind::ALL {
            assert!(text.contains(&format!("{}: not usable: ", kind.title())), "{text}");
        }
        assert!(text.contains("GPUs: none"), "{text}");
    }
}
