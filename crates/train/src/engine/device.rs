//! Selects the backend of a run, and describes the machine to the compiler. The only file that knows the backends.

use std::path::PathBuf;
use std::sync::Arc;

use cpu::CpuBackend;
pub(crate) use cpu::{products, sums_by_sequence};
use gpu::library::Kind;
use gpu::{GpuBackend, Search, Vendor};
use net::{Channel, Nodes};
use options::Setting;
use program::{Backend, Machine};

use crate::config;
use crate::engine::machines;
use crate::error::{Result, TrainError};
use crate::nodes::exchange::{failed, least};

/// With the value 0 no GPU counts as reaching the memory of another.
const WITHOUT_PEERS: &str = "SUROGATE_PEER_ACCESS";

/// With the value 1 all ranks or stages are on the first GPU, which they share: for tests where there is one only.
const ONE_GPU: &str = "SUROGATE_ONE_GPU";

/// The reason that a run on an AMD GPU adds to its choice of the device.
const NEVER_RUN: &str =
    "this backend was never run on an AMD GPU before: `surogate doctor --report FILE` writes what to send";

/// Bytes of a GPU's memory that NCCL takes: 1.27 GiB between two H200, NCCL 2.28.3; 0.44 over sockets.
const NCCL_BYTES: usize = 3 << 29;

/// The requested device, and folders in which its libraries may be.
#[derive(Clone, Debug, Default)]
pub struct DeviceRequest {
    /// Left open: an NVIDIA GPU if one can be used, otherwise an AMD GPU, otherwise the CPU.
    pub device: Setting<config::Device>,
    /// Threads of the CPU backend; all cores when unset.
    pub threads: Option<usize>,
    /// Devices that train together, or ranks that share the CPU and its memory; 0 counts as 1.
    pub ranks: usize,
    /// Folders of installed Python packages, in which libraries of GPUs may be.
    pub site_packages: Vec<PathBuf>,
    /// The interpreter of Python that runs reward functions.
    pub python: Option<PathBuf>,
    /// Look at every result before the next instruction starts, so that an error names the one that
    /// failed. Slow.
    pub check_each: bool,
    /// Launch instruction by instruction instead of replaying CUDA graphs. The bits are the same.
    pub eager: bool,
    /// All GPUs that are visible train together.
    pub every_gpu: bool,
    /// The transport of bytes from one GPU to another, if the options choose it.
    pub ways: gpu::Ways,
    /// The other processes that train with this one.
    pub nodes: Option<Arc<Nodes>>,
}

impl DeviceRequest {
    /// The request that a run's options make.
    pub fn of(config: &config::Config, site_packages: Vec<PathBuf>) -> DeviceRequest {
        DeviceRequest {
            device: config.hardware.device,
            ranks: config.devices(),
            site_packages,
            eager: !config.hardware.use_cuda_graphs,
            every_gpu: config.hardware.gpus == 0,
            ways: ways(config),
            ..DeviceRequest::default()
        }
    }
}

/// A backend that is ready, and what it runs on.
pub struct Device {
    pub backend: Box<dyn Backend>,
    pub machine: Machine,
    /// The reason for this device, when the choice was left open.
    pub because: String,
    /// GPUs that are visible; 0 on the CPU.
    pub gpus: usize,
    /// The key of measured rates: the device's name and the version of its driver.
    pub card: (String, String),
    /// The properties that the bits of results depend on besides the program: the processor's set of instructions, or
    /// the kind of GPU.
    pub arithmetic: String,
    /// The other processes that train with this one.
    pub nodes: Option<Arc<Nodes>>,
    /// The interpreter of Python that runs reward functions.
    pub python: Option<PathBuf>,
}

impl Device {
    /// Opens the device. A GPU that is requested and not usable is an error that says what is missing.
    pub fn open(request: &DeviceRequest) -> Result<Device> {
        Ok(Device { python: request.python.clone(), ..Device::find(request)? })
    }

    fn find(request: &DeviceRequest) -> Result<Device> {
        let found = match request.device {
            Setting::Value(config::Device::Cpu) => return of_cpu(request, "requested"),
            Setting::Value(config::Device::Cuda) => gpu(request, Vendor::Nvidia, "requested"),
            Setting::Value(config::Device::Rocm) => gpu(request, Vendor::Amd, "requested"),
            Setting::Auto => {
                let found = |vendor| gpu(request, vendor, "a GPU can be used");
                found(Vendor::Nvidia).or_else(|why| found(Vendor::Amd).map_err(|_| why))
            }
        };
        match (found, request.device) {
            (Ok(device), _) => of_node(device, request),
            (Err(_), Setting::Auto) => of_cpu(request, "no GPU can be used; `surogate doctor` says why"),
            (Err(why), _) => Err(TrainError::Failed(why)),
        }
    }

