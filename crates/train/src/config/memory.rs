//! Options that split large temporary tensors into chunks.

use options::{Setting, options};

options! {
    /// Chunking of large computations to reduce peak memory. With `auto` the planner decides.
    pub struct Memory: "Memory" {
        /// Chunks of the LM head and its loss: groups of rows, or, if there are more chunks than rows in a micro-batch,
        /// pieces of rows. The gradient of a trained head is then summed in another order, and a GPU library may choose
        /// another algorithm for other chunk heights: the last bits change.
        lmhead_chunks: Setting<u32> = auto, min = 1, max = 65536, resumable;
        /// Chunks of the attention backward pass: rows of the micro-batch, on the CPU also key heads; equal chunks,
        /// rounded up to a divisor. This reduces the workspace: the statistics of each query of a chunk (on Hopper also
        /// f32 sums of the queries' gradients), and on the CPU the threads' partial results.
        attn_bwd_chunks: Setting<u32> = auto, min = 1, max = 65536, resumable;
    }
}
