//! Options of `task: grpo`: rewards, samples and the loss of sampled answers. Names, values and defaults are those of TRL
//! 1.16 where it has the thing.

use options::{Setting, choices, options};
use serde_json::{Value, json};

use super::PreferenceLoss;

options! {
    /// Rewards, samples and losses of `task: grpo`. docs/reinforcement.md has the formulas.
    pub struct Reinforcement: "Reinforcement learning" {
        /// The functions that judge answers. Their weighted sum is the reward.
        rewards: Option<Vec<RewardFunction>> = null;
        /// Seconds that one call of a reward function may take.
        reward_timeout: f64 = 60.0, above = 0, max = 86400;
        /// Answers that are sampled for each prompt.
        num_generations: u64 = 8, min = 2, max = 65536;
        /// Answers that are sampled for each held-out prompt in an evaluation. Null: `num_generations`.
        num_generations_eval: Option<u64> = null, min = 1, max = 65536;
        /// Maximum tokens of an answer.
        max_completion_length: u64 = 512, min = 1;
        /// Temperature of the samples. The loss takes the log-probabilities at the same temperature. `distil`: that of both
        /// distributions.
        temperature: f64 = 1.0, above = 0, max = 1000;
        /// Sample from the likeliest tokens whose probabilities reach this sum.
        top_p: f64 = 1.0, above = 0, max = 1;
        /// Number of the likeliest tokens to sample from. 0: all.
        top_k: u64 = 0;
        /// Sample from tokens that are at least this much as probable as the likeliest.
        min_p: Option<f64> = null, min = 0, max = 1;
        /// `module:name` or `file.py:name` of a Python class, of which each answer has an object: its method `step` gets the
        /// text of a turn and returns the messages that follow, or None at the end. Null: an answer is one turn.
        environment: Option<String> = null;
        /// Turns of an answer at most, with `environment`.
        max_turns: u64 = 8, min = 1, max = 1024;
        /// Maximum tokens of one turn, with `environment`. Null: what is left of `max_completion_length`, in which the turns
        /// and what the environment says between them have to find room.
        max_turn_length: Option<u64> = null, min = 1;
        /// The sampler gives each token the log-probability that training gives it, bit for bit. `auto`: on CPUs, where that is so,
        /// which the plan says. `true` takes kernels for it on Hopper GPUs, which are slower, is an error where there are none
        /// (docs/reinforcement.md), and ends a run whose sampler and training differ.
        exact_sampling: Setting<bool> = auto;
        /// Updates with the answers of one step.
        num_iterations: u64 = 1, min = 1, max = 1000;
        /// Distance below 1 at which the ratio of the new to the old probability is clipped.
        epsilon: f64 = 0.2, min = 0, max = 1;
        /// Distance above 1 at which it is clipped. Null: `epsilon`. With `loss_type: cispo` the largest ratio itself.
        epsilon_high: Option<f64> = null, min = 0, max = 1000000;
        /// The largest ratio of answers with a negative advantage. Null: no bound.
        delta: Option<f64> = null, above = 0, max = 1000000;
        /// Ratios of each token, or of whole answers (GSPO).
        importance_sampling_level: Level = "token";
        /// Divisor of advantages: the standard deviation over the answers to a prompt, over all answers of the step, or
        /// none.
        scale_rewards: ScaleRewards = "group";
        /// Order of summing and normalizing with several reward functions.
        multi_objective_aggregation: Aggregation = "sum_then_normalize";
        /// Leave answers that were cut off at `max_completion_length` out of the loss.
        mask_truncated_completions: bool = false;
        /// Train on this share of the tokens, those with the largest entropy.
        top_entropy_quantile: f64 = 1.0, above = 0, max = 1;
        /// Multiply the estimate of the KL divergence by the ratio of the probabilities.
        use_bias_correction_kl: bool = true;
        /// Leave out answers with a negative advantage of which the mean log-probability has fallen by more than this.
        /// Null: none.
        off_policy_mask_threshold: Option<f64> = null;
        /// Weigh tokens by the ratio of the probability in training to that in sampling, where the latter is given.
        vllm_importance_sampling_correction: bool = true;
        /// The ratio of each token or of whole answers, cut off at its bounds or 0 beyond them.
        vllm_importance_sampling_mode: Correction = "sequence_mask";
        /// Upper bound of that ratio.
        vllm_importance_sampling_clip_max: f64 = 3.0, above = 0;
        /// Lower bound of that ratio. Null: none.
        vllm_importance_sampling_clip_min: Option<f64> = null, min = 0;
        /// Temperature of `loss_type: sapo` for positive advantages.
        sapo_temperature_pos: f64 = 1.0, above = 0, max = 1000000;
        /// Temperature of `loss_type: sapo` for the others.
        sapo_temperature_neg: f64 = 1.05, above = 0, max = 1000000;
        /// Exponent of `loss_type: vespo` for positive advantages.
        vespo_k_pos: f64 = 2.0, min = 0, max = 1000;
        /// Rate of `loss_type: vespo` for positive advantages.
        vespo_lambda_pos: f64 = 3.0, min = 0, max = 1000;
        /// Exponent of `loss_type: vespo` for negative advantages.
        vespo_k_neg: f64 = 3.0, min = 0, max = 1000;
        /// Rate of `loss_type: vespo` for negative advantages.
        vespo_lambda_neg: f64 = 2.0, min = 0, max = 1000;
    }
}

