//! Options of the optimizer and its schedule.

use std::collections::BTreeMap;

use options::{Setting, choices, options};

options! {
    /// The update rule and the learning-rate schedule.
    ///
    /// With `N` steps, `W` warm-up steps and `K` cooldown steps, `W + K` may not exceed `N`.
    pub struct Optimizer: "Optimizer" {
        /// The update rule.
        optimizer: OptimizerKind = "adamw_8bit";
        /// Peak learning rate, at the end of the warm-up.
        learning_rate: f64 = 2e-4, min = 0, resumable;
        /// Learning-rate schedule between warm-up and cooldown.
        lr_scheduler_type: Schedule = "linear";
        /// Fraction of all steps over which the learning rate rises from 0. `warmup_steps` takes precedence.
        warmup_ratio: f64 = 0.0, min = 0, max = 1;
        /// Steps over which the learning rate rises from 0. `auto` follows `warmup_ratio`.
        warmup_steps: Setting<u64> = auto;
        /// Last steps, over which the learning rate falls to its final value. `auto` is 0, or a tenth of all steps for
        /// `wsd`.
        cooldown_steps: Setting<u64> = auto;
        /// Waves of `lr_scheduler_type: cosine_with_restarts`: in each the rate falls from its peak to the final rate.
        lr_cycles: u32 = 2, min = 1;
        /// Final learning rate as a fraction of `learning_rate`.
        final_lr_fraction: f64 = 0.0, min = 0, max = 1;
        /// Peak learning rates of single parameters, as `pattern: rate`; they follow the same schedule. A pattern is the end
        /// of the name of a parameter or of a module around it, such as `embed_tokens`, `layers.0`, `lora_B`, or a regular
        /// expression for the whole of such a name, such as `model\.layers\.[0-3]`.
        learning_rates: Option<BTreeMap<String, f64>> = null, resumable;
        /// Peak learning rate of the weights of the vision tower and the projector, where these are trained in full. Null
        /// trains them at `learning_rate`.
        vision_learning_rate: Option<f64> = null, above = 0, resumable;
        /// Parameters that are not trained with `lora: false`, by the same patterns: no gradient is computed and no
        /// optimizer state is kept for them.
        frozen_parameters: Vec<String> = [];
        /// Weight decay of every parameter with more than one dimension.
        weight_decay: f64 = 0.1, min = 0;
        /// Maximum gradient norm: larger gradients are clipped to it. 0 disables clipping; the norm is still reported.
        max_grad_norm: f64 = 1.0, min = 0;
        /// Loss-free balancing of experts (DeepSeek-V3, GLM-4.5): after each step the bias that an expert is chosen by rises
        /// by this if the expert got less than an even share of the step's tokens, and falls if more. `null`: the biases
        /// stay. DeepSeek-V3 was trained with 0.001.
        router_bias_update_rate: Option<f64> = null, above = 0;
        /// AdamW: decay rate of the first moment.
        adamw_beta1: f64 = 0.9, min = 0, below = 1;
        /// AdamW: decay rate of the second moment.
        adamw_beta2: f64 = 0.999, min = 0, below = 1;
        /// AdamW: added to the square root of the second moment before dividing.
        adamw_epsilon: f64 = 1e-8, above = 0, max = 1000000000000;
        /// NorMuon: momentum of the matrices.
        normuon_momentum: f64 = 0.95, min = 0, below = 1;
        /// NorMuon: decay rate of the second moment.
        normuon_beta2: f64 = 0.95, min = 0, below = 1;
        /// NorMuon: apply weight decay only to weights that the step shrinks anyway.
        normuon_cautious_wd: bool = true;
    }
}

choices! {
    /// An update rule.
    pub enum OptimizerKind {
        /// AdamW with float32 states.
        AdamW = "adamw",
        /// AdamW with 8-bit blockwise states.
        AdamW8bit = "adamw_8bit",
        /// Orthogonalized momentum for matrices, AdamW for the rest.
        NorMuon = "normuon",
    }
}

choices! {
    /// A learning-rate schedule between warm-up and cooldown.
    pub enum Schedule {
        /// Linear decay to the final rate.
        Linear = "linear",
        /// Cosine decay to the final rate.
        Cosine = "cosine",
        /// `lr_cycles` such waves one after the other.
        CosineWithRestarts = "cosine_with_restarts",
        /// Constant, then decay during the cooldown.
        Wsd = "wsd",
        /// Constant after the warm-up, to the end unless there is a cooldown.
        Constant = "constant" | "constant_with_warmup",
    }
}

impl Optimizer {
    /// Steps of warm-up in a run of `total` steps.
    pub fn warmup(&self, total: u64) -> u64 {
        self.warmup_steps.unwrap_or_else(|| (self.warmup_ratio * total as f64).ceil() as u64)
    }

    /// Steps of cool-down in a run of `total` steps.
    pub fn cooldown(&self, total: u64) -> u64 {
        let unset = || if self.lr_scheduler_type == Schedule::Wsd { total.div_ceil(10) } else { 0 };
        self.cooldown_steps.unwrap_or_else(unset)
    }
}
