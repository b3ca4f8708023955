//! Options of the optimizer and its schedule.

use options::{Setting, choices, options};

options! {
    /// The update rule and the course of the learning rate.
    ///
    /// With `N` steps, `W` of warm-up and `K` of cool-down, `W + K` may not exceed `N`.
    pub struct Optimizer: "Optimizer" {
        /// The update rule.
        optimizer: OptimizerKind = "adamw_8bit";
        /// Learning rate at the end of the warm-up.
        learning_rate: f64 = 2e-4, min = 0;
        /// Course of the learning rate between warm-up and cool-down.
        lr_scheduler_type: Schedule = "linear";
        /// Share of all steps over which the learning rate rises from 0. `warmup_steps` wins over it.
        warmup_ratio: f64 = 0.0, min = 0, max = 1;
        /// Steps over which the learning rate rises from 0. `auto` follows `warmup_ratio`.
        warmup_steps: Setting<u64> = auto;
        /// Steps at the end over which the learning rate falls to its final value. `auto` is 0, and a tenth of all
        /// steps for `wsd`.
        cooldown_steps: Setting<u64> = auto;
        /// Learning rate at the end as a share of `learning_rate`.
        final_lr_fraction: f64 = 0.0, min = 0, max = 1;
        /// Decay of every parameter with more than one dimension.
        weight_decay: f64 = 0.1, min = 0;
        /// Norm to which greater gradients are scaled. 0 switches clipping off; the norm is reported all the same.
        max_grad_norm: f64 = 1.0, min = 0;
        /// AdamW: how slowly the mean of the gradients moves.
        adamw_beta1: f64 = 0.9, min = 0, below = 1;
        /// AdamW: how slowly the mean of the squared gradients moves.
        adamw_beta2: f64 = 0.999, min = 0, below = 1;
        /// AdamW: added to the root of the squares before dividing.
        adamw_epsilon: f64 = 1e-8, above = 0;
        /// NorMuon: momentum of the matrices.
        normuon_momentum: f64 = 0.95, min = 0, below = 1;
        /// NorMuon: how slowly the mean of the squares moves.
        normuon_beta2: f64 = 0.95, min = 0, below = 1;
        /// NorMuon: decay a weight only where the step makes it smaller anyway.
        normuon_cautious_wd: bool = true;
    }
}

choices! {
    /// An update rule.
    pub enum OptimizerKind {
        /// AdamW with states in float32.
        AdamW = "adamw",
        /// AdamW with states in blocks of 8 bits.
        AdamW8bit = "adamw_8bit",
        /// Orthogonalised momentum for matrices, AdamW for the rest.
        NorMuon = "normuon",
    }
}

choices! {
    /// A course of the learning rate between warm-up and cool-down.
    pub enum Schedule {
        /// A straight line to the final rate.
        Linear = "linear",
        /// Half a cosine wave to the final rate.
        Cosine = "cosine",
        /// Constant; the fall is the cool-down's.
        Wsd = "wsd",
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
