//! Options that cut large temporary tensors.

use options::{Setting, options};

options! {
    /// Work that can be done in parts to need less memory at a time. Left at `auto`, the planner decides.
    pub struct Memory: "Memory" {
        /// Parts of the output head and its loss: as many groups of rows, or, beyond the rows of a micro-batch, pieces of
        /// each row. A trained head's gradient is then summed in another order, and a GPU's library may multiply parts of
        /// another height with another algorithm: the last bits change.
        lmhead_chunks: Setting<u32> = auto, min = 1, max = 65536, resumable;
        /// Parts of the attention's backward pass: rows of the micro-batch, on the CPU key heads too; in equal parts,
        /// rounded up to a number that divides them. Less scratch memory: what the pass keeps for each query of a part
        /// (on Hopper also f32 sums of the queries' gradients), on the CPU the parts of the threads.
        attn_bwd_chunks: Setting<u32> = auto, min = 1, max = 65536, resumable;
    }
}
