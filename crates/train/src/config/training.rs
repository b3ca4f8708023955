//! Options of the training loop: batch sizes, number of steps, evaluation.

use options::{Setting, options};

use super::cadence::Strategy;

options! {
    /// Batch size, number of steps, evaluation.
    pub struct Training: "Training loop" {
        /// Rows of a step on each GPU are this × `gradient_accumulation_steps`. `micro_batch_size` says how many of them are
        /// worked on at once.
        per_device_train_batch_size: u32 = 2, min = 1, max = 1048576;
        /// The other factor of the rows of a step. A step trains on batch size × this × GPUs rows; the last of an epoch may
        /// have fewer.
        gradient_accumulation_steps: u32 = 4, min = 1, max = 1048576;
        /// Rows of a step on all GPUs of all nodes, in place of the two options above: the same file then makes the same
        /// steps on any number of GPUs that divides them, also on resume.
        batch_size: Option<u32> = null, min = 1, max = 1048576, resumable;
        /// Rows that a GPU works on at once, in one micro-step. `auto`: the split of a step that fits and that the plan
        /// expects to be fastest; on a CPU, and for losses that compare the rows of a micro-batch,
        /// `per_device_train_batch_size`. Sums are the same but for rounding; dropout draws other numbers. A number goes with
        /// `per_device_train_batch_size` or `batch_size`, and divides the rows of a step on a GPU.
        micro_batch_size: Setting<u32> = "auto", min = 1, max = 1048576, resumable;
        /// Number of steps. -1 derives it from `num_epochs` and the data.
        max_steps: i64 = -1, min = -1, resumable;
        /// Compute logits only for the tokens that are trained, if batches have many others: prompts, images, padding. Losses are
        /// the same, but for the order of sums in the gradient of a trained LM head. Of `sft`, `dpo`, `kto` and `cpo`, without
        /// nodes, stages and sequence parallelism. A batch with more trained tokens than there is room for computes the logits
        /// of all.
        trained_logits_only: bool = true, resumable;
        /// NEFTune: add noise to the embeddings in training steps, uniform between ±alpha / √(tokens · hidden size),
        /// where tokens are those of the document, without padding. Evaluations have no noise. 5 is a common value.
        neftune_noise_alpha: Option<f64> = null, above = 0, max = 1000;
        /// Times of evaluations, of the loss on the validation data or with `task: grpo` of the reward: every `eval_steps` and at
        /// the end, after every pass over the data and at the end, or never.
        eval_strategy: Strategy = "steps", resumable;
        /// Steps between evaluations, for `eval_strategy: steps`.
        eval_steps: u64 = 100, min = 1, resumable;
        /// End the run after this many evaluations in a row whose loss is not lower (`task: grpo`: whose reward
        /// is not higher) than the best by more than `early_stopping_threshold`. Null disables it.
        early_stopping_patience: Option<u64> = null, min = 1, resumable;
        /// The least gain over the best loss or reward with which an evaluation counts for `early_stopping_patience`.
        early_stopping_threshold: f64 = 0.0, min = 0, resumable;
    }
}

impl Training {
    /// The number of steps, if the user fixed it.
    pub fn fixed_steps(&self) -> Option<u64> {
        u64::try_from(self.max_steps).ok()
    }
}
