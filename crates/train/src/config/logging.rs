//! Options of logs, reports and debugging.

use options::{Setting, choices, options};
use serde_json::{Value, json};

use super::sample_prompt::SamplePrompt;

options! {
    /// Logs, trackers and debug output.
    pub struct Logging: "Logging" {
        /// Trackers that receive the metrics: one, or a list. Each has its own process that reads the log, so its failures
        /// do not affect the run.
        report_to: Option<Vec<Reporter>> = null, resumable;
        /// Steps between lines on the terminal and between the values that trackers receive; the last step is always
        /// included. The log has every step.
        logging_steps: u64 = 1, min = 1, resumable;
        /// Path of the log, one JSON object per line: a new file, an empty one, or a log to append to. `auto` is
        /// `log-{run_name}-{time}.json` in `output_dir`.
        log_file: Setting<String> = auto, path, resumable;
        /// Steps between samples of the device: utilization, clocks, power, temperature and memory of a GPU; on the CPU
        /// the process's utilization of its threads and its memory. 0 disables sampling; `auto` is 100, or fewer in a run of
        /// less than 10 000 steps, so that there are about a hundred samples.
        log_gpu_util: Setting<u64> = auto, resumable;
        /// Prompts that the model answers at every evaluation with its current weights: in the log, the report and the
        /// trackers. In a run on conversations or instructions with a chat template, a text is a user message; otherwise it
        /// is continued. A row as in files of `surogate generate --prompts` has `messages`, which may show images.
        sample_prompts: Vec<SamplePrompt> = [], resumable;
        /// Maximum tokens of an answer to one of `sample_prompts`.
        sample_tokens: u64 = 64, min = 1, resumable;
        /// `host:port` that serves the newest metrics of the run as Prometheus text, at `/metrics`. A port alone is
        /// served on the loopback of this machine.
        metrics_address: Option<String> = null, resumable;
        /// Form of standard output: lines for people, or the log, one JSON object per line, as with `--json`.
        log_format: LogFormat = "text", resumable;
        /// Weights & Biases: project.
        wandb_project: String = "Surogate", resumable;
        /// Weights & Biases: run name. `auto` is `run_name`.
        wandb_name: Setting<String> = auto, resumable;
        /// Aim: experiment.
        aim_experiment: String = "Surogate", resumable;
        /// Aim: repository. Null is Aim's default.
        aim_repo: Option<String> = null, path, resumable;
        /// Aim: run name. `auto` is `run_name`.
        aim_name: Setting<String> = auto, resumable;
        /// Report the time of a step by class of instructions. Every instruction of the third step of the process, or
        /// of the last step of a shorter run, is timed.
        debug_time_breakdown: bool = false, resumable;
        /// Report planned and allocated memory by class.
        debug_memory_breakdown: bool = false, resumable;
    }
}

choices! {
    /// A tracker.
    pub enum Reporter {
        /// Weights & Biases.
        Wandb = "wandb",
        /// Aim.
        Aim = "aim",
        /// TensorBoard event files, in the folder `tensorboard` of `output_dir`.
        Tensorboard = "tensorboard",
        /// No tracker, as without the option.
        None = "none",
    }
}

choices! {
    /// Form of the output on the terminal and in pipes.
    pub enum LogFormat {
        /// Lines for people, with a progress bar on a terminal.
        Text = "text",
        /// The events of the log, one JSON object per line.
        Json = "json",
    }
}

impl Logging {
    /// Returns true if `metrics_address` is `host:port`, a port, or null.
    pub fn has_valid_metrics_address(&self) -> bool {
        let is_port = |text: &str| text.parse::<u16>().is_ok();
        self.metrics_address.as_deref().is_none_or(|text| is_port(text) || is_address(text))
    }

    /// Each service once, with what its client needs; a name that was left open is null. `metrics_address` is the last.
    pub fn trackers(&self) -> Vec<Value> {
        let requested = self.report_to.as_deref().unwrap_or_default();
        let reported = |service: Reporter| match service {
            Reporter::None => None,
            Reporter::Wandb => {
                Some(json!({"tracker": "wandb", "project": self.wandb_project, "name": self.wandb_name.value()}))
            }
            Reporter::Aim => Some(json!({
                "tracker": "aim", "experiment": self.aim_experiment, "repo": self.aim_repo, "name": self.aim_name.value(),
            })),
            Reporter::Tensorboard => Some(json!({"tracker": "tensorboard"})),
        };
        let trackers = Reporter::ALL.iter().copied().filter(|service| requested.contains(service)).filter_map(reported);
        let served = self.metrics_address.iter().map(|address| json!({"tracker": "metrics", "address": address}));
        trackers.chain(served).collect()
    }
}

/// True for a text of the form `host:port`.
pub(crate) fn is_address(text: &str) -> bool {
    text.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}