    /// Facts of devices and libraries that must be equal on all nodes, by name, before any is opened.
    pub(crate) fn facts(request: &DeviceRequest) -> Vec<(String, String)> {
        let fact = |name: &str, value: String| (name.to_owned(), value);
        let cpu = || vec![fact("arithmetic", instructions_of_cpu())];
        if request.device == Setting::Value(config::Device::Cpu) {
            return cpu();
        }
        let reported = |vendor| gpu::Report::for_nodes(&Search::of(vendor, request.site_packages.clone()));
        let found = match request.device {
            Setting::Value(config::Device::Rocm) => reported(Vendor::Amd),
            Setting::Value(_) => reported(Vendor::Nvidia),
            Setting::Auto => {
                let usable = Vendor::ALL.into_iter().map(reported).find(gpu::Report::usable);
                let Some(found) = usable else { return cpu() };
                found
            }
        };
        let gpu = found.devices.as_ref().ok().and_then(|devices| devices.first()).map(ToString::to_string);
        let library = |kind| found.version(kind).unwrap_or("none").to_owned();
        let kinds = [Kind::Nccl, Kind::CublasLt, Kind::Cudnn].into_iter();
        let of_vendor = kinds.filter(|kind| Kind::all(found.vendor).contains(kind));
        let libraries = of_vendor.map(|kind| fact(kind.title(found.vendor), library(kind)));
        [
            fact("GPU", gpu.unwrap_or_else(|| "none".to_owned())),
            fact("driver", found.driver_release.clone().unwrap_or_else(|| library(Kind::Driver))),
        ]
        .into_iter()
        .chain(libraries)
        .collect()
    }
}

/// The transports between GPUs that the options choose.
fn ways(config: &config::Config) -> gpu::Ways {
    let copies = |setting: Setting<bool>| match setting {
        Setting::Value(on) => Some(on),
        Setting::Auto => None,
    };
    let of = &config.sharding;
    gpu::Ways {
        gather: copies(of.memcpy_all_gather),
        exchange: copies(of.memcpy_send_recv),
        without_peers: std::env::var_os(WITHOUT_PEERS).is_some_and(|value| value == "0"),
    }
}

/// The machine without the memory that NCCL takes.
fn without_nccl(machine: Machine) -> Machine {
    Machine { memory: machine.memory.saturating_sub(NCCL_BYTES), ..machine }
}

fn of_cpu(request: &DeviceRequest, because: &str) -> Result<Device> {
    match request.nodes {
        Some(_) => cpu_of_node(request),
        None => cpu(request, because),
    }
}

/// The GPUs of one of several nodes, which all plan for the machine of node 0, with the least memory of all: their programs
/// are the same.
fn of_node(device: Device, request: &DeviceRequest) -> Result<Device> {
    let Some(nodes) = request.nodes.clone() else { return Ok(device) };
    let own = (device.machine.memory, device.gpus);
    let (memory, gpus) = least(&nodes, own).map_err(failed)?;
    let text = machines::to_json(&device.machine).to_string();
    let machine = match nodes.node {
        0 => {
            nodes.tell(Channel::Command, &[text.as_bytes()]).map_err(failed)?;
            text
        }
        _ => {
            let bytes = nodes.receive(0, Channel::Command, "the description of the machine").map_err(failed)?;
            String::from_utf8_lossy(&bytes).into_owned()
        }
    };
    // Node 0's own goes the same way: numbers are those of the text on all.
    let machine = machines::parse(machine.as_bytes()).map_err(|why| TrainError::Failed(format!("node 0: {why}")))?;
    let machine = without_nccl(Machine { memory, ..machine });
    let because = format!("node {} of {}", nodes.node, nodes.count);
    Ok(Device { machine, because, gpus, nodes: Some(nodes), ..device })
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
    Ok(Device { backend: Box::new(backend), machine, because, gpus: 0, card, arithmetic, nodes: None, python: None })
}

