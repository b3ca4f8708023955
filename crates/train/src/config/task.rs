//! The tasks: kinds of training, with their data and losses.

use data::Purpose;
use options::choices;

choices! {
    /// Kind of training, which decides a few defaults.
    pub enum Task {
        /// Supervised fine-tuning.
        Sft = "sft",
        /// Pre-training.
        Pt = "pt",
        /// Direct preference optimization, on pairs of answers.
        Dpo = "dpo",
        /// Kahneman-Tversky optimization, on answers with a verdict each.
        Kto = "kto",
        /// Odds ratio preference optimization, on pairs of answers, without a reference.
        Orpo = "orpo",
        /// Contrastive preference optimization and SimPO, on pairs of answers, without a reference.
        Cpo = "cpo",
        /// A reward model: a score for each answer, on pairs of answers.
        Reward = "reward",
        /// Group relative policy optimization, on answers that the model samples to prompts.
        Grpo = "grpo",
        /// Distillation: the distributions of tokens of another model, the teacher.
        Distil = "distil" | "distill",
    }
}

impl Task {
    /// Defaults that differ from the tables': (option, value as in YAML).
    pub const fn defaults(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Task::Sft => &[],
            Task::Pt => &[("lora", "false")],
            Task::Dpo | Task::Orpo | Task::Cpo => &[("learning_rate", "1e-6")],
            Task::Kto => &[("learning_rate", "1e-6"), ("loss_type", "kto")],
            Task::Reward => &[("learning_rate", "1e-4")],
            Task::Grpo => {
                // Samples are drawn without dropout: with it the loss would see other probabilities.
                &[
                    ("learning_rate", "1e-6"),
                    ("loss_type", "dapo"),
                    ("beta", "0"),
                    ("validation_split_ratio", "0"),
                    ("lora_dropout", "0"),
                    ("sample_packing", "false"),
                ]
            }
            Task::Distil => &[("learning_rate", "1e-6"), ("beta", "1")],
        }
    }

    /// The purpose for which the task reads rows.
    pub const fn purpose(self) -> Purpose {
        match self {
            Task::Sft | Task::Pt | Task::Distil => Purpose::Documents,
            Task::Dpo | Task::Orpo | Task::Cpo => Purpose::Pairs,
            Task::Kto => Purpose::Answers,
            Task::Reward => Purpose::Scores,
            Task::Grpo => Purpose::Prompts,
        }
    }

    /// The file of `python/surogate/tasks/` that has its loss.
    pub(crate) const fn loss(self) -> &'static str {
        match self {
            Task::Sft | Task::Pt => CAUSAL_LM,
            Task::Dpo | Task::Kto | Task::Orpo | Task::Cpo | Task::Reward | Task::Grpo | Task::Distil => self.name(),
        }
    }
}

/// The loss of a language model, next to which others are built: it gives the log-probabilities of targets.
pub(crate) const CAUSAL_LM: &str = "causal_lm";
