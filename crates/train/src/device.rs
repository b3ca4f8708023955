//! Selects the backend of a run, and describes the machine to the compiler. The only file that knows both backends.

use std::path::PathBuf;
use std::sync::Arc;

use cpu::CpuBackend;
use cuda::{CudaBackend, Search};
use net::Nodes;
use options::Setting;
use program::{Backend, Machine};

use crate::config;
use crate::error::{Result, TrainError};
use crate::machines;
use crate::nodes;

/// Which device is requested and where its libraries may be.
#[derive(Clone, Debug, Default)]
pub struct DeviceRequest {
    /// Left open: the GPU if one can be used, otherwise the CPU.
    pub device: Setting<config::Device>,
    /// Threads of the CPU backend; all cores when unset.
    pub threads: Option<usize>,
    /// Devices that train together, or ranks that share the CPU and its memory; 0 counts as 1.
    pub ranks: usize,
    /// Folders of installed Python packages, in which CUDA libraries may be.
    pub site_packages: Vec<PathBuf>,
    /// Look at every result before the next instruction starts, so that an error names the one that
    /// failed. Slow.
    pub check_each: bool,
    /// Launch instruction by instruction instead of replaying CUDA graphs. The bits are the same.
    pub eager: bool,
    /// All GPUs that are visible train together.
    pub every_gpu: bool,
    /// The other processes that train with this one.
    pub nodes: Option<Arc<Nodes>>,
}

impl DeviceRequest {
    /// What a run's options ask for.
    pub fn of(config: &config::Config, site_packages: Vec<PathBuf>) -> DeviceRequest {
        DeviceRequest {
            device: config.hardware.device,
            ranks: config.local_ranks(),
            site_packages,
            eager: !config.hardware.use_cuda_graphs,
            every_gpu: config.hardware.gpus == 0,
            ..DeviceRequest::default()
        }
    }
}

/// A backend that is ready, and what it runs on.
pub struct Device {
    pub backend: Box<dyn Backend>,
    pub machine: Machine,
    /// Why this one, when the choice was left open.
    pub because: String,
    /// GPUs that are visible; 0 on the CPU.
    pub gpus: usize,
    /// What measured rates are kept by: the device's name, and its driver.
    pub card: (String, String),
    /// What the bits of results depend on besides the program: the processor's set of instructions, or the kind of GPU.
    pub arithmetic: String,
    /// The other processes that train with this one.
    pub nodes: Option<Arc<Nodes>>,
}

impl Device {
    /// Opens the device. A GPU that is requested and not usable is an error that says what is missing.
    pub fn open(request: &DeviceRequest) -> Result<Device> {
        if request.nodes.is_some() {
            return cpu_of_node(request);
        }
        let device = match request.device {
            Setting::Value(config::Device::Cpu) => cpu(request, "requested")?,
            Setting::Value(config::Device::Cuda) => cuda(request, "requested").map_err(TrainError::Failed)?,
            Setting::Auto => match cuda(request, "a GPU can be used") {
                Ok(device) => device,
                Err(_) => cpu(request, "no GPU can be used; `surogate doctor` says why")?,
            },
        };
        Ok(device)
    }
}

/// The instructions that this CPU computes with: others give other bits.
pub(crate) fn instructions_of_cpu() -> String {
    cpu::instructions().into()
}

fn cpu(request: &DeviceRequest, because: &str) -> Result<Device> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = request.threads.unwrap_or(cores);
    let backend = CpuBackend::new(Some(threads))?.check_finite(request.check_each);
    let (name, version) = (processor(), env!("CARGO_PKG_VERSION"));
    let ranks = request.ranks.max(1);
    let machine = Machine::cpu(usable(host_memory()) / ranks, (threads / ranks).max(1));
    let machine = machines::calibrated(&machine, &name, version).unwrap_or(machine);
    let (because, card) = (because.to_owned(), (name, version.to_owned()));
    let arithmetic = format!("a CPU with {}", instructions_of_cpu());
    Ok(Device { backend: Box::new(backend), machine, because, gpus: 0, card, arithmetic, nodes: None })
}