/// The CPU of one of several nodes, which all plan for the least of them: their programs are the same.
fn cpu_of_node(request: &DeviceRequest) -> Result<Device> {
    let nodes = request.nodes.clone().expect("it is one of several");
    let of_node = cpu(&DeviceRequest { nodes: None, ..request.clone() }, "")?;
    let own = (of_node.machine.memory, of_node.machine.units);
    let (memory, threads) = least(&nodes, own).map_err(failed)?;
    let threads_here = request.threads.or_else(|| std::thread::available_parallelism().ok().map(|n| n.get()));
    let backend = CpuBackend::new(threads_here)?.check_finite(request.check_each).with_nodes(Some(nodes.clone()));
    Ok(Device {
        backend: Box::new(backend),
        machine: Machine::cpu(memory, threads),
        because: format!("node {} of {}", nodes.node, nodes.count),
        nodes: Some(nodes),
        python: None,
        ..of_node
    })
}

fn gpu(request: &DeviceRequest, vendor: Vendor, because: &str) -> std::result::Result<Device, String> {
    let search = Search::of(vendor, request.site_packages.clone());
    let report = gpu::Report::for_one_gpu(&search);
    if !report.usable() {
        return Err(match vendor {
            Vendor::Nvidia => format!("no GPU can be used here:\n{report}"),
            Vendor::Amd => format!("no AMD GPU can be used here:\n{report}"),
        });
    }
    let mut devices = report.devices.expect("a usable report lists devices");
    let one_device = std::env::var_os(ONE_GPU).is_some_and(|value| value == "1");
    let gpus = if one_device { request.ranks.max(1) } else { devices.len() };
    let kind = |of: &gpu::driver::Properties| (of.name.clone(), of.architecture, of.multiprocessors);
    let together = if request.every_gpu { gpus } else { request.ranks.max(1) };
    let unlike = devices.iter().take(together).find(|other| kind(other) != kind(&devices[0]));
    if let Some(other) = unlike {
        return Err(format!("GPUs that train together are of one kind: {} and {other} are not", devices[0]));
    }
    let properties = devices.swap_remove(0);
    let (check_each, graphs) = (request.check_each, !request.eager);
    let ways = request.ways;
    let options = gpu::Options { check_each, graphs, ways, one_device, ..gpu::Options::new(search) };
    let machine = gpu::machine(&properties);
    let card = (properties.name.clone(), report.driver_release.unwrap_or_default());
    let arithmetic = format!("a GPU {}, {}", machine.name, machine.arch);
    let machine = machines::calibrated(&machine, &card.0, &card.1).unwrap_or(machine);
    let machine = if one_device { Machine { memory: machine.memory / gpus, ..machine } } else { machine };
    let backend = GpuBackend::new(options).with_nodes(request.nodes.clone());
    let by_nccl = together > 1 && [request.ways.gather, request.ways.exchange].contains(&Some(false));
    let machine = if by_nccl && request.nodes.is_none() { without_nccl(machine) } else { machine };
    let because = match vendor {
        Vendor::Nvidia => because.to_owned(),
        Vendor::Amd => format!("{because}; {NEVER_RUN}"),
    };
    let backend = Box::new(backend);
    Ok(Device { backend, machine, because, gpus, card, arithmetic, nodes: None, python: None })
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

/// The bytes of host memory that a run may plan with: the system, the interpreter, the loader's batches and files that
/// are mapped need some of it, too.
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
    fn the_transport_follows_from_the_options() {
        let ways = |text: &str| {
            let text = format!("model: m\n{text}");
            let config = config::Config::load(&text, "run.yaml", config::Task::Sft, &[]);
            let of = ways(&config.unwrap_or_else(|problems| panic!("{}", options::render_problems(&problems))));
            (of.gather, of.exchange)
        };
        assert_eq!(ways(""), (None, None));
        assert_eq!(ways("memcpy_all_gather: false"), (Some(false), None));
        assert_eq!(ways("memcpy_send_recv: true"), (None, Some(true)));
    }

    #[test]
    fn a_plan_leaves_some_of_the_hosts_memory() {
        assert_eq!(usable(16 << 30), 14 << 30);
        assert_eq!(usable(1 << 30), 768 << 20);
        assert_eq!(usable(128 << 20), 0);
        assert_eq!(usable(1 << 40), (1 << 40) - (8 << 30));
        assert!(host_memory() > 128 << 20 && !processor().is_empty());
    }
}
