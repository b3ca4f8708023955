"""The results of a step and of an evaluation, typed."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class Flushed(TypedDict):
    """The tensor of which the largest share of values became 0 in 8 bits."""

    tensor: str
    share: float


#: The metrics of the tasks that compare, sample or distil; those of a reward have its name, `rewards/NAME/mean` and `/std`.
TaskMetrics = TypedDict(
    "TaskMetrics",
    {
        "rewards/chosen": float,
        "rewards/rejected": float,
        "rewards/accuracies": float,
        "rewards/margins": float,
        "logps/chosen": float,
        "logps/rejected": float,
        "logits/chosen": float,
        "logits/rejected": float,
        "entropy": float,
        "mean_token_accuracy": float,
        "nll_loss": float,
        "log_odds_ratio": float,
        "log_odds_chosen": float,
        "kl": float,
        "accuracy": float,
        "margin": float,
        "min_reward": float,
        "mean_reward": float,
        "max_reward": float,
        "divergence": float,
        "cross_entropy": float,
        "reward": float,
        "reward_std": float,
        "frac_reward_zero_std": float,
        "completions/mean_length": float,
        "completions/min_length": float,
        "completions/max_length": float,
        "completions/mean_terminated_length": float,
        "completions/min_terminated_length": float,
        "completions/max_terminated_length": float,
        "completions/clipped_ratio": float,
        "completions/mean_turns": float,
        "sampling_seconds": float,
        "reward_seconds": float,
        "sampling/sampling_logp_difference/mean": float,
        "sampling/sampling_logp_difference/max": float,
        "sampling/importance_sampling_ratio/mean": float,
        "cispo_clip_ratio": float,
        "vespo/phi_seq_mean": float,
        "clip_ratio/low_mean": float,
        "clip_ratio/high_mean": float,
        "clip_ratio/region_mean": float,
        "clip_ratio/low_min": float,
        "clip_ratio/high_max": float,
    },
    total=False,
)


class StepMetrics(TaskMetrics):
    """One optimizer step."""

    #: Number of the step, from 0.
    step: int
    #: Before the update.
    loss: float
    #: Before clipping.
    grad_norm: float
    learning_rate: float
    tokens: int
    tokens_per_second: float
    seconds: float
    #: False if the norm was not finite and the update was suppressed.
    applied: bool
    #: Passes over the data; None for batches of the caller.
    epoch: float | None
    #: Seconds in which the process waited for batches since the step before; None without data.
    data_wait_seconds: float | None
    #: Model FLOPs utilization; None if the peak of the device is not known.
    mfu: float | None
    #: Bytes in use; None if not known.
    memory: int | None
    #: With `torch_dtype: float16`.
    loss_scale: NotRequired[float]
    skipped: NotRequired[bool]
    #: With `recipe: fp8_hybrid`: tensors whose largest magnitude did not fit their scale.
    fp8_clipped: NotRequired[float]
    #: In the first step with `recipe: fp8_hybrid`.
    fp8_flushed: NotRequired[Flushed]
    #: For mixtures of experts: the share of each expert in all choices.
    expert_load: NotRequired[list[float]]
    #: The largest of these, as a multiple of an even load.
    busiest_expert: NotRequired[float]
    router_entropy: NotRequired[float]
    #: Before its coefficient.
    router_loss: NotRequired[float]


class EvaluationMetrics(TaskMetrics):
    """One pass over the validation data."""

    #: Steps that were done before.
    step: int
    #: Mean over the trained tokens; None with `task: grpo`, whose answers are judged instead.
    loss: float | None
    #: Tokens that were read, or sampled.
    tokens: int
    seconds: float
