//! Options of logs, reports and debugging.

use options::{Setting, choices, options};

options! {
    /// What is recorded, and who gets it.
    pub struct Logging: "Logging" {
        /// Services that get the metrics.
        report_to: Option<Vec<Reporter>> = null, pending, resumable;
        /// File of the log, one JSON object on a line. `auto` is `log-{run_name}-{time}.json` in `output_dir`.
        log_file: Setting<String> = auto, resumable;
        /// Steps from one look at the GPU's load to the next. 0 never looks.
        log_gpu_util: u64 = 100, pending, resumable;
        /// Project on Weights & Biases.
        wandb_project: String = "Surogate", pending, resumable;
        /// Name on Weights & Biases. `auto` is `run_name`.
        wandb_name: Setting<String> = auto, pending, resumable;
        /// Experiment in Aim.
        aim_experiment: String = "Surogate", pending, resumable;
        /// Repository of Aim. Null is Aim's own choice.
        aim_repo: Option<String> = null, pending, resumable;
        /// Name in Aim. `auto` is `run_name`.
        aim_name: Setting<String> = auto, pending, resumable;
        /// Report where the time of a step goes, by classes of instructions: the third step of the process, or the last
        /// of a shorter run, has the clock around every instruction.
        debug_time_breakdown: bool = false, resumable;
        /// Report where the memory goes: the plan beside what was allocated.
        debug_memory_breakdown: bool = false, resumable;
    }
}

choices! {
    /// A service that takes metrics.
    pub enum Reporter {
        /// Weights & Biases.
        Wandb = "wandb",
        /// Aim.
        Aim = "aim",
    }
}
