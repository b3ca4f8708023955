//! Options of several GPUs in one machine.

use options::options;

options! {
    /// How weights, gradients and optimizer states are sharded over the GPUs of a machine. The results do not depend on
    /// it.
    pub struct Sharding: "Several GPUs" {
        /// ZeRO level: 1 shards optimizer states, 2 also gradients, 3 also weights.
        zero_level: u32 = 1, min = 1, max = 3, pending, resumable;
        /// Shard the weights. Implied by `zero_level: 3`.
        shard_weights: bool = false, pending, resumable;
        /// Shard the gradients. Implied by `zero_level: 2` and `3`.
        shard_gradients: bool = false, pending, resumable;
        /// Reduce gradients with an all-to-all exchange.
        use_all_to_all_reduce: bool = false, pending, resumable;
        /// All-gather weights with copies instead of kernels, which leaves the SMs free.
        memcpy_all_gather: bool = false, pending, resumable;
        /// Send and receive with copies instead of kernels.
        memcpy_send_recv: bool = false, pending, resumable;
    }
}
