//! Options of logs, reports and debugging.

use options::{Setting, choices, options};
use serde_json::{Value, json};

options! {
    /// What is recorded, and who gets it.
    pub struct Logging: "Logging" {
        /// Services that get the metrics: from the log, by a process of its own for each, whose failures do not touch
        /// the run.
        report_to: Option<Vec<Reporter>> = null, resumable;
        /// File of the log, one JSON object on a line: a new one, an empty one, or a log to go on with. `auto` is
        /// `log-{run_name}-{time}.json` in `output_dir`.
        log_file: Setting<String> = auto, resumable;
        /// Steps from one look at the device's load to the next: of a GPU utilisation, clocks, power, temperature and
        /// memory, on the CPU the process's share of its threads and its memory. 0 never looks.
        log_gpu_util: u64 = 100, resumable;
        /// Project on Weights & Biases.
        wandb_project: String = "Surogate", resumable;
        /// Name on Weights & Biases. `auto` is `run_name`.
        wandb_name: Setting<String> = auto, resumable;
        /// Experiment in Aim.
        aim_experiment: String = "Surogate", resumable;
        /// Repository of Aim. Null is Aim's own choice.
        aim_repo: Option<String> = null, resumable;
        /// Name in Aim. `auto` is `run_name`.
        aim_name: Setting<String> = auto, resumable;
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
        /// Event files for TensorBoard, in the folder `tensorboard` of `output_dir`.
        Tensorboard = "tensorboard",
    }
}

impl Logging {
    /// Each service once, with what its client has to be told; a name that was left open is null.
    pub fn trackers(&self) -> Vec<Value> {
        let asked = self.report_to.as_deref().unwrap_or_default();
        let told = |service: Reporter| match service {
            Reporter::Wandb => {
                json!({"tracker": "wandb", "project": self.wandb_project, "name": self.wandb_name.value()})
            }
            Reporter::Aim => json!({
                "tracker": "aim", "experiment": self.aim_experiment, "repo": self.aim_repo, "name": self.aim_name.value(),
            }),
            Reporter::Tensorboard => json!({"tracker": "tensorboard"}),
        };
        Reporter::ALL.iter().copied().filter(|service| asked.contains(service)).map(told).collect()
    }
}