options! {
    /// A function that judges answers.
    pub struct RewardFunction: "Reward" {
        /// `module:name` of a Python function, or one of `number`, `regex`, `json`, `length`, `environment`.
        function: String = required;
        /// Weight of its rewards in their sum.
        weight: f64 = 1.0;
        /// The row's field with the right answer, of `number`. Null: `answer`.
        field: Option<String> = null;
        /// The regular expression of `regex`, which an answer has to contain.
        pattern: Option<String> = null;
        /// Tokens from which on `length` gives less.
        tokens: Option<u64> = null, min = 1;
    }
}

choices! {
    /// The unit that has a ratio of probabilities.
    pub enum Level {
        /// Each token has a ratio.
        Token = "token",
        /// Each answer has one, from the mean over its tokens.
        Sequence = "sequence",
    }
}

choices! {
    /// The number by which advantages are divided.
    pub enum ScaleRewards {
        /// The standard deviation over the answers of the prompt.
        Group = "group",
        /// The standard deviation over all answers of the step.
        Batch = "batch",
        /// Nothing (Dr. GRPO).
        None = "none",
    }
}

choices! {
    /// The order of summing and normalizing the rewards of several functions.
    pub enum Aggregation {
        /// The weighted sum is normalized.
        SumThenNormalize = "sum_then_normalize",
        /// Each function is normalized by itself (GDPO), and the sum once more over the step.
        NormalizeThenSum = "normalize_then_sum",
    }
}

choices! {
    /// A correction for samples that were drawn with other probabilities.
    pub enum Correction {
        /// The ratio of each token, cut off at its bounds.
        TokenTruncate = "token_truncate",
        /// The ratio of each token, 0 beyond its bounds.
        TokenMask = "token_mask",
        /// The ratio of the answer, cut off at its bounds.
        SequenceTruncate = "sequence_truncate",
        /// The ratio of the answer, 0 beyond its bounds.
        SequenceMask = "sequence_mask",
    }
}

impl Reinforcement {
    /// Returns the settings of the recorded loss.
    pub(super) fn recorded(&self, loss: PreferenceLoss, beta: f64) -> Value {
        let correction = self.vllm_importance_sampling_correction.then(|| self.vllm_importance_sampling_mode.name());
        let low = self.vllm_importance_sampling_clip_min.unwrap_or(0.0);
        json!({
            "loss": loss.name(),
            "beta": beta,
            "temperature": self.temperature,
            "epsilon": self.epsilon,
            "epsilon_high": self.epsilon_high.unwrap_or(self.epsilon),
            "delta": self.delta,
            "level": self.importance_sampling_level.name(),
            "sapo_temperatures": [self.sapo_temperature_pos, self.sapo_temperature_neg],
            "vespo": [self.vespo_k_pos, self.vespo_lambda_pos, self.vespo_k_neg, self.vespo_lambda_neg],
            "corrected_kl": self.use_bias_correction_kl,
            "off_policy_threshold": self.off_policy_mask_threshold,
            "top_entropy": self.top_entropy_quantile,
            "correction": correction,
            "correction_bounds": [low, self.vllm_importance_sampling_clip_max],
            "longest": self.max_completion_length,
        })
    }
}