/// The CPU of one of several nodes, which all plan for the least of them: their programs are the same.
fn cpu_of_node(request: &DeviceRequest) -> Result<Device> {
    let nodes = request.nodes.clone().expect("it is one of several");
    let of_node = cpu(&DeviceRequest { nodes: None, ..request.clone() }, "")?;
    let own = (of_node.machine.memory, of_node.machine.units);
    let (memory, threads) = nodes::least(&nodes, own).map_err(|failure| TrainError::Failed(failure.to_string()))?;
    let threads_here = request.threads.or_else(|| std::thread::available_parallelism().ok().map(|n| n.get()));
    let backend = CpuBackend::new(threads_here)?.check_finite(request.check_each).among(Some(nodes.clone()));
    Ok(Device {
        backend: Box::new(backend),
        machine: Machine::cpu(memory, threads),
        because: format!("node {} of {}", nodes.node, nodes.count),
        nodes: Some(nodes),
        ..of_node
    })
}

fn cuda(request: &DeviceRequest, because: &str) -> std::result::Result<Device, String> {
    let search = Search::from_environment(request.site_packages.clone());
    let report = cuda::Report::for_one_gpu(&search);
    if !report.usable() {
        return Err(format!("no GPU can be used here:\n{report}"));
    }
    let mut devices = report.devices.expect("a usable report lists devices");
    let gpus = devices.len();
    let kind = |of: &cuda::driver::Properties| (of.name.clone(), of.architecture, of.multiprocessors);
    let together = if request.every_gpu { gpus } else { request.ranks.max(1) };
    let unlike = devices.iter().take(together).find(|other| kind(other) != kind(&devices[0]));
    if let Some(other) = unlike {
        return Err(format!("GPUs that train together are of one kind: {} and {other} are not", devices[0]));
    }
    let properties = devices.swap_remove(0);
    let (check_each, graphs) = (request.check_each, !request.eager);
    let options = cuda::Options { check_each, graphs, ..cuda::Options::new(search) };
    let machine = cuda::machine(&properties);
    let card = (properties.name.clone(), report.driver_release.unwrap_or_default());
    let arithmetic = format!("a GPU {}, {}", machine.name, machine.arch);
    let machine = machines::calibrated(&machine, &card.0, &card.1).unwrap_or(machine);
    let (backend, because) = (Box::new(CudaBackend::new(options)), because.to_owned());
    Ok(Device { backend, machine, because, gpus, card, arithmetic, nodes: None })
}

/// Memory of this host that processes may use, bytes; without a way to ask, no limit.
fn host_memory() -> usize {
    let kilobytes = |text: String| {
        let line = text.lines().find(|line| line.starts_with("MemTotal:"))?.to_owned();
        line.split_whitespace().nth(1)?.parse::<usize>().ok()
    };
    let own = std::fs::read_to_string("/proc/meminfo").ok().and_then(kilobytes).map_or(usize::MAX, |kb| kb * 1024);
    let of_group = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    of_group.and_then(|text| text.trim().parse().ok()).map_or(own, |limit: usize| own.min(limit))
}

/// Of host memory, what a run may plan with: the system, the interpreter, the loader's batches and files that are
/// mapped need some of it, too.
fn usable(memory: usize) -> usize {
    memory - (memory / 8).clamp(256 << 20, 8 << 30).min(memory)
}

/// The processor's name.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("model name"));
    line.and_then(|line| line.split_once(':')).map_or("cpu".to_owned(), |(_, name)| name.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_leaves_some_of_the_hosts_memory() {
        assert_eq!(usable(16 << 30), 14 << 30);
        assert_eq!(usable(1 << 30), 768 << 20);
        assert_eq!(usable(128 << 20), 0);
        assert_eq!(usable(1 << 40), (1 << 40) - (8 << 30));
        assert!(host_memory() > 128 << 20 && !processor().is_empty());
    }
}
