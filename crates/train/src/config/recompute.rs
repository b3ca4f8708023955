//! Options of recomputation: what the backward pass computes again instead of keeping it.

use options::{Setting, options};

options! {
    /// Activations that are computed again in the backward pass instead of being kept. Left at `auto`, the planner
    /// decides by measured speed and memory. The numbers of training are the same bits either way.
    ///
    /// `recompute_block` includes `recompute_att`, `recompute_ffn` and `recompute_rmsnorm`; `recompute_att` includes
    /// `recompute_qkv`; `recompute_ffn` includes `recompute_swiglu`. A part that is switched off under a whole that is
    /// switched on is an error.
    pub struct Recompute: "Recomputation" {
        /// The activation inside the feed-forward part, the widest tensor of a layer.
        recompute_swiglu: Setting<bool> = auto, resumable;
        /// The outputs of the norms.
        recompute_rmsnorm: Setting<bool> = auto, resumable;
        /// The whole feed-forward part.
        recompute_ffn: Setting<bool> = auto, resumable;
        /// The query, key and value projections, with the norms of heads and the rotation behind them.
        recompute_qkv: Setting<bool> = auto, resumable;
        /// The whole attention part.
        recompute_att: Setting<bool> = auto, resumable;
        /// The whole layer, from its input.
        recompute_block: Setting<bool> = auto, resumable;
        /// With LoRA, the outputs of the norms, which the adapters read. `true` includes `recompute_block`; `false` keeps
        /// them even where the rest of the layer is computed again.
        recompute_lora: Setting<bool> = auto, resumable;
    }
}
