//! Options of recomputation: what the backward pass recomputes instead of saving it.

use options::{Setting, options};

options! {
    /// Activations that the backward pass recomputes instead of saving them. With `auto` the planner decides by
    /// measured speed and memory. The training is bit-identical either way.
    ///
    /// `recompute_block` includes `recompute_att`, `recompute_ffn` and `recompute_rmsnorm`; `recompute_att` includes
    /// `recompute_qkv`; `recompute_ffn` includes `recompute_swiglu`. Disabling a part of an enabled whole is an error.
    pub struct Recompute: "Recomputation" {
        /// The activation function of the feed-forward block, the widest tensor of a layer.
        recompute_swiglu: Setting<bool> = auto, resumable;
        /// The outputs of the norms.
        recompute_rmsnorm: Setting<bool> = auto, resumable;
        /// The whole feed-forward block.
        recompute_ffn: Setting<bool> = auto, resumable;
        /// The query, key and value projections, with QK norms and rotary embedding.
        recompute_qkv: Setting<bool> = auto, resumable;
        /// The whole attention block.
        recompute_att: Setting<bool> = auto, resumable;
        /// The whole layer, from its input.
        recompute_block: Setting<bool> = auto, resumable;
        /// With LoRA, the outputs of the norms, which the adapters read. `true` includes `recompute_block`; `false`
        /// saves them even if the rest of the layer is recomputed.
        recompute_lora: Setting<bool> = auto, resumable;
    }
}
