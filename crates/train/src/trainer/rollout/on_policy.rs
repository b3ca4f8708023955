//! Distillation on the student's own answers (GKD, 2306.13649): a share of the steps replaces the answers of the data by
//! samples of the model as it is, which the teacher then judges token by token. Knows no loss.

use serde_json::{Value, json};

use super::rollouts::{encoder, generation_options, seed_of};
use super::turns::Answer;
use crate::config::{Config, Task};
use crate::error::Result;
use crate::inference::generate::{Finish, GenerationOptions, PromptEncoder};
use crate::model::source::ModelSource;
use crate::plan::sampled_shapes::AT_ONCE;

/// The turn of a step that decides whether its answers are sampled: no answer has as many.
const DECISION: u64 = u64::MAX;

/// The student's own answers in a run of `task: distil`.
pub(crate) struct OnPolicy {
    /// The share of the steps.
    pub(super) share: f64,
    pub(super) seed: u64,
    /// Tokens of an answer, at most.
    pub(super) longest: usize,
    pub(super) options: GenerationOptions,
    pub(super) encoder: PromptEncoder,
    /// Metrics of the answers that the next step trains on; empty: it trains on those of the data.
    pub(super) metrics: Vec<(String, f64)>,
    /// Answers of the last step that were sampled, for the log.
    pub(super) shown: Vec<Value>,
}

impl OnPolicy {
    /// Returns what samples in a run; None where `lmbda` is 0.
    pub fn new(config: &Config, source: &ModelSource) -> Result<Option<OnPolicy>> {
        let (share, sampling) = (config.distillation.lmbda, &config.reinforcement);
        if config.task != Task::Distil || share == 0.0 || config.data.datasets.is_none() {
            return Ok(None);
        }
        let at_once = (config.device_rows() as usize * config.replicas()).min(AT_ONCE * config.replicas());
        Ok(Some(OnPolicy {
            share,
            seed: config.data.train_seed,
            longest: sampling.max_completion_length as usize,
            options: generation_options(sampling, config.distillation.sampling_temperature, at_once)?,
            encoder: encoder(config, source)?,
            metrics: Vec::new(),
            shown: Vec::new(),
        }))
    }

    /// True if a step trains on answers of the student.
    pub(super) fn samples(&self, step: u64) -> bool {
        let drawn = seed_of(self.seed, step, 0, DECISION) as f64 / u64::MAX as f64;
        self.share >= 1.0 || drawn < self.share
    }

    pub(super) fn shown(&self, answer: &Answer) -> Value {
        let ids: Vec<u32> = answer.prompt.iter().map(|id| *id as u32).collect();
        let decoded = self.encoder.tokenizer().and_then(|of| of.encoder().decode(&ids, true).ok());
        json!({"prompt": decoded.unwrap_or_default(), "text": answer.text(), "tokens": answer.ids.len(),
            "finish": answer.finish.map_or("", Finish::name)})
    }
}
