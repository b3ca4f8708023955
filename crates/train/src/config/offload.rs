//! Options of offloading: what is kept in host memory while the GPU does not need it.

use options::{Setting, options};

options! {
    /// Tensors kept in host memory and transferred when they are needed. With `auto` the planner decides. Needs a GPU.
    pub struct Offload: "Offloading" {
        /// The residual stream: the input of each layer, as far as the backward pass needs it.
        offload_residual: Setting<bool> = auto, resumable;
        /// The f32 master weights of `master_dtype: float32`.
        offload_master: Setting<bool> = auto, resumable;
        /// The codes of frozen weights: those of `qlora_*` and of models that are published quantized. Each is fetched
        /// shortly before the products of its layer, in both passes. `auto` leaves them on the GPU, unless nothing else
        /// makes the run fit.
        offload_quants: Setting<bool> = auto, resumable;
        /// Optimizer states. The transfers take time in every step, so this is best with many micro-batches per step.
        offload_optimizer: Setting<bool> = auto, resumable;
        /// Gradients: each is stored when the backward pass has completed it, and fetched for the next micro-batch and
        /// for the update.
        offload_grads: Setting<bool> = auto, resumable;
        /// Allow keeping quantized weights between their uses instead of quantizing again. The engine always does this.
        persistent_quants: bool = false, resumable;
        /// Let the update kernels access offloaded optimizer states, master weights and gradients directly in host
        /// memory, instead of copying them in slices.
        use_zero_copy: bool = false, resumable;
        /// Allow write-combined host memory, which is faster to read for the GPU and slower for the CPU.
        use_write_combined: bool = false, resumable;
        /// Maximum memory of the plan, such as `22GiB`: device memory, or host memory if the run is on the CPU.
        memory_limit: Option<options::ByteSize> = null, resumable;
    }
}
