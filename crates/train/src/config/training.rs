//! Options of the training loop: batch sizes, number of steps, evaluation.

use options::options;

options! {
    /// How much data makes a step, how many steps make the run.
    pub struct Training: "Training loop" {
        /// Rows of a micro-batch on each GPU.
        per_device_train_batch_size: u32 = 2, min = 1;
        /// Micro-batches of a step. A step trains on batch size × this × GPUs rows.
        gradient_accumulation_steps: u32 = 4, min = 1;
        /// Steps of the run. -1 follows from `num_epochs` and the data.
        max_steps: i64 = -1, min = -1, resumable;
        /// Steps from one evaluation to the next.
        eval_steps: u64 = 100, min = 1, resumable;
    }
}

impl Training {
    /// The number of steps, if the user fixed it.
    pub fn fixed_steps(&self) -> Option<u64> {
        u64::try_from(self.max_steps).ok()
    }
}
