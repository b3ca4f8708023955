"""Losses of distillation: a teacher's distribution of each token is learned (Hinton et al. 2015, arXiv:1503.02531), by one of
the divergences of GKD (Agarwal et al. 2023, arXiv:2306.13649)."""

from __future__ import annotations

from typing import Any

from ..dsl import Batch, Module, Results, Tensor, ops, output, task
from .causal_lm import CausalLM


@task("distil")
class Distillation(CausalLM):
    """Marks `loss_sum` and `weight_sum` as :class:`CausalLM`, of the divergence of each token from the teacher's, and the sums
    of the metrics."""

    def __init__(
        self, config: Any, *, beta: float, temperature: float, top_k: int, tail: bool, cross_entropy_weight: float
    ) -> None:
        super().__init__(config)
        self.beta, self.temperature, self.top_k, self.tail = beta, temperature, top_k, tail
        self.cross_entropy_weight = cross_entropy_weight
        #: Where the loss has two parts, each of them.
        self.metrics = ("entropy", *(("divergence", "cross_entropy") if cross_entropy_weight else ()))

    def forward(self, of: Results, batch: Batch) -> None:
        """Outputs the divergence from the teacher at each token, with the cross entropy if it has a weight."""
        divergence, entropy = self.divergence(of["logits"], batch)
        values, token_loss = [entropy], divergence
        if self.cross_entropy_weight:
            cross_entropy, _ = ops.cross_entropy(of["logits"], batch.targets)
            token_loss = divergence + cross_entropy * self.cross_entropy_weight
            values += [divergence, cross_entropy]
        self.reduce(token_loss, of, batch)
        output("task_report", ops.task_report(*(of for value in values for of in (value, batch.weights))))

    def divergence(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The divergence and the student's entropy, both [B, T]."""
        if self.top_k:
            ids, logps = batch.of("teacher_ids", self.top_k), batch.of("teacher_logps", self.top_k)
            divergence, entropy, _ = ops.distillation_top(
                logits, ids, logps, batch.targets, tail=self.tail, temperature=self.temperature
            )
        else:
            teacher = batch.of("teacher_logits", columns(logits))
            divergence, entropy, *_ = ops.distillation(
                logits, teacher, batch.targets, beta=self.beta, temperature=self.temperature
            )
        return divergence, entropy


def columns(logits: Tensor) -> int:
    """The size of the vocabulary."""
    size = logits.shape[-1]
    assert isinstance(size, int), "the vocabulary of a model has a size"
    return size


@task("teacher")
class Teacher(Module):
    """Marks the likeliest tokens of each token's distribution, `teacher_ids`, and their log-probabilities, `teacher_logps`,
    both [B, T, K]."""

    def __init__(self, config: Any, *, count: int, temperature: float) -> None:
        self.count, self.temperature = count, temperature

    def forward(self, of: Results, batch: Batch) -> None:
        """Outputs the `count` largest log probabilities of the teacher at each position, and their token ids."""
        logps, ids = ops.top_logps(of["logits"], batch.targets, count=self.count, temperature=self.temperature)
        output("teacher_logps", logps)
        output("teacher_ids", ids)
