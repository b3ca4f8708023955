//! Options of the hardware that a run uses.

use options::{Setting, choices, options};

options! {
    /// What the run is executed on.
    pub struct Hardware: "Hardware" {
        /// GPUs to train on. 0 is all that are visible.
        gpus: u32 = 1, pending_over = 1, resumable;
        /// Where the program runs. `auto` is the GPU if there is one.
        device: Setting<Device> = auto;
        /// Permission to record a step once and replay it. A run is never taken off this path silently.
        use_cuda_graphs: bool = true, resumable;
        /// Whether the same run gives the same bits twice. `auto` is true: every kernel in use does. `false`, which would
        /// allow others, is *not available yet*.
        deterministic: Setting<bool> = auto;
    }
}

choices! {
    /// What executes the program.
    pub enum Device {
        /// NVIDIA GPUs.
        Cuda = "cuda",
        /// The reference kernels on the CPU.
        Cpu = "cpu",
    }
}
