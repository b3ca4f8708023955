//! Options that cut large temporary tensors.

use options::{Setting, options};

options! {
    /// Work that can be done in parts to need less memory at a time. Left at `auto`, the planner decides.
    pub struct Memory: "Memory" {
        /// Parts of the output head and its loss.
        lmhead_chunks: Setting<u32> = auto, min = 1, pending, resumable;
        /// Parts of the attention's backward pass.
        attn_bwd_chunks: Setting<u32> = auto, min = 1, pending, resumable;
    }
}
