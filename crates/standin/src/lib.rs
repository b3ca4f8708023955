//! GPUs that are not there: functions in place of a driver, a compiler and libraries of products and collectives, of CUDA or of HIP, over the
//! memory of this process. For tests: the sessions of `gpu` run whole programs on them.
//!
//! Imitates memory, streams, events, captures and graphs, with queued work that runs when something waits for it,
//! streams alternating at random, so that a missing wait shows as wrong numbers. A launch is identified by its kernel and its
//! arguments among the instructions of the programs that were loaded, and computes the operation by its CPU reference; an
//! argument that no instruction has is a failed launch. Does not imitate the kernels themselves, time, Hopper's own kernels,
//! cuDNN, other processes.
//!
//! All state belongs to the thread that calls: a session stays on the thread that made it.

mod capture;
mod collectives;
mod compiler;
mod driver;
mod groups;
mod kernels;
mod launches;
mod memory;
mod products;
mod reference;
mod status;
mod world;

use gpu::{Given, Options, Search, Vendor};
use program::Arch;

pub use world::{Fault, Machine};

/// Replaces the machine of this thread, with its memory and faults. `seed`: of the order in which streams alternate.
pub fn start(machine: Machine, seed: u64) {
    world::start(machine, seed);
}

/// Makes a call fail from now on.
pub fn inject(fault: Fault) {
    world::world(|world| world.inject(fault));
}

/// Number of operations that launches and products have computed on this thread since its start.
pub fn computed() -> usize {
    world::world(|world| world.computed)
}

/// Returns a machine with `gpus` GPUs of an architecture, with 1 GiB each.
pub fn machine(arch: Arch, gpus: usize) -> Machine {
    Machine { arch, gpus, memory: 1 << 30, reach: true }
}

/// The functions, in place of libraries.
pub fn search(vendor: Vendor) -> Search {
    let given = Given {
        driver: Some(driver::table(vendor)),
        nvrtc: Some(compiler::table(vendor)),
        cublaslt: Some(products::table(vendor)),
        nccl: Some(collectives::table(vendor)),
        program: Some(launches::show),
        ..Given::default()
    };
    Search { vendor, given: Some(given), ..Search::default() }
}

/// Options of a backend on the functions: nothing is timed, and no cache is kept.
pub fn options(vendor: Vendor) -> Options {
    Options { cache: gpu::disk_cache::DiskCache::default(), time_products: false, ..Options::new(search(vendor)) }
}
