//! Options of the training loop: batch sizes, number of steps, evaluation.

use options::options;

options! {
    /// Batch size, number of steps, evaluation.
    pub struct Training: "Training loop" {
        /// Rows per micro-batch on each GPU.
        per_device_train_batch_size: u32 = 2, min = 1;
        /// Micro-batches per step. A step trains on batch size × this × GPUs rows.
        gradient_accumulation_steps: u32 = 4, min = 1;
        /// Number of steps. -1 derives it from `num_epochs` and the data.
        max_steps: i64 = -1, min = -1, resumable;
        /// Steps between evaluations.
        eval_steps: u64 = 100, min = 1, resumable;
    }
}

impl Training {
    /// The number of steps, if the user fixed it.
    pub fn fixed_steps(&self) -> Option<u64> {
        u64::try_from(self.max_steps).ok()
    }
}
