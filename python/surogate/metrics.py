"""The results of a step and of an evaluation, typed."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class Flushed(TypedDict):
    """The tensor of which the largest share of values became 0 in 8 bits."""

    tensor: str
    share: float


class StepMetrics(TypedDict):
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


class EvaluationMetrics(TypedDict):
    """One pass over the validation data."""

    #: Steps that were done before.
    step: int
    #: Mean over the trained tokens; None with `task: grpo`, whose answers are judged instead.
    loss: float | None
    #: Tokens that were read, or sampled.
    tokens: int
    seconds: float
