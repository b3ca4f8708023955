"""Reward models: a score for each answer, the higher the better (Bradley and Terry 1952; arXiv:2203.02155)."""

from __future__ import annotations

from typing import Any

from ..dsl import Batch, Module, Results, Tensor, ops, output, task
from .answers import log_sigmoid


@task("reward")
class Reward(Module):
    """Marks `loss_sum`, the sum of the losses of the pairs, `weight_sum`, their number, and the sums of the metrics."""

    metrics = ("accuracy", "margin", "min_reward", "mean_reward", "max_reward")

    def __init__(self, config: Any, *, centering: float) -> None:
        self.centering = centering

    def forward(self, of: Results, batch: Batch) -> None:
        """Outputs the Bradley-Terry loss of the scores of each pair, and metrics."""
        # A score for each token, of which that of the last token of an answer counts.
        scores = ops.merge_heads(ops.cast(of["logits"], dtype="f32")) * batch.last
        chosen, rejected = (ops.document_sum(scores, batch.documents, every=2, at=at) for at in (0, 1))
        apart = chosen - rejected
        loss = -log_sigmoid(apart - batch.margins)
        if self.centering:
            total = chosen + rejected
            loss = loss + total * total * self.centering
        loss_sum, weight_sum = ops.weighted_sum(loss, batch.pair_weights)
        output("loss_sum", loss_sum)
        output("weight_sum", weight_sum)
        sides = (chosen, rejected)
        rows = [(ops.activation(apart, function="step"), batch.pair_weights), (apart, batch.pair_weights)]
        # The least and the largest of a micro-batch are in its first entry.
        rows.append((least(*(first(side, batch) for side in sides)), batch.first_pair))
        rows.append(((chosen + rejected) * 0.5, batch.pair_weights))
        rows.append((-least(*(first(-side, batch) for side in sides)), batch.first_pair))
        output("task_report", ops.task_report(*(value for row in rows for value in row)))


def first(values: Tensor, batch: Batch) -> Tensor:
    """The values of the pairs in rising order."""
    return ops.sorted(values, batch.pair_weights)[0]


def least(a: Tensor, b: Tensor) -> Tensor:
    """The smaller one of each entry."""
    return a - ops.activation(a - b, function="relu")
