//! Options of several GPUs in one machine.

use options::{Setting, options};

options! {
    /// How weights, gradients and optimizer states are sharded over the GPUs of a machine. The results do not depend on
    /// it.
    pub struct Sharding: "Several GPUs" {
        /// ZeRO level: 1 shards optimizer states, 2 also gradients, 3 also weights. `auto` is 1, or the level above that
        /// makes the run fit or takes less time than recomputing more.
        zero_level: Setting<u32> = auto, min = 1, max = 3, resumable;
        /// Shard the weights. Implied by `zero_level: 3`; without a level, optimizer states and what is named are sharded.
        shard_weights: Setting<bool> = auto, resumable;
        /// Shard the gradients. Implied by `zero_level: 2` and `3`.
        shard_gradients: Setting<bool> = auto, resumable;
        /// Reduce gradients with an all-to-all exchange.
        use_all_to_all_reduce: bool = false, pending, resumable;
        /// All-gather weights with copies instead of kernels, which leaves the SMs free.
        memcpy_all_gather: bool = false, pending, resumable;
        /// Send and receive with copies instead of kernels.
        memcpy_send_recv: bool = false, pending, resumable;
    }
}
