//! Options of offloading: what lies in host memory while the GPU does not need it.

use options::{Setting, options};

options! {
    /// Tensors that are kept in host memory and copied when they are needed. Left at `auto`, the planner decides.
    /// Needs a GPU.
    pub struct Offload: "Offloading" {
        /// The residual stream: what enters each layer, as far as the backward pass needs it again.
        offload_residual: Setting<bool> = auto, resumable;
        /// The master copy of the weights, which `master_dtype: float32` keeps beside those in 16 bits.
        offload_master: Setting<bool> = auto, resumable;
        /// Quantised weights. Needs `persistent_quants`.
        offload_quants: Setting<bool> = auto, pending, resumable;
        /// Optimizer states. Slow per step, so it pays with many micro-batches in a step.
        offload_optimizer: Setting<bool> = auto, resumable;
        /// Gradients: each is stored when the backward pass has completed it, and fetched for the next micro-batch and
        /// for the update.
        offload_grads: Setting<bool> = auto, resumable;
        /// Keep quantised weights from step to step instead of quantising again. Needs `shard_weights`.
        persistent_quants: bool = false, pending, resumable;
        /// Let the update's kernels read and write offloaded optimizer states, master copies and gradients where they lie
        /// in host memory, instead of copying them slice by slice.
        use_zero_copy: bool = false, resumable;
        /// Permission to use write-combined host memory, which the GPU reads faster and the CPU slower.
        use_write_combined: bool = false, resumable;
        /// Most memory that the plan may use, such as `22GiB`: of the GPU, or of the host where the run is on the CPU.
        memory_limit: Option<options::ByteSize> = null, resumable;
    }
}
