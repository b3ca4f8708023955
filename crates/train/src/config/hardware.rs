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
        /// Whether the same run gives the same bits twice. `true` refuses what would not, of which there is nothing:
        /// every kernel in use does. So `auto` is true, and `false`, which allows others where they are faster, changes
        /// nothing and is answered with a note that says so.
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
