//! Options of several GPUs in one machine.

use options::options;

options! {
    /// How weights, gradients and optimizer states are divided among the GPUs of a machine. The numbers of training do
    /// not depend on it.
    pub struct Sharding: "Several GPUs" {
        /// What is divided: 1 optimizer states, 2 also gradients, 3 also weights.
        zero_level: u32 = 1, min = 1, max = 3, pending, resumable;
        /// Divide the weights. Implied by `zero_level: 3`.
        shard_weights: bool = false, pending, resumable;
        /// Divide the gradients. Implied by `zero_level: 2` and `3`.
        shard_gradients: bool = false, pending, resumable;
        /// Reduce gradients by an exchange of all with all.
        use_all_to_all_reduce: bool = false, pending, resumable;
        /// Gather weights by copies instead of kernels, which leaves the multiprocessors free.
        memcpy_all_gather: bool = false, pending, resumable;
        /// Send and receive by copies instead of kernels.
        memcpy_send_recv: bool = false, pending, resumable;
    }
}
