//! Options of the hardware that a run uses.

use options::{Setting, choices, options};

options! {
    /// The devices of the run.
    pub struct Hardware: "Hardware" {
        /// Number of GPUs, from the first visible one on. 0 uses all visible GPUs. With `device: cpu`, the number of
        /// ranks, which are threads of this process, at most 64: the same results, to try a configuration without GPUs.
        gpus: u32 = 1, resumable;
        /// Device of the run. `auto` is the GPU if there is one, NVIDIA's before AMD's.
        device: Setting<Device> = auto;
        /// Allow CUDA graphs (HIP graphs): a step is captured once and replayed. A run never stops using them silently.
        use_cuda_graphs: bool = true, resumable;
        /// Require that the same run gives the same bits twice. All current kernels are deterministic, so `auto` is
        /// true. `true` would reject other kernels; `false` would allow them where they are faster, has no effect
        /// today, and gives a note that says so.
        deterministic: Setting<bool> = auto;
    }
}

choices! {
    /// The backend that runs the program.
    pub enum Device {
        /// NVIDIA GPUs.
        Cuda = "cuda",
        /// AMD GPUs, which this backend was never run on.
        Rocm = "rocm",
        /// The reference kernels on the CPU.
        Cpu = "cpu",
    }
}
