"""Losses of pairs of answers that compare with a reference: DPO (Rafailov et al. 2023, arXiv:2305.18290) and its kin.

docs/preferences.md has the formulas. Values of pairs lie in the first entries of tensors [B, T].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..dsl import Batch, Module, Results, Tensor, ops, output, task
from .answers import Side, exp, log_sigmoid, mean_over_batch, none, reciprocal, sigmoid, smoothed


@task("dpo")
class DPO(Module):
    """Marks `loss_sum`, the sum of the losses of the pairs, `weight_sum`, their number, and the sums of the metrics."""

    metrics = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
        "logits/chosen",
        "logits/rejected",
        "entropy",
        "mean_token_accuracy",
    )

    def __init__(
        self,
        config: Any,
        *,
        losses: Sequence[str],
        loss_weights: Sequence[float],
        beta: float,
        label_smoothing: float,
        divergence: str,
        alpha: float,
        ld_alpha: float | None,
        discopop_tau: float,
        weighted: bool,
        reference_free: bool,
    ) -> None:
        self.losses = list(zip(losses, loss_weights, strict=True))
        self.beta, self.smoothing, self.tau = beta, label_smoothing, discopop_tau
        #: The exponent is 1 minus TRL's coefficient; with 0 it is reverse KL divergence.
        self.divergence, self.alpha = divergence, 1.0 - alpha
        self.ld_alpha, self.weighted, self.reference_free = ld_alpha, weighted, reference_free
        self.entries = ("train", "evaluate") if reference_free else ("reference", "train", "evaluate")

    def forward(self, of: Results, batch: Batch) -> None:
        """Outputs the loss of each pair, without reference model if `reference_free`, and metrics."""
        token_loss, _ = ops.cross_entropy(of["logits"], batch.targets)
        entropy, mean_logit, collision, hit = ops.token_statistics(of["logits"], batch.targets)
        logps = -token_loss
        weights = batch.weights
        if self.ld_alpha is not None:
            # Tokens beyond the shorter answer count less.
            weights = weights * (batch.common * (1.0 - self.ld_alpha) + self.ld_alpha)
        reference = None if self.reference_free else batch.reference_logps * weights
        sides = [Side(at, logps * weights, reference, batch) for at in (0, 1)]
        chosen, rejected = sides
        scores = [self.score(side.ratio) for side in sides]
        total: Tensor | None = None
        for name, weight in self.losses:
            loss = self.loss(name, sides, scores, logps, batch) * weight
            total = loss if total is None else total + loss
        assert total is not None
        if self.weighted:
            # The likelihood of each answer relative to that of a sample of the model, as a constant.
            relative = [side.mean(side.sum((logps - collision) * batch.weights)) for side in sides]
            total = total * ops.detach(exp(relative[0] + relative[1]))
        loss_sum, weight_sum = ops.weighted_sum(total, batch.pair_weights)
        output("loss_sum", loss_sum)
        output("weight_sum", weight_sum)
        rewards = [side.ratio * self.beta for side in sides]
        margin = rewards[0] - rewards[1]
        of_pairs = [*rewards, ops.activation(margin, function="step"), margin, chosen.logps, rejected.logps]
        rows = [(value, batch.pair_weights) for value in of_pairs]
        rows += [(mean_logit, chosen.mask), (mean_logit, rejected.mask)]
        rows += [(entropy, batch.weights), (hit, chosen.mask)]
        output("task_report", ops.task_report(*(value for row in rows for value in row)))

    def score(self, ratio: Tensor) -> Tensor:
        """The log-ratio of an answer, or what another divergence has in its place (Wang et al. 2023, arXiv:2309.16240)."""
        match self.divergence:
            case "forward_kl":
                return -exp(-ratio)
            case "js_divergence":
                return log_sigmoid(ratio) + math.log(2.0)
            case "alpha_divergence" if self.alpha:
                return (1.0 - exp(ratio * -self.alpha)) * (1.0 / self.alpha)
            case _:
                return ratio

    def loss(
        self, name: str, sides: Sequence[Side], scores: Sequence[Tensor], logps: Tensor, batch: Batch
    ) -> Tensor:
        """A loss of each pair. Only entries of pairs mean something."""
        beta, smoothing = self.beta, self.smoothing
        chosen, rejected = sides
        good, bad = scores
        margin = (good - bad) * beta
        match name:
            case "sigmoid" | "cdpo":
                return smoothed(margin, smoothing)
            case "hinge":
                return ops.activation(1.0 - margin, function="relu")
            case "ipo":
                return _square(chosen.mean(good) - rejected.mean(bad) - 0.5 / beta)
            case "ipo_paper":
                return _square(good - bad - 0.5 / beta)
            case "robust":
                loss = log_sigmoid(-margin) * smoothing - log_sigmoid(margin) * (1.0 - smoothing)
                return loss * (1.0 / (1.0 - 2.0 * smoothing))
            case "exo_pair":
                right = sigmoid(margin) * (log_sigmoid(margin) - math.log1p(-smoothing))
                return right + sigmoid(-margin) * (log_sigmoid(-margin) - math.log(smoothing))
            case "nca_pair":
                both = log_sigmoid(good * -beta) + log_sigmoid(bad * -beta)
                return -log_sigmoid(good * beta) - both * 0.5
            case "bco_pair":
                return -log_sigmoid(good * beta) - log_sigmoid(bad * -beta)
            case "bco_pair_paper":
                rewards = (good + bad) * batch.pair_weights
                pairs = ops.batch_sum(batch.pair_weights)
                mean = ops.detach(ops.batch_sum(rewards) * reciprocal(pairs + none(pairs)) * (0.5 * beta))
                return -log_sigmoid(good * beta - mean) - log_sigmoid(mean - bad * beta)
            case "sppo_hard":
                return _square(good - 0.5 / beta) + _square(bad + 0.5 / beta)
            case "aot":
                ours = _in_order(chosen.logps - rejected.logps, batch)
                if chosen.reference is not None and rejected.reference is not None:
                    ours = ours - _in_order(chosen.reference - rejected.reference, batch)
                return smoothed(ours * beta, smoothing)
            case "aot_unpaired":
                return smoothed((_in_order(good, batch) - _in_order(bad, batch)) * beta, smoothing)
            case "apo_zero":
                return 1.0 - sigmoid(good * beta) + sigmoid(bad * beta)
            case "apo_down":
                return sigmoid(good * beta) + 1.0 - sigmoid(margin)
            case "discopop":
                gate = sigmoid(margin * (1.0 / self.tau))
                return (1.0 - gate) * -log_sigmoid(margin) + gate * exp(-margin)
            case "sigmoid_norm":
                return -log_sigmoid((chosen.mean(good) - rejected.mean(bad)) * beta)
            case "sft":
                return -mean_over_batch(logps, chosen.mask)
            case "nll_paper":
                return -chosen.mean(chosen.sum(logps * batch.weights))
        raise ValueError(f"there is no loss `{name}`")


def _square(x: Tensor) -> Tensor:
    return x * x


def _in_order(values: Tensor, batch: Batch) -> Tensor:
    """The values of the pairs of the micro-batch in rising order."""
    return ops.sorted(values, batch.pair_weights)[0]
