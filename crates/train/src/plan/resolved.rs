//! The values of options that were left open, as far as they concern the computation: known before a run as well as during it.

use options::Table;
use serde_json::{Value, json};

use crate::config::{Config, Offload, Reason, Reasons};
use crate::engine::instruments::Instruments;
use crate::input::encoded;
use crate::model::source::ModelSource;
use crate::plan::Plan;

/// The values that the choices follow from, before or during the run.
pub(crate) struct Known<'a> {
    pub config: &'a Config,
    pub source: &'a ModelSource,
    pub plan: &'a Plan,
    /// The backend, and why this one.
    pub device: &'a str,
    pub because: &'a str,
    /// Steps of the run, where they are known.
    pub steps: Option<u64>,
}

impl Known<'_> {
    /// The choices for options that were left open, as far as they concern the computation.
    pub fn reasons(&self) -> Reasons {
        let config = self.config;
        let mut reasons = self.plan.reasons.clone();
        let mut choose = chooser(config, &mut reasons);
        choose("device", json!(self.device), self.because);
        choose("model_type", json!(self.source.model_type()), "the model's configuration");
        let because = config.micro_batch.as_ref().map_or("`per_device_train_batch_size`", |of| of.because.as_str());
        choose("micro_batch_size", json!(config.micro_rows()), because);
        if let Some(positions) = self.source.max_positions() {
            choose("max_model_len", json!(positions), "the model's configuration");
        }
        choose("dataloader_num_workers", json!(encoded::workers(config)), "the cores of this machine");
        choose(
            "log_gpu_util",
            json!(Instruments::interval(config, self.steps)),
            "a hundredth of the run's steps, at most 100",
        );
        choose("deterministic", json!(true), "every kernel in use gives the same bits each time");
        let (copies, because) = match self.device {
            _ if config.multi_node.distributed.num_nodes > 1 => (false, "several nodes use NCCL"),
            "cpu" => (false, "the ranks of a CPU share its memory"),
            _ => (true, "the GPUs are in one process"),
        };
        for name in ["memcpy_all_gather", "memcpy_send_recv"] {
            choose(name, json!(copies), because);
        }
        for row in Offload::ROWS {
            choose(row.name, json!(false), "it stays on the device");
        }
        if let Some(total) = self.steps {
            let (warmup, cooldown) = (config.optimizer.warmup(total), config.optimizer.cooldown(total));
            choose("warmup_steps", json!(warmup), "`warmup_ratio` of all steps");
            choose("cooldown_steps", json!(cooldown), "the schedule");
            if let Some(first) = config.sharding.compression_warmup(total, warmup) {
                choose(
                    "compression_warmup_steps",
                    json!(first),
                    "a fifth of all steps, and the warm-up of the learning rate",
                );
            }
        }
        drop(choose);
        reasons
    }
}

/// Notes a choice where the option was left open.
pub(crate) fn chooser<'a>(config: &Config, reasons: &'a mut Reasons) -> impl FnMut(&str, Value, &str) + 'a {
    let given = config.recorded_json();
    move |name, value, because| {
        if given[name] == "auto" {
            reasons.insert(name.to_owned(), Reason { value, because: because.to_owned() });
        }
    }
}
