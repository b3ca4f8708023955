//! Options of several GPUs in one machine.

use options::{Setting, choices, options};

options! {
    /// Sharding of weights, gradients and optimizer states over the GPUs of a machine. The results do not depend on it.
    pub struct Sharding: "Several GPUs" {
        /// Pipeline parallelism: the layers are divided into this many stages of consecutive layers, one on each GPU, and
        /// the micro-batches of a step go through all of them. Must equal `gpus`. Embeddings that are also the output
        /// head, mixtures of experts and several nodes are not supported.
        pipeline_parallel_size: u32 = 1, min = 1, max = 64, resumable;
        /// ZeRO level: 1 shards optimizer states, 2 also gradients, 3 also weights. `auto` is 1, or a higher level if
        /// that makes the run fit or takes less time than recomputing more.
        zero_level: Setting<u32> = auto, min = 1, max = 3, resumable;
        /// Shard the weights. Implied by `zero_level: 3`; without a level, optimizer states and weights are sharded.
        shard_weights: Setting<bool> = auto, resumable;
        /// Shard the gradients. Implied by `zero_level: 2` and `3`.
        shard_gradients: Setting<bool> = auto, resumable;
        /// GPUs that share one set of shards, in a run of several nodes. `auto` is `node`, or `world` if nothing else
        /// makes the run fit, or if a node has one GPU and gradients or weights are to be sharded. With one node both
        /// are the same.
        shard_scope: Setting<ShardScope> = auto, resumable;
        /// Compression of gradients on their way to the other GPUs and nodes. They are summed in float32.
        gradient_compression: GradientCompression = "none", resumable;
        /// With `gradient_compression: onebit`: the first updates of the run, in which gradients travel in float32. They
        /// decide the second moments of AdamW, which then stay as they are. `auto` is a fifth of all steps, and at least the
        /// warm-up of the learning rate.
        compression_warmup_steps: Setting<u64> = auto, min = 1;
        /// Allow reducing gradients with an all-to-all exchange: each GPU sends every other one its piece, and adds what it
        /// receives in the order of the GPUs. The engine always does this.
        use_all_to_all_reduce: bool = false, resumable;
        /// Gather weights, and what else all GPUs need of each other, with copies, which leave the multiprocessors free:
        /// from one GPU to another, or through host memory where they do not reach each other. `false` leaves it to
        /// NCCL. `auto` is `true` for the GPUs of one process. Several nodes always use NCCL.
        memcpy_all_gather: Setting<bool> = auto, resumable;
        /// The same for what is exchanged piece by piece: gradients, and the heads of sequence parallelism.
        memcpy_send_recv: Setting<bool> = auto, resumable;
    }
}

choices! {
    /// GPUs that share what is sharded.
    pub enum ShardScope {
        /// The GPUs of a node. Each node has all shards, and gradients are summed inside each node, then once per step
        /// between the nodes.
        Node = "node",
        /// The GPUs of all nodes: less memory, and more bytes between nodes.
        World = "world",
    }
}

impl Sharding {
    /// Updates of the warm-up before first moments are compressed, in a run of `total` steps whose learning rate rises over
    /// `rising` of them; none where they never are.
    pub fn compression_warmup(&self, total: u64, rising: u64) -> Option<u64> {
        let open = || total.div_ceil(5).max(rising);
        let compresses = self.gradient_compression == GradientCompression::OneBit;
        compresses.then(|| self.compression_warmup_steps.unwrap_or_else(open))
    }
}

impl GradientCompression {
    /// True for a format that is used only between nodes.
    pub fn is_between_nodes(self) -> bool {
        matches!(self, GradientCompression::Int8 | GradientCompression::TopK | GradientCompression::OneBit)
    }
}

choices! {
    /// A form of gradients on their way between ranks.
    pub enum GradientCompression {
        /// They travel in float32.
        None = "none",
        /// Rounded to the nearest bfloat16: half the bytes.
        BFloat16 = "bf16" | "bfloat16",
        /// Between nodes only: blocks of 256 in 8 bits with one scale each, a quarter of the bytes. What rounding takes away
        /// is sent with the next step.
        Int8 = "int8",
        /// Between nodes only: the 16 largest of every 256. What is left is sent with later steps, in sums of about 16
        /// gradients. AdamW needs up to 4 times the learning rate then.
        TopK = "topk",
        /// Between nodes only: 1-bit Adam. After a warm-up the first moments of AdamW travel instead of gradients, in blocks
        /// of 256 signs with one scale each. What is left is sent with the next step. Needs `optimizer: adamw`.
        OneBit = "onebit",
    }
}
