"""ORPO: cross entropy with an odds ratio of both answers, without a reference (Hong et al. 2024, arXiv:2403.07691)."""

from __future__ import annotations

from typing import Any

from ..dsl import Batch, Module, Results, Tensor, ops, output, task
from .answers import Side, log_sigmoid, mean_over_batch

#: The first metrics of losses that compare two answers, in this order.
PAIR_METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
    "logits/chosen",
    "logits/rejected",
    "nll_loss",
)


def pair_metrics(
    rewards: tuple[Tensor, Tensor],
    logps: tuple[Tensor, Tensor],
    mean_logit: Tensor,
    nll: Tensor,
    sides: tuple[Side, Side],
    batch: Batch,
) -> list[tuple[Tensor, Tensor]]:
    """The values of `PAIR_METRICS` with their weights."""
    margin = rewards[0] - rewards[1]
    of_pairs = [*rewards, ops.activation(margin, function="step"), margin, *logps]
    rows = [(value, batch.pair_weights) for value in of_pairs]
    rows += [(mean_logit, side.mask) for side in sides]
    return [*rows, (nll, batch.pair_weights)]


@task("orpo")
class ORPO(Module):
    """Marks `loss_sum`, the sum of the losses of the pairs, `weight_sum`, their number, and the sums of the metrics."""

    metrics = (*PAIR_METRICS, "log_odds_ratio", "log_odds_chosen")

    def __init__(self, config: Any, *, beta: float, nll: str) -> None:
        self.beta, self.nll = beta, nll

    def forward(self, of: Results, batch: Batch) -> None:
        """Outputs the cross entropy with the log odds ratio of each pair, and metrics."""
        token_loss, _ = ops.cross_entropy(of["logits"], batch.next_tokens)
        _, mean_logit, _, _ = ops.token_statistics(of["logits"], batch.targets)
        logps = -token_loss
        chosen, rejected = sides = (Side(0, logps * batch.weights, None, batch), Side(1, logps * batch.weights, None, batch))
        # Means over the tokens: the logarithm of a probability of a token.
        means = (chosen.mean(chosen.logps), rejected.mean(rejected.logps))
        # An entry without a pair has a probability of its own, so that its odds are finite.
        apart = [mean - (1.0 - batch.pair_weights) for mean in means]
        odds = [mean - ops.log_complement(mean) for mean in apart]
        log_odds = odds[0] - odds[1]
        ratio = log_sigmoid(log_odds)
        nll = -means[0] if self.nll == "paper" else mean_over_batch(token_loss, chosen.tokens * batch.followed)
        loss_sum, weight_sum = ops.weighted_sum(nll - ratio * self.beta, batch.pair_weights)
        output("loss_sum", loss_sum)
        output("weight_sum", weight_sum)
        rewards = (means[0] * self.beta, means[1] * self.beta)
        rows = pair_metrics(rewards, means, mean_logit, nll, sides, batch)
        rows += [(ratio, batch.pair_weights), (log_odds, batch.pair_weights)]
        output("task_report", ops.task_report(*(value for row in rows for value in row)))
