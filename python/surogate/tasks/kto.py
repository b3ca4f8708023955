"""Losses of answers with a verdict each: KTO (Ethayarajh et al. 2024, arXiv:2402.01306) and its kin."""

from __future__ import annotations

from typing import Any

from ..dsl import Batch, Module, Results, Tensor, ops, output, task
from .answers import log_sigmoid, mean_over_batch, sigmoid


@task("kto")
class KTO(Module):
    """Marks `loss_sum`, the sum of the losses of the answers, `weight_sum`, their number, and the sums of the metrics."""

    metrics = (
        "rewards/chosen",
        "rewards/rejected",
        "logps/chosen",
        "logps/rejected",
        "logits/chosen",
        "logits/rejected",
        "kl",
        "entropy",
    )
    differences = (("rewards/margins", "rewards/chosen", "rewards/rejected"),)
    entries = ("reference", "train", "evaluate")

    def __init__(self, config: Any, *, loss: str, beta: float, weights: tuple[float, float]) -> None:
        self.loss, self.beta, self.weights = loss, beta, weights

    def forward(self, of: Results, batch: Batch) -> None:
        """Outputs the loss of each answer, desirable or not, against the reference model, and metrics."""
        token_loss, _ = ops.cross_entropy(of["logits"], batch.targets)
        entropy, mean_logit, _, _ = ops.token_statistics(of["logits"], batch.targets)
        good = batch.desirable
        bad = batch.pair_weights - good
        logps = self.sum(-token_loss * batch.weights, batch)
        ratio = logps - self.sum(batch.reference_logps * batch.weights, batch)
        loss = self.of(ratio, good, bad, batch)
        loss_sum, weight_sum = ops.weighted_sum(loss, batch.pair_weights)
        output("loss_sum", loss_sum)
        output("weight_sum", weight_sum)
        rows = [(value, of_kind) for value in (ratio * self.beta, logps) for of_kind in (good, bad)]
        spread = [ops.document_spread(of_kind, batch.documents, every=1, at=0) for of_kind in (good, bad)]
        rows += [(mean_logit, tokens * batch.weights) for tokens in spread]
        rows += [(batch.divergence, batch.pair_weights), (entropy, batch.weights)]
        output("task_report", ops.task_report(*(value for row in rows for value in row)))

    def sum(self, tokens: Tensor, batch: Batch) -> Tensor:
        """Sums over each answer."""
        return ops.document_sum(tokens, batch.documents, every=1, at=0)

    def of(self, ratio: Tensor, good: Tensor, bad: Tensor, batch: Batch) -> Tensor:
        """The loss of each answer, given the log-ratio to the reference."""
        reward = ratio * self.beta
        match self.loss:
            case "kto":
                margin = reward - batch.divergence * self.beta
                of_good, of_bad = 1.0 - sigmoid(margin), 1.0 - sigmoid(-margin)
            case "apo_zero_unpaired":
                of_good, of_bad = 1.0 - sigmoid(reward), sigmoid(reward)
            case "bco_paper":
                # The mean of the mean rewards of both kinds, as a constant.
                shift = ops.detach((mean_over_batch(reward, good) + mean_over_batch(reward, bad)) * 0.5)
                of_good, of_bad = -log_sigmoid(reward - shift), -log_sigmoid(shift - reward)
            case _:
                raise ValueError(f"there is no loss `{self.loss}`")
        return good * of_good * self.weights[0] + bad * of_bad * self.weights[1]
