"""Losses of pairs without a reference: CPO (Xu et al. 2024, arXiv:2401.08417), SimPO (Meng et al. 2024, arXiv:2405.14734)
and AlphaPO (arXiv:2501.03884)."""

from __future__ import annotations

from typing import Any

from ..dsl import Batch, Module, Results, Tensor, ops, output, task
from .answers import Side, exp, log_sigmoid, mean_over_batch, smoothed
from .orpo import PAIR_METRICS, pair_metrics

#: Losses of means over the tokens; the others take sums.
OF_MEANS = ("ipo", "simpo", "alphapo")


@task("cpo")
class CPO(Module):
    """Marks `loss_sum`, the sum of the losses of the pairs, `weight_sum`, their number, and the sums of the metrics."""

    metrics = PAIR_METRICS

    def __init__(
        self,
        config: Any,
        *,
        loss: str,
        beta: float,
        label_smoothing: float,
        nll_weight: float,
        gamma: float,
        alpha: float,
    ) -> None:
        self.loss, self.beta, self.smoothing = loss, beta, label_smoothing
        self.nll_weight, self.gamma, self.alpha = nll_weight, gamma, alpha

    def forward(self, of: Results, batch: Batch) -> None:
        """Outputs the loss of each pair, the cross entropy of the chosen answers, and metrics."""
        token_loss, _ = ops.cross_entropy(of["logits"], batch.targets)
        _, mean_logit, _, _ = ops.token_statistics(of["logits"], batch.targets)
        tokens = -token_loss * batch.weights
        chosen, rejected = sides = (Side(0, tokens, None, batch), Side(1, tokens, None, batch))
        logps = (chosen.logps, rejected.logps)
        if self.loss in OF_MEANS:
            logps = (chosen.mean(logps[0]), rejected.mean(logps[1]))
        scores = (self.shaped(logps[0]), self.shaped(logps[1]))
        nll = mean_over_batch(token_loss, chosen.mask)
        loss = self.of(scores[0] - scores[1])
        if self.nll_weight:
            loss = loss + nll * self.nll_weight
        loss_sum, weight_sum = ops.weighted_sum(loss, batch.pair_weights)
        output("loss_sum", loss_sum)
        output("weight_sum", weight_sum)
        rewards = (scores[0] * self.beta, scores[1] * self.beta)
        # As TRL has it, this is 0 where it is no part of the loss.
        rows = pair_metrics(rewards, logps, mean_logit, nll * float(self.nll_weight != 0.0), sides, batch)
        output("task_report", ops.task_report(*(value for row in rows for value in row)))

    def shaped(self, mean: Tensor) -> Tensor:
        """(1 − exp(−α·mean)) ÷ α, which is the mean for α → 0."""
        return (1.0 - exp(mean * -self.alpha)) * (1.0 / self.alpha) if self.alpha else mean

    def of(self, difference: Tensor) -> Tensor:
        """The loss of each pair, given the difference of the log-probabilities of its sides."""
        match self.loss:
            case "sigmoid":
                return smoothed(difference * self.beta, self.smoothing)
            case "hinge":
                return ops.activation(1.0 - difference * self.beta, function="relu")
            case "ipo":
                apart = difference - 0.5 / self.beta
                return apart * apart
            case "simpo" | "alphapo":
                return -log_sigmoid(difference * self.beta - self.gamma)
        raise ValueError(f"there is no loss `{self.loss}`")
